"""Over a fleet with a hundred jobs in trouble of ten kinds, `top` and the first page name each kind.

The pictures of the docs are of these two.
"""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest

from tests.system.cli.browser import need_chromium
from tests.system.cli.node import Node
from tests.system.cli.page_pictures import KINDS, PICTURES, SHOTS, SHOWN, take
from tests.system.cli.picture_of_top import FOLDER, SIZES, picture, view_of
from tests.troubled import troubled

PICTURE_BYTES_MAX = 200_000
AGAIN = "look at them, and if it is meant: python -m tests.system.cli.picture_of_top"


@pytest.mark.long
@pytest.mark.slow
async def test_each_kind_of_trouble_is_named_by_top_and_by_the_first_page(tmp_path: Path) -> None:
    """One fleet for both screens: to bring it into trouble takes longer than to look at it."""
    async with troubled(tmp_path / "up") as made:
        await named_by_top(made.node)
        need_chromium()
        said = await take(made.node, tmp_path)
    for name in ("page-fleet", "page-phone"):
        missing = [kind for kind, word in KINDS.items() if word not in said[name]]
        assert missing == [], said[name]
        assert "sim: all GPUs are simulated" in said[name]
    assert "code 1" in said["page-job"]
    assert "held" in said["page-queue"], "that an operator holds a queue is below what the first page has room for"
    for shot in SHOTS:
        assert (tmp_path / f"{shot.name}.png").stat().st_size > 10_000, shot


async def named_by_top(node: Node) -> None:
    view = await view_of(node.url)  # which waits until all of it is named
    for name, size in SIZES.items():
        kept, now = (FOLDER / name).read_text(), picture(view, *size)
        assert words_of(kept) == words_of(now), AGAIN
    [drained] = [worker.worker for worker in view.workers if worker.state == "draining"]
    warn = await node.run("ls", "--worker", drained, "--format", "{tenant}", tenant="all")
    assert "batch" in warn.out.split(), "what runs there, whom to warn before the drain"
    held = await node.run("ls", "--reason", "held", "--format", "{tenant}/{job}", tenant="all")
    assert held.out.split() == [f"ops/held-{number}" for number in reversed(range(10))]


def words_of(svg: str) -> set[str]:
    """The titles of a picture: what its parts are called."""
    text = html.unescape(re.sub(r"<[^>]+>", "", svg))
    return set(re.findall(r"─ \d (\w+)", text)) | set(re.findall(r"fits now|simulated|TENANT|LONGEST", text))


def test_the_pictures_of_the_docs_are_small() -> None:
    for name in SHOWN:
        size = (PICTURES / f"{name}.png").stat().st_size
        assert size < PICTURE_BYTES_MAX, f"{name} has {size} bytes: python -m tests.system.cli.page_pictures"
