"""A function mapped over items: how it is found, how it is called, and in which order its answers come."""

from __future__ import annotations

import asyncio
import io
import json
import math
import os
import sys
import tarfile
import threading
from collections.abc import AsyncIterator
from functools import partial, wraps
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from moorage.bus.jetstream import JetStream
from moorage.client import AsyncClient, AsyncJob, ItemFailed, Rejected, Unreachable, map_runner
from moorage.client.answers import JobInfo
from moorage.client.connected import Connected
from moorage.client.mapping import _module_of, in_order, named, travel_of, travelling
from moorage.client.sending import bucket_of
from moorage.client.stored_file import stored_file
from moorage.client.sweeps import sweep_of_values
from moorage.schemas.errors import Problem
from moorage.system.archives import compressed
from moorage.testing import Ran, SimFleet
from moorage.worker.attempt.job_files import JobFiles, LeftOut
from tests.scenes import in_virtual_time


def halve(item: float) -> Any:
    return {"half": item / 2}


def spoil(_: float) -> Any:
    return math.nan


def ran(folder: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, number: int) -> tuple[int, Any]:
    monkeypatch.setenv("MOORAGE_INDEX", str(number))
    monkeypatch.setenv(map_runner.VARIABLE, "")
    monkeypatch.setattr(sys, "path", [str(folder / map_runner.FOLDER), *sys.path[1:]])
    code = map_runner.main(words, folder)
    return code, json.loads((folder / map_runner.VALUE).read_bytes()) if (folder / map_runner.VALUE).exists() else None


def test_the_runner_calls_the_function_with_the_item_of_its_number(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    items = sweep_of_values([1, "a\nb", 4], ())
    with travelling(halve, "cloudpickle", items) as (words, paths):
        folder = Path(paths[0])
        assert ran(folder, [*words[1:], "check"], monkeypatch, 0) == (0, None)
        assert ran(folder, words[1:], monkeypatch, 2) == (0, {"value": {"half": 2}})
        code, outcome = ran(folder, words[1:], monkeypatch, 1)
        assert (code, outcome["error"]["kind"]) == (1, "TypeError")
        assert ran(folder, ["pickle", "2.7"], monkeypatch, 0)[0] == map_runner.CODE_NOT_LOADED
        assert "name another python=" in capsys.readouterr().err
        assert ran(folder, ["module", "moorage.no_such", "f"], monkeypatch, 0)[0] == map_runner.CODE_NOT_LOADED
        assert "does not import moorage" in capsys.readouterr().err
    with travelling(spoil, "cloudpickle", items) as (words, paths):
        code, outcome = ran(Path(paths[0]), words[1:], monkeypatch, 0)
        assert (code, outcome["error"]["kind"]) == (1, "ValueError")  # JSON has no NaN


class Unspeakable(Exception):
    """An error that has no text."""

    def __str__(self) -> str:
        raise LookupError("no text")


def raised(error: Exception) -> Any:
    def function(item: Any) -> Any:
        raise error

    return function


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        (lambda item: ["half \ud800"], "UnicodeEncodeError", "surrogates not allowed"),
        (raised(ValueError("half \ud800")), "ValueError", "half \\ud800"),
        (raised(Unspeakable()), "Unspeakable", "its text raises LookupError"),
    ],
)
@pytest.mark.parametrize("closed", [False, True])
def test_an_item_says_how_it_failed_whatever_its_texts_are(
    function: Any, kind: str, message: str, closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value that no client could read was said to be no longer kept, and of such errors only the code was known."""
    if closed:
        monkeypatch.setattr(sys, "stderr", None)
    kept = map_runner.outcome(function, 1)
    error = msgspec.json.decode(kept)["error"]
    assert error["kind"] == kind
    assert message in error["message"]
    assert kind in error["traceback"]


def test_a_value_keeps_its_letters() -> None:
    assert msgspec.json.decode(map_runner.outcome(lambda item: item, "é \U0001f600 \0")) == {"value": "é \U0001f600 \0"}


def test_what_no_import_finds_is_pickled_without_asking() -> None:
    assert [travel_of(each) for each in (halve, json.dumps, lambda _: 1)] == ["module", "module", "cloudpickle"]
    of_cell = eval("lambda item: item", {"__name__": "__main__"})
    assert travel_of(of_cell) == "cloudpickle"


def test_a_module_of_one_file_is_sent_and_an_installed_one_is_not() -> None:
    assert _module_of(json.dumps) == ("json", "dumps", "")
    name, function, file = _module_of(halve)
    assert (name.rpartition(".")[2], function) == ("test_mapping", "halve")
    assert not file  # a module of a package travels by `files`
    for nameless in (lambda n: n, print):
        with pytest.raises(Rejected, match="no module has the function"):
            _module_of(nameless)


class Scaled:
    """Multiplies by its own factor: a bound method of it is not the function of that name in its class."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def of(self, item: float = 0) -> float:
        return item * self.factor

    @classmethod
    def twice(cls, item: float) -> float:
        return item * 2

    @staticmethod
    def thrice(item: float) -> float:
        return item * 3

    def each(self, item: float) -> Any:
        yield item


def logged(function: Any) -> Any:
    return wraps(function)(lambda item: function(item))


@logged
def decorated(item: float) -> float:
    return item


async def later(item: float) -> float:
    await asyncio.sleep(0)
    return item + 1


def yields(item: float) -> Any:
    yield item


async def yields_later(item: float) -> Any:
    yield item


@pytest.mark.parametrize("function", [Scaled(2).of, decorated.__wrapped__, logged(halve)])
def test_a_function_that_its_name_would_not_bring_back_is_refused(function: Any) -> None:
    with pytest.raises(Rejected, match="is not this function") as refused:
        _module_of(function)
    assert "cloudpickle" in refused.value.fixes[0]


@pytest.mark.parametrize("function", [halve, decorated, Scaled.twice, Scaled.thrice, later])
def test_what_its_name_brings_back_travels_by_name(function: Any) -> None:
    name = _module_of(function)[1]
    found: Any = sys.modules[__name__]
    for part in name.split("."):
        found = getattr(found, part)
    assert found == function


@pytest.mark.parametrize("function", [yields, yields_later, partial(yields), Scaled(1).each])
@pytest.mark.parametrize("how", ["module", "cloudpickle"])
def test_a_generator_is_refused_before_anything_is_sent(function: Any, how: Any) -> None:
    with pytest.raises(Rejected, match="is a generator"), travelling(function, how, sweep_of_values([1], ())):
        pytest.fail("it was taken")


def test_an_async_function_is_awaited() -> None:
    assert msgspec.json.decode(map_runner.outcome(later, 1)) == {"value": 2}


def test_a_module_that_maps_is_refused_while_a_job_loads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert named("mine", check=True) == "mine"
    monkeypatch.setenv(map_runner.VARIABLE, "1")
    with pytest.raises(Rejected, match="submits a job itself"):
        named("mine", check=True)


def test_a_failed_item_says_how_it_ended() -> None:
    assert str(ItemFailed("j", 7, "FAILED", 9, "")) == "item 7 of job j failed with code 9"
    assert str(ItemFailed("j", 7, "FAILED", 1, "two", kind="ValueError")) == "item 7 of job j failed: ValueError: two"
    assert str(ItemFailed("j", 7, "CANCELLED", -15, "by ana")) == "item 7 of job j was cancelled: by ana"


def test_a_value_is_the_first_of_what_is_kept_so_that_what_is_behind_is_not_read(tmp_path: Path) -> None:
    for name in (map_runner.VALUE, "a.pt", "a/b.pt", f"{map_runner.FOLDER}/c"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    files, packed = JobFiles(cast(JetStream, None), "moorage", tmp_path, 1 << 20, 0), io.BytesIO()
    files._pack(packed, str(tmp_path), ["**", map_runner.VALUE], threading.Event(), LeftOut(), files.bucket("acme"))
    packed.seek(0)
    with tarfile.open(fileobj=packed) as archive:
        assert archive.getnames()[0] == map_runner.VALUE


@in_virtual_time
async def test_one_stored_file_is_read_unless_all_of_them_take_too_much() -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, content in (("value", b"7"), ("large", os.urandom(3 << 20))):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    async with AsyncClient(transport=SimFleet("1xH100")) as client:
        store = bucket_of(client._wire)
        await store.put("kept", compressed(packed), {}, lambda _: None)
        await store.put("none", [b"no archive"], {}, lambda _: None)
        read = partial(stored_file, client._wire)
        assert (await read("kept", "value", 9), await read("kept", "value", 9, 4 << 20)) == (b"7", b"7")
        assert len(await read("kept", "large", 9) or b"") == 9
        for name, path, most in (
            ("kept", "value", 1 << 20),
            ("kept", "other", None),
            ("none", "a", None),
            ("a", "a", 1),
        ):
            assert await read(name, path, 9, most) is None


@in_virtual_time
async def test_what_would_be_misread_is_refused_before_anything_is_submitted() -> None:
    async with AsyncClient(transport=SimFleet("1xH100")) as client:
        for fields, why in (
            ({"keep": "out"}, "keep is a list"),
            ({"after": "prep", "check": False}, "after is a list"),
            ({"job": 59 * "a"}, "leave room for -check"),
        ):
            with pytest.raises(Rejected, match=why):
                await client.map(json.dumps, [1], **fields)
        assert (await client.ls()).jobs == []
        assert (await client.map(json.dumps, [1], job=64 * "a", check=False)).job == 64 * "a"


def test_the_check_of_a_cancelled_job_is_looked_at_once_and_only_if_it_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    show = Connected.show

    async def noted(client: Connected, job: str, *asked: Any) -> JobInfo:
        shown.append(job)
        return await show(client, job, *asked)

    monkeypatch.setattr(Connected, "show", noted)

    @in_virtual_time
    async def scene() -> None:
        async with AsyncClient(transport=SimFleet("1xH100", script=lambda _: Ran(seconds=1000))) as client:
            for check in (True, False):
                shown.clear()
                job = await client.map(json.dumps, range(5), check=check)
                await job.cancel()
                assert [answer.state async for answer in job.answers(errors="return")] == ["CANCELLED"] * 5
                assert shown.count(f"{job.job}-check") == check

    scene()


@pytest.mark.parametrize("is_heard", [False, True])
def test_an_interruption_goes_on_whether_or_not_the_cancel_is_heard(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_heard: bool
) -> None:
    async def unheard(job: AsyncJob, _: str) -> None:
        if job.job.endswith("-check"):
            raise Unreachable(Problem("unreachable", "the connection is down"))
        await asyncio.Event().wait()

    if not is_heard:
        monkeypatch.setattr(AsyncJob, "cancel", unheard)

    @in_virtual_time
    async def scene() -> None:
        async with AsyncClient(transport=SimFleet("1xH100", script=lambda _: Ran(seconds=1000))) as client:
            job = await client.map(json.dumps, [1, 2], job="a")
            waits: asyncio.Future[Any] = asyncio.ensure_future(anext(job.answers()))
            await asyncio.sleep(10)
            waits.cancel()
            await asyncio.wait({waits}, timeout=60)
            assert waits.cancelled()
            assert ((await job.show()).state == "CANCELLED") is is_heard

    scene()
    told = "job a is cancelled, as" if is_heard else "it may go on: moorage cancel a,a-check"
    assert told in caplog.text


async def test_answers_that_come_early_are_held() -> None:
    async def pairs() -> AsyncIterator[tuple[int, Any]]:
        for number in (7, 2, 5):
            yield number, f"of {number}"

    assert [answer async for answer in in_order(pairs(), iter([2, 5, 7]))] == ["of 2", "of 5", "of 7"]
