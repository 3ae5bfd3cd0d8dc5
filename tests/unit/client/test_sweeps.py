"""Sweeps by the SDK: one job with a replica for each item, in the request or in a file of the job."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moorage.client import AsyncClient, Rejected
from moorage.client.packing import pack
from moorage.client.sweeps import INLINE_BYTES_MAX, argv_of, sweep_of_file, sweep_of_values
from moorage.schemas.items import Format, ItemsFile
from moorage.schemas.job import Request
from moorage.system.item_files import items_in
from moorage.testing import Ran, SimFleet, Task
from moorage.worker import HandlerContext
from tests.scenes import in_virtual_time


def say_item(task: Task) -> Ran:
    seen = [value for name, value in sorted(task.env.items()) if name.startswith("MOORAGE_ITEM")]
    return Ran(out=f"{' '.join(task.argv)} {seen}\n")


@in_virtual_time
async def test_each_item_has_a_replica_with_it() -> None:
    async with AsyncClient(transport=SimFleet("8xH100", script=say_item)) as moorage:
        items = [{"lr": 0.1, "seed": 1}, {"lr": 0.2, "seed": 2}, {"lr": 0.3, "seed": 3}]
        job = await moorage.map(["train", "--lr={lr}"], items, gpu="1xH100")
        texts = {piece.replica: piece.text async for piece in job.logs() if piece.text}
        assert texts == {
            at: f"train --lr={item['lr']} {[msgspec.json.encode(item).decode(), str(item['lr']), str(item['seed'])]}\n"
            for at, item in enumerate(items)
        }
        some = await moorage.map(["train", "{item}"], ["a", "b", "c"], indices="1-2", max_running=1)
        assert {piece.replica: piece.text async for piece in some.logs() if piece.text} == {
            1: "train b ['b']\n",
            2: "train c ['c']\n",
        }


@in_virtual_time
async def test_a_function_reads_its_item_as_it_was_given() -> None:
    def double(context: HandlerContext) -> Any:
        return {"twice": 2 * context.item["n"], "as": context.environment["MOORAGE_ITEM_N"]}

    fleet = SimFleet("4xH100", handlers={"double": double})
    async with AsyncClient(transport=fleet) as moorage:
        job = await moorage.submit_handler("double", items=[{"n": 1}, {"n": 21}])
        result = await job.result()
        assert result.value == [{"twice": 2, "as": "1"}, {"twice": 42, "as": "21"}]


@pytest.mark.parametrize(
    ("items", "word", "fields", "says"),
    [
        ([], "x", {}, "there are no items"),
        (["a", object()], "x", {}, "item 1 a request cannot have a value of type object"),
        ("abc", "x", {}, "items are a list of values, not a text"),
        ({"a": 1}, "x", {}, "items are a list of values, not a mapping"),
        (None, "x", {}, "items are a list of values, not one value"),
        ([1], "x", {"files": ""}, "an empty path is no file or folder"),
        ([1], "x", {"files": ["a.py", ""]}, "an empty path is no file or folder"),
        (["a", b"b"], "x", {}, "item 1 must be text, found bytes"),
        (["a", "b\0"], "x", {}, "item 1 must be text without NUL"),
        ([1.5, float("nan")], "x", {}, "item 1 has NaN or infinity, which JSON cannot hold: write it as text"),
        ([{"lr": [1, float("inf")]}], "x", {}, "item 0 has NaN or infinity, which JSON cannot hold at ['lr'][1]"),
        ([{"lr": 1}, {"seed": 1}], "{lr}", {}, "argv names {lr}, and item 1 has the columns seed"),
        (["a"], "{lr}", {}, "argv names {lr}, and item 0 has no columns: write {{lr} for braces"),
        (["a"], "x", {"replicas": 2}, "2 replicas are asked for, and there are 1 items"),
        (["a"], "x", {"indices": "0-1"}, "replica 1 has no item, as there are 1"),
        (["a"], "x", {"indices": "0-"}, "indices must be numbers and ranges"),
        ([{"x" * 20: "y" * 20_000}], "x", {"files": "0" * 64}, "the files are sent already"),
    ],
)
def test_what_no_replica_could_have_is_refused_before_anything_is_sent(
    items: Any, word: str, fields: dict[str, Any], says: str
) -> None:
    async def submit() -> None:
        await AsyncClient(transport=SimFleet("1xH100")).map(["train", word], items, **fields)  # it is not open

    with pytest.raises(Rejected) as caught:
        asyncio.run(submit())
    assert says in caught.value.problem.message


@pytest.mark.parametrize(
    "what",
    [
        ["a", "{b}"],
        {"run": {"argv": ["a", "{b}"]}},
        msgspec.convert({"run": {"argv": ["a", "{b}"]}}, Request),
    ],
)
def test_a_command_is_found_in_whatever_is_submitted(what: Any) -> None:
    assert argv_of(what) == ["a", "{b}"]


def test_many_items_are_a_file_that_says_the_same() -> None:
    values = [{"n": at, "text": "é" * at} for at in range(200)]
    assert sweep_of_values([Path("a.png"), {"at": Path("b")}], []).values == ["a.png", {"at": "b"}]
    few, many = sweep_of_values(values[:10], []), sweep_of_values(values, [])
    assert (few.size, few.values, few.file) == (10, values[:10], None)
    assert (many.size, many.values, many.file) == (200, None, ItemsFile("moorage-items.jsonl", "jsonl"))
    with many.to_send() as paths:
        content = Path(paths[0]).read_bytes()
        packed = pack(paths)
        packed.file.close()
    assert [item.value for _, item in items_in(io.BytesIO(content), "jsonl")] == values
    assert not Path(paths[0]).exists()


@pytest.mark.parametrize(
    ("format", "line", "value"),
    [("lines", "a b", "a b"), ("csv", 'x,"y z"', {"a": "x", "b": "y z"}), ("jsonl", '{"a": 1.5}', {"a": 1.5})],
)
def test_a_small_file_is_in_the_request_and_a_large_one_among_the_files(
    tmp_path: Path, format: Format, line: str, value: Any
) -> None:
    head = "a,b\n" if format == "csv" else ""
    few, many = tmp_path / "few", tmp_path / "many"
    few.write_text(f"{head}{line}\n\n{line}\n")
    many.write_text(head + f"{line}\n" * INLINE_BYTES_MAX)
    with few.open("rb") as source:
        assert sweep_of_file(str(few), source, format, ["{item}"])[:3] == (2, [value, value], None)
    with many.open("rb") as source:
        sweep = sweep_of_file(str(many), source, format, [])
    assert sweep[:4] == (INLINE_BYTES_MAX, None, ItemsFile("many", format), str(many))


def test_a_bad_line_is_told_with_its_file(tmp_path: Path) -> None:
    with pytest.raises(Rejected, match=r"sweep.csv: line 3 must have 2 values, one for each column, found 1"):
        sweep_of_file("sweep.csv", io.BytesIO(b"a,b\n1,2\n3\n"), "csv", [])
    with pytest.raises(Rejected, match=r"argv names \{c\}, and line 2 of sweep.csv has the columns a, b"):
        sweep_of_file("sweep.csv", io.BytesIO(b"a,b\n1,2\n3\n"), "csv", ["{c}"])
    with pytest.raises(Rejected, match=r"sweep.csv has no items"):
        sweep_of_file("sweep.csv", io.BytesIO(b"a,b\n"), "csv", [])


def test_a_header_that_names_no_columns_is_told_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "sweep.csv"
    path.write_text("0.1;1\n0.2;2\n")
    with path.open("rb") as source, pytest.raises(Rejected, match="line 1 must have columns named by") as caught:
        sweep_of_file(str(path), source, "csv", ["x"])
    assert "the first row of a .csv names the columns, divided by commas" in str(caught.value.problem.next)


def test_a_file_that_is_named_twice_is_brought_once(tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text("a\n1\n")
    with pack([tmp_path, tmp_path / "items.csv"]).file as both, pack([tmp_path]).file as one:
        assert both.read() == one.read()
