"""The link to the supervisor while one supervisor dies and the next one comes."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest

from moorage.system.proctree import boottime_s
from moorage.worker.drivers.supervisor_link import START_ATTEMPTS_MAX, SupervisorLink, SupervisorMissing
from moorage.worker.supervisor import client, protocol
from moorage.worker.supervisor.client import Answer, Supervised, SupervisorRefused
from moorage.worker.supervisor.protocol import Done, Event, StartAttempt
from tests.system.worker.supervisor_rig import arguments_of, rig_at, sh
from tests.waiting import until


class Told:
    """A listener that notes what it is told."""

    def __init__(self) -> None:
        self.lists: list[list[str]] = []
        self.events: list[str] = []

    def on_event(self, key: str, event: Event) -> None:
        self.events.append(key)

    def on_events_over(self) -> None:
        return

    def on_replaced(self) -> None:
        return

    def on_listed(self, listed: Sequence[tuple[str, str, Event | None]]) -> None:
        self.lists.append([key for key, _, _ in listed])

    def on_start_refused(self, keys: Sequence[str], why: str) -> None:
        self.events += keys


class GatedLink(SupervisorLink):
    """The real link, whose way back to a supervisor waits for the gate."""

    gate: asyncio.Event | None = None

    async def _connect(self, *, replaces_other: bool = False) -> Supervised:
        if self.gate is not None:
            await self.gate.wait()
        return await super()._connect(replaces_other=replaces_other)


async def test_a_start_asked_for_between_two_supervisors_is_told_lost_and_never_starts() -> None:
    with tempfile.TemporaryDirectory(prefix="moorage-link-") as folder:
        link, told = GatedLink(Path(folder) / "s"), Told()
        await link.open("w1", told)
        link.gate = asyncio.Event()
        first = link._supervised
        assert first is not None
        mark = Path(folder) / "ran"
        try:
            first.kill()
            await first.wait_gone()
            await until(lambda: link._supervised is None, what="the link knows that its supervisor is gone")
            attempt = StartAttempt(key="w1|a", argv=("/bin/sh", "-c", f"touch {mark}"), env={"PATH": "/bin:/usr/bin"})
            link.start([attempt])
            link.gate.set()
            await until(lambda: told.lists, what="the next supervisor's list")
            assert told.lists == [[]], "what is not listed is told lost by its listener"
            # a later start of the same supervisor has run: nothing asked for before it still waits
            after = Path(folder) / "after"
            link.start(
                [StartAttempt(key="w1|b", argv=("/bin/sh", "-c", f"touch {after}"), env={"PATH": "/bin:/usr/bin"})]
            )
            await until(after.exists, what="the later start")
            assert not mark.exists(), "it started although it was told lost"
            assert "a" not in told.events
        finally:
            last = link._supervised
            assert last is not None
            await last.shutdown(0.0)
            await link.close("w1")


@pytest.mark.parametrize("before_it_is_known", [True, False])
async def test_an_end_asked_for_while_the_connection_is_lost_reaches_the_same_supervisor(
    before_it_is_known: bool,
) -> None:
    """The supervisor lives, and so does its attempt: nobody asks for that end again."""
    with tempfile.TemporaryDirectory(prefix="moorage-link-") as folder:
        link, told = GatedLink(Path(folder) / "s"), Told()
        await link.open("w1", told)
        link.start([StartAttempt(key="w1|a", argv=("/bin/sleep", "600"), env={"PATH": "/bin:/usr/bin"})])
        link.start([StartAttempt(key="w1|b", argv=("/bin/true",), env={"PATH": "/bin:/usr/bin"})])
        await until(lambda: told.events.count("a") == 1 and told.events.count("b") == 2, what="one runs, one is over")
        link.gate = asyncio.Event()
        first = link._supervised
        assert first is not None
        assert first._transport is not None
        try:
            first._transport.abort()
            if not before_it_is_known:
                await until(lambda: link._supervised is None, what="the link knows that its connection is lost")
            link.end("w1|a", 0.0, "cancelled")
            link.forget(["w1|b"])
            link.gate.set()
            await until(lambda: told.events.count("a") == 2, what="its end")
            found = await link.listed("w1")
            assert found is not None
            assert [key for key, _, _ in found] == ["a"], "the other one is forgotten"
        finally:
            last = link._supervised
            assert last is not None
            await last.shutdown(0.0)
            await link.close("w1")


async def test_an_output_folder_that_cannot_be_read_is_not_told_as_a_supervisor_that_did_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryDirectory(prefix="moorage-link-") as folder:
        link = SupervisorLink(Path(folder) / "s")

        def unread() -> None:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(link.keeper, "scan", unread)
        with pytest.raises(SupervisorMissing, match=r"the supervisor on .* cannot be used: .*Input/output error"):
            await link.open("w1", Told())
        await link.close("w1")


async def test_an_owner_that_opens_between_two_supervisors_waits_for_the_next_one() -> None:
    with tempfile.TemporaryDirectory(prefix="moorage-link-") as folder:
        link, told = GatedLink(Path(folder) / "s"), Told()
        await link.open("w1", told)
        first, pump = link._supervised, link._pump
        assert first is not None
        link.gate = asyncio.Event()
        try:
            first.kill()
            await until(lambda: link._supervised is None, what="the link knows that its supervisor is gone")
            opened = asyncio.create_task(link.open("w2", Told()))
            link.gate.set()
            assert await opened == []
            assert told.lists == [[]], "the link has reconnected by itself"
            assert link._pump is pump
        finally:
            link.gate.set()
            last = await until(lambda: link._supervised, what="a supervisor to shut down")
            await last.shutdown(0.0)
            await link.close("w1")
            await link.close("w2")


async def test_a_lease_that_was_renewed_between_two_supervisors_holds_at_the_next_one() -> None:
    with tempfile.TemporaryDirectory(prefix="moorage-link-") as folder:
        link, told = GatedLink(Path(folder) / "s"), Told()
        await link.open("w1", told)
        now_s = boottime_s()
        link.set_fence("w1", now_s + 600, 1.0)
        link.gate = asyncio.Event()
        first = link._supervised
        assert first is not None
        try:
            first.kill()
            await until(lambda: link._supervised is None, what="the link knows that its supervisor is gone")
            link.set_fence("w1", now_s + 900, 1.0)
            link.gate.set()
            await until(lambda: told.lists, what="the next supervisor's list")
            assert link._supervised is not None
            assert link._supervised._fence_boottime_s == now_s + 900
        finally:
            link.gate.set()
            last = await until(lambda: link._supervised, what="a supervisor to shut down")
            await last.shutdown(0.0)
            await link.close("w1")


class Fenced:
    """A supervisor that notes its deadlines."""

    def __init__(self) -> None:
        self.deadlines: list[float] = []

    def fence(self, deadline_s: float, grace_s: float) -> asyncio.Future[Answer]:
        self.deadlines.append(deadline_s)
        return asyncio.get_running_loop().create_future()


async def test_the_deadline_of_an_owner_that_closed_fences_no_other(tmp_path: Path) -> None:
    link, fenced = SupervisorLink(tmp_path), Fenced()
    link._supervised = cast(Supervised, fenced)
    for owner, deadline_s in (("w1", 100.0), ("w2", 200.0)):
        link._listeners[owner] = Told()
        link.set_fence(owner, deadline_s, 1.0)
    await link.close("w1")
    assert fenced.deadlines == [100.0, 200.0]


async def test_a_listener_that_raises_ends_the_worker_and_not_its_hearing_alone() -> None:
    """A worker that heard no end of a job any more would go on with none of them over."""

    class Broken(Told):
        def on_event(self, key: str, event: Event) -> None:
            raise ValueError(key)

    broke: list[BaseException] = []
    with tempfile.TemporaryDirectory(prefix="moorage-link-") as folder:
        link = SupervisorLink(Path(folder) / "s", on_broken=broke.append)
        await link.open("w1", Broken())
        link.start([StartAttempt(key="w1|a", argv=("/bin/true",), env={})])
        await until(lambda: broke, what="it is said")
        assert [str(error) for error in broke] == ["a"]
        last = link._supervised
        assert last is not None
        await last.shutdown(0.0)
        await link.close("w1")


class Choosy:
    """A supervisor that takes the first frame of a start and refuses the second one, later."""

    def __init__(self) -> None:
        self.begun: list[asyncio.Future[Answer]] = []

    def start(self, attempts: Sequence[StartAttempt]) -> asyncio.Future[Answer]:
        self.begun.append(asyncio.get_running_loop().create_future())
        return self.begun[-1]


async def test_what_is_refused_of_a_long_start_is_told_and_nothing_else(tmp_path: Path) -> None:
    link, told, choosy = SupervisorLink(tmp_path), Told(), Choosy()
    link._supervised = cast(Supervised, choosy)
    link._listeners["w1"] = told
    link.start([StartAttempt(key=f"w1|{n}", argv=("true",), env={}) for n in range(START_ATTEMPTS_MAX + 1)])
    first, second = choosy.begun
    first.set_result(Done(n=1))
    second.set_exception(SupervisorRefused("unproven", "not proven over yet"))
    await until(lambda: told.events, what="the refusal")
    assert told.events == [str(START_ATTEMPTS_MAX)]
    assert not link._unanswered


async def test_attempts_that_are_too_large_for_one_frame_start_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of secrets count, and no bound of a request is about these."""
    with tempfile.TemporaryDirectory(prefix="moorage-link-") as folder:
        link, told = SupervisorLink(Path(folder) / "s"), Told()
        await link.open("w1", told)
        try:
            monkeypatch.setattr(protocol, "FRAME_BYTES_MAX", 4096)
            keys = [str(number) for number in range(20)]
            link.start([StartAttempt(key=f"w1|{key}", argv=("/bin/true",), env={"A": "a" * 1000}) for key in keys])
            link.start([StartAttempt(key="w1|large", argv=("/bin/true",), env={"A": "a" * 5000})])
            await until(lambda: all(told.events.count(key) == 2 for key in keys), what="each has begun and ended")
            assert told.events.count("large") == 1, "it is refused alone"
        finally:
            last = link._supervised
            assert last is not None
            await last.shutdown(0.0)
            await link.close("w1")


@pytest.mark.slow
async def test_an_agent_without_a_free_descriptor_finds_a_supervisor_once_it_has_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="moorage-link-") as folder:
        link, told = SupervisorLink(Path(folder) / "s"), Told()
        await link.open("w1", told)
        first = link._supervised
        assert first is not None
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            lowest_free, other = os.pipe()
            os.close(lowest_free)
            os.close(other)
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
            try:
                first.kill()
                await until(lambda: len(caplog.messages) >= 2, deadline_s=60, what="what it says of it")
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            await until(lambda: told.lists, deadline_s=60, what="the next supervisor's list")
            assert "Too many open files" in caplog.text
            assert not [record for record in caplog.records if record.exc_info]
        finally:
            last = link._supervised
            if last is not None:
                await last.shutdown(0.0)
            await link.close("w1")


async def test_an_agent_that_starts_beside_much_output_hears_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing takes events yet while it asks: the answer stands behind more output than the client keeps."""
    monkeypatch.setattr(client, "EVENTS_BYTES_MAX", 64 * 1024)
    with tempfile.TemporaryDirectory(prefix="moorage-link-") as folder:
        async with rig_at(Path(folder) / "s", *arguments_of("walk")) as rig:
            await rig.client.start([sh("w1|a", "yes | head -c 4000000; sleep 60", stream_output=True)])
            transport = rig.client._transport
            assert transport is not None
            await until(lambda: not transport.is_reading(), what="the client has stopped reading")
            async with asyncio.timeout(60):
                listed = await rig.client.list()
            assert [event.key for event in listed.running] == ["w1|a"]
            assert not transport.is_reading(), "nobody waits for an answer any more"
