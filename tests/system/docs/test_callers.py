"""The callers of services in JavaScript and Go, as a reader runs them: parts, errors, a full service and a cancel."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.system.cli.node import Node
from tests.system.docs.driver import environment, skip_without
from tests.system.services.members import Gate, member
from tests.unit.docs.markdown import DOCS, page

PAGE = DOCS / "how-to" / "serve-a-model-to-any-language.md"
INSTALL = "npm install --no-audit --no-fund --silent @nats-io/transport-node@3"


def made(kind: str, folder: Path, env: dict[str, str]) -> list[str]:
    """Make the caller in this folder; return the command that runs it. Skips where its tools are not here."""
    if kind == "go":
        source = DOCS / "examples" / "call.go"
        skip_without(page(source, "<!-- needs: go nats.go -->"))
        subprocess.run(["go", "build", "-o", "call", source], cwd=folder, env=env, check=True)
        return ["./call"]
    how_to = page(PAGE)
    skip_without(how_to)
    (code,) = [block.body for block in how_to.blocks if block.title == "call.mjs"]
    (folder / "call.mjs").write_text(code)
    subprocess.run(INSTALL.split(), cwd=folder, env=env, check=True)
    return ["node", "call.mjs"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["node", "go"])
async def test_a_caller_in_another_language_has_answers_parts_errors_and_cancels(
    tmp_path: Path, open_fleet: Node, unique: str, kind: str
) -> None:
    env = environment(tmp_path, NATS_URL=open_fleet.url)
    command = await asyncio.to_thread(made, kind, tmp_path, env)
    names = {name: f"{name}-{unique}"[:32] for name in ("echo", "count", "wrong", "held", "digest")}
    functions = {name: f"functions:{name}" for name in ("echo", "count", "wrong", "digest")}
    gate = Gate(tmp_path)

    async def start(service: str, data: str, *more: str, stdin: int | None = None) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        words = (*command, service, data, *more)
        return await asyncio.create_subprocess_exec(
            *words, cwd=tmp_path, env=env, stdin=stdin, stdout=pipe, stderr=pipe
        )

    async def ended(process: asyncio.subprocess.Process) -> tuple[int, str, str]:
        out, err = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode is not None
        return process.returncode, out.decode(), err.decode()

    async def call(service: str, data: str, *more: str) -> tuple[int, str, str]:
        return await ended(await start(service, data, *more))

    words = [(where, "--name", names[name]) for name, where in functions.items()]
    large = os.urandom(9_000_000)
    words.append(("functions:aheld", "--name", names["held"]))
    async with (
        member(open_fleet.url, tmp_path, *words[0]) as one,
        member(open_fleet.url, tmp_path, *words[1]) as two,
        member(open_fleet.url, tmp_path, *words[2]) as three,
        member(open_fleet.url, tmp_path, *words[3]) as four,
        member(open_fleet.url, tmp_path, *words[4]) as five,
    ):
        await asyncio.gather(*(each.ready() for each in (one, two, three, four, five)))
        assert await call(names["echo"], "zwölf") == (0, "zwölf\n", "")
        assert await call(names["count"], "3") == (0, "0\n1\n2\n", "")
        (tmp_path / "large").write_bytes(large)
        with (tmp_path / "large").open("rb") as file:
            code, out, err = await ended(await start(names["digest"], "-", stdin=file.fileno()))
        assert (code, json.loads(out)[:2]) == (0, [len(large), hashlib.sha256(large).hexdigest()]), err
        code, _, err = await call(names["wrong"], "x")
        assert code != 0
        assert "no such thing: b'x'" in err
        assert await call(names["echo"], "soon", "100") == (0, "soon\n", "")
        code, _, err = await call(names["echo"], "x", "101")
        assert code != 0
        assert "from 0 to 100, found '101'" in err
        assert "in time" not in err, "it is not sent again"
        code, _, err = await call(f"none-{unique}"[:32], "x")
        assert code != 0
        assert "has the service none-" in err
        # one place, and a room for two: of four calls one finds all full, and is sent again once a place is free
        running = [await start(names["held"], gate.data.decode()) for _ in range(4)]
        await gate.runs()
        gate.open()
        assert [await ended(each) for each in running] == [(0, f"{gate.data.decode()}\n", "")] * 4
        full = Gate(tmp_path)
        running = [await start(names["held"], full.data.decode()) for _ in range(4)]
        await full.runs()
        for each in running:  # one runs, two wait in the room, and one is between two tries
            each.send_signal(signal.SIGINT)
        assert all([(await ended(each))[0] for each in running])
        begun = tmp_path / full.data.decode() / "runs"
        before = begun.stat().st_size
        left = Gate(tmp_path)  # nobody opens this one: its call keeps the only place until it is cancelled
        leaving = await start(names["held"], left.data.decode())
        await left.runs()
        leaving.send_signal(signal.SIGINT)
        assert (await ended(leaving))[0] != 0
        assert await call(names["held"], gate.data.decode()) == (0, f"{gate.data.decode()}\n", "")
        assert begun.stat().st_size == before, "none begins after its caller has left"
