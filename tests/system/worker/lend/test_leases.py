"""Leases for processes that already run: the agent's socket and its client, with real processes as holders."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import os
import signal
import socket
import struct
import sys
import tempfile
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import moorage
from moorage.bus.lend.client import GIVEN_BACK, AskedBack, LeaseRefused, borrow
from moorage.bus.lend.protocol import SOCKET_NAME
from moorage.schemas.codec import encode
from moorage.schemas.frames import End, Place
from moorage.system import pidfds
from moorage.system.framing import framed
from moorage.system.proctree import boottime_s
from moorage.system.simulated_hosts import simulated_hosts
from moorage.testing.conformance.leader import ScriptedLeader
from moorage.worker.agent.run import start
from moorage.worker.devices.pool import GpuPool
from moorage.worker.devices.readers.base import DeviceProcess, SlotReading
from moorage.worker.devices.readers.simulated import SimulatedInventory
from moorage.worker.lend import family, given_back
from moorage.worker.lend import lender as lease_server
from moorage.worker.lend.holder import Holder
from moorage.worker.lend.lender import LeaseServer
from moorage.worker.settings import WorkerSettings
from moorage.worker.sharing.idle_watch import IdleWatch
from tests.system.worker.agent.test_agent_process import state_folder
from tests.waiting import until

#: says what it holds, what it is asked, and that it lost it, a line each; gives back when asked, if told so
HOLDER = """
import asyncio, os, subprocess, sys
from moorage.bus.lend.client import LeaseRefused, borrow

async def main(path, gpu, how):
    if how == "nobody":
        os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
    try:
        async with borrow(path, gpu, purpose=how) as lease:
            if how == "heir":
                os.set_inheritable(lease._writer.get_extra_info("socket").fileno(), True)
                heir = subprocess.Popen([sys.executable, "-c", "input()"], close_fds=False)
                print("heir", heir.pid, flush=True)
            print("held", *lease.uuids, lease.environment["CUDA_VISIBLE_DEVICES"], flush=True)
            asked = await lease.wait_asked_back()
            print("lost" if lease.lost else "asked", asked.reason, flush=True)
    except LeaseRefused as refused:
        print("refused", refused.code, refused.problem.message, flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


class HolderProcess:
    """A process that borrows."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.pid = process.pid

    async def line(self) -> list[str]:
        assert self.process.stdout is not None
        async with asyncio.timeout(90):
            return (await self.process.stdout.readline()).decode().split()


@contextlib.asynccontextmanager
async def holder(path: Path, gpu: str = "1x", how: str = "plain") -> AsyncIterator[HolderProcess]:
    roots = os.pathsep.join(str(Path(root).parent) for root in moorage.__path__)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        HOLDER,
        str(path),
        gpu,
        how,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": roots},
    )
    try:
        yield HolderProcess(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        assert process.stdin is not None
        process.stdin.close()  # an heir reads from it
        await process.wait()
        assert process.stdout is not None
        await process.stdout.read()


class Lender:
    def __init__(self, server: LeaseServer, pool: GpuPool, inventory: SimulatedInventory, path: Path) -> None:
        self.server = server
        self.pool = pool
        self.inventory = inventory
        self.path = path

    def taken(self) -> list[int]:
        return [state.slot for state in self.pool.slot_states() if state.sharers]

    def quarantined(self) -> dict[int, str]:
        return {state.slot: state.quarantine for state in self.pool.slot_states() if state.quarantine}


@contextlib.asynccontextmanager
async def lender(devices: str = "2xH100", **fields: Any) -> AsyncIterator[Lender]:
    with tempfile.TemporaryDirectory(prefix="moorage-lease-") as folder:
        inventory = SimulatedInventory(simulated_hosts(devices)[0])
        pool = GpuPool(inventory.devices())
        server = LeaseServer("w1", pool, inventory, **fields)
        path = Path(folder) / SOCKET_NAME
        await server.open(path)
        try:
            yield Lender(server, pool, inventory, path)
            pool.validate()
        finally:
            await server.close()
            assert pool.pending_claimers() == 0


async def test_a_lease_is_whole_devices_until_given_back() -> None:
    async with lender("1xL40S,2xH100") as w:
        async with borrow(w.path, "2xH100:80G", purpose="train") as lease:
            assert (lease.worker, [device.index for device in lease.devices]) == ("w1", [1, 2])
            assert lease.environment["CUDA_VISIBLE_DEVICES"] == "1,2"
            assert not any(name in lease.environment for name in ("MOORAGE_JOB", "MOORAGE_FENCE"))
            assert w.taken() == [1, 2]
            [held] = w.server.holders
            assert (held.pid, held.uid, held.slots, held.purpose) == (os.getpid(), os.geteuid(), (1, 2), "train")
            assert not lease.lost
        await until(lambda: not w.taken(), what="both devices free")
        await lease.give_back()  # again: nothing


async def test_a_process_of_any_language_borrows_by_the_frames_of_the_protocol_page() -> None:
    """A borrower of its own, which has nothing of moorage: its frames are made by hand."""
    async with lender() as w:
        reader, writer = await asyncio.open_unix_connection(w.path)

        def say(**fields: Any) -> None:
            body = msgspec.msgpack.encode(fields)
            writer.write(struct.pack(">II", len(body), zlib.crc32(body)) + body)

        async def heard() -> dict[str, Any]:
            length, crc = struct.unpack(">II", await reader.readexactly(8))
            body = await reader.readexactly(length)
            assert zlib.crc32(body) == crc
            found: dict[str, Any] = msgspec.msgpack.decode(body)
            return found

        say(kind="borrow", gpu={"count": 1, "model": ["H100"]}, purpose="by hand", protocol=1)
        granted = await heard()
        assert (granted["kind"], granted["worker"], granted["devices"][0]["index"]) == ("granted", "w1", 0)
        w.server.drain(True, 60.0)
        asked = await heard()
        assert (asked["kind"], asked["deadline_boottime_s"] > boottime_s()) == ("asked-back", True)
        w.server.drain(False)
        assert (await heard())["deadline_boottime_s"] == math.inf
        say(kind="give-back")
        assert await heard() == {"kind": "returned"}
        assert await reader.read() == b""
        writer.close()
        reader, writer = await asyncio.open_unix_connection(w.path)
        say(kind="borrow", gpu={}, protocol=2)
        refused = await heard()
        assert (refused["kind"], refused["code"], refused["found"]) == ("error", "unknown-version", "2")
        writer.close()


async def test_a_lease_without_use_is_asked_back_by_the_rules_and_one_in_use_or_shared_is_not() -> None:
    idle = IdleWatch[Holder](30, {"*": 60})
    async with lender("3xH100", modes=("exclusive", "time-slice"), idle=idle) as w:
        works, still = SlotReading(util_percent=1), SlotReading(util_percent=0)
        async with borrow(w.path) as busy, borrow(w.path) as unused, borrow(w.path, "1xH100@time-slice") as shares:
            for now_s in (0.0, 59.0):
                w.server.seen([works, still, still], now_s)
                assert unused.asked_back is None
            w.server.seen([works, still, still], 60.0)
            asked = await unused.wait_asked_back()
            assert asked.reason == "no use of its GPUs for 60 s, 60 are allowed"
            assert (busy.asked_back, shares.asked_back, w.quarantined()) == (None, None, {})


async def test_all_or_nothing_and_nothing_of_another_kind_is_kept() -> None:
    async with lender("1xL40S,2xH100") as w:
        async with borrow(w.path, "1xH100"):
            with pytest.raises(TimeoutError):
                async with borrow(w.path, "2xH100", timeout_s=0.1):
                    raise AssertionError("one of the two is lent")
            await until(lambda: w.taken() == [1], what="only the first one's device is taken")
            waiting = asyncio.create_task(_uuids(w.path, "2xH100"))
            await until(lambda: w.pool.pending_claimers() == 1, what="it waits")
        assert len(await waiting) == 2
        await until(lambda: not w.taken(), what="all free")


async def _uuids(path: Path, gpu: str) -> tuple[str, ...]:
    async with borrow(path, gpu) as lease:
        return lease.uuids


async def test_a_killed_holder_s_device_goes_round_once_its_memory_is_seen_free() -> None:
    async with lender("1xH100") as w, holder(w.path) as process:
        assert (await process.line())[0] == "held"
        w.inventory.keep_memory(0, 5000)  # the driver has not yet cleared it away
        os.kill(process.pid, signal.SIGKILL)
        await until(lambda: not w.server.holders, what="the lease is over")
        next_one = asyncio.create_task(_uuids(w.path, "1xH100"))
        await until(lambda: w.pool.pending_claimers() == 1, what="the next one waits for the memory")
        assert w.taken() == [0]
        w.inventory.set_reading(0, None)
        assert len(await next_one) == 1


async def test_memory_that_does_not_come_back_quarantines_the_device_until_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(given_back, "PROBE_S", 0.01)
    monkeypatch.setattr(given_back, "PROBE_QUARANTINED_S", 0.01)
    async with lender("1xH100", free_wait_s=0.05) as w:
        async with borrow(w.path):
            w.inventory.keep_memory(0, 300)
        await until(lambda: "memory kept" in w.quarantined().get(0, ""), what="quarantine")
        w.inventory.set_reading(0, None)
        await until(lambda: not w.quarantined() and not w.taken(), what="free again")


async def test_sharers_are_counted_and_freed_when_the_driver_lists_them_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(given_back, "PROBE_S", 0.01)
    async with lender("2xH100", modes=("exclusive", "time-slice")) as w:
        async with borrow(w.path, "1x@time-slice") as one, borrow(w.path, "1xH100@time-slice") as two:
            assert (one.uuids, one.mode, w.taken()) == (two.uuids, "time-slice", [0])
            async with borrow(w.path, "1xH100", timeout_s=5) as whole:
                assert [device.index for device in whole.devices] == [1]
            reading = SlotReading(memory_used_mib=9000, processes=(DeviceProcess(os.getpid()), DeviceProcess(1)))
            w.inventory.set_reading(0, reading)
            await two.give_back()
            await until(lambda: len(w.server.holders) == 1, what="one of them is over")
            assert w.pool.slot_states()[0].sharers == 2  # its process is on the device yet
            w.inventory.set_reading(0, SlotReading(memory_used_mib=9000, processes=(DeviceProcess(1),)))
            await until(lambda: w.pool.slot_states()[0].sharers == 1, what="its share is free, whatever others use")
        await until(lambda: not w.taken(), what="all free")
        for gpu in ("1x@mps", "1x@time-slice=50%"):
            with pytest.raises(LeaseRefused) as refused:
                async with borrow(w.path, gpu):
                    pass
            assert refused.value.code == "failed-precondition"


async def test_overdue_sharers_keep_their_device_marked_until_the_last_is_back() -> None:
    async with (
        lender("1xH100", modes=("time-slice",)) as w,
        borrow(w.path, "1x@time-slice") as one,
        borrow(w.path, "1x@time-slice") as two,
    ):
        w.server.ask_back("now", 0.0)
        await until(w.quarantined, what="it is marked")
        await one.give_back()
        await until(lambda: w.pool.slot_states()[0].sharers == 1, what="one is back")
        assert w.quarantined()
        await two.give_back()
        await until(lambda: not w.quarantined() and not w.taken(), what="both are")


async def test_a_child_that_inherited_the_socket_does_not_keep_the_lease() -> None:
    async with lender("1xH100") as w, holder(w.path, how="heir") as process:
        word, heir = await process.line()
        assert (word, (await process.line())[0]) == ("heir", "held")
        os.kill(process.pid, signal.SIGKILL)
        await until(lambda: not w.taken(), what="the lease is over although the socket is open")
        os.kill(int(heir), 0)


async def test_a_share_is_free_only_when_a_dead_borrower_s_children_are_off_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(given_back, "PROBE_S", 0.01)
    monkeypatch.setattr(family, "LOOK_S", 0.01)
    async with (
        lender("1xH100", modes=("time-slice",)) as w,
        holder(w.path, "1x@time-slice", how="heir") as process,
    ):
        child = int((await process.line())[1])
        await process.line()
        [held] = w.server.holders
        assert held.family is not None
        await until(lambda: held.family is not None and held.family.has(child), what="its child is known")
        w.inventory.set_reading(0, SlotReading(memory_used_mib=9000, processes=(DeviceProcess(child),)))
        looks: list[int] = []
        sample = w.inventory.sample

        async def counted() -> list[SlotReading]:
            looks.append(1)
            return await sample()

        monkeypatch.setattr(w.inventory, "sample", counted)
        os.kill(process.pid, signal.SIGKILL)
        await until(lambda: len(looks) > 3, what="looked at after its death")
        assert w.taken() == [0]
        os.kill(child, signal.SIGKILL)
        await until(lambda: not w.taken(), what="free once the child is gone, whatever the driver still lists")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_another_user_is_refused_by_its_credentials() -> None:
    async with lender("1xH100", gid=65534) as w:
        w.path.parent.chmod(0o711)
        assert w.path.stat().st_mode & 0o777 == 0o660
        async with holder(w.path, how="nobody") as process:  # the file's mode lets it in, SO_PEERCRED does not
            assert (await process.line())[:2] == ["refused", "not-permitted"]
        assert not w.taken()
    async with lender("1xH100") as w:
        w.path.parent.chmod(0o711)
        assert w.path.stat().st_mode & 0o777 == 0o600
        async with holder(w.path, how="nobody") as process:
            assert "Permission denied" in " ".join(await process.line())
    async with lender("1xH100", gid=65534, uids=(65534,)) as w:
        w.path.parent.chmod(0o711)
        async with holder(w.path, how="nobody") as process:
            assert (await process.line())[0] == "held"
            assert w.server.holders[0].uid == 65534


async def test_a_lease_is_asked_back_with_reason_and_deadline_and_marked_when_overdue() -> None:
    async with lender("2xH100") as w:
        async with borrow(w.path) as lease, borrow(w.path) as other:
            w.server.ask_back("maintenance at noon", 60.0)
            asked = await lease.wait_asked_back()
            assert asked.reason == "maintenance at noon"
            assert 0 < asked.left_s <= 60
            assert not w.quarantined()
            w.server.ask_back("now", 0.0)
            await until(lambda: len(w.quarantined()) == 2, what="both are overdue")
            assert "now" in w.quarantined()[0]
            assert w.taken() == [0, 1]  # nobody is killed: they hold on
            await other.give_back()
            await until(lambda: list(w.quarantined()) == [0], what="one came back")
        await until(lambda: not w.quarantined() and not w.taken(), what="both are back")


async def test_a_callback_that_raises_hides_no_lost_lease(caplog: pytest.LogCaptureFixture) -> None:
    """With the listener ended, the process would go on using a GPU that others get."""

    def raises(asked: AskedBack) -> None:
        raise RuntimeError(asked.reason)

    async with lender("1xH100") as w:
        async with borrow(w.path, on_asked_back=raises) as lease:
            w.server.ask_back("maintenance", 60.0)
            await lease.wait_asked_back()
            await w.server.close()
            await until(lambda: lease.lost, what="the holder learns that the agent is gone")
        assert [record.exc_text is not None for record in caplog.records if "raised" in record.message] == [True, True]


async def test_a_task_that_waits_for_the_lease_to_be_asked_back_goes_on_once_it_is_given_back() -> None:
    async with lender("1xH100") as w, asyncio.timeout(60):
        async with borrow(w.path) as lease:
            waits = asyncio.create_task(lease.wait_asked_back())
        assert (await waits).reason == GIVEN_BACK
        assert (await lease.wait_asked_back()).left_s == 0
        assert (lease.asked_back, lease.lost) == (None, False)


async def test_a_drain_asks_back_by_its_own_deadline_and_again_when_that_moves() -> None:
    async with lender("1xH100") as w, borrow(w.path) as lease:
        w.server.drain(True, 600.0)
        asked = await lease.wait_asked_back()
        assert (asked.reason, 590 < asked.left_s <= 600) == (lease_server.DRAINED, True)
        w.server.drain(True, 0.0)
        await until(lambda: 0 in w.quarantined(), what="the holder is overdue")
        w.server.drain(True, None)
        await until(lambda: lease.asked_back is not None and lease.asked_back.left_s > 3500, what="an hour is left")
        assert not w.quarantined()


async def test_a_drain_that_is_taken_back_is_taken_back_from_the_holders_too_and_nothing_else_with_it() -> None:
    async with lender("2xH100") as w, borrow(w.path) as lease:
        w.server.drain(True)
        assert (await lease.wait_asked_back()).reason == lease_server.DRAINED
        w.server.drain(False)
        await until(lambda: lease.asked_back is None, what="the holder may keep its device")
        waits = asyncio.create_task(lease.wait_asked_back())
        w.server.ask_back("maintenance at 5", 7200.0)
        assert (await waits).reason == "maintenance at 5"
        w.server.drain(True)
        await until(lambda: "drained" in str(lease.asked_back), what="the drain is earlier")
        w.server.drain(False)
        await until(lambda: "maintenance" in str(lease.asked_back), what="the other request is left")
        [held] = w.server.holders
        assert held.asked_back is not None
        assert held.overdue is not None
        assert not held.overdue.cancelled()


async def test_a_lease_that_a_drain_refuses_is_told_that_it_may_come_again_after_an_uncordon() -> None:
    """The worker learns of `uncordon` with its next renewal, and advised `moorage plan` until then."""
    async with lender("1xH100") as w:
        w.server.drain(True)
        with pytest.raises(LeaseRefused, match="drained") as refused:
            await _uuids(w.path, "1x")
        assert "a few seconds after an operator has ended the drain" in refused.value.problem.next
        w.server.drain(False)
        assert len(await _uuids(w.path, "1x")) == 1


async def test_a_drain_in_the_turn_of_a_grant_refuses_that_one_and_asks_no_other_for_longer() -> None:
    async with lender("2xH100") as w, borrow(w.path) as lease:
        of_a_job = w.pool.try_claim_slots([1], "exclusive", "job")
        second = asyncio.create_task(_uuids(w.path, "1x"))
        await until(w.pool.pending_claimers, what="the second borrower waits")
        of_a_job.release()  # its GPU goes to the borrower in this call
        w.server.drain(True)
        with pytest.raises(LeaseRefused, match="drained"):
            await second
        await lease.wait_asked_back()
        w.server.drain(False)
        await until(lambda: lease.asked_back is None, what="the holder may keep its device")
        await until(lambda: w.taken() == [0], what="the GPU that was granted is free")


async def test_a_share_granted_in_the_turn_of_a_drain_is_freed_as_a_share_whatever_the_others_use() -> None:
    async with lender("1xH100", modes=("time-slice",), free_wait_s=0.0) as w:
        of_a_job = w.pool.try_claim_slots([0], "exclusive", "job")
        borrower = asyncio.create_task(_uuids(w.path, "1x@time-slice"))
        await until(w.pool.pending_claimers, what="the borrower waits")
        w.inventory.set_reading(0, SlotReading(memory_used_mib=9000, processes=(DeviceProcess(1),)))
        of_a_job.release()  # its GPU goes to the borrower in this call
        w.server.drain(True)
        with pytest.raises(LeaseRefused, match="drained"):
            await borrower
        await until(lambda: w.quarantined() or not w.taken(), what="the share is free, or its device is closed")
        assert (w.quarantined(), w.taken()) == ({}, [])


async def test_devices_that_cannot_be_looked_at_come_back_once_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    async with lender("1xH100") as w:
        look, broken = w.inventory.memory_is_free, asyncio.Event()

        async def memory_is_free(slot: int) -> bool:
            if not broken.is_set():
                broken.set()
                raise OSError("no driver")
            return await look(slot)

        monkeypatch.setattr(w.inventory, "memory_is_free", memory_is_free)
        async with borrow(w.path):
            pass
        await until(lambda: broken.is_set() and not w.taken(), what="the device is back")


async def test_frames_that_are_none_end_their_connection_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    async with lender("1xH100") as w, borrow(w.path) as lease:
        for words in (framed(b"\xc1\xc1", 2), framed(b"{}", 2)[:-1] + b"]", b"\xff" * 8, b"", b"\x00\x00"):
            monkeypatch.setattr(lease_server, "FIRST_WORD_S_MAX", 30.0 if len(words) > 2 else 0.05)
            reader, writer = await asyncio.open_unix_connection(str(w.path))
            writer.write(words)
            async with asyncio.timeout(60):
                answer = await reader.read()
            assert (b"error" in answer) == (len(words) > 2)
            writer.close()
        monkeypatch.setattr(lease_server, "FIRST_WORD_S_MAX", 30.0)
        monkeypatch.setattr(lease_server, "CONNECTIONS_MAX", 1)
        with pytest.raises(LeaseRefused) as refused:
            async with borrow(w.path):
                pass
        assert refused.value.code == "queue-full"
        assert w.taken() == [0]
        assert lease.asked_back is None


@pytest.mark.parametrize(
    ("number", "said"), [(errno.EMFILE, "Too many open files"), (errno.ESRCH, "does not see this process")]
)
async def test_a_process_that_the_agent_cannot_watch_is_told_why(
    monkeypatch: pytest.MonkeyPatch, number: int, said: str
) -> None:
    def fails(pid: int) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pidfd_open", fails)
    monkeypatch.setattr(pidfds, "_SO_PEERPIDFD", -1)  # as before Linux 6.5
    async with lender("1xH100") as w:
        with pytest.raises(LeaseRefused, match=said):
            async with borrow(w.path):
                pass


async def test_a_live_agent_s_socket_is_not_taken_over() -> None:
    async with lender("1xH100") as w:
        second = LeaseServer("w2", w.pool, w.inventory)
        with pytest.raises(OSError, match="another agent lends") as refused:
            await second.open(w.path)
        assert refused.value.errno == errno.EADDRINUSE
    with tempfile.TemporaryDirectory(prefix="moorage-lease-") as folder:  # a stale one is replaced
        path = Path(folder) / SOCKET_NAME
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(str(path))
        again = LeaseServer("w1", w.pool, w.inventory)
        await again.open(path)
        async with borrow(path):
            pass
        await again.close()


async def test_an_agent_that_accepts_nothing_blocks_neither_borrowers_nor_the_next_agent() -> None:
    """As one that got SIGSTOP: the kernel has only so many connections wait for it."""
    with tempfile.TemporaryDirectory(prefix="moorage-lease-") as folder, contextlib.ExitStack() as opened:
        path = Path(folder) / SOCKET_NAME
        stopped = opened.enter_context(socket.socket(socket.AF_UNIX))
        stopped.bind(str(path))
        stopped.listen(0)
        waits = opened.enter_context(socket.socket(socket.AF_UNIX))
        waits.setblocking(False)
        waits.connect(str(path))
        with pytest.raises(TimeoutError):
            async with borrow(path, timeout_s=0.1):
                pass
        inventory = SimulatedInventory(simulated_hosts("1xH100")[0])
        with pytest.raises(OSError, match="another agent lends"):
            await LeaseServer("w1", GpuPool(inventory.devices()), inventory).open(path)
        late = asyncio.create_task(_uuids(path, "1x"))
        stopped.setblocking(False)
        accepted, _ = await asyncio.get_running_loop().sock_accept(stopped)
        accepted.close()
        second, _ = await asyncio.get_running_loop().sock_accept(stopped)
        second.close()
        with pytest.raises(LeaseRefused, match="the agent closed the connection"):
            await late


async def test_a_borrower_is_in_line_with_placements(nats_url: str, unique: str) -> None:
    def place(job: str, fence: int, *argv: str) -> Place:
        body = encode({"gpu": {}, "run": {"driver": "noop", "argv": list(argv)}})
        return Place("acme", job, 0, 1, fence, [0], "exclusive", False, body)

    async with state_folder() as state, ScriptedLeader(nats_url, unique) as leader:
        settings = WorkerSettings(state, "w1", unique, simulate="1xH100", drivers=("noop",))
        worker = await start(settings, nats_url)
        try:
            seat = await leader.joined("w1")
            await leader.want("w1", place("first", 1, "hang"))
            await leader.await_report("w1", "started", ("acme", "first", 0, 1, 1))
            pool = worker.agents[0].pool
            waiting = asyncio.create_task(_held(state / SOCKET_NAME, seat))
            await until(lambda: pool.pending_claimers() == 1, what="the borrower waits")
            await until(lambda: seat.renewals[-1].waiting, what="a renewal that says that a local claimer waits")
            await leader.want("w1", place("second", 2), End("acme", "first", 0, 1, 1, "cancelled"))
            await leader.await_report("w1", "freed", ("acme", "first", 0, 1, 1))
            await leader.want("w1", place("third", 3))
            refused = await leader.await_report("w1", "refused", ("acme", "third", 0, 1, 3))
            assert refused.detail == "leased 0"
            await waiting
            await until(lambda: not pool.slot_states()[0].sharers, what="given back")
            await leader.want("w1", place("fourth", 4))
            await leader.await_report("w1", "freed", ("acme", "fourth", 0, 1, 4))
        finally:
            await worker.stop()


async def _held(path: Path, seat: Any) -> None:
    """Hold until a refusal of the device was told."""
    async with borrow(path):
        await until(lambda: seat.renewals[-1].busy == [0], what="a renewal that shows the lease")
        await until(lambda: seat.report("refused", ("acme", "third", 0, 1, 3)), what="a refused placement")


async def test_a_worker_that_leaves_for_good_says_so_before_it_waits_for_what_it_has_lent(
    nats_url: str, unique: str
) -> None:
    async with state_folder() as state, ScriptedLeader(nats_url, unique) as leader:
        worker = await start(WorkerSettings(state, "w1", unique, simulate="1xH100"), nats_url)
        seat = await leader.joined("w1")
        async with borrow(state / SOCKET_NAME):
            stopping = asyncio.create_task(worker.stop(3600.0))
            await until(lambda: seat.renewals and seat.renewals[-1].leaving_s, what="a renewal that says so")
            assert not seat.said_goodbye
        await stopping
        assert seat.said_goodbye


@pytest.mark.slow
async def test_a_worker_says_no_goodbye_while_a_process_of_its_host_keeps_a_gpu(
    nats_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moorage.worker.agent.run.LEAVE_S_MAX", 0.2)
    async with state_folder() as state, ScriptedLeader(nats_url, unique) as leader:
        settings = WorkerSettings(state, "w1", unique, simulate="1xH100")
        worker = await start(settings, nats_url)
        seat = await leader.joined("w1")
        async with borrow(state / SOCKET_NAME):
            await worker.stop()  # asked back, and not given
            again = await start(settings, nats_url)
            try:
                await leader.joined("w1", joins=2)  # behind whatever the one before had to say
                assert not seat.said_goodbye
                await until(
                    lambda: again.agents[0].attempts.session.phase == "live", what="it knows that it has joined"
                )
            finally:
                await again.stop()
        await until(lambda: seat.said_goodbye, what="the goodbye of the second, which lent nothing")
