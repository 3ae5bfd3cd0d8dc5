"""An engine on a host whose aiohttp is installed, but cannot be imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from moorage.schemas.errors import Refused
from moorage.schemas.optional import install_extra
from moorage.system.lazy_imports import import_when_used
from moorage.worker.drivers.container.docker import Docker


@pytest.mark.parametrize("when_used", [True, False])
def test_an_engine_says_why_its_library_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when_used: bool
) -> None:
    (tmp_path / "aiohttp.py").write_text("raise ImportError('libssl.so.3: no such file')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "aiohttp", None)  # so that it is as it was after the test
    del sys.modules["aiohttp"]
    if when_used:  # as in the moorage command
        import_when_used("aiohttp")
    with pytest.raises(Refused) as refused:
        Docker(tmp_path / "socket")
    assert refused.value.problem.message == "a driver of containers needs aiohttp: libssl.so.3: no such file"
    assert refused.value.problem.next == install_extra("containers")
