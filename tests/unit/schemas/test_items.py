"""Items of a sweep: what a replica reads of its item, what a command becomes, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moorage.schemas.codec import canonical, decode_request
from moorage.schemas.errors import Refused
from moorage.schemas.items import ITEM_BYTES_MAX, WORD_BYTES_MAX, item_of, substituted, unfilled
from moorage.schemas.job import Request


def decode(argv: list[str], items: Any, **fields: Any) -> Request:
    return decode_request(json.dumps({"run": {"argv": argv, "items": items}, **fields}).encode())


def test_a_replica_reads_its_item_and_each_column() -> None:
    item = item_of({"lr": 0.1, "batch-size": 32, "name": "a b", "deep": True, "none": None, "layers": [1, 2]})
    assert item.variables == {
        "MOORAGE_ITEM": '{"lr":0.1,"batch-size":32,"name":"a b","deep":true,"none":null,"layers":[1,2]}',
        "MOORAGE_ITEM_LR": "0.1",
        "MOORAGE_ITEM_BATCH_SIZE": "32",
        "MOORAGE_ITEM_NAME": "a b",
        "MOORAGE_ITEM_DEEP": "true",
        "MOORAGE_ITEM_NONE": "null",
        "MOORAGE_ITEM_LAYERS": "[1,2]",
    }
    assert item_of("0.1").variables == {"MOORAGE_ITEM": "0.1"}
    assert item_of(7).variables == {"MOORAGE_ITEM": "7"}


@pytest.mark.parametrize(
    ("word", "becomes"),
    [
        ("--lr={lr}", "--lr=0.1"),
        ("{lr}{lr}-{name}", "0.10.1-{lr}"),  # what a column says is not read again
        ("{item}", '{"lr":0.1,"name":"{lr}"}'),
        ("{{lr}", "{lr}"),
        ("${{HOME}", "${HOME}"),
        ("{}", "{}"),
        ("{print $1}", "{print $1}"),
        ('{"a": {"b": 1}}', '{"a": {"b": 1}}'),
        ("plain", "plain"),
    ],
)
def test_names_in_braces_stand_for_the_item(word: str, becomes: str) -> None:
    assert substituted(["echo", word], item_of({"lr": 0.1, "name": "{lr}"})) == ["echo", becomes]


def test_a_column_named_item_stands_for_itself() -> None:
    assert substituted(["{item}"], item_of({"item": "x"})) == ["x"]


def test_a_word_that_no_system_takes_is_refused() -> None:
    item = item_of("é" * (ITEM_BYTES_MAX // 2))
    assert substituted(["{item}" * 3 + "x" * (WORD_BYTES_MAX - 3 * ITEM_BYTES_MAX)], item)
    with pytest.raises(ValueError, match=f"{WORD_BYTES_MAX + 1} bytes"):
        substituted(["{item}" * 3 + "x" * (WORD_BYTES_MAX + 1 - 3 * ITEM_BYTES_MAX)], item)


def test_a_list_has_a_replica_for_each_item() -> None:
    request = decode(["echo", "{item}"], ["a", "b", "c"])
    assert request.replicas == 3
    assert request.trouble is None
    assert decode_request(canonical(request)) == request
    some = decode(["echo", "{item}"], ["a", "b", "c"], indices="1-2")
    assert (some.replicas, some.numbers) == (2, ((1, 2),))


@pytest.mark.parametrize(
    ("items", "fields", "says"),
    [
        ([], {}, "run.items must have an item for each replica"),
        (["a", "b"], {"replicas": 3}, "replicas must be left out, or be 2 as run.items says, found 3"),
        (["a", "b"], {"indices": "0-2"}, "indices must be numbers of items, 0..1, found 2"),
        ({"file": "x", "format": "xml"}, {}, "format"),
        ({"flie": "x"}, {}, "unknown field"),
        ("a", {}, "items"),
    ],
)
def test_items_that_do_not_fit_the_replicas_are_refused(items: Any, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(Refused) as caught:
        decode(["true"], items, **fields)
    problem = caught.value.problem
    assert says in f"{problem.field} {problem.message}"


@pytest.mark.parametrize(
    ("argv", "items", "field", "says"),
    [
        (
            ["echo", "{lr}"],
            [{"lr": 1}, {"seed": 1}],
            "run.argv",
            "argv names {lr}, and item 1 has the columns seed",
        ),
        (["echo", "{lr}"], ["a"], "run.argv", "has no columns: write {{lr} for braces"),
        (["true"], ["a", "b" * (ITEM_BYTES_MAX + 1)], "run.items[1]", f"at most {ITEM_BYTES_MAX} bytes"),
        (["true"], ["a\0"], "run.items[0]", "without NUL"),
        (["true"], [{"learning rate": 1}], "run.items[0]", "columns named by"),
        (["true"], [{"a.b": 1, "a-b": 2}], "run.items[0]", "variables of their own"),
        (["true"], [{f"c{number}": 0 for number in range(257)}], "run.items[0]", "at most 256 columns"),
        (["true"], {"file": "items.txt"}, "run.items.file", "it brings none"),
    ],
)
def test_an_item_that_no_replica_could_have_is_refused(argv: list[str], items: Any, field: str, says: str) -> None:
    trouble = decode(argv, items).trouble
    assert trouble is not None
    assert trouble.field == field
    assert says in trouble.message


@pytest.mark.parametrize("file", ["", ".", "../items.txt", "/items.txt", "a/../../b"])
def test_a_file_of_items_is_among_the_files(file: str) -> None:
    trouble = decode_request(
        json.dumps({"run": {"argv": ["true"], "files": "0" * 64, "items": {"file": file}}}).encode()
    ).trouble
    assert trouble is not None
    assert trouble.field == "run.items.file"


def test_braces_mean_nothing_without_items() -> None:
    assert decode_request(b'{"run": {"argv": ["echo", "{lr}", "{{"]}}').trouble is None


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("{lr}", "lr"),
        ("--lr={lr}", "lr"),
        ("out/{run-1}/{x}", "run-1"),
        ("python3 train.py {item}", "item"),  # in a word for a shell, too
        ("for x in *; do echo {x}; done", ""),
        ("echo ${item}", ""),
        ("$HOME/${x}", ""),
        ("{print $1}", ""),
        ('{"a": 1}', ""),
        ("{{lr}}", ""),
        ("{}", ""),
    ],
)
def test_a_placeholder_of_a_job_without_items_is_found_among_other_braces(word: str, name: str) -> None:
    assert unfilled(["echo", word]) == name
