"""A fleet with a hundred jobs in trouble of ten kinds: the screen names each kind, and the pictures show it."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest

from tests.system.cli.node import moorage
from tests.system.cli.picture_of_top import FOLDER, SIZES, picture, view_of
from tests.troubled import troubled

AGAIN = "look at them, and if it is meant: python -m tests.system.cli.picture_of_top"


@pytest.mark.slow
async def test_each_kind_of_trouble_is_named_and_an_operators_questions_have_one_command_each(tmp_path: Path) -> None:
    async with troubled(tmp_path / "fleet") as made:
        view = await view_of(made.node.url)  # which waits until all of it is named
        for name, size in SIZES.items():
            kept, now = (FOLDER / name).read_text(), picture(view, *size)
            assert words_of(kept) == words_of(now), AGAIN
        [drained] = [worker.worker for worker in view.workers if worker.state == "draining"]
        env = made.node.env("all")
        warn = await moorage("ls", "--worker", drained, "--format", "{tenant}", env=env)
        assert "batch" in warn.out.split(), "what runs there, whom to warn before the drain"
        held = await moorage("ls", "--reason", "held", "--format", "{tenant}/{job}", env=env)
        assert held.out.split() == [f"ops/held-{number}" for number in reversed(range(10))]


def words_of(svg: str) -> set[str]:
    """The titles of a picture: what its parts are called."""
    text = html.unescape(re.sub(r"<[^>]+>", "", svg))
    return set(re.findall(r"─ \d (\w+)", text)) | set(re.findall(r"fits now|simulated|TENANT|LONGEST", text))
