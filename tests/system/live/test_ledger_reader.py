"""What was decided, read again from a real ledger, whole and cut, and from a backup; through the command, too."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from moorage.bus.connection import connect
from moorage.bus.jetstream import Ack, JetStream
from moorage.cli.framework.exit_codes import EXIT_PIPE_CLOSED
from moorage.client import AsyncClient
from moorage.scheduler.core.config import Config
from moorage.scheduler.core.events import SnapshotTaken
from moorage.scheduler.core.ledger import acts
from moorage.scheduler.core.ledger.record import decode_record
from moorage.scheduler.ledger.ledger import Ledger
from moorage.scheduler.ledger.ledger_reader import CannotShow, LedgerReader, concerns, rows
from moorage.scheduler.ledger.snapshots import Snapshots
from moorage.scheduler.ledger.traced import read_trace
from moorage.schemas.subjects import Subjects
from moorage.testing.simulate.from_ledger import TraceWriter
from tests.servers import Server
from tests.system.cli.node import Node, moorage, node_on, unread
from tests.unit.scheduler.driving import Driving


class Written:
    """A ledger of a driven leader, stored on a real server record by record."""

    def __init__(self, jetstream: JetStream, subjects: Subjects) -> None:
        self.jetstream, self.subjects = jetstream, subjects
        self.drive = Driving(Config(preempt_priority=80, preempt_after=0))
        self.stored = 0
        self.ledger = Ledger(jetstream, subjects, 0)
        self.snapshots = Snapshots(jetstream, subjects)

    async def store(self) -> None:
        for payload in self.drive.records[self.stored :]:
            kinds = {type(act) for act in decode_record(payload).acts}
            subject = self.subjects.ledger_record
            if acts.Epoch in kinds:
                subject = self.subjects.ledger_epoch
            elif acts.Snapshot in kinds:
                subject = self.subjects.ledger_snapshot
            assert isinstance(await self.jetstream.append(subject, payload, {}), Ack)
        self.stored = len(self.drive.records)

    async def snapshot(self) -> None:
        self.drive.engine.offer(SnapshotTaken(*await self.snapshots.write(self.drive.state)))
        self.drive.tick()
        await self.store()

    async def told(self, at: int | None = None, job: str | None = None) -> list[dict[str, Any]]:
        look = LedgerReader(self.jetstream, self.subjects)
        found = [row async for told in look.records(at, job) for row in rows(told)]
        return look.before + [row for row in found if job is None or concerns(row, job)]


@asynccontextmanager
async def written(server: Server, prefix: str) -> AsyncIterator[Written]:
    async with await connect(server.url, "ledger-reader-test") as connection:
        made = Written(JetStream(connection), Subjects(prefix))
        await made.ledger.ensure()
        await made.snapshots.ensure()
        drive = made.drive
        drive.worker("w0", 2)
        drive.worker("w1", 1)
        drive.submit("a", gpu={})
        drive.submit("wide", gpu={"count": 2}, tenant="u")
        drive.settle()
        drive.order("limit", tenant="u", gpus=2, why="until Monday")
        drive.submit("urgent", gpu={"count": 2}, priority=90)
        drive.pass_time(3_000)
        drive.settle()
        await made.store()
        yield made


async def test_any_decision_with_its_evidence(nats_server: Server, unique: str) -> None:
    async with written(nats_server, unique) as made:
        placed = made.drive.attempt("urgent").fence
        [row] = [row for row in await made.told(placed) if row.get("job") == "urgent"]
        told = (row["tenant"], row["job"], row["state"], row["worker"], row["gpus"])
        assert told == ("t", "urgent", "PLACED", "w0", ["GPU-w0-0", "GPU-w0-1"])
        assert (row["ledger"], row["workers_known"], row["free_left"]) == (placed, 2, 0)
        assert row["waited_ms"] > 0
        history = await made.told(job="u/wide")
        assert [row.get("state", row.get("act")) for row in history] == [
            "ACCEPTED", "PLACED", "CLAIMED", "RUNNING", "ENDING", "preempt", "QUEUED",
        ]  # fmt: skip
        assert history[4]["why"] == "preempted by tenant t: priority 90 over 50"
        [limit] = [row for row in await made.told() if row.get("act") == "limit"]
        assert (limit["tenant"], limit["gpus"], limit["by"], limit["why"]) == ("u", 2, "operator ana", "until Monday")
        everything = json.dumps(await made.told())
        assert not any(word in everything for word in ("session", "hello")), "no lease is shown"
        with pytest.raises(CannotShow) as none:
            await made.told(made.stored + 1)
        assert none.value.problem.allowed == f"1..{made.stored}"


async def test_of_a_ledger_that_was_cut_it_says_what_can_no_longer_be_shown(nats_server: Server, unique: str) -> None:
    async with written(nats_server, unique) as made:
        placed = made.drive.attempt("urgent").fence
        cut = made.stored
        await made.snapshot()
        made.drive.run_out("w0")
        await made.store()
        await made.snapshot()
        before = await made.told(job="wide")
        await made.ledger.purge_below(cut + 1)
        with pytest.raises(CannotShow) as gone:
            await made.told(placed)
        assert f"record {placed} can no longer be shown" in gone.value.problem.message
        assert gone.value.problem.allowed == f"records {cut + 1} to {made.stored}"
        after = await made.told(job="wide")
        states = [row["state"] for row in before if row["kind"] == "decision"]
        assert [row["state"] for row in after if row["kind"] == "decision"] == states
        assert [row.get("recorded", True) for row in after][:3] == [False] * 3, "by its outcome alone"
        again = made.drive.attempt("wide", tenant="u").fence
        assert [row["state"] for row in await made.told(again) if row.get("job") == "wide"] == ["PLACED"]
        trace, _ = await read_trace(nats_server.url, unique, TraceWriter, None)
        assert (trace.records, trace.is_cut) == (made.stored - cut, True), "it begins with the older snapshot"


@pytest.mark.slow
async def test_reading_holds_one_record_at_a_time(nats_server: Server, unique: str) -> None:
    async with written(nats_server, unique) as made:
        made.drive.checks = False
        for _ in range(1_500):
            made.drive.tick(1_000)
        await made.store()
        look, most = LedgerReader(made.jetstream, made.subjects), 0
        async for told in look.records():
            most = max(most, len(told.state.jobs))
        assert (told.seq, most) == (made.stored, 3)
        assert told.state.digest == made.drive.state.digest


@pytest.mark.slow
async def test_the_command_reads_ledger_and_backup(tmp_path: Path) -> None:
    async with node_on(tmp_path / "node") as node:
        async with AsyncClient(node.url, tenant="acme") as client:
            job = await client.submit(["true"], gpu="2xH100")
            await client.wait([job], "90s")
        ran = await node.run("replay", "--job", f"acme/{job.job}")
        assert ran.code == 0, ran.err
        assert [row[3] for row in ran.rows] == ["ACCEPTED", "PLACED", "CLAIMED", "RUNNING", "SUCCEEDED"]
        placed = ran.rows[1]
        assert "2 workers known" in placed[-1]
        shown = await node.run("replay", "--at", placed[0], "--json")
        frames = [json.loads(line) for line in shown.out.splitlines()]
        assert {(frame["job"], frame["state"]) for frame in frames} >= {(job.job, "PLACED")}
        beyond = await node.run("replay", "--at", "99999999")
        assert (beyond.code, "there is no record 99999999" in beyond.err) == (1, True), beyond.err
        none = await node.run("replay", "--job", "nosuch")
        assert (none.code, "nothing about job nosuch is in the" in none.err) == (3, True), none.err
        gone = await unread("replay", env=node.env())
        assert (gone.code, gone.err) == (EXIT_PIPE_CLOSED, "")
        await _of_a_backup(node, tmp_path, job.job, placed[0])


async def _of_a_backup(node: Node, folder: Path, job: str, seq: str) -> None:
    taken = await node.run("admin", "backup", str(folder))
    assert taken.code == 0, taken.err
    file = taken.rows[0][0]
    ran = await moorage("replay", "--backup", file, "--job", job)
    assert ran.code == 0, ran.err
    assert [row[3] for row in ran.rows] == ["ACCEPTED", "PLACED", "CLAIMED", "RUNNING", "SUCCEEDED"]
    assert "a backup has no records" in ran.err
    at = await moorage("replay", "--backup", file, "--at", seq)
    assert [row[2:4] for row in at.rows] == [[f"acme/{job}/0", "PLACED"]]
    meant = await moorage("replay", file)
    assert (meant.code, f"fix: moorage replay --backup {file}" in meant.err) == (2, True), meant.err
    none = await moorage("replay", "--backup", f"{file}-not")
    assert (none.code, "fix: name a file of moorage admin backup" in none.err) == (2, True), none.err
    nobody = await moorage("replay", "--backup", file, "--job", "nosuch")
    assert (nobody.code, "nothing about job nosuch" in nobody.err) == (3, True), nobody.err
    late = await moorage("replay", "--backup", file, "--at", "99999999")
    assert (late.code, "does not contain record 99999999" in late.err) == (1, True), late.err
