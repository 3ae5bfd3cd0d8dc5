"""Files of items as people and programs write them: what each item says, by the whole file and by its index."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage.schemas.items import ITEM_BYTES_MAX, Format, Item, item_of
from moorage.system.item_files import ItemIndex, items_in


def read(content: bytes, format: Format) -> list[tuple[int, Item]]:
    """Return the items of a file, each as the whole file and as the index has it."""
    found = list(items_in(io.BytesIO(content), format))
    held = io.BytesIO(b"before" + content + b"\n\nbehind")
    index = ItemIndex(held, format, 6, len(content))
    assert [index.item(held, number) for number in range(len(index))] == [item for _, item in found]
    return found


@pytest.mark.parametrize(
    ("content", "items"),
    [
        (b"a\nb\n", [(1, "a"), (2, "b")]),
        (b"a\r\n\r\n  \nb", [(1, "a"), (4, "b")]),
        (b"\xef\xbb\xbfa b\n", [(1, "a b")]),
        (b'"a\n\xc3\xa9\n', [(1, '"a'), (2, "é")]),
        (b"\n\n", []),
        (b"", []),
        (b"x" * ITEM_BYTES_MAX + b"\r\ny", [(1, "x" * ITEM_BYTES_MAX), (2, "y")]),
    ],
)
def test_each_line_is_an_item(content: bytes, items: list[tuple[int, str]]) -> None:
    assert read(content, "lines") == [(line, Item(text, {}, text)) for line, text in items]


def test_the_first_row_of_csv_names_the_columns() -> None:
    content = b'\xef\xbb\xbflr, seed,note\r\n0.1,1,plain\r\n\r\n0.2, 2,"a ""b"",\r\nc"\r\n,,\r\n'
    assert read(content, "csv") == [
        (2, item_of({"lr": "0.1", "seed": "1", "note": "plain"})),
        (4, item_of({"lr": "0.2", "seed": "2", "note": 'a "b",\r\nc'})),
        (6, item_of({"lr": "", "seed": "", "note": ""})),
    ]


def test_each_line_of_json_is_an_item() -> None:
    content = b'{"lr": 0.1, "tags": ["a"]}\n\n"text"\n7\n'
    assert read(content, "jsonl") == [
        (1, Item('{"lr":0.1,"tags":["a"]}', {"lr": "0.1", "tags": '["a"]'}, {"lr": 0.1, "tags": ["a"]})),
        (3, Item("text", {}, "text")),
        (4, Item("7", {}, 7)),
    ]


@pytest.mark.parametrize(
    ("content", "format", "says"),
    [
        (b"a\n\n" + b"x" * (ITEM_BYTES_MAX + 1), "lines", f"line 3 must have at most {ITEM_BYTES_MAX} bytes"),
        (b"a\nb\xff\n", "lines", "line 2 must be UTF-8, found the byte 0xff"),
        (b"a\nb\0\n", "lines", "line 2 must be text without NUL"),
        (b"a,b\n1,2\n3\n", "csv", "line 3 must have 2 values, one for each column, found 1"),
        (b"a,b\n1,2\n1,2,3\n", "csv", "line 3 must have 2 values, one for each column, found 3"),
        (b'a\n1\n"x\n', "csv", "line 3 has a quote that is not closed"),
        (b'a\n"x"y\n', "csv", "line 2 must be a row of CSV"),
        (b'a\n1\n5" x\n7" x\n', "csv", "line 3 must be one row of CSV"),
        (b'a\n"' + b"x\n" * ITEM_BYTES_MAX + b'"\n', "csv", f"line 2 must have at most {ITEM_BYTES_MAX} bytes"),
        (b"learning rate\n1\n", "csv", "line 1 must have columns named by"),
        (b"a,a\n1,2\n", "csv", "line 1 must have columns with variables of their own, found 'a' and 'a'"),
        (b"\xff\n1\n", "csv", "line 1 must be UTF-8"),
        (b'1\n{"a": }\n', "jsonl", "line 2 must be a JSON value"),
        (b'{"a b": 1}\n', "jsonl", "line 1 must have columns named by"),
        (b'"\\u0000"\n', "jsonl", "line 1 must be text without NUL"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(content: bytes, format: Format, says: str) -> None:
    with pytest.raises(ValueError, match=r"^line ") as caught:
        list(items_in(io.BytesIO(content), format))
    assert str(caught.value).startswith(says)


def test_an_item_that_is_wrong_costs_its_own_replica_alone() -> None:
    content = io.BytesIO(b"a,b\n1,2\n3\n5,6\n")
    index = ItemIndex(content, "csv")
    assert index.item(content, 2).columns == {"a": "5", "b": "6"}
    with pytest.raises(ValueError, match=r"^item 1 must have 2 values"):
        index.item(content, 1)
    with pytest.raises(ValueError, match=r"^has 3 items, and none for replica 3$"):
        index.item(content, 3)


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.text(st.characters(codec="utf-8", exclude_characters="\0")),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)


@given(st.lists(st.dictionaries(st.from_regex(r"[a-z]{1,3}", fullmatch=True), _VALUES, max_size=3), max_size=20))
def test_any_json_is_read_back(values: list[dict[str, Any]]) -> None:
    content = "\r\n".join(json.dumps(value) for value in values).encode()
    assert [item.value for _, item in read(content, "jsonl")] == values


@given(st.binary(max_size=200), st.sampled_from(["lines", "csv", "jsonl"]))
def test_any_bytes_are_items_or_an_error_with_a_line(content: bytes, format: Format) -> None:
    try:
        list(items_in(io.BytesIO(content), format))
    except ValueError as error:
        said = str(error)
    else:
        said = "line none"
        read(content, format)
    assert said.startswith("line ")
