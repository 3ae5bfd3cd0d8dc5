"""Calls through breaks on real nats-servers, by seed: a server is ended, killed or stopped for five seconds, or the
links of members and of callers are cut, and joined again after five milliseconds to five seconds.

Members are processes of `moorage serve`. Callers are the SDK, nats-py and nats.js as their users have them.

    python -m tests.release.breaks.real --seeds 50 --node-modules FOLDER
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Final, Protocol

import msgspec
import nats.errors
from nats.aio.client import Client

from moorage.client import AsyncClient, ClientError, TimedOut
from tests.cluster import Cluster
from tests.release.chaos.proxy import Proxy
from tests.servers import WheelServer
from tests.system.cli import forks
from tests.system.cli.node import environment
from tests.system.services.members import MemberProcess

HERE: Final = Path(__file__).parent
SUBJECT: Final = "moorage.call.default.timed"
MEMBERS: Final = 2
AT_ONCE: Final = 4
CALLS_S: Final = 6.0
#: the callers' time-out, which nothing is to wait for
PATIENCE_S: Final = 25.0
#: behind the return of its caller and its member, an answer that is there is heard
ANSWERED_S: Final = 2.0
#: what a busy machine adds
BUSY_S: Final = 1.5
#: answers sooner than this have no receipt, and what is on its way to a bare caller may be lost with its link
QUICK_S: Final = 0.15
TAKES_S: Final = (0.01, 0.3, 0.3, 1.0, 2.5)


class Made(msgspec.Struct, eq=False):
    caller: str
    takes_s: float
    told: str = ""
    told_s: float = 0.0


class Servers(Protocol):
    """Servers to break."""

    @property
    def ports(self) -> list[int]: ...

    async def harm(self, how: str, at: int, for_s: float) -> None: ...

    async def close(self) -> None: ...


class One:
    """One server."""

    def __init__(self, server: WheelServer) -> None:
        self._server = server

    @property
    def ports(self) -> list[int]:
        return [self._server.port]

    async def harm(self, how: str, at: int, for_s: float) -> None:
        if how == "stop":
            pid = self._server._embedded.pid
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(5)
            os.kill(pid, signal.SIGCONT)
            return
        await (self._server.kill() if how == "kill" else self._server.stop())
        await asyncio.sleep(for_s)
        await self._server.start()

    async def close(self) -> None:
        await self._server.stop()


class Three:
    """Three servers with routes."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    @property
    def ports(self) -> list[int]:
        return self._cluster.ports

    async def harm(self, how: str, at: int, for_s: float) -> None:
        node = self._cluster.nodes[at]
        if how == "stop":
            node.send(signal.SIGSTOP)
            await asyncio.sleep(5)
            node.send(signal.SIGCONT)
            return
        if how == "term":
            node.send(signal.SIGTERM)
            await asyncio.sleep(0.2)
        node.kill()
        await asyncio.sleep(for_s)
        node.start()

    async def close(self) -> None:
        await self._cluster.stop()


class World:
    def __init__(self, seed: int, folder: Path, node_modules: Path | None) -> None:
        self.dice = random.Random(seed)
        self.folder = folder
        self.node_modules = node_modules
        self.is_cluster = seed % 4 == 3
        self.what = ""
        self.calls: list[Made] = []
        self.back: dict[str, list[float]] = {}  # by caller, when its link was there again
        self.cuts: dict[str, list[float]] = {}  # when the link of a caller alone was cut
        self.joined_s = 0.0
        self.wrong: list[str] = []
        self.kinds = Counter[str]()
        self.late_s = 0.0
        self._proxies: dict[str, Proxy] = {}
        self._ends_s = 0.0

    def make(self, caller: str) -> tuple[int, Made]:
        call = Made(caller, self.dice.choice(TAKES_S) * self.dice.uniform(0.8, 1.2))
        self.calls.append(call)
        return len(self.calls) - 1, call

    def _url(self, name: str) -> str:
        return f"nats://127.0.0.1:{self._proxies[name].port}"

    async def _calls(self, name: str, call: Callable[[str], Awaitable[str]]) -> None:
        async def some() -> None:
            while time.time() < self._ends_s:
                number, made = self.make(name)
                made.told = await call(f"{number} {made.takes_s:.3f}")
                made.told_s = time.time()

        await asyncio.gather(*(some() for _ in range(AT_ONCE)))

    # -- callers

    async def sdk(self, ready: asyncio.Barrier) -> None:
        async with AsyncClient(self._url("sdk"), timeout=PATIENCE_S) as client:
            client._wire.link.on_back(lambda: self.back.setdefault("sdk", []).append(time.time()))

            async def call(data: str) -> str:
                try:
                    return bytes(await client.call("timed", data.encode())).decode()
                except TimedOut:
                    return "hung"
                except ClientError as error:
                    return error.code

            await ready.wait()
            await self._calls("sdk", call)

    async def nats_py(self, ready: asyncio.Barrier) -> None:
        async def back() -> None:
            self.back.setdefault("nats-py", []).append(time.time())

        async def failed(_: Exception) -> None:
            """Close the socket of an attempt to come back: nats-py leaves it open where the server ends it at once."""
            writer = getattr(client._transport, "_bare_io_writer", None)
            if not client.is_connected and writer is not None:
                writer.transport.abort()

        client = Client()
        await client.connect(self._url("nats-py"), reconnected_cb=back, error_cb=failed)

        async def call(data: str) -> str:
            try:
                answer = await client.request(SUBJECT, data.encode(), timeout=PATIENCE_S)
            except nats.errors.TimeoutError:
                return "hung"
            except nats.errors.Error as error:
                return f"failed {error!r}"
            return str((answer.headers or {}).get("Nats-Service-Error") or answer.data.decode())

        await ready.wait()
        await self._calls("nats-py", call)
        await client.close()

    async def nats_js(self, ready: asyncio.Barrier) -> None:
        assert self.node_modules is not None
        (self.node_modules / "caller.mjs").write_text((HERE / "caller.mjs").read_text())
        pipe = asyncio.subprocess.PIPE
        words = ("node", "caller.mjs", self._url("nats-js"), SUBJECT, str(round(PATIENCE_S * 1000)))
        process = await asyncio.create_subprocess_exec(*words, cwd=self.node_modules, stdin=pipe, stdout=pipe)
        assert process.stdin is not None
        assert process.stdout is not None
        waiting: dict[int, asyncio.Future[str]] = {}

        async def read() -> None:
            assert process.stdout is not None
            async for line in process.stdout:
                said = msgspec.json.decode(line)
                if said["told"] == "back":
                    self.back.setdefault("nats-js", []).append(said["at"])
                elif "number" in said:
                    told = "hung" if "TimeoutError" in said["told"] else said["told"]
                    waiting.pop(said["number"]).set_result(told)

        async def call(data: str) -> str:
            assert process.stdin is not None
            number = int(data.split()[0])
            future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            waiting[number] = future
            process.stdin.write(f"{data}\n".encode())
            return await future

        assert b"ready" in await process.stdout.readline()
        reading = asyncio.create_task(read())
        await ready.wait()
        try:
            await self._calls("nats-js", call)
        finally:
            reading.cancel()
            process.kill()
            await process.wait()

    # -- members, servers and breaks

    @contextlib.asynccontextmanager
    async def _member(self, at: int) -> AsyncIterator[MemberProcess]:
        words = ("--nats", self._url(f"member-{at}"), "served:timed", "--name", "timed", "--concurrency", "8")
        log, env = self.folder / f"member-{at}.log", {**environment(), "RUNS": str(self.folder / "runs")}
        with log.open("wb") as out:
            process = await forks.python("-m", "moorage.cli", "serve", *words, env=env, out=out, cwd=HERE)
        try:
            yield MemberProcess(process, log)
        finally:
            process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), 20)
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def _break(self, servers: Servers) -> None:
        await asyncio.sleep(self.dice.uniform(1.0, 3.0))
        for_s = self.dice.choice((0.005, 0.05, 0.5, 2.0, 5.0))
        how = self.dice.choice(("term", "kill", "stop", "member", "callers", "both"))
        self.what = f"{how} for {for_s} s{' of three servers' if self.is_cluster else ''}"
        if how in ("term", "kill", "stop"):
            await servers.harm(how, self.dice.randrange(len(servers.ports)), for_s)
        else:
            callers = ("sdk", "nats-py", "nats-js")
            names = {"member": ("member-0",), "callers": callers, "both": (*callers, "member-0", "member-1")}[how]
            await asyncio.gather(*(self._cut(name, for_s, how) for name in names if name in self._proxies))
        self.joined_s = time.time()

    async def _cut(self, name: str, for_s: float, how: str) -> None:
        if how == "callers":
            self.cuts.setdefault(name, []).append(time.time())
        self._proxies[name].reset()
        await asyncio.sleep(for_s * self.dice.uniform(0.6, 1.0))
        self._proxies[name].heal()

    async def play(self) -> None:
        (self.folder / "server").mkdir()
        servers: Servers
        if self.is_cluster:
            servers = Three(await Cluster.start(self.folder / "server"))
        else:
            servers = One(await WheelServer.on(self.folder / "server"))
        callers = [self.sdk, self.nats_py, *([self.nats_js] if self.node_modules else [])]
        names = [
            "sdk",
            "nats-py",
            *(["nats-js"] if self.node_modules else []),
            *(f"member-{n}" for n in range(MEMBERS)),
        ]
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(servers.close)
            for name in names:
                proxy = self._proxies[name] = Proxy(self.dice.choice(servers.ports))
                await proxy.open()
                stack.push_async_callback(proxy.close)
            members = [await stack.enter_async_context(self._member(at)) for at in range(MEMBERS)]
            await asyncio.gather(*(one.ready() for one in members))
            ready = asyncio.Barrier(len(callers) + 1)

            async def breaks() -> None:
                await ready.wait()
                await self._break(servers)

            self._ends_s = time.time() + CALLS_S + 3
            await asyncio.gather(breaks(), *(caller(ready) for caller in callers))
        self._judge()

    def _judge(self) -> None:
        noted: dict[str, Counter[int]] = {"began": Counter(), "ended": Counter()}
        ended_s: dict[int, float] = {}
        for line in (self.folder / "runs").read_text().splitlines():
            noting, of, at = line.split()
            noted[noting][int(of)] += 1
            if noting == "ended":
                ended_s[int(of)] = float(at)
        for number, call in enumerate(self.calls):
            kind = "right" if call.told == str(number) else call.told
            self.kinds[f"{call.caller} {kind}"] += 1
            what = f"{self.what}: call {number} of {call.caller}, {call.takes_s:.2f} s"
            if noted["began"][number] > 1:
                self.wrong.append(f"{what}, ran {noted['began'][number]} times")
            if call.caller == "sdk" and kind == "hung":
                self.wrong.append(f"{what}, hung; begun: {noted['began'][number]}")
            if number not in ended_s or self._is_excused(call, ended_s[number]):
                continue
            back_s = [at for at in self.back.get(call.caller, []) if at <= call.told_s]
            late_s = call.told_s - max(ended_s[number], self.joined_s, *back_s)
            if kind != "right":
                self.wrong.append(f"{what}, ran and is {kind}")
            elif call.told_s > self.joined_s:
                self.late_s = max(self.late_s, late_s)
                if late_s > ANSWERED_S + BUSY_S:
                    self.wrong.append(f"{what}, was answered {late_s:.2f} s late")

    def _is_excused(self, call: Made, ended_s: float) -> bool:
        """Of a bare caller whose link alone was cut: a quick answer, and what was on its way as that happened."""
        if call.caller == "sdk":
            return False
        back_s = max(self.back.get(call.caller, [0.0]))
        return any(
            abs(ended_s - cut_s) < 0.05 or (call.takes_s < QUICK_S and cut_s - 0.05 <= ended_s <= back_s + 0.05)
            for cut_s in self.cuts.get(call.caller, [])
        )


def play(seed: int, folder: Path, node_modules: Path | None = None) -> World:
    """Play one world in this folder, with nats.js if it is in `node_modules`' folder."""
    world = World(seed, folder, node_modules)
    asyncio.run(world.play())
    return world


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.release.breaks.real", description=__doc__)
    parser.add_argument("--seeds", type=int, default=50, help="how many")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first of them")
    parser.add_argument("--node-modules", type=Path, help="a folder in which @nats-io/transport-node is installed")
    asked = parser.parse_args()
    kinds, failed, late_s = Counter[str](), 0, 0.0
    for seed in range(asked.first, asked.first + asked.seeds):
        with tempfile.TemporaryDirectory() as folder:
            world = play(seed, Path(folder), asked.node_modules)
        kinds, late_s, failed = kinds + world.kinds, max(late_s, world.late_s), failed + bool(world.wrong)
        print(f"seed {seed}, {world.what}: {dict(world.kinds)}, {world.late_s:.2f} s late", *world.wrong, sep="\n  ",
              flush=True)  # fmt: skip
    print(
        f"{asked.seeds} worlds, {sum(kinds.values())} calls: {dict(sorted(kinds.items()))}; the latest {late_s:.2f} s"
    )
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
