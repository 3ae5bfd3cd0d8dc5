"""A moorage of real processes for one test: schedulers and agents to kill, stop and start again, and plain NATS to ask.

Nothing here is a stand-in: a scheduler is `python -m moorage.scheduler` (or the same `Scheduler` with other numbers),
an agent has its real supervisor. Both are forks of a process that has imported them, which takes a second of processor
time. Each test has a subject prefix of its own, so that one nats-server serves them all.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg

from moorage.schemas.job import TERMINAL
from moorage.schemas.subjects import Subjects
from moorage.system.proctree import read_process
from moorage.testing.conformance import plain_nats
from moorage.worker.agent.run import SUPERVISOR_FOLDER
from moorage.worker.supervisor.client import Supervised, SupervisorError
from tests.asking import answered
from tests.servers import Server, delete_streams
from tests.system.cli import forks
from tests.waiting import until

#: every answer of these tests is due long before; only a defect makes one wait so long
ANSWER_S: Final = 90.0
#: one try: a leader that was killed never answers what it had taken
TRY_S: Final = 5.0
#: small numbers that keep the rule between them, for tests that wait for a takeover; no busy machine loses a worker
QUICK: Final[dict[str, float]] = {
    "renew_s": 0.3,
    "takeover_s": 3.0,
    "heartbeat_s": 0.1,
    "renewal_append_s": 0.05,
    "margin_s": 0.3,
    "grace_s": 0.5,
    "lease_s": 20.0,
}
#: with a lease that is soon over, for tests that wait for the loss of a worker
BRIEF: Final[dict[str, float]] = QUICK | {"lease_s": 5.0}

_QUICK_SCHEDULER: Final = """
import asyncio, logging, sys
import msgspec
from moorage.bus.connection import connect
from moorage.scheduler.core.config import Config
from moorage.scheduler.main import ledger_url
from moorage.scheduler.leader.service import Scheduler
from moorage.schemas.subjects import Subjects

async def main(url, prefix, config):
    world, ledger = await connect(url, "scheduler"), await connect(ledger_url(), "ledger")
    await Scheduler(world, ledger, config=msgspec.convert(config, Config), subjects=Subjects(prefix)).run()

logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)-7s %(name)s %(message)s")
asyncio.run(main(sys.argv[1], sys.argv[2], msgspec.json.decode(sys.argv[3])))
"""

#: put before `_AGENT`: an agent of a release whose supervisor speaks another version of the protocol
_OTHER_PROTOCOL: Final = """
from moorage.worker.supervisor import client
client.PROTOCOL = {}
"""

_POISONED: Final = """
import runpy, sys
sys.path.append(sys.argv.pop(1))
runpy.run_module("tests.system.live.poisoned_scheduler", run_name="__main__")
"""

#: `python -m moorage.scheduler` that looks at things more often than it would
_HASTY_SCHEDULER: Final = """
import importlib, json, sys
for place, seconds in json.loads(sys.argv.pop(1)).items():
    module, _, name = place.rpartition(".")
    assert hasattr(importlib.import_module(module), name)
    setattr(importlib.import_module(module), name, seconds)
importlib.import_module("moorage.scheduler.main").main()
"""

_AGENT: Final = """
import asyncio, logging, signal, sys
import msgspec
from moorage.worker.agent.run import run
from moorage.worker.settings import settings_from

async def main():
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await run(settings_from(msgspec.json.decode(sys.argv[1])), sys.argv[2], stop)

logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)-7s %(name)s %(message)s")
asyncio.run(main())
"""


class RealProcess:
    """A process whose words go to a file, to be read when a test fails; `end` leaves none behind."""

    def __init__(self, process: asyncio.subprocess.Process | forks.Service, log: Path) -> None:
        self.process = process
        self.log = log

    @property
    def pid(self) -> int:
        return self.process.pid

    def words(self) -> str:
        return self.log.read_text(errors="replace")

    async def kill(self) -> None:
        """SIGKILL, and wait until it is gone; a stopped one dies too."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()

    def stop(self) -> None:
        """SIGSTOP: it does nothing from now on, and knows nothing of it."""
        self.process.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    async def terminate(self) -> int:
        """SIGTERM; its exit code."""
        self.process.terminate()
        return await self.process.wait()


async def _spawn(arguments: list[str], log: Path, **environment: str) -> RealProcess:
    with log.open("ab") as out:
        return RealProcess(await forks.python(*arguments, env=os.environ | environment, out=out), log)


class Stack:
    """What a test starts under one prefix. Made by `stack`, which ends all of it."""

    def __init__(self, server: Server, folder: Path, prefix: str) -> None:
        self.server = server
        self.url = server.url
        self.ledger_url = server.ledger_url
        self.folder = folder
        self.subjects = Subjects(prefix)
        self.processes: list[RealProcess] = []
        self.states: list[Path] = []

    async def scheduler(self, name: str = "", config: dict[str, float] | None = None) -> RealProcess:
        """Start a scheduler; with `config` one with those numbers. It need not lead yet: see `Caller.leader`."""
        if config is None:
            return await self.set_scheduler(name, {}, self.url, self.ledger_url)
        log = self.folder / f"scheduler-{len(self.processes)}.log"
        arguments = ["-c", _QUICK_SCHEDULER, self.url, self.subjects.prefix, msgspec.json.encode(config).decode()]
        return self._keep(await _spawn(arguments, log, MOORAGE_LEDGER_URL=self.ledger_url))

    async def poisoned_scheduler(self, place: str, config: dict[str, float]) -> RealProcess:
        """Start a scheduler with a defect at this place, see `tests.system.live.poisoned_scheduler`."""
        log = self.folder / f"scheduler-{len(self.processes)}.log"
        numbers = msgspec.json.encode(config).decode()
        arguments = ["-c", _POISONED, str(Path(__file__).resolve().parents[3]), place, self.url, self.subjects.prefix]
        return self._keep(await _spawn([*arguments, numbers], log, MOORAGE_LEDGER_URL=self.ledger_url))

    async def set_scheduler(
        self, name: str, settings: dict[str, float], url: str, ledger_url: str, hasty: dict[str, float] | None = None
    ) -> RealProcess:
        """Start `python -m moorage.scheduler` with these settings, on servers that it reaches by these URLs.

        `hasty` are constants of its modules, by their full names, that are other ones in this process.
        """
        log = self.folder / f"scheduler-{len(self.processes)}.log"
        begin = ["-m", "moorage.scheduler"] if hasty is None else ["-c", _HASTY_SCHEDULER, json.dumps(hasty)]
        arguments = [*begin, "--nats", url, "--prefix", self.subjects.prefix, "--name", name]
        for key, value in settings.items():
            arguments += [f"--{key.replace('_', '-')}", f"{value:g}"]
        return self._keep(await _spawn(arguments, log, MOORAGE_LEDGER_URL=ledger_url))

    async def agent(self, state: str, simulate: str | None, **settings: Any) -> RealProcess:
        """Start an agent on the state folder `state`; again after a kill to take up what lives.

        `url` among the settings is where it reaches the server, in place of the stack's own; `environment` are further
        variables. With `protocol` it speaks that version with its supervisor, which runs already. Without `simulate` it
        offers this host's own devices.
        """
        url = str(settings.pop("url", self.url))
        environment: dict[str, str] = settings.pop("environment", {})
        script = _AGENT
        if "protocol" in settings:
            script = _OTHER_PROTOCOL.format(settings.pop("protocol")) + _AGENT
        folder = self.folder / state
        if folder not in self.states:
            self.states.append(folder)
        name = {"id": settings.pop("worker")} if "worker" in settings else {}
        table = {"state_dir": str(folder), "prefix": self.subjects.prefix, "simulate": simulate, **name, **settings}
        log = self.folder / f"agent-{len(self.processes)}.log"
        return self._keep(await _spawn(["-c", script, msgspec.json.encode(table).decode(), url], log, **environment))

    def _keep(self, process: RealProcess) -> RealProcess:
        self.processes.append(process)
        return process

    async def supervisor(self, state: str) -> Supervised:
        """A connection to the supervisor that runs on a state folder."""
        return await Supervised.connect(self.folder / state / SUPERVISOR_FOLDER, spawn_if_absent=False)

    async def end(self) -> None:
        for process in self.processes:
            await process.kill()
        for state in self.states:
            with contextlib.suppress(SupervisorError, OSError):
                supervised = await Supervised.connect(state / SUPERVISOR_FOLDER, spawn_if_absent=False)
                await supervised.shutdown(0.0)
        urls = (self.server.url, self.server.ledger_url)
        await delete_streams(urls, self.subjects.ledger_stream.removesuffix("LEDGER"))

    def words(self) -> str:
        """What every process said, for a test that failed."""
        return "\n".join(f"--- {process.log.name}\n{process.words()[-6000:]}" for process in self.processes)


@contextlib.asynccontextmanager
async def stack(server: Server, prefix: str) -> AsyncIterator[Stack]:
    """A stack with nothing started in it. All of it is gone at the end; a failure shows what its processes said."""
    # A short path: a supervisor's socket lies in it, whose path may have some 100 characters (unix(7)).
    with tempfile.TemporaryDirectory(prefix="moorage-live-") as folder:
        made = Stack(server, Path(folder), prefix)
        try:
            yield made
        except BaseException:
            print(made.words())
            raise
        finally:
            await made.end()


class Caller:
    """A caller without an SDK: plain nats-py and JSON. Keeps every event of its tenant that it hears."""

    def __init__(self, nc: Client, subjects: Subjects, tenant: str) -> None:
        self.nc = nc
        self.subjects = subjects
        self.tenant = tenant
        #: job -> revision -> change
        self.heard: dict[str, dict[int, dict[str, Any]]] = {}
        self.states: dict[str, str] = {}
        self.ended: dict[str, list[str]] = {}
        self.stalls: dict[str, list[dict[str, Any]]] = {}

    async def follow(self) -> None:
        await self.nc.subscribe(self.subjects.events(self.tenant), cb=self._on_events)
        for _ in range(2):  # nats-py sends the first PING ahead of the subscription
            await self.nc.flush()

    async def _on_events(self, msg: Msg) -> None:
        for event in msgspec.json.decode(msg.data)["jobs"]:
            job = event["job"]
            history = self.heard.setdefault(job, {})
            if "stalled" in event:
                self.stalls.setdefault(job, []).append(event["stalled"])
            for change in event.get("changes", ()):
                if change["rev"] in history:
                    assert history[change["rev"]] == change, f"two histories of {job}"
                    continue
                history[change["rev"]] = change
            self.states[job] = event["state"]
            if event["state"] in TERMINAL:
                self.ended.setdefault(job, []).append(event["state"])

    async def ask(self, subject: str, body: object = None, deadline_s: float = ANSWER_S) -> Any:
        """Ask again with the same content until somebody answers, as the protocol says."""
        payload = body if isinstance(body, bytes) else b"" if body is None else msgspec.json.encode(body)
        answer = await answered(self.nc, subject, payload, deadline_s, TRY_S)
        return msgspec.json.decode(answer.data)

    async def api(self, verb: str, body: object) -> Any:
        return await self.ask(self.subjects.api(self.tenant, verb), body)

    async def submit(self, job: str, *argv: str, **fields: Any) -> Any:
        return await self.api("submit", request(job, *argv, **fields))

    async def queue(self, verb: str, body: object) -> int:
        """Publish to the durable queue; the sequence in JetStream's PubAck."""
        return int((await self.ask(self.subjects.request(self.tenant, verb), body))["seq"])

    async def show(self, job: str) -> dict[str, Any]:
        """The data of `show`, or {} for a job that nobody knows (yet)."""
        answer = await self.api("show", {"job": job})
        return dict(answer["data"]) if answer["kind"] == "answer" else {}

    async def state(self, job: str) -> str:
        return str((await self.show(job)).get("state", ""))

    async def reaches(self, job: str, *states: str, deadline_s: float = ANSWER_S) -> dict[str, Any]:
        """Wait until the job is in one of these states, by asking; its `show`."""

        async def there() -> dict[str, Any] | None:
            shown = await self.show(job)
            return shown if shown.get("state") in states else None

        found = await until(there, deadline_s, f"{job} in {' or '.join(states)}")
        return dict(found)

    async def admin(self, verb: str, body: object = None) -> Any:
        return await self.ask(self.subjects.admin(verb), body)

    async def fleet(self) -> dict[str, Any]:
        return dict((await self.admin("fleet"))["data"])

    async def leader(self, epoch: int = 1) -> dict[str, Any]:
        """Wait until the term with this number (or a later one) answers; the fleet as it shows it."""

        async def leads() -> dict[str, Any] | None:
            fleet = await self.fleet()
            return fleet if fleet["epoch"] >= epoch else None

        return dict(await until(leads, ANSWER_S, f"epoch {epoch}"))

    async def workers_up(self, *workers: str) -> None:
        """Wait until these workers can be placed on."""

        async def up() -> bool:
            rows = {row["worker"]: row["state"] for row in (await self.fleet())["workers"]}
            return all(rows.get(worker) == "up" for worker in workers)

        await until(up, ANSWER_S, f"{workers} up")

    async def all_free(self) -> None:
        """Wait until no attempt holds anything and every GPU is free; then the audit finds no drift."""

        async def free() -> bool:
            rows = (await self.fleet())["workers"]
            return all(row["free"] == row["gpus"] and not row["members"] for row in rows)

        await until(free, ANSWER_S, "every GPU free")

        async def agreed() -> bool:
            data = (await self.admin("audit"))["data"]
            return not data["drift"] and not data["leases"]

        await until(agreed, ANSWER_S, "an audit without drift")

    async def check_history(self, job: str) -> dict[str, Any]:
        """The revisions heard, merged with those of `show`, have no gap, no double and no second history."""

        async def told() -> dict[str, Any] | None:  # without its changes while the history cannot be read
            shown = await self.show(job)
            return shown if "changes" in shown else None

        shown = dict(await until(told, ANSWER_S, f"the history of {job}"))
        merged = {change["rev"]: change for change in shown["changes"]}
        for rev, change in self.heard.get(job, {}).items():
            assert merged.setdefault(rev, change) == change, f"{job}: revision {rev} was told in two ways"
        assert sorted(merged) == list(range(1, shown["rev"] + 1)), f"{job}: revisions {sorted(merged)}"
        return shown


@contextlib.asynccontextmanager
async def caller(
    made: Stack, tenant: str = "acme", url: str | None = None, *, follows: bool = True
) -> AsyncIterator[Caller]:
    """`follows`: whether it hears, and keeps, every event of its tenant: for a long run that is more than fits."""
    nc = await plain_nats.connect((url or made.url).split(","), reconnect_time_wait=0.1, max_reconnect_attempts=-1)
    try:
        one = Caller(nc, made.subjects, tenant)
        if follows:
            await one.follow()
        yield one
    finally:
        try:
            await nc.close()
        except asyncio.CancelledError:  # nats-py cancels what it awaits when its server has gone before it
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise


def request(job: str | None, *argv: str, **fields: Any) -> dict[str, Any]:
    """A request with one GPU that runs `argv`, or `true`."""
    run = {"argv": list(argv) or ["true"]} | fields.pop("run", {})
    return {"gpu": {}, "run": run, **({} if job is None else {"job": job}), **fields}


def unique_prefix() -> str:
    return "t" + secrets.token_hex(6)


def is_alive(pid: int) -> bool:
    process = read_process(pid)
    return process is not None and not process.dead
