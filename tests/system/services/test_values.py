"""Values of calls beside bytes, text and JSON: answers of a type, and arrays both ways, by real members."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest

from moorage.bus.connection import connect
from moorage.client import AsyncClient, CallFailed, Client, Rejected
from moorage.serve import Answer
from tests.servers import Server
from tests.system.services.members import member


@dataclass
class Word:
    text: str
    size: int


class Sized(msgspec.Struct):
    size: int


def client(url: str, prefix: str) -> AsyncClient:
    return AsyncClient(url, tenant="default", prefix=prefix, timeout="30s")


async def test_an_answer_is_of_the_type_that_its_caller_names(nats_url: str, unique: str, tmp_path: Path) -> None:
    async with (
        client(nats_url, unique) as moorage,
        member(nats_url, tmp_path, "functions:word", "--name", "word", prefix=unique) as one,
        member(nats_url, tmp_path, "functions:words", "--name", "words", prefix=unique) as two,
        member(nats_url, tmp_path, "functions:echo", "--name", "echo", prefix=unique) as three,
    ):
        await asyncio.gather(one.ready(), two.ready(), three.ready())
        assert await moorage.call("word", "zwölf", returns=Word) == Word("zwölf", 5)
        named, listed = moorage.service("word"), moorage.service("words")
        assert (await named.answer("ab", returns=Sized)).value == Sized(2)
        assert [each async for each in named.map(["a", "bc"], returns=Sized)] == [Sized(1), Sized(2)]
        assert [each async for each in listed.stream("a bc", returns=Word)] == [Word("a", 1), Word("bc", 2)]
        assert await listed.call("a bc", returns=list[Sized]) == [Sized(1), Sized(2)]
        assert await listed.call("", returns=list[Word]) == []
        assert await moorage.call("echo", Word("x", 1), returns=Word) == Word("x", 1)
        assert await moorage.call("echo", b"x", returns=bytes) == b"x"
        with pytest.raises(CallFailed, match=r"the answer is no Word: Expected `object`, got `array`") as failed:
            await moorage.call("echo", [1], returns=Word)
        assert failed.value.code == "call-failed"
        with pytest.raises(CallFailed, match=r"the answer is no Sized: Expected `int`, got `str` - at `\$\.size`"):
            await moorage.call("echo", {"size": "2"}, returns=Sized)
        with pytest.raises(CallFailed, match=r"the answer is no int: Expected `int`, got `bytes`"):
            await moorage.call("echo", b"2", returns=int)
        unread: Any = 7
        with pytest.raises(TypeError, match="7"):
            await moorage.call("nobody", returns=unread)
        unknown: Any = {"timout": 1}
        with pytest.raises(TypeError, match="no keyword 'timout' here, of a call: the nearest is 'timeout'"):
            await moorage.call("nobody", **unknown)


def test_the_twin_without_await_has_types_too(nats_server: Server, unique: str, tmp_path: Path) -> None:
    async def serve(work: Any) -> None:
        async with member(nats_server.url, tmp_path, "functions:word", "--name", "word", prefix=unique) as one:
            await one.ready()
            await asyncio.to_thread(work)

    def work() -> None:
        with Client(nats_server.url, tenant="default", prefix=unique) as moorage:
            assert moorage.call("word", "ab", returns=Word) == Word("ab", 2)
            service = moorage.service("word")
            assert list(service.map(iter(["a", "bc"]), returns=Sized)) == [Sized(1), Sized(2)]
            assert list(service.map(["a"], returns=Sized)) == [Sized(1)]
            assert list(service.stream("a", returns=Word)) == [Word("a", 1)]
            unknown: Any = {"timout": 1}
            with pytest.raises(TypeError, match="timout"):
                list(service.map(["a"], **unknown))

    asyncio.run(serve(work))


async def test_arrays_go_both_ways_as_large_as_data_may_be(nats_url: str, unique: str, tmp_path: Path) -> None:
    async with (
        client(nats_url, unique) as moorage,
        member(nats_url, tmp_path, "functions:doubled", "--name", "doubled", prefix=unique) as one,
        member(nats_url, tmp_path, "functions:rows", "--name", "rows", prefix=unique) as two,
        member(nats_url, tmp_path, "functions:summed", "--name", "summed", "--batch", "8", prefix=unique) as three,
        member(nats_url, tmp_path, "functions:echo", "--name", "echo", prefix=unique) as four,
    ):
        await asyncio.gather(one.ready(), two.ready(), three.ready(), four.ready())
        for kind in ("<f4", ">i8", "|u1", "<f2", "<c16"):
            for shape in ((2, 3), (0, 4), (5,)):
                sent = numpy.arange(numpy.prod(shape, dtype=int)).reshape(shape).astype(kind)
                got = await moorage.call("doubled", sent, returns=numpy.ndarray)
                assert (got.shape, got.tolist()) == (shape, (sent * 2).tolist())
        assert (await moorage.call("echo", numpy.array(5))).tolist() == 5
        found = await moorage.call(
            "echo", {"label": numpy.int64(3), "scores": [numpy.float32(0.5)], "yes": numpy.True_}
        )
        assert found == {"label": 3, "scores": [0.5], "yes": True}
        assert await moorage.call("doubled", numpy.array(5)) == 10, "numpy makes a number of it"
        with pytest.raises(Rejected, match=r"data\['x'\] is NaN or infinity"):
            await moorage.call("echo", {"x": numpy.float32("nan")})
        turned = numpy.arange(6, dtype="<f4").reshape(2, 3).T
        got = await moorage.call("doubled", turned)
        assert (got.dtype.str, got.tolist()) == ("<f4", [[0, 6], [2, 8], [4, 10]])
        got += 1  # it may be written to
        large = numpy.ones((3, 1 << 20), "<f4")  # 12 MiB: in parts both ways
        assert (await moorage.call("doubled", large)).sum() == 2 * 3 * (1 << 20)
        parts = [each.tolist() async for each in moorage.service("rows").stream(turned)]
        assert parts == [[0, 3], [1, 4], [2, 5]]
        answers = [each.tolist() async for each in moorage.service("summed").map([turned, turned * 2, large])]
        assert answers == [[15], [30], [3 << 20]]
        with pytest.raises(CallFailed, match="the answer is no Word"):
            await moorage.call("doubled", turned, returns=Word)


async def test_an_array_is_bytes_and_a_header_for_any_client(nats_url: str, unique: str, tmp_path: Path) -> None:
    async with (
        member(nats_url, tmp_path, "functions:doubled", "--name", "doubled", prefix=unique) as one,
        await connect(nats_url, "bare") as bare,
    ):
        await one.ready()
        subject = f"{unique}.call.default.doubled"
        answer = await bare.request(subject, bytes([1, 2, 3, 4]), 10, headers={"Moorage-Array": "|u1 2 2"})
        assert answer.data == bytes([2, 4, 6, 8])
        assert (answer.headers or {})["Moorage-Array"] == "|u1 2 2"
        assert (answer.headers or {})["Content-Type"] == "application/octet-stream"
        for header in ("|u1 2 3", "|O 4", "<f3 4", "|u1 -1 -4", "", "|u1 " + "9" * 400):
            wrong = await bare.request(subject, bytes([1, 2, 3, 4]), 10, headers={"Moorage-Array": header})
            assert (wrong.headers or {})["Nats-Service-Error-Code"] == "500", header


def test_a_model_imports_its_names_from_where_they_are_served() -> None:
    assert Answer(1).headers == {}
