"""Frames that are nearly right at a running moorage: `python -m tests.release.fuzz.live --frames 100000`.

A real nats-server, a scheduler and a worker with its supervisor, all processes of their own. Every subject that one of
them hears gets its share, some with the session of a worker that really joined, and the UNIX sockets of agent and
supervisor do, too. In between and at the end a job must still run; then no process has died, said that it broke, or
grown without bound.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import re
import struct
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

from moorage.bus.embedded import EmbeddedServer
from moorage.bus.lend import protocol as leases
from moorage.schemas import frames, job, operate
from moorage.schemas.job import STATES, TERMINAL
from moorage.schemas.subjects import Subjects
from moorage.schemas.unreadable import UNREADABLE
from moorage.worker.supervisor import protocol as supervisor
from tests.release.fuzz import kept
from tests.release.fuzz.mutate import mutated
from tests.release.fuzz.targets import Target, samples_of
from tests.servers import Server
from tests.system.live.stack import Caller, RealProcess, Stack, caller, stack, unique_prefix
from tests.waiting import NeverHappened

#: in whose name the frames come
TENANT: Final = "fuzz"
#: frames between two jobs that must run
BATCH: Final = 2_500
#: of a batch that many go to each of the two sockets
TO_SOCKETS: Final = 40
#: what a process may grow by from the first batches to the last: queues are bounded, and so are the kept jobs
GROWTH_MIB_MAX: Final = 192
#: the words of a process that broke, or whose handler did
BROKE: Final = re.compile(r"Traceback|never retrieved|never awaited|HandlerFailed|handler failed", re.IGNORECASE)


@dataclass
class Outcome:
    """What was sent and what came of it. `broke` says what went wrong; empty is as it should be."""

    sent: Counter[str] = field(default_factory=Counter)
    answers: int = 0
    jobs: int = 0
    broke: list[str] = field(default_factory=list)
    rss_mib: dict[str, tuple[int, int]] = field(default_factory=dict)

    def told(self) -> str:
        grown = ", ".join(f"{name} {first} to {last} MiB" for name, (first, last) in sorted(self.rss_mib.items()))
        return (
            f"{self.sent.total()} frames on {len(self.sent)} subjects and sockets, {self.answers} answers,"
            f" {self.jobs} jobs in between, {len(self.broke)} escapes; {grown}"
        )


class Assault:
    """`rng` decides what is sent; `session` is one that the scheduler gave, for what is behind the first check."""

    def __init__(self, made: Stack, one: Caller, nc: Client, rng: random.Random) -> None:
        self._made = made
        self._one = one
        self._nc = nc
        self._rng = rng
        self._session = ""
        self._inbox = nc.new_inbox()
        self.outcome = Outcome()
        self._targets = self._subjects(made.subjects)

    def _subjects(self, subjects: Subjects) -> list[tuple[str, Target]]:
        """Every subject that a process of ours hears, with what is said there."""
        said: dict[str, list[bytes]] = {}
        for verb, payload in kept.said():
            said.setdefault(verb, []).append(payload)

        def at(subject: str, verb: str, kind: Any) -> tuple[str, Target]:
            return subject, Target(subject, bytes, (), kind, tuple(said.get(verb, ())))

        api = [at(subjects.api(TENANT, verb), verb, job.Request if verb == "submit" else frames.LogsAsked)
               for verb in ("submit", "submit", "submit", "cancel", "show", "ls", "explain", "history", "logs", "plan", "usage", "x")]  # noqa: E501  # fmt: skip
        admin = [at(subjects.admin(verb), verb, operate.ACTS.get(verb, operate.HoldAct))
                 for verb in (*operate.ACTS, "fleet", "audit", "tenants", "usage", "dlq", "x")]  # fmt: skip
        worker = [
            at(subjects.worker(name, verb), verb, kind)
            for name in ("fuzzed", "w0")
            for verb, kind in (
                ("join", frames.Join | frames.Goodbye), ("renew", frames.Renew), ("fact", frames.ReportFrame),
                ("looked", frames.Looked), ("wanted", frames.Wanted), ("logs", frames.ReadLog),
            )
        ]  # fmt: skip
        return [
            *api, *admin, *worker,
            at(subjects.request(TENANT, "submit"), "submit", job.Request),
            at(subjects.request(TENANT, "cancel"), "cancel", frames.LogsAsked),
            at(subjects.hello("w0"), "hello", frames.Hello), at(subjects.hello("fuzzed"), "hello", frames.Hello),
            at(subjects.load("w0"), "load", frames.Load), at(subjects.load("fuzzed"), "load", frames.Load),
            at(subjects.roll_call, "rollcall", frames.RollCall), at(subjects.look, "look", frames.Look),
        ]  # fmt: skip

    async def listen(self) -> None:
        async def answered(_: Msg) -> None:
            self.outcome.answers += 1

        await self._nc.subscribe(self._inbox, cb=answered)

    async def join(self) -> None:
        """A session of its own: a worker that joined and then says whatever comes."""
        frame = frames.Join("fuzzed-machine", "boot", int(time.time()), frames.Hello("fuzzed", "boot"))
        answer = await self._one.ask(self._made.subjects.worker("fuzzed", "join"), frame)
        self._session = str(answer.get("session", self._session))

    async def batch(self, count: int) -> None:
        rng = self._rng
        await self.join()
        for _ in range(count):
            subject, target = rng.choice(self._targets)
            payload = samples_of(target, rng)
            payload = payload if rng.random() < 0.1 else mutated(rng, payload, target.samples)
            if ".worker.fuzzed." in subject and rng.random() < 0.7:
                payload = _with_session(payload, self._session)
            await self._nc.publish(subject, payload[: self._nc.max_payload], reply=self._inbox)
            self.outcome.sent[subject] += 1
        await self._nc.flush(30)

    async def sockets(self, folder: Path) -> None:
        """Frames, and what is none, at the UNIX sockets of the agent and the supervisor."""
        kinds = {"lease.sock": leases.Request, "supervisor.sock": supervisor.Request}
        for path in sorted(folder.rglob("*.sock")):
            kind = kinds.get(path.name, supervisor.Request)
            for _ in range(TO_SOCKETS):
                payload = mutated(self._rng, samples_of(Target(path.name, bytes, (), kind, (), True), self._rng), ())
                if b"shutdown" in payload or b"\xa3end" in payload or b"fence" in payload:
                    continue  # whoever may open this socket may say these, and is obeyed
                length = struct.pack(">I", len(payload)) if self._rng.random() < 0.9 else self._rng.randbytes(4)
                await _say(path, length + payload)
                self.outcome.sent[path.name] += 1

    async def a_job_runs(self) -> None:
        """Once what the frames rightly asked for, as users and as operators, is taken back."""
        self.outcome.jobs += 1
        live = [state for state in STATES if state not in TERMINAL]
        listed = await self._one.ask(self._one.subjects.api(TENANT, "ls"), {"limit": 1000, "states": live})
        for each in listed["data"]["jobs"]:
            await self._one.ask(self._one.subjects.api(TENANT, "cancel"), {"job": each["job"]})
        name, tenant = f"between-{self.outcome.jobs}", self._one.tenant
        await self._one.admin("uncordon", {"worker": "w0"})
        await self._one.admin("release", {"tenant": tenant})
        await self._one.admin("limit", {"tenant": tenant, "gpus": 0, "jobs": 0})
        await self._one.submit(name, "true", priority=100)
        try:
            await self._one.reaches(name, "SUCCEEDED", deadline_s=60)
        except NeverHappened:
            self.outcome.broke.append(f"{name} did not run: {await self._one.api('explain', {'job': name})}")


def _with_session(payload: bytes, session: str) -> bytes:
    """Let the frame pass the first check: whatever it says its session is, it is the one that stands."""
    for decode, encode in (
        (msgspec.json.decode, msgspec.json.encode),
        (msgspec.msgpack.decode, msgspec.msgpack.encode),
    ):
        with contextlib.suppress(*UNREADABLE):
            found = decode(payload)
            if isinstance(found, dict) and "session" in found:
                return encode({**found, "session": session})
    return payload


async def _say(path: Path, data: bytes) -> None:
    try:
        reader, writer = await asyncio.open_unix_connection(str(path))
        writer.write(data)
        writer.write_eof()
        await asyncio.wait_for(reader.read(65_536), 0.05)
    except (OSError, TimeoutError):
        return
    finally:
        if "writer" in locals():
            writer.close()


def _rss_mib(process: RealProcess) -> int:
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) // 1024
    return 0


async def assault(server: Server, count: int, seed: int, *, told: bool = False) -> Outcome:
    """Send so many frames at a stack of its own on this server, and look at what is left of it."""
    async with stack(server, unique_prefix()) as made:
        watched = {"scheduler": await made.scheduler("one"), "agent": await made.agent("s", "2xH100", worker="w0")}
        async with caller(made) as one:
            await one.leader()
            await one.workers_up("w0")
            nc = await nats.connect(server.url)
            try:
                attack = Assault(made, one, nc, random.Random(seed))
                await attack.listen()
                await attack.a_job_runs()
                began: dict[str, int] = {}
                while (left := count - attack.outcome.sent.total()) > 0:
                    await attack.batch(min(BATCH, left))
                    await attack.sockets(made.folder)
                    await attack.a_job_runs()
                    if not began and attack.outcome.sent.total() >= count // 4:
                        began = {name: _rss_mib(process) for name, process in watched.items()}
                    if told:
                        print(attack.outcome.told(), flush=True)
                _look(attack.outcome, watched, began)
                if told and attack.outcome.broke:
                    print(made.words())
                return attack.outcome
            finally:
                await nc.close()


def _look(outcome: Outcome, watched: dict[str, RealProcess], began: dict[str, int]) -> None:
    for name, process in watched.items():
        if process.process.returncode is not None:
            outcome.broke.append(f"{name} ended with {process.process.returncode}: {process.words()[-2000:]}")
            continue
        if found := BROKE.search(process.words()):
            at = found.start()
            outcome.broke.append(f"{name} said: {process.words()[max(0, at - 300) : at + 1500]}")
        first, last = began.get(name, 0), _rss_mib(process)
        outcome.rss_mib[name] = (first, last)
        if first and last - first > GROWTH_MIB_MAX:
            outcome.broke.append(f"{name} grew from {first} to {last} MiB")


async def _main(count: int, seed: int) -> int:
    with tempfile.TemporaryDirectory(prefix="moorage-fuzz-") as folder:
        server = await EmbeddedServer.start(Path(folder))
        try:
            outcome = await assault(server, count, seed, told=True)
        finally:
            await server.stop()
    print(outcome.told())
    for what in outcome.broke:
        print(f"ESCAPED  {what}")
    return 1 if outcome.broke else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.release.fuzz.live", description=__doc__)
    parser.add_argument("--frames", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    return asyncio.run(_main(asked.frames, asked.seed))


if __name__ == "__main__":
    sys.exit(main())
