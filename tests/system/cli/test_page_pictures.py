"""Over a fleet in trouble, the first page names each kind of it; the pictures of the docs are of that page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.cli.browser import need_chromium
from tests.system.cli.page_pictures import KINDS, PICTURES, SHOTS, SHOWN, take
from tests.troubled import troubled

PICTURE_BYTES_MAX = 200_000


@pytest.mark.slow
async def test_the_first_page_names_each_kind_of_trouble(tmp_path: Path) -> None:
    need_chromium()
    async with troubled(tmp_path / "up") as made:
        said = await take(made.node, tmp_path)
    for name in ("page-fleet", "page-phone"):
        missing = [kind for kind, word in KINDS.items() if word not in said[name]]
        assert missing == [], said[name]
        assert "sim: all GPUs are simulated" in said[name]
    assert "code 1" in said["page-job"]
    assert "held" in said["page-queue"], "that an operator holds a queue is below what the first page has room for"
    for shot in SHOTS:
        assert (tmp_path / f"{shot.name}.png").stat().st_size > 10_000, shot


def test_the_pictures_of_the_docs_are_small() -> None:
    for name in SHOWN:
        size = (PICTURES / f"{name}.png").stat().st_size
        assert size < PICTURE_BYTES_MAX, f"{name} has {size} bytes: python -m tests.system.cli.page_pictures"
