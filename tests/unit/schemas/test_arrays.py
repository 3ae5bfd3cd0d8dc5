"""Arrays as data of calls: what is none of numbers is refused by name, and a header that lies is an error."""

from __future__ import annotations

import re
import sys
from typing import Any

import numpy
import pytest

from moorage.schemas.arrays import decoded_array, encoded_array


def test_an_array_is_its_bytes_in_c_order_with_its_dtype_and_sizes() -> None:
    assert encoded_array(numpy.array([[1, 2], [3, 4]], ">u2").T) == (b"\0\1\0\3\0\2\0\4", ">u2 2 2")
    assert encoded_array(numpy.array(True)) == (b"\1", "|b1")
    assert [encoded_array(each) for each in (b"x", [1], None, numpy.float64(1))] == [None] * 4


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (numpy.array([object()]), "object"),
        (numpy.array(["a"]), "<U1"),
        (numpy.zeros(2, [("a", "<f4")]), "a"),
        (numpy.array(["2026-01-01"], "datetime64[D]"), "datetime64"),
        (numpy.ma.masked_array([1, 2], [True, False]), "masked"),
    ],
)
def test_what_is_none_of_numbers_is_refused(value: Any, said: str) -> None:
    with pytest.raises(TypeError, match=re.escape(said)):
        encoded_array(value)


@pytest.mark.parametrize(
    "header", ["", "<f4", "<f4 2 2", "<f4 -1", "<f4 1 ", "|O 1", "<f3 1", "<f4 ½", "<f4" + " 1" * 40]
)
def test_a_header_that_is_not_of_these_bytes_is_an_error(header: str) -> None:
    with pytest.raises(ValueError, match=r"Moorage-Array|bytes"):
        decoded_array(b"12345678", header)


def test_nothing_imports_numpy_before_an_array_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "numpy")
    assert encoded_array(b"x") is None
    assert "numpy" not in sys.modules


def test_without_numpy_an_array_is_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)  # an import of it raises
    assert decoded_array(b"12345678", "<f4 2") == b"12345678"
