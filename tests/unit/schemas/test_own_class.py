"""A class of the user's own, named as module:Class."""

from __future__ import annotations

from pathlib import Path

import pytest

from moorage.schemas.own_class import is_own, own_class


class Base:
    pass


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"mine_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(
        "from tests.unit.schemas.test_own_class import Base\nclass Good(Base): pass\nclass Other: pass\nword = 'x'\n"
    )
    (tmp_path / f"{name}_broken.py").write_text("1 / 0\n")
    (tmp_path / f"{name}_needs.py").write_text("import nowhere_to_be_found\n")
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_a_class_of_ones_own_is_imported(module: str) -> None:
    assert is_own(f"{module}:Good")
    assert not is_own("fragments")
    found = own_class(f"{module}:Good", Base)
    assert issubclass(found, Base)
    assert found.__name__ == "Good"


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("{m}:Missing", "there is no such class"),
        ("{m}:Other", "it is no Base"),
        ("{m}:word", "it is no Base"),
        ("{m}:", "there is no such class"),
        ("{m}_absent:Good", "PYTHONPATH"),
        ("{m}_needs:Good", "'nowhere_to_be_found'"),
        ("{m}_broken:Good", "ZeroDivisionError: division by zero"),
        (":Good", "Empty module name"),
    ],
)
def test_what_is_not_there_or_no_such_class_is_told(module: str, word: str, told: str) -> None:
    with pytest.raises(ValueError, match=r".+") as refused:
        own_class(word.format(m=module), Base)
    assert told in str(refused.value)
    assert str(refused.value).startswith(word.format(m=module))
