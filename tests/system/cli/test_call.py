"""`moorage call`: what is sent, what is printed of the answer, and how an error and Ctrl-C end it."""

from __future__ import annotations

import asyncio
import base64
import fcntl
import hashlib
import json
import os
import signal
import struct
import termios
from pathlib import Path

from tests.system.cli.node import Node, moorage, start
from tests.system.services.members import Gate, member
from tests.waiting import until


async def test_a_call_sends_text_json_or_bytes_and_prints_the_answer(node: Node, unique: str, tmp_path: Path) -> None:
    blob = bytes(range(256))
    (tmp_path / "data.bin").write_bytes(blob)
    (tmp_path / "query.json").write_text('{"a": [1, null]}')
    names = ("echo", "count", "wrong", "held", "digest", "own", "named")
    echo, count, wrong, held, digest, own, named = (f"{name}-{unique}"[:32] for name in names)
    gate = Gate(tmp_path)
    async with (
        member(node.url, tmp_path, "functions:echo", "--name", echo) as one,
        member(node.url, tmp_path, "functions:count", "--name", count) as two,
        member(node.url, tmp_path, "functions:wrong", "--name", wrong) as three,
        member(node.url, tmp_path, "functions:aheld", "--name", held, "--concurrency", "1") as four,
        member(node.url, tmp_path, "functions:digest", "--name", digest) as five,
        member(node.url, tmp_path, "functions:own", "--name", own) as six,
        member(node.url, tmp_path, "functions:told", "--name", named) as seven,
    ):
        await asyncio.gather(*(each.ready() for each in (one, two, three, four, five, six, seven)))

        async def printed(*words: str, stdin: str = "") -> str:
            ran = await moorage("call", *words, env=node.env(), stdin=stdin, cwd=tmp_path)
            assert (ran.code, ran.err) == (0, "")
            return ran.out

        assert await printed(echo, "zwölf") == "zwölf\n"
        assert await printed(echo, "@query.json") == '{"a":[1,null]}\n'
        assert await printed(echo, "-", "--as", "json", stdin="[1, 2]") == "[1,2]\n"
        assert await printed(echo, "-", stdin="as it is") == "as it is"
        assert await printed(echo) == ""
        told = json.loads(await printed(echo, "@data.bin", "--json"))
        assert (told["service"], base64.b64decode(told["base64"])) == (echo, blob)
        assert told["headers"]["Moorage-Waited-Ms"] == "0"
        own_headers = ("--header", "X-Of=a=b", "--header", "content-type=text/x")
        heard = json.loads(await printed(named, "x", *own_headers, "--json"))["value"]["headers"]
        assert (heard["X-Of"], heard["Content-Type"]) == ("a=b", "text/x")
        large = os.urandom(3_000_000)
        (tmp_path / "large.bin").write_bytes(large)
        told = json.loads(await printed(digest, "@large.bin", "--json"))["value"]
        assert told[:2] == [len(large), hashlib.sha256(large).hexdigest()]
        assert await printed(count, "3", "--as", "bytes") == "0\n1\n2\n"
        parts = (await printed(count, "2", "--as", "bytes", "--json")).splitlines()
        assert [json.loads(each)["value"] for each in parts] == [0, 1]

        for words, code, said in (
            ((wrong, "x"), 1, "error[call-failed]: ValueError: no such thing: 'x'"),
            ((echo, "{", "--as", "json"), 2, "the data are not json"),
            ((echo, "x", "--header", "Moorage-Hops=1"), 2, "'Moorage-Hops' cannot be a header"),
            ((echo, "x", "--header", "moorage-wait-ms=1"), 2, "'moorage-wait-ms' cannot be a header"),
            ((echo, "@no-such-file"), 2, "no-such-file cannot be read"),
            ((f"none-{unique}"[:32], "--within", "5s"), 1, "error[no-service]"),
        ):
            ran = await moorage("call", *words, env=node.env(), cwd=tmp_path)
            assert (ran.code, ran.out) == (code, "")
            assert said in ran.err

        ran = await moorage("call", own, "bad", "--as", "bytes", "--json", env=node.env(), cwd=tmp_path)
        told = json.loads(ran.out)
        assert (told["code"], told["fault"], told["status"], told["headers"]["X-Field"]) == (
            "call-failed", "service", 422, "word",
        )  # fmt: skip
        assert (ran.code, "found" in ran.err) == (1, False)

        waiting = await start("call", echo, "-", env=node.env())
        assert waiting.stdin is not None
        waiting.stdin.write(b"the beginning")
        pipe = waiting.stdin.get_extra_info("pipe")
        await until(lambda: _unread(pipe.fileno()) == 0, 60, "it reads")
        waiting.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(waiting.wait(), 60) != 0

        ran = await moorage("call", held, os.fsdecode(gate.data), "--within", "1s", env=node.env(), cwd=tmp_path)
        assert ran.code != 0
        assert "error[timed-out]" in ran.err
        assert "fix: wait longer with --within\n" in ran.err

        begun = gate.begun  # one, unless its time was over before it ran
        for at, number in enumerate((signal.SIGINT, signal.SIGTERM, signal.SIGINT), begun + 1):
            calling = await start("call", held, os.fsdecode(gate.data), env=node.env())
            await gate.runs(at)  # in the only place: the one before is cancelled
            calling.send_signal(number)
            assert await asyncio.wait_for(calling.wait(), 60) == 128 + number
        gate.open()


def _unread(number: int) -> int:
    """The bytes in a pipe that nobody has read (pipe(7))."""
    found: int = struct.unpack("i", fcntl.ioctl(number, termios.FIONREAD, bytes(4)))[0]
    return found
