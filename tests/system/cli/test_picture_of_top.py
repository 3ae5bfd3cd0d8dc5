"""A fleet with a hundred jobs in trouble of ten kinds: the screen names each kind, and the pictures show it."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest

from moorage.cli.top.draw import as_text
from tests.system.cli.node import moorage
from tests.system.cli.picture_of_top import FOLDER, SIZES, drawn, picture, view_of
from tests.troubled import LOST, troubled

#: what names each kind of trouble, on the wide screen
NAMED = {
    "never": r"10 jobs of audio +can never run as the fleet is",
    "gang": r"llm +10 .* 2x8xH100 ",
    "busy": r"bio +10 .* 8xA100 .*busy",
    "limit": r"search +6 .*limit",
    "held": r"ops +10 .*held",
    "fails": r"10 jobs of vision +fails again and again",
    "idle": r"notebooks +10 +10 +0 ",
    "stalled": r"10 jobs of train +stalled for ",
    "leaves": r"n\d\d +draining .*new disks",
    "lost": rf"{LOST} +(lost|stale).* with \d+ jobs of render",
}
#: and each fault of a GPU
FAULTS = (r"n03 GPU 1 +xid", r"n14 GPU 0 +thermal", r"n08 GPU 7 +used by pid 8812", r"n12 +cordoned")
AGAIN = "look at them, and if it is meant: python -m tests.system.cli.picture_of_top"


@pytest.mark.slow
async def test_each_kind_of_trouble_is_named_and_an_operators_questions_have_one_command_each(tmp_path: Path) -> None:
    async with troubled(tmp_path / "fleet") as made:
        view = await view_of(made.node.url)
        wide = "\n".join(as_text(line) for line in drawn(view, 160, 50))
        missing = [kind for kind, pattern in NAMED.items() if not re.search(pattern, wide)]
        assert not missing, wide
        assert all(re.search(pattern, wide) for pattern in FAULTS), wide
        small = "\n".join(as_text(line) for line in drawn(view, 80, 24))
        assert re.search(NAMED["lost"], small), small
        assert sum(bool(re.search(pattern, small)) for pattern in (*NAMED.values(), *FAULTS)) >= 7, small
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
