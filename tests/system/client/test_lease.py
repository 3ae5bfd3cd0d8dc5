"""Leases by the SDK: real agents and schedulers, and borrowers that are processes of their own.

The lease's row of the promise table: asked back with a deadline over the agent's UNIX socket; freed when the socket is
closed or the pid is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import moorage
from moorage.bus.embedded import EmbeddedServer
from moorage.bus.lend.protocol import SOCKET_NAME
from moorage.bus.target import HOME_VARIABLE, UP_FILE, Up, started_ticks
from moorage.client import AsyncClient, Client, Gpu, Lease, NoAgent, NotPermitted, Rejected, TimedOut
from moorage.client.lease import SOCKET_VARIABLE, SYSTEM_SOCKET, find_sockets, torch_device
from moorage.schemas.codec import encode
from moorage.schemas.frames import Device
from moorage.testing import SimFleet, SimulatedClock
from tests.system.live.stack import QUICK, RealProcess, Stack, stack
from tests.system.worker.lend.test_leases import HolderProcess
from tests.waiting import until

_ROOTS = os.pathsep.join(str(Path(root).parent) for root in moorage.__path__)

#: borrows with the SDK, says in lines what becomes of it and gives back when asked
BORROWER = """
import asyncio, sys
from moorage.client import AsyncClient, Client
how, gpu = sys.argv[1:3]

def say(*words):
    print(*words, flush=True)

def asked(back):
    say("asked", back.reason, round(back.left_s))

async def plain():
    async with AsyncClient("nats://127.0.0.1:1").lease(gpu, purpose="test", on_asked_back=asked) as lease:
        say("held", lease.worker, lease.mode, ",".join(lease.uuids), lease.environment["CUDA_VISIBLE_DEVICES"])
        await lease.wait_asked_back()
    say("given back")

def sync(url):
    with Client(url) as m, m.lease(gpu, purpose="test", on_asked_back=asked) as lease:
        say("held", lease.worker, lease.mode, ",".join(lease.uuids), lease.environment["CUDA_VISIBLE_DEVICES"])
        lease.wait_asked_back("60s")
    say("given back")

sync(sys.argv[3]) if how == "sync" else asyncio.run(plain())
"""


class Borrower(HolderProcess):
    """A process that borrows by the SDK or by the command."""

    async def is_asked(self, why: str, within_s: int) -> None:
        """Wait until it says that it is asked back for this reason; a busy machine tells it some seconds later."""
        word, *reason, left_s = await self.line()
        assert (word, " ".join(reason)) == ("asked", why)
        assert within_s - 30 <= int(left_s) <= within_s


@contextlib.asynccontextmanager
async def borrower(socket: Path, gpu: str = "1x", how: str = "plain", *more: str) -> AsyncIterator[Borrower]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        BORROWER,
        how,
        gpu,
        *more,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": _ROOTS, "MOORAGE_LEASE_SOCKET": str(socket)},
    )
    try:
        yield Borrower(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


class World:
    """A scheduler and one agent process whose socket the tests know."""

    def __init__(self, made: Stack, moorage: AsyncClient) -> None:
        self.made = made
        self.moorage = moorage
        self.state = made.folder / "w"
        self.socket = self.state / SOCKET_NAME
        self.agent: RealProcess

    async def start(self, simulate: str = "2xL40S", **settings: Any) -> None:
        settings.setdefault("modes", ("exclusive", "mps", "time-slice"))
        self.agent = await self.made.agent("w", simulate, worker="w1", drivers=("noop",), load_s=0.2, **settings)
        await until(self.up, 90, "the worker is up")

    async def up(self) -> bool:
        """The fleet has it, and this agent's socket answers (one that was killed leaves its own behind)."""
        rows = (await self.moorage.fleet.show()).workers
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_unix_connection(self.socket)
            writer.close()
            return [(row.worker, row.state) for row in rows] == [("w1", "up")]
        return False

    async def cells(self) -> str:
        [row] = (await self.moorage.fleet.show()).workers
        return str(row.cells)

    def shows(self, *cells: str) -> Callable[[], Any]:
        async def seen() -> bool:
            return await self.cells() in cells

        return seen


@contextlib.asynccontextmanager
async def world(server: EmbeddedServer, prefix: str, simulate: str = "2xL40S", **settings: Any) -> AsyncIterator[World]:
    async with stack(server, prefix) as made, AsyncClient(made.url, prefix=prefix) as client:
        await made.scheduler(config=QUICK)
        it = World(made, client)
        await it.start(simulate, **settings)
        yield it


@pytest.mark.slow
async def test_a_lease_hides_its_devices_from_the_fleet_and_what_cannot_be_lent_is_told_with_what_to_do(
    nats_server: EmbeddedServer, unique: str
) -> None:
    async with world(nats_server, unique, modes=("exclusive",)) as w:
        async with w.moorage.lease(Gpu("L40S"), purpose="fine-tune", wait="60s", socket=w.socket) as lease:
            assert (lease.worker, lease.mode, lease.simulated, len(lease.devices)) == ("w1", "exclusive", True, 1)
            assert lease.environment["CUDA_VISIBLE_DEVICES"] == str(lease.devices[0].index)
            assert lease.uuids[0] == lease.devices[0].uuid
            assert (lease.asked_back, lease.lost) == (None, False)
            child = lease.child_environment()
            assert child["PATH"]
            assert child["CUDA_VISIBLE_DEVICES"] == str(lease.devices[0].index)
            assert lease.device == f"cuda:{lease.devices[0].index}"
            await until(w.shows("x·"), what="the fleet sees that somebody of the host holds it")
            with pytest.raises(TimedOut, match="was not asked back"):
                await lease.wait_asked_back("50ms")
            await lease.give_back()
            await until(w.shows("··"), what="both are free")
        async with w.moorage.lease(2, wait="60s", socket=w.socket) as both:
            assert len(set(both.uuids)) == 2
        for gpu, code in {
            "1xH100": "no-match",
            "3x": "no-match",
            "2x1xL40S": "invalid-argument",
            "64x8xL40S": "invalid-argument",
            "1x:80Q": "invalid-argument",
            "1x@time-slice": "failed-precondition",
        }.items():
            with pytest.raises(Rejected) as refused:
                async with w.moorage.lease(gpu, wait="60s", socket=w.socket):
                    pass
            assert refused.value.code == code
            assert refused.value.fixes
        with pytest.raises(NoAgent) as nobody:
            async with w.moorage.lease(socket=w.socket.with_name("nothing.sock")):
                pass
        assert nobody.value.fixes[0] == "start one on this host: moorage worker"
        assert "nothing.sock" in nobody.value.why


#: prints each signal that it gets
SIGNALLED = """
import signal
for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT, signal.SIGALRM, signal.SIGRTMIN + 3):
    signal.signal(number, lambda number, _: print(number, flush=True))
print("ready", flush=True)
while True:
    signal.pause()
"""

#: shows what it was lent, then says which signal ends it, and goes on until SIGKILL if it is to
PROGRAM = """
trap 'echo TERM; [ $1 = stays ] || exit 7' TERM
echo has $CUDA_VISIBLE_DEVICES
while :; do sleep 0.05; done
"""


@pytest.mark.slow
async def test_a_program_has_the_gpus_that_its_command_was_lent_and_ends_with_the_lease(
    nats_server: EmbeddedServer, unique: str
) -> None:
    async with world(nats_server, unique) as w:

        @contextlib.asynccontextmanager
        async def leased(*words: str) -> AsyncIterator[Borrower]:
            command = (sys.executable, "-m", "moorage.cli", "lease", "1xL40S", "--socket", str(w.socket), *words)
            environment = os.environ | {"PYTHONPATH": _ROOTS}
            process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=environment)
            try:
                yield Borrower(process)
                await until(w.shows("··"), what="its GPU is given back")
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.communicate()

        async def code(borrower: Borrower) -> int:
            return await asyncio.wait_for(borrower.process.wait(), 60)

        for program, ends in (("exit 3", 3), ("kill -9 $$", 137)):
            async with leased("--", "sh", "-c", program) as one:
                assert await code(one) == ends
        for program, ends in (("no-such-program", 127), ("/tmp", 126)):
            async with leased("--", program) as one:
                assert await code(one) == ends
        async with leased("--", "sh", "-c", PROGRAM, "sh", "ends") as one:
            assert await one.line() == ["has", "0"]
            one.process.send_signal(signal.SIGTERM)
            assert (await one.line(), await code(one)) == (["TERM"], 7)
        async with leased("--", sys.executable, "-c", SIGNALLED) as one:
            assert await one.line() == ["ready"]
            for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT, signal.SIGALRM, signal.SIGRTMIN + 3):
                one.process.send_signal(number)
                assert await one.line() == [str(int(number))]
            one.process.send_signal(signal.SIGHUP)
            assert await code(one) == 128 + signal.SIGHUP
        async with leased("--", "sh", "-c", PROGRAM, "sh", "stays") as one:
            assert await one.line() == ["has", "0"]
            await w.moorage.fleet.drain("w1", within="2s")
            assert (await one.line(), await code(one)) == (["TERM"], 137)


@pytest.mark.slow
async def test_a_lease_without_a_block_is_held_until_it_is_given_back(nats_server: EmbeddedServer, unique: str) -> None:
    async with world(nats_server, unique) as w:
        lease = await w.moorage.lease(wait="60s", socket=w.socket)
        gc.collect()  # what made it is gone
        async with w.moorage.lease(wait="60s", socket=w.socket) as other:
            assert other.uuids != lease.uuids
            with pytest.raises(TimedOut, match="came free on this host"):
                await w.moorage.lease(wait="100ms", socket=w.socket)
        await lease.give_back()
        await lease.give_back()
        await until(w.shows("··"), what="both are free")


@pytest.mark.slow
async def test_a_lease_of_the_client_without_await_is_held_from_cell_to_cell_too(
    nats_server: EmbeddedServer, unique: str
) -> None:
    """In a notebook a block cannot span cells. It was not taken at all there, and nothing said so."""
    async with world(nats_server, unique) as w:

        def cells() -> Lease:
            client = Client(w.made.url, prefix=unique).open()
            first = client.lease(wait="60s", socket=w.socket)
            gc.collect()
            second = client.lease(wait="60s", socket=w.socket)
            assert first.uuids != second.uuids
            with pytest.raises(TimedOut, match="came free on this host"):
                client.lease(wait="100ms", socket=w.socket)
            first.give_back()
            first.give_back()
            with client.lease(wait="60s", socket=w.socket) as third:
                assert third.uuids == first.uuids
            assert "given back" in repr(third)
            client.close()
            second.give_back()  # does nothing: it ended with the client
            return second

        assert "given back" in repr(await asyncio.to_thread(cells))
        await until(w.shows("··"), what="both are free")


@pytest.mark.slow
async def test_a_borrower_that_is_killed_gives_back_by_dying(nats_server: EmbeddedServer, unique: str) -> None:
    async with world(nats_server, unique, "1xL40S") as w, borrower(w.socket) as one, borrower(w.socket) as other:
        lines = {asyncio.create_task(each.line()): each for each in (one, other)}
        (first,), (second,) = await asyncio.wait(lines, return_when=asyncio.FIRST_COMPLETED)
        os.kill(lines[first].pid, signal.SIGKILL)
        assert (first.result()[0], second.done()) == ("held", False)
        assert (await second)[3] == first.result()[3]


@pytest.mark.slow
async def test_a_worker_that_is_drained_or_stops_asks_back_with_reason_and_deadline(
    nats_server: EmbeddedServer, unique: str
) -> None:
    async with world(nats_server, unique) as w:
        async with borrower(w.socket, "1x", "sync", w.made.url) as process:
            assert (await process.line())[0] == "held"
            await w.moorage.fleet.drain("w1")
            await process.is_asked("the worker is drained", 3600)
            assert await process.line() == ["given", "back"]
        with pytest.raises(Rejected, match="no more leases: the worker is drained"):
            async with w.moorage.lease(wait="60s", socket=w.socket):
                pass
        await w.moorage.fleet.uncordon("w1")

        async def lends() -> bool:
            with contextlib.suppress(Rejected):
                async with w.moorage.lease(wait="60s", socket=w.socket):
                    return True
            return False

        await until(lends, 90, "it lends again")
        async with borrower(w.socket, "1x", "sync", w.made.url) as polite, borrower(w.socket) as other:
            assert (await polite.line())[0] == (await other.line())[0] == "held"
            w.agent.process.send_signal(signal.SIGTERM)
            for each in (polite, other):
                assert (await each.line())[:4] == ["asked", "the", "agent", "stops"]
                assert await each.line() == ["given", "back"]
            async with asyncio.timeout(60):
                assert await w.agent.process.wait() == 0


@pytest.mark.slow
async def test_an_agent_that_is_killed_takes_its_leases_along_and_the_next_one_lends_anew(
    nats_server: EmbeddedServer, unique: str
) -> None:
    async with world(nats_server, unique) as w:
        told: list[str] = []
        lending = w.moorage.lease(2, wait="60s", socket=w.socket, on_asked_back=lambda back: told.append(back.reason))
        async with lending as lease:
            await w.agent.kill()
            asked = await lease.wait_asked_back("60s")
            assert (lease.lost, asked.reason, asked.left_s, told) == (True, "agent-gone", 0.0, ["agent-gone"])
            with pytest.raises(NoAgent) as nobody:
                async with w.moorage.lease(wait="60s", socket=w.socket):
                    pass
            assert nobody.value.code == "no-agent"
            await w.start()
            async with w.moorage.lease(2, wait="60s", socket=w.socket) as again:
                assert again.uuids == lease.uuids
        assert "lost" in repr(lease)


async def test_a_socket_of_another_owner_is_told_as_such(tmp_path: Path) -> None:
    assert issubclass(NoAgent, Exception)
    assert not issubclass(NotPermitted, NoAgent)
    (tmp_path / SOCKET_NAME).write_text("no socket at all")
    with pytest.raises(NoAgent):
        async with AsyncClient("nats://127.0.0.1:1").lease(socket=tmp_path / SOCKET_NAME):
            pass


async def test_beside_a_simulated_fleet_it_is_told_which_worker_lends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path))
    monkeypatch.delenv(SOCKET_VARIABLE, raising=False)
    here = Up("nats://127.0.0.1:5", os.getpid(), started_ticks(os.getpid()), "4x8xH100")
    (tmp_path / UP_FILE).write_bytes(encode(here))
    with pytest.raises(NoAgent) as nobody:
        await AsyncClient("nats://127.0.0.1:1").lease()
    assert nobody.value.fixes[0] == "start one on this host: moorage worker --id lender --simulate 2xH100"
    assert "the moorage up of this folder simulates 4 hosts, and only a worker of one host lends" in nobody.value.why


def test_where_a_socket_is_looked_for(tmp_path: Path) -> None:
    for worker in ("here", "up"):
        (tmp_path / "workers" / worker).mkdir(parents=True)
        (tmp_path / "workers" / worker / SOCKET_NAME).touch()
    env = {"MOORAGE_HOME": str(tmp_path)}
    found = [tmp_path / "workers" / worker / SOCKET_NAME for worker in ("here", "up")]
    assert find_sockets(None, env) == [*found, SYSTEM_SOCKET]
    assert find_sockets(None, {**env, "MOORAGE_LEASE_SOCKET": "/x/y.sock"}) == [Path("/x/y.sock")]
    assert find_sockets("/z.sock", {**env, "MOORAGE_LEASE_SOCKET": "/x/y.sock"}) == [Path("/z.sock")]


@pytest.mark.parametrize(
    ("vendor", "visible", "expected"),
    [
        ("nvidia", None, "cuda:3"),
        ("amd", None, "cuda:3"),
        ("intel", None, "xpu:3"),
        ("nvidia", "7,3", "cuda:1"),
        ("nvidia", "GPU-aaaa, GPU-bbbb-cc", "cuda:1"),
        ("nvidia", "GPU-bbbb", "cuda:0"),
    ],
)
def test_a_device_as_torch_names_it_here(vendor: str, visible: str | None, expected: str) -> None:
    device = Device(3, vendor, "card", "GPU-bbbb-cc")
    assert torch_device(device, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == expected


@pytest.mark.parametrize("visible", ["", "0,1", "GPU-aaaa"])
def test_a_device_that_this_process_cannot_see_is_told(visible: str) -> None:
    with pytest.raises(Rejected, match="cannot see GPU-bbbb"):
        torch_device(Device(3, "nvidia", "card", "GPU-bbbb-cc"), {"CUDA_VISIBLE_DEVICES": visible})


def test_a_simulated_fleet_lends_nothing_and_says_so() -> None:
    async def scene() -> None:
        async with AsyncClient(transport=SimFleet("1xL40S")) as client:
            with pytest.raises(Rejected, match="lends no GPUs"):
                client.lease()

    SimulatedClock().run(scene())
    with Client(transport=SimFleet("1xL40S")) as sync, pytest.raises(Rejected, match="lends no GPUs"):
        sync.lease()
