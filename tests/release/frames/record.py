"""Record what a release says on NATS and writes in its ledger, for the next one: `python -m
tests.release.frames.record`.

Its real scheduler, worker and command run as processes on a real server, and every message below `moorage.` and every
answer is kept as it came, beside the ledger's records and a snapshot of the middle.
`tests/release/frames/<major.minor>/`:

- `session.jsonl`   the messages in the server's order; `data` as text where it is JSON, else `msgpack` in base64
- `ledger.jsonl`    the ledger's records; `snapshot.json` a snapshot's bytes and the sequence it stands at
- `expected.json`   the release, how each job ended, and the digest of the state after the last record

Nothing here imports the release: `--python` names the interpreter that has it. Nothing in the files names this host:
the worker is simulated, its address is one for documentation (RFC 5737). No release is kept yet, the first will be
0.3; `tests/system/live/test_releases.py` takes what it needs from each that is, and from this one as it is.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import nats
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from moorage.bus.embedded import EmbeddedServer
from tests.asking import answered
from tests.waiting import until

FOLDER: Final = Path(__file__).parent
#: the releases that are kept, and this one as it is
PRESENT: Final = "present"
RELEASES: Final = [*sorted(folder.name for folder in FOLDER.iterdir() if (folder / "expected.json").exists()), PRESENT]
TENANT: Final = "acme"
WORKER: Final = "w1"
PREFIX: Final = "moorage"
POLL: Final = "_POLL"
FLEET_FRAMES_MAX: Final = 5
WAIT_S: Final = 60.0
TERMINAL: Final = ("SUCCEEDED", "FAILED", "TIMED_OUT", "CANCELLED", "EXPIRED", "REJECTED")

#: folds a ledger as the release itself does, and prints the digest of its state
_DIGEST: Final = """
import sys, json, base64
from moorage.scheduler.core.ledger.fold import fold
from moorage.scheduler.core.ledger.record import decode_record
from moorage.scheduler.core.ledger.state import State
state = State()
for line in open(sys.argv[1]):
    row = json.loads(line)
    fold(state, decode_record(base64.b64decode(row["record"])), row["seq"])
print(state.digest)
"""
_RELEASE: Final = "from importlib.metadata import version; print(version('moorage'))"


class Recording:
    """One run of a release, from an empty server to a ledger whose leader has resigned."""

    def __init__(self, python: str, folder: Path, server: EmbeddedServer, nc: Client, poll: Client) -> None:
        self.python = python
        self.folder = folder
        self.server = server
        self.nc = nc
        self.poll = poll  # whose questions are left out
        self.lines: list[dict[str, Any]] = []
        self.fleet_frames = 0
        self.processes: list[asyncio.subprocess.Process] = []
        self.environment = {
            **os.environ,
            "MOORAGE_LEDGER_URL": server.ledger_url,
            "MOORAGE_TENANT": TENANT,
            "NATS_URL": server.url,
        }
        self.environment.pop("PYTHONPATH", None)

    # ------------------------------------------------------------------------------------------- what is heard

    async def on_message(self, msg: Msg) -> None:
        if not msg.subject.startswith((f"{PREFIX}.", "_INBOX.")) or msg.reply.startswith(POLL):
            return
        if (msg.headers or {}).get("Status"):
            return
        if msg.subject == f"{PREFIX}.fleet.frame":
            if self.fleet_frames == FLEET_FRAMES_MAX:
                return
            self.fleet_frames += 1
        line: dict[str, Any] = {"subject": msg.subject}
        if msg.reply:
            line["reply"] = msg.reply
        if msg.data[:1] in (b"{", b"["):
            line["data"] = msg.data.decode()
        else:
            line["msgpack"] = base64.b64encode(msg.data).decode()
        self.lines.append(line)

    def session(self) -> list[dict[str, Any]]:
        """The messages of the protocol: questions and their answers, not what nats.py and JetStream say beside them."""
        asked: set[str] = set()
        kept = []
        for line in self.lines:
            if not line["subject"].startswith("_INBOX."):
                kept.append(line)
                asked.add(line.get("reply", ""))
                if ".mux." in line.get("reply", ""):
                    asked.add(f"{line['reply'].rpartition('.')[0]}.all")
            elif line["subject"] in asked:
                kept.append(line)
        return kept

    # ------------------------------------------------------------------------------------------- what is started

    async def start(self, *argv: str) -> asyncio.subprocess.Process:
        with (self.folder / f"{argv[0]}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                self.python, "-m", "moorage.cli", *argv, env=self.environment, cwd=self.folder,
                stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        self.processes.append(process)
        return process

    async def worker(self) -> asyncio.subprocess.Process:
        state = str(self.folder / "state")
        return await self.start(
            "worker", "--id", WORKER, "--simulate", "4xH100", "--state", state, "--address", "192.0.2.7"
        )

    async def command(self, *argv: str) -> str:
        """A command of the release, to its end; what it wrote."""
        process = await asyncio.create_subprocess_exec(
            self.python, "-m", "moorage.cli", *argv, env=self.environment, cwd=self.folder,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, _ = await process.communicate()
        return out.decode()

    def end_supervisor(self) -> None:
        """It outlives its agent; its state folder stands in its arguments."""
        mark = str(self.folder / "state").encode()
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                if mark in (entry / "cmdline").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)

    # ------------------------------------------------------------------------------------------- what is asked

    async def ask(self, subject: str, body: object, *, msgpack: bool = False, by: Client | None = None) -> Any:
        payload = msgspec.msgpack.encode(body) if msgpack else msgspec.json.encode(body)
        answer = await answered(by or self.nc, f"{PREFIX}.{subject}", payload, WAIT_S, 5)
        return msgspec.msgpack.decode(answer.data) if msgpack else msgspec.json.decode(answer.data)

    async def api(self, verb: str, body: object, *, msgpack: bool = False) -> Any:
        return await self.ask(f"api.{TENANT}.{verb}", body, msgpack=msgpack)

    async def submit(self, job: str, *argv: str, msgpack: bool = False, **fields: Any) -> None:
        run = {"argv": list(argv), **fields.pop("run", {})}
        answer = await self.api("submit", {"job": job, "gpu": {}, "run": run, **fields}, msgpack=msgpack)
        assert answer["kind"] == "accepted", answer

    async def reaches(self, job: str, *states: str) -> None:
        async def there() -> bool:
            answer = await self.ask(f"api.{TENANT}.show", {"job": job}, by=self.poll)
            return answer["kind"] == "answer" and answer["data"]["state"] in states

        await until(there, WAIT_S, f"{job} in {states}")

    async def up(self) -> None:
        async def is_up() -> bool:
            fleet = await self.ask("admin._.fleet", {}, by=self.poll)
            return any(row["state"] == "up" for row in fleet["data"]["workers"])

        await until(is_up, WAIT_S, "the worker")


async def one_of_each(it: Recording) -> dict[str, str]:
    """A job of each kind, and every question; how each job ended."""
    scheduler = await it.start("scheduler", "--name", "recorded")
    await it.ask("admin._.fleet", {}, by=it.poll)
    agent = await it.worker()
    await it.up()
    await it.ask("admin._.fleet", {})
    await it.submit("ok", "true")
    await it.submit("packed", "true", msgpack=True, labels={"as": "msgpack"})
    await it.submit("fails", "sh", "-c", "echo to stdout; echo to stderr >&2; exit 3", retries=1)
    await it.submit("times-out", "sleep", "60", run={"timeout_s": 0.2, "grace_s": 0.1})
    await it.submit("shared", "true", gpu={"sharing": "time-slice", "model": ["H100"]})
    await it.submit("gang", "true", gpu={"scheduling": "gang"}, replicas=2)
    await it.api("submit", {"job": "typo", "gpu": {"cuont": 1}, "run": {"argv": ["true"]}})
    await it.api("submit", [{"job": "batch-1", "run": {"argv": ["true"]}}, {"job": "batch-2", "replicas": 0}])
    await it.ask(f"request.{TENANT}.submit", {"job": "queued", "gpu": {}, "run": {"argv": ["true"]}})
    for job in ("ok", "packed", "fails", "times-out", "shared", "gang", "batch-1", "queued"):
        await it.reaches(job, *TERMINAL)
    await it.command("run", "--gpu", "1xH100", "--job", "by-command", "--", "true")
    await it.submit("cancelled", "sleep", "60", run={"grace_s": 0.1}, priority=90)
    await it.reaches("cancelled", "RUNNING")
    await it.submit("waits", "true", gpu={"count": 4})
    await it.submit("never", "true", gpu={"model": "none-such"})
    await it.api("explain", {"job": "waits"})
    await it.api("explain", {"job": "never"})
    await it.api("ls", {})
    await it.api("cancel", {"job": "cancelled", "reason": "recorded"})
    await it.reaches("waits", *TERMINAL)
    await it.ask(f"request.{TENANT}.cancel", {"job": "never"})
    await it.reaches("never", *TERMINAL)
    await it.ask("admin._.cordon", {"worker": WORKER, "by": "operator"})
    await it.ask("admin._.uncordon", {"worker": WORKER, "by": "operator"})
    await it.ask("admin._.audit", {})
    # the agent is restarted under a running job: the second join holds it
    await it.submit("adopted", "sleep", "3")
    await it.reaches("adopted", "RUNNING")
    agent.send_signal(signal.SIGTERM)
    await agent.wait()
    await write_snapshot(it)
    await it.worker()
    await it.reaches("adopted", *TERMINAL)
    for job in ("ok", "fails", "gang", "nobody"):
        await it.api("show", {"job": job})
    await it.api("cancel", {"job": "ok"})
    states = {row["job"]: row["state"] for row in (await it.api("ls", {"limit": 100}))["data"]["jobs"]}
    scheduler.send_signal(signal.SIGTERM)
    await scheduler.wait()
    return states


async def write_snapshot(it: Recording) -> None:
    """The follower of the release writes the state as of now; the leader goes on."""
    follower = [it.python, "-m", "moorage.scheduler.ledger.snapshots", "--prefix", PREFIX]
    done = await asyncio.to_thread(
        subprocess.run, follower, env=it.environment, cwd=it.folder, capture_output=True, text=True, check=True
    )
    name, seq, _ = done.stdout.split()
    chunks = [data for _, subject, data in await stored(it.server, f"{PREFIX.upper()}_SNAPSHOT") if name in subject]
    snapshot = {"seq": int(seq), "snapshot": base64.b64encode(b"".join(chunks)).decode()}
    (it.folder / "snapshot.json").write_text(json.dumps(snapshot, indent=1) + "\n")


async def stored(server: EmbeddedServer, stream: str) -> list[tuple[int, str, bytes]]:
    """Every message of a stream of the schedulers' account: sequence, subject, data."""
    nc = await nats.connect(server.ledger_url)
    try:
        jetstream = nc.jetstream()
        info = await jetstream.stream_info(stream)
        found = [await jetstream.get_msg(stream, seq) for seq in range(1, info.state.last_seq + 1)]
        return [(each.seq or 0, each.subject or "", each.data or b"") for each in found]
    finally:
        await nc.close()


async def record(python: str, out: Path) -> None:
    """Record into `out/<major.minor>`; what stood there is written over."""
    with tempfile.TemporaryDirectory(prefix="moorage-rec-") as name:
        folder = Path(name)
        server = await EmbeddedServer.start(folder / "nats")
        nc, poll = await nats.connect(server.url), await nats.connect(server.url, inbox_prefix=POLL)
        it = Recording(python, folder, server, nc, poll)
        try:
            await nc.subscribe(">", cb=it.on_message)
            states = await one_of_each(it)
            ledger = await stored(server, f"{PREFIX.upper()}_LEDGER")
        except BaseException:
            for log in folder.glob("*.log"):
                print(f"--- {log.name}\n{log.read_text(errors='replace')[-4000:]}", file=sys.stderr)
            raise
        finally:
            it.end_supervisor()
            for process in it.processes:
                await process.wait()
            await nc.close()
            await poll.close()
            await server.stop()
        release = await output(it, "-c", _RELEASE)
        target = out / ".".join(release.split(".")[:2])
        target.mkdir(parents=True, exist_ok=True)
        write_lines(target / "session.jsonl", it.session())
        records = [
            {"seq": seq, "subject": subject, "record": base64.b64encode(data).decode()} for seq, subject, data in ledger
        ]
        write_lines(target / "ledger.jsonl", records)
        (target / "snapshot.json").write_text((folder / "snapshot.json").read_text())
        digest = int(await output(it, "-c", _DIGEST, str(target / "ledger.jsonl")))
        expected = {"release": release, "digest": digest, "states": dict(sorted(states.items()))}
        (target / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
        print(f"{target}: {len(it.session())} messages, {len(ledger)} records of moorage {release}")


class Recorded:
    """What a later release takes from one: its ledger, and the requests of its clients with how they were answered."""

    def __init__(self, folder: Path) -> None:
        expected = json.loads((folder / "expected.json").read_text())
        self.release: str = expected["release"]
        self.digest: int = expected["digest"]
        self.states: dict[str, str] = expected["states"]
        #: sequence, subject, bytes
        self.ledger = [
            (row["seq"], row["subject"], base64.b64decode(row["record"])) for row in _lines(folder / "ledger.jsonl")
        ]
        snapshot = json.loads((folder / "snapshot.json").read_text())
        self.snapshot: tuple[int, bytes] = (snapshot["seq"], base64.b64decode(snapshot["snapshot"]))
        self.session = _lines(folder / "session.jsonl")

    def submits(self) -> Iterator[tuple[bytes, dict[str, Any]]]:
        """Every request for one job to the API, with its answer."""
        answers = {row["subject"]: row for row in self.session}
        for row in self.session:
            if row["subject"] == f"{PREFIX}.api.{TENANT}.submit" and not _data(row).startswith(b"["):
                payload = _data(answers[row["reply"]])
                read = msgspec.json.decode if payload.startswith(b"{") else msgspec.msgpack.decode
                yield _data(row), read(payload)


def recorded(release: str) -> Recorded:
    """A kept recording, or one that is made now."""
    if release != PRESENT:
        return Recorded(FOLDER / release)
    with tempfile.TemporaryDirectory(prefix="moorage-rec-") as out:
        command = [sys.executable, "-m", "tests.release.frames.record", "--out", out]
        done = subprocess.run(command, cwd=FOLDER.parents[2], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        (folder,) = Path(out).iterdir()
        return Recorded(folder)


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _data(row: dict[str, Any]) -> bytes:
    return row["data"].encode() if "data" in row else base64.b64decode(row["msgpack"])


async def output(it: Recording, *argv: str) -> str:
    done = await asyncio.to_thread(
        subprocess.run,
        [it.python, *argv],
        env=it.environment,
        cwd=it.folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def write_lines(file: Path, lines: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has the release")
    parser.add_argument("--out", type=Path, default=FOLDER)
    arguments = parser.parse_args()
    asyncio.run(record(arguments.python, arguments.out))


if __name__ == "__main__":
    main()
