"""The tutorial, typed as it stands: it starts a node of its own, kills its parts, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.cli.node import processes_of
from tests.system.docs.driver import environment, run
from tests.unit.docs.markdown import page, pages


@pytest.mark.slow
@pytest.mark.parametrize("path", pages("tutorial"), ids=lambda path: path.stem)
def test_every_step_does_what_the_page_says(path: Path, tmp_path: Path) -> None:
    run(page(path), tmp_path, environment(tmp_path))
    assert processes_of(str(tmp_path / ".moorage")) == []
