"""A package that is imported once it is used."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from moorage.system.lazy_imports import import_when_used


def test_a_package_is_loaded_once_a_name_of_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "seldom").mkdir()
    (tmp_path / "seldom" / "__init__.py").write_text("from seldom import part\nNAME = part.NAME\n")
    (tmp_path / "seldom" / "part.py").write_text("NAME = 'read'\n")
    monkeypatch.syspath_prepend(tmp_path)
    import_when_used("seldom")
    seldom = importlib.import_module("seldom")
    assert "seldom.part" not in sys.modules
    import_when_used("seldom")
    assert importlib.import_module("seldom") is seldom
    assert (seldom.NAME, "seldom.part" in sys.modules) == ("read", True)
    assert importlib.import_module("seldom").NAME == "read"
    for name in ("seldom", "seldom.part"):
        del sys.modules[name]


def test_a_package_that_is_not_installed_is_missed_as_before() -> None:
    import_when_used("not_installed_here")
    with pytest.raises(ImportError):
        importlib.import_module("not_installed_here")
