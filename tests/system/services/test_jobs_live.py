"""A service as a job: with the rights of a site and its keys, on a real scheduler, worker and server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import stat
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from moorage.bus.connection import Connection
from moorage.bus.errors import BusError, NoResponders, PermissionRefused
from moorage.bus.transport import Delivery
from moorage.client import AsyncClient, JobFailed, Rejected, whereabouts
from moorage.client.job import AsyncJob
from moorage.schemas.held_calls import HELD_FILE, HeldCall, held_in
from tests.sites import settled
from tests.system.deploy.test_roles_live import everybody
from tests.system.services.members import FUNCTIONS, Gate, error_of
from tests.waiting import NeverHappened, until

ANSWER_S: Final = 90.0
SITES: Final[dict[str, dict[str, Any]]] = {
    "nkey": {},
    "nkey-shared-tls": {"shared": True, "tls": "only"},
    "mtls": {"auth": "mtls"},
}


async def serving(client: AsyncClient, function: str, **fields: Any) -> AsyncJob:
    """Submit a job that serves with a function of the tests."""
    argv = [sys.executable, "-m", "moorage.cli", "serve", f"functions:{function}"]
    env: Mapping[str, str] = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    body = {"run": {"argv": argv, "cwd": str(FUNCTIONS.parent), "env": env}, "service": {"name": function}, **fields}
    return await client.submit(body, job=f"s-{function}")


async def end_of(job: AsyncJob) -> tuple[str, str]:
    """Its last state and the reason."""
    try:
        result = await job.result(wait=ANSWER_S)
    except JobFailed as failed:
        result = failed.result
    return result.state, result.why


async def answers(caller: Connection, subject: str, data: bytes, job: AsyncJob) -> Delivery:
    """The first answer, once a member of the job is there. Without one, what became of the job is printed."""
    got: list[Delivery] = []

    async def ask() -> bool:
        try:
            got.append(await caller.request(subject, data, 5.0))
        except BusError:
            return False
        return True

    try:
        await until(ask, ANSWER_S, "an answer of the service")
    except NeverHappened:
        shown = await job.show()
        print(shown.state, shown.why, *shown.changes, sep="\n")
        async for piece in job.logs(follow=False):
            print(piece.text)
        raise
    return got[0]


@pytest.mark.slow
@pytest.mark.parametrize("site", SITES)
async def test_a_job_answers_its_tenants_calls_and_publishes_for_no_caller(site: str) -> None:
    async with (
        everybody(calls=True, **SITES[site]) as made,
        made.client("submitter.acme") as acme,
        await made.site.connect("submitter.acme") as caller,
        await made.site.connect("submitter.beta") as other,
        await made.site.connect("service.acme") as peer,
    ):
        subject = "moorage.call.acme.echo"
        job = await serving(acme, "echo")
        assert (await answers(caller, subject, b"hello", job)).data == b"hello"
        with pytest.raises(PermissionRefused):
            await other.request(subject, b"hello", 5.0)
        [key] = [path for path in (made.folder / "w1").rglob("*.key") if "s-echo" in path.name]
        assert stat.S_IMODE(key.stat().st_mode) == 0o600

        # subjects that the member's key may publish to and the caller's may not
        heard: list[Delivery] = []
        for forged in ("moorage.calls.acme.echo.have", "moorage.calls.acme.~.x", "moorage.calls.acme.other.want"):
            await peer.subscribe(forged, heard.append)
            await settled(peer)
            await caller.send([(subject, b"forged", forged)])
        assert (await caller.request(subject, b"behind them", ANSWER_S)).data == b"behind them"
        await settled(peer)
        assert [each.data for each in heard if each.data] == []

        await job.cancel()
        assert (await end_of(job))[0] == "CANCELLED"
        await until(lambda: not key.exists(), ANSWER_S, "the key is gone with its attempt")


@pytest.mark.slow
async def test_the_calls_of_a_killed_member_are_answered_by_its_worker() -> None:
    """With the rights of a site: by the key of the tenant's members, and by no right of the worker."""
    async with (
        everybody(calls=True) as made,
        made.client("submitter.acme") as acme,
        await made.site.connect("submitter.acme") as caller,
    ):
        gate = Gate(made.folder)
        job = await serving(acme, "aheld", service={"name": "aheld", "concurrency": 2})
        subject = "moorage.call.acme.aheld"

        async def ask() -> Delivery:
            while True:
                with contextlib.suppress(NoResponders):
                    return await caller.request(subject, gate.data, ANSWER_S)
                await asyncio.sleep(0.05)

        calls = [asyncio.create_task(ask()) for _ in range(5)]
        await until(lambda: gate.begun >= 2, ANSWER_S, "two calls run")
        await until(lambda: len(_held(made.folder)) == 5, ANSWER_S, "three calls wait")
        os.kill(_serving("aheld", made.folder), signal.SIGKILL)
        told = Counter(error_of(each) for each in await asyncio.gather(*calls))
        assert told == {"member-died": 2, "busy": 3}
        assert (await end_of(job))[0] == "FAILED"


@pytest.mark.slow
async def test_calls_that_a_killed_member_had_not_read_end_as_soon_as_their_callers_hear_of_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They ended with the time of a member that may be away, and where it was the only one, with that of its answers:
    no such time passes here."""
    monkeypatch.setattr(whereabouts, "SILENT_S", 1e6)
    monkeypatch.setattr(whereabouts, "KEPT_S", 1e6)
    async with (
        everybody(calls=True) as made,
        made.client("submitter.acme") as acme,
        made.client("submitter.acme") as stranger,
        await made.site.connect("service.acme") as peer,
    ):
        job = await serving(acme, "echo")
        assert await acme.call("echo", "warm", timeout=ANSWER_S) == "warm"
        given = 0

        def on_given(delivery: Delivery) -> None:
            nonlocal given
            given += 1

        await peer.subscribe("moorage.call.acme.echo", on_given)
        await settled(peer)
        member = _serving("echo", made.folder)
        os.kill(member, signal.SIGSTOP)
        calls = [
            asyncio.create_task(client.call("echo", "unread", timeout="1h"))
            for client in [acme] * 40 + [stranger] * 10
        ]  # fmt: skip
        await until(lambda: given == len(calls), ANSWER_S, "the server has given all of them to the member")
        os.kill(member, signal.SIGKILL)
        async with asyncio.timeout(ANSWER_S):
            told = await asyncio.gather(*calls, return_exceptions=True)
        assert Counter(getattr(each, "code", str(each)) for each in told) == {"unreachable": len(calls)}
        assert (await end_of(job))[0] == "FAILED"


def _serving(function: str, folder: Path) -> int:
    """The process of `moorage serve` with this function, whose key is below a folder: other tests serve it, too."""
    words = {pid: _read(pid / "cmdline") for pid in Path("/proc").iterdir() if pid.name.isdigit()}
    found = [pid for pid, argv in words.items() if f"\0serve\0functions:{function}\0".encode() in argv]
    [service] = [int(pid.name) for pid in found if f"={folder}/".encode() in _read(pid / "environ")]
    return service


def _held(folder: Path) -> list[HeldCall]:
    """The calls that members hold."""
    files = [path.read_bytes() for path in folder.rglob(HELD_FILE)]
    return [call for data in files for call in held_in(data, 100, "moorage", "acme")]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.slow
async def test_a_service_without_a_key_on_the_worker_is_told_what_is_missing() -> None:
    async with everybody() as made, made.client("submitter.acme") as acme:
        job = await serving(acme, "echo")
        state, why = await end_of(job)
        assert state == "FAILED"
        assert "secret 'calls/acme'" in why


@pytest.mark.slow
async def test_a_service_loses_no_call_while_one_job_replaces_the_other() -> None:
    """Two members; twice they are replaced, each once the new one is ready, under load."""
    async with (
        everybody(calls=True) as made,
        made.client("submitter.acme") as acme,
        await made.site.connect("submitter.acme") as caller,
    ):
        subject, told, stop = "moorage.call.acme.nap", Counter[str](), False

        async def members(number: int) -> AsyncJob:
            argv = [sys.executable, "-m", "moorage.cli", "serve", "functions:nap"]
            env = {"PYTHONPATH": ":".join(filter(None, sys.path))}
            run = {"argv": argv, "cwd": str(FUNCTIONS.parent), "env": env, "ready": {"call": True}, "restart": "always"}
            fields: dict[str, Any] = {"service": {"name": "nap", "concurrency": 2}, "replicas": 2, "run": run}
            if number:
                fields["instead_of"] = f"nap-{number - 1}"
            return await acme.submit(fields, job=f"nap-{number}")

        async def load() -> None:
            while not stop:
                told[error_of(await caller.request(subject, b"10", ANSWER_S))] += 1

        old = await members(0)
        await answers(caller, subject, b"10", old)
        callers = [asyncio.create_task(load()) for _ in range(3)]
        for number in (1, 2):
            before = told.total()
            await until(lambda before=before: told.total() > before + 30, ANSWER_S)
            with pytest.raises(Rejected) as refused:
                await acme.submit({"run": {"argv": ["true"]}, "service": {"name": "nap"}})
            assert refused.value.code == "service-taken"
            new = await members(number)
            state, why = await end_of(old)
            assert (state, why) == ("CANCELLED", f"replaced by job nap-{number}")
            assert (await new.show()).state == "RUNNING"
            old = new
        before = told.total()
        await until(lambda: told.total() > before + 30, ANSWER_S)
        stop = True
        await asyncio.gather(*callers)
        assert set(told) == {""}, told
