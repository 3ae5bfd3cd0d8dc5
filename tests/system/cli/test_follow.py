"""`moorage follow`: a command and a web address are told what becomes of jobs, across kills, on a real node."""

from __future__ import annotations

import asyncio
import http.server
import json
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moorage.cli.jobs.follow import POST_S
from moorage.client import AsyncClient
from tests.system.cli.node import Lines, Node, start
from tests.waiting import until, until_state


async def follower(node: Node, unique: str, *words: str) -> asyncio.subprocess.Process:
    process = await start("follow", *words, env=node.env(unique))
    await Lines(process.stderr).until("telling what becomes of")
    return process


async def kill(process: asyncio.subprocess.Process) -> None:
    process.send_signal(signal.SIGKILL)
    await process.wait()


async def run(client: AsyncClient, job: str, command: str, **fields: Any) -> None:
    handle = await client.submit(["sh", "-c", command], job=job, **fields)
    await client.wait([handle], "60s")


async def test_follow_hands_each_failure_to_a_command_though_it_is_killed(
    node: Node, unique: str, tmp_path: Path
) -> None:
    told = tmp_path / "told"
    command = f'echo "$MOORAGE_JOB $MOORAGE_STATE $MOORAGE_CODE $(cat)" >> {told}'
    words = ("--state", "failed", "--label", "sweep", "--exec", command, "--state-file", str(tmp_path / "state.json"))

    def lines() -> list[str]:
        return told.read_text().splitlines() if told.exists() else []

    async with AsyncClient(node.url, tenant=unique) as client:
        process = await follower(node, unique, *words)
        other = await node.run("follow", *words, tenant=unique)
        assert (other.code, "is in use by another run" in other.err) == (1, True), other.err
        await run(client, "other", "exit 1")
        await run(client, "a", "exit 3", labels={"sweep": "x"})
        await until(lambda: len(lines()) == 1, 60, "the first is told")
        await kill(process)
        await run(client, "b", "exit 4", labels={"sweep": "x"})
        await run(client, "c", "exit 0", labels={"sweep": "x"})
        process = await follower(node, unique, *words)
        await run(client, "d", "exit 5", labels={"sweep": "x"})
        await until(lambda: any(line.startswith("d ") for line in lines()), 60, "the last is told")
        found = [line.partition("{") for line in lines()]
        said = list(dict.fromkeys(words.strip() for words, _, _ in found))
        assert said == ["a FAILED 3", "b FAILED 4", "d FAILED 5"]
        frame = json.loads("{" + found[-1][2])
        assert (frame["kind"], frame["tenant"], frame["labels"]) == ("told", unique, {"sweep": "x"})
        assert frame["text"].startswith("d FAILED with code 5 on ")
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 0
        changed = await node.run("follow", "--state-file", str(tmp_path / "state.json"), tenant=unique)
        assert (changed.code, "is of another choice of jobs" in changed.err) == (1, True), changed.err


async def test_the_line_is_one_line_and_the_code_is_that_of_a_shell(node: Node, unique: str, tmp_path: Path) -> None:
    told = tmp_path / "told"
    async with AsyncClient(node.url, tenant=unique) as client:
        process = await follower(node, unique, "--exec", f'echo "$MOORAGE_CODE:$MOORAGE_TEXT" >> {told}')
        job = await client.submit(["sleep", "600"], job="long")
        await until_state(job, "RUNNING")
        await job.cancel("two\nlines")
        await until(lambda: told.exists() and told.read_text().endswith("\n"), 60, "the end is told")
        [line] = told.read_text().splitlines()
        assert line.startswith("143:long CANCELLED by signal 15 (SIGTERM) on "), line
        assert line.endswith(": two lines"), line
        await kill(process)


class Receiver(http.server.ThreadingHTTPServer):
    """A web address that refuses what it is told to, and keeps the rest."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Posted)
        self.kept: list[dict[str, Any]] = []
        self.refusals = 0
        self.refusal = 503


class Posted(http.server.BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.refusals -= 1
        self.send_response(self.server.refusal if self.server.refusals >= 0 else 204)
        self.send_header("Location", "/elsewhere")
        self.end_headers()
        if self.server.refusals < 0:
            self.server.kept.append(body | {"key": self.headers["Idempotency-Key"]})

    def do_GET(self) -> None:
        self.send_response(200)  # the page of a login, behind a redirect
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("refusal", [503, 301, 302, 303, 307, 308])
async def test_follow_hands_each_event_to_a_web_address_until_it_takes_it(
    node: Node, unique: str, receiver: Receiver, refusal: int
) -> None:
    url = f"http://127.0.0.1:{receiver.server_port}/jobs"
    receiver.refusals, receiver.refusal = 2, refusal
    async with AsyncClient(node.url, tenant=unique) as client:
        process = await start("follow", "--post", url, env=node.env(unique))
        errors = Lines(process.stderr)
        await errors.until("telling what becomes of")
        await run(client, "a", "exit 3")
        await errors.until(str(refusal))
        await run(client, "b", "true")
        await until(lambda: len(receiver.kept) == 2, 60, "both are taken")
        assert [(each["job"], each["state"]) for each in receiver.kept] == [("a", "FAILED"), ("b", "SUCCEEDED")]
        assert receiver.kept[0]["key"] == f"{unique}/a/{receiver.kept[0]['rev']}"


async def test_ctrl_c_does_not_wait_for_a_web_address_that_does_not_answer(node: Node, unique: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        process = await follower(node, unique, "--post", f"http://127.0.0.1:{silent.getsockname()[1]}/")
        async with AsyncClient(node.url, tenant=unique) as client:
            await run(client, "a", "true")
        asking, _ = await asyncio.to_thread(silent.accept)
        with asking:
            process.send_signal(signal.SIGINT)
            async with asyncio.timeout(POST_S / 3):
                assert await process.wait() == 0


async def test_what_cannot_be_followed_is_told_with_what_to_do(node: Node, unique: str, tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    for words, said in (
        (("--state", "BROKEN"), "no job is ever BROKEN"),
        (("--exec", "true", "--post", "http://x"), "exclude each other"),
        (("--post", "x"), "no web address"),
        (("--state-file", str(tmp_path / "no" / "file")), "cannot be written"),
        (("--state-file", str(broken)), "cannot be read"),
    ):
        ran = await node.run("follow", *words, tenant=unique)
        assert (ran.code != 0, said in ran.err) == (True, True), (words, ran.err)
