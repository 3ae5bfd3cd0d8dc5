"""Backup and restore on a real server, and a ledger that is older than what its workers know."""

from __future__ import annotations

import asyncio
import os
import re
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import pytest

from moorage.bus.connection import connect
from moorage.bus.embedded import EmbeddedServer
from moorage.bus.errors import JetStreamRefused
from moorage.bus.jetstream import JetStream
from moorage.scheduler.durable.queue_streams import stream_config
from moorage.scheduler.follower.follower import count_the_rest
from moorage.scheduler.history.unpacking import read_frame
from moorage.scheduler.ledger import backup as backups
from moorage.scheduler.ledger.backup import BackupRefused, backup, read, restore
from moorage.scheduler.ledger.invariants import validate
from moorage.scheduler.ledger.ledger import Ledger
from tests.servers import MortalServer, Server, WheelServer
from tests.system.live.scripted_worker import scripted_worker
from tests.system.live.stack import BRIEF, Caller, RealProcess, Stack, caller, is_alive, stack
from tests.waiting import until

#: a lease that outlives two restores, of half a second each; as long nothing is placed on what was restored
LONG_S: Final = 15.0


async def take(made: Stack, to: Path) -> Path:
    file, _ = await backup(made.ledger_url, made.subjects.prefix, to)
    return file


async def bring_back(made: Stack, file: Path, *, replace: bool = False) -> None:
    prefix = made.subjects.prefix
    urls = made.ledger_url, made.url
    await restore(*urls, prefix, 1, file, replace=replace, say=lambda text: None, count_the_rest=count_the_rest)


async def start(made: Stack, **numbers: float) -> RealProcess:
    return await made.set_scheduler("", BRIEF | numbers, made.url, made.ledger_url)


async def a_leader(made: Stack, acme: Caller, **numbers: float) -> RealProcess:
    process = await start(made, **numbers)
    await acme.leader()
    return process


# ------------------------------------------------------------------------------------------------------------- backup


async def test_a_backup_is_the_ledgers_state_and_comes_whole_or_not_at_all(
    nats_server: Server, unique: str, tmp_path: Path
) -> None:
    async with stack(nats_server, unique) as made, caller(made) as acme:
        await a_leader(made, acme)
        for job in ("a", "b"):
            await acme.submit(job, gpu={"model": "none"})
        await acme.queue("submit", {"job": "queued", "gpu": {"model": "none"}, "run": {"argv": ["true"]}})
        await acme.reaches("queued", "QUEUED")

        file = await take(made, tmp_path)
        assert re.fullmatch(r"moorage-[0-9a-f]{16}-\d+\.backup", file.name)
        assert file.stat().st_mode & 0o777 == 0o600
        header, state = read(file)
        validate(state)
        assert (header.seq, header.jobs, header.replicas) == (state.seq, 3, 1)
        assert set(state.tenants["acme"].jobs) == {"a", "b", "queued"}
        assert state.tenants["acme"].submit_cursor > 0

        with pytest.raises(BackupRefused, match="exists already"):
            await take(made, file)
        whole = file.read_bytes()
        for damaged in (whole[:-1], whole[:-9] + b"x" + whole[-8:], b"junk", whole.replace(b'"seq"', b'"sew"', 1)):
            file.write_bytes(damaged)
            with pytest.raises(BackupRefused, match=r"damaged|not a backup|cannot be read"):
                read(file)
        assert [each.name for each in tmp_path.iterdir()] == [file.name], "nothing partial is left"
        with pytest.raises(BackupRefused, match="there is no ledger"):
            await backup(made.ledger_url, "nobody", tmp_path)


# ------------------------------------------------------------------------------------------------------------ restore


@pytest.mark.slow
async def test_a_running_job_outlives_two_restores_and_what_came_behind_the_backup_is_ended(
    fresh_server: EmbeddedServer, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One upon the other: a worker that saw neither was kept out for good, and lost what came to it.

    One job runs that the backup knows, one that it does not; the request queue's cursors hold on a lost queue."""
    async with stack(fresh_server, unique) as made, caller(made) as acme:
        first = await a_leader(made, acme, lease_s=LONG_S)
        await made.agent("w", "4xH100", worker="w1")
        await acme.workers_up("w1")
        pids = {job: made.folder / job for job in ("known", "unknown")}
        script = "echo $$ > {file}.new; mv {file}.new {file}; exec sleep 600"
        await acme.queue("submit", {"job": "early", "run": {"argv": ["true"]}, "gpu": {}})
        await acme.reaches("early", "SUCCEEDED")
        await acme.submit("known", "/bin/sh", "-c", script.format(file=pids["known"]))
        await acme.reaches("known", "RUNNING")
        file = await take(made, tmp_path)
        await acme.submit("unknown", "/bin/sh", "-c", script.format(file=pids["unknown"]), run={"grace_s": 0.2})
        await acme.reaches("unknown", "RUNNING")
        await until(lambda: all(path.exists() for path in pids.values()), what="both running")
        pid_of = {job: int(path.read_text()) for job, path in pids.items()}

        with pytest.raises(BackupRefused, match="a scheduler may lead"):
            await bring_back(made, file, replace=True)
        assert await first.terminate() == 0
        with pytest.raises(BackupRefused, match="there is a ledger"):
            await bring_back(made, file)
        async with await connect(made.url, "test") as users:
            await JetStream(users).delete_stream(made.subjects.request_stream)
        await bring_back(made, file, replace=True)
        monkeypatch.setattr(backups, "SILENT_S", 0.0)  # nobody leads what was restored a moment ago
        await bring_back(made, await take(made, tmp_path), replace=True)

        await start(made, lease_s=LONG_S)
        await acme.leader(1 << 20)
        await until(lambda: not is_alive(pid_of["unknown"]), what="what the backup does not know ended")
        assert await acme.state("unknown") == ""
        assert await acme.state("known") == "RUNNING"
        assert (await acme.submit("early", run={"argv": ["true"]}))["duplicate"], "a finished id is known still"
        await acme.queue("submit", {"job": "late", "run": {"argv": ["true"]}, "gpu": {}})
        shown = await acme.reaches("late", "SUCCEEDED")
        assert shown["changes"][-1]["fence"] > 1 << 32, "no fence of the lost ledger comes again"
        assert is_alive(pid_of["known"])
        assert await acme.state("known") == "RUNNING"
        await acme.api("cancel", {"job": "known"})
        await acme.reaches("known", "CANCELLED")
        await acme.all_free()


@pytest.mark.slow
async def test_nothing_is_placed_on_a_restored_ledger_before_its_workers_are_heard_or_lost(
    nats_server: Server, unique: str, tmp_path: Path
) -> None:
    """The backup shows a job on a worker that is gone by now: where it ran since, nobody can tell."""
    async with stack(nats_server, unique) as made, caller(made) as acme:
        first = await a_leader(made, acme)
        async with scripted_worker(acme.nc, made.subjects, "w1", 1) as worker:
            await acme.submit("held")
            await worker.step("held", "claimed", "started")
            file = await take(made, tmp_path)
        assert await first.terminate() == 0
        await bring_back(made, file, replace=True)
        await start(made)
        await acme.leader(1 << 20)
        async with scripted_worker(acme.nc, made.subjects, "w2", 2) as other:
            await acme.submit("new")
            await until(lambda: any(place.job == "new" for place in other.placed), what="a placement")
            changes = (await acme.show("new"))["changes"]
        async with await connect(made.ledger_url, "test") as schedulers:
            stream = made.subjects.ledger_stream
            epoch = await JetStream(schedulers).get_last(stream, made.subjects.ledger_epoch)
        assert epoch is not None
        placed_s = next(change["time_ms"] for change in changes if change["state"] == "PLACED") / 1000
        waited_s = placed_s - datetime.fromisoformat(epoch.stored_at).timestamp()  # of the ledger's own times
        lost_s = BRIEF["lease_s"] + BRIEF["grace_s"] + BRIEF["margin_s"]
        assert waited_s > lost_s - 0.5, f"placed after {waited_s:.1f} s, and the lost worker's lease may take {lost_s}"


@pytest.mark.slow
async def test_a_queue_that_is_another_is_not_read_over(nats_server: Server, unique: str, tmp_path: Path) -> None:
    async with stack(nats_server, unique) as made, caller(made) as acme:
        first = await a_leader(made, acme)
        for number in range(3):
            await acme.queue("submit", {"job": f"q{number}", "gpu": {"model": "none"}, "run": {"argv": ["true"]}})
        await acme.reaches("q2", "QUEUED")
        file = await take(made, tmp_path)
        assert await first.terminate() == 0
        async with await connect(made.url, "test") as users:
            js = JetStream(users)
            await js.delete_stream(made.subjects.request_stream)
            await js.ensure_stream(stream_config(made.subjects, 1))
        await acme.queue("submit", {"job": "passed-over", "run": {"argv": ["true"]}})
        with pytest.raises(BackupRefused, match="it is another queue"):
            await bring_back(made, file, replace=True)
        await start(made)  # refused is refused: the ledger that was to be replaced is there, and is led
        await acme.leader(2)
        assert await acme.state("q2") == "QUEUED"


@pytest.mark.slow
async def test_a_restored_ledger_has_as_many_copies_as_it_had(nats_server: Server, unique: str, tmp_path: Path) -> None:
    """Unless somebody says another number: a scheduler that finds fewer than its setting does not start."""
    async with stack(nats_server, unique) as made, caller(made) as acme:
        leader = await a_leader(made, acme)
        file = await take(made, tmp_path)
        await leader.terminate()
        whole = file.read_bytes()
        file.write_bytes(whole.replace(b'"replicas":1}', b'"replicas":3}', 1))
        assert read(file)[0].replicas == 3
        say = list[str]()
        again = made.ledger_url, made.url, made.subjects.prefix
        with pytest.raises(JetStreamRefused, match="replicas > 1 not supported"):  # by this one server
            await restore(*again, 0, file, replace=True, say=say.append)
        await restore(*again, 1, file, replace=True, say=say.append)
        assert not any("copies" in text for text in say)
        await a_leader(made, acme)


@pytest.mark.slow
async def test_a_half_made_restore_is_led_by_nobody_and_done_again(
    nats_server: Server, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stack(nats_server, unique) as made, caller(made) as acme:
        first = await a_leader(made, acme)
        await acme.submit("a", gpu={"model": "none"})
        file = await take(made, tmp_path)
        assert await first.terminate() == 0

        class Crash(Exception):
            pass

        async def crash(*_: Any) -> None:
            raise Crash

        with monkeypatch.context() as patched:
            patched.setattr("moorage.scheduler.ledger.ledger.Ledger.begin_restored", crash)
            with pytest.raises(Crash):
                await bring_back(made, file, replace=True)
        stray = await start(made)
        await stray.process.wait()
        assert "gap" in stray.words()
        await bring_back(made, file)
        await start(made)
        await acme.leader(1 << 20)
        assert await acme.state("a") == "QUEUED"


@pytest.mark.slow
async def test_a_backup_is_restored_again_over_a_ledger_that_was_restored_from_it(
    nats_server: Server, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its terms and fences began again where the first restored ledger's had: its workers knew more, and nobody led.

    The second restore ends when the first ledger is gone already, and is done again."""
    async with stack(nats_server, unique) as made, caller(made) as acme:
        first = await a_leader(made, acme)
        await made.agent("w", "4xH100", worker="w1")
        await acme.workers_up("w1")
        file = await take(made, tmp_path)
        assert await first.terminate() == 0
        await bring_back(made, file, replace=True)
        second = await start(made)
        await acme.leader(1 << 20)
        await acme.workers_up("w1")
        pid_file = made.folder / "pid"
        await acme.submit("between", "/bin/sh", "-c", f"echo $$ > {pid_file}; exec sleep 600", run={"grace_s": 0.2})
        fence = (await acme.reaches("between", "RUNNING"))["changes"][-1]["fence"]
        pid = await until(lambda: pid_file.exists() and int(pid_file.read_text() or 0), what="it runs")
        await second.kill()
        monkeypatch.setattr(backups, "SILENT_S", 0.0)
        with monkeypatch.context() as patched:
            patched.setattr("moorage.scheduler.ledger.ledger.Ledger.ensure", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                await bring_back(made, file, replace=True)
        await bring_back(made, file, replace=True)
        await start(made)
        await acme.leader(2 << 20)
        await acme.workers_up("w1")
        await until(lambda: not is_alive(pid), what="what nobody knows any more ended")
        assert await acme.state("between") == ""
        await acme.submit("after")
        assert (await acme.reaches("after", "SUCCEEDED"))["changes"][-1]["fence"] > fence + (1 << 32) - (1 << 16)


@pytest.mark.slow
async def test_what_ended_since_the_backup_is_told_again_to_the_restored_ledger(
    nats_server: Server, unique: str, tmp_path: Path
) -> None:
    """Its only worker keeps its session, and was answered all that it had to say: the GPU was taken for ever."""
    async with stack(nats_server, unique) as made, caller(made) as acme:
        first = await a_leader(made, acme, lease_s=90.0)
        agent = await made.agent("w", "1xH100", worker="w1")
        await acme.workers_up("w1")
        go = made.folder / "go"
        os.mkfifo(go)
        await acme.submit("ends", "/bin/sh", "-c", f"read line < {go}")
        await acme.reaches("ends", "RUNNING")
        file = await take(made, tmp_path)
        await asyncio.to_thread(go.write_text, "now\n")
        await acme.reaches("ends", "SUCCEEDED")
        await acme.all_free()
        assert await first.terminate() == 0
        agent.stop()
        await bring_back(made, file, replace=True)
        await start(made, lease_s=90.0)
        await acme.leader(1 << 20)
        assert await acme.state("ends") == "RUNNING"
        agent.wake()
        shown = await acme.reaches("ends", "SUCCEEDED")
        assert shown["changes"][-1]["attempt"] == 1, "it is not run again"
        await acme.all_free()


@pytest.mark.slow
async def test_restores_back_and_forth_lose_no_history_and_no_end_is_written_twice_to_it(
    nats_server: Server, unique: str, tmp_path: Path
) -> None:
    """To readers, what had left memory by then had no history after a restore. A job that one backup has alive, and
    another one as ended, was written again each time."""
    async with stack(nats_server, unique) as made, caller(made) as acme:

        async def cancelled(leads: RealProcess, job: str) -> None:
            await acme.api("cancel", {"job": job})
            await until(lambda: gone(job), what=f"{job} left memory")
            assert await leads.terminate() == 0

        async def gone(job: str) -> bool:
            return bool((await acme.show(job)).get("compacted"))

        async def kept() -> list[str]:
            answer = await acme.api("history", {"job": "long-over"})
            return [change["state"] for change in answer.get("data", {}).get("changes", ())]

        leads = await a_leader(made, acme, ended_max=0)
        for job in ("long-over", "ends"):
            await acme.submit(job, gpu={"model": "none"})
        await acme.api("cancel", {"job": "long-over"})
        await until(lambda: gone("long-over"), what="it left memory")
        await until(lambda: kept(), what="its history is written")  # what was not, a restore leaves behind
        alive = await take(made, tmp_path / "alive.backup")
        await cancelled(leads, "ends")
        over = await take(made, tmp_path / "over.backup")
        for times, file in enumerate((alive, over, alive), 1):
            await bring_back(made, file, replace=True)
            leads = await start(made, ended_max=0)
            await acme.leader(times << 20)
            await until(lambda: kept(), what="the history is read")
            assert await kept() == ["ACCEPTED", "CANCELLED"]
            await cancelled(leads, "ends")
        async with await connect(made.url, "reader") as reader:
            stream = JetStream(reader).read_range(made.subjects.history_stream)
            frames = [decoded.jobs async for each in stream if (decoded := read_frame(each.data))]
        assert sorted(told.job for jobs in frames for told in jobs if told.over) == ["ends", "long-over"]


@pytest.mark.slow
async def test_a_restore_loses_no_gpu_time_of_the_ledger_that_it_replaces(
    nats_server: Server, unique: str, tmp_path: Path
) -> None:
    """The follower saves its count every 50,000 records, and at the end of the ledger before a restore deletes it."""
    async with (
        stack(nats_server, unique) as made,
        caller(made) as acme,
        await connect(made.ledger_url, "test") as schedulers,
    ):
        saves = made.subjects.follower_stream, made.subjects.follower_saved

        async def is_saved() -> bool:
            try:
                return await JetStream(schedulers).get_last(*saves) is not None
            except JetStreamRefused:  # the follower has not made the stream yet
                return False

        async def counted() -> dict[str, Any] | None:
            answer = await acme.api("usage", {"by": ["tenant"], "since_s": 86_400})
            return dict(answer["data"]) if answer["kind"] == "answer" else None

        leads = await a_leader(made, acme)
        await made.agent("w", "4xH100", worker="w1")
        await acme.workers_up("w1")
        file = await take(made, tmp_path)
        await until(is_saved, what="the first save, which is the only one of so short a ledger")
        for job in ("a", "b"):
            await acme.submit(job)
            await acme.reaches(job, "SUCCEEDED")
        await acme.all_free()
        before = await until(counted, what="the GPU time")
        assert before["rows"][0]["gpu_s"] > 0
        assert await leads.terminate() == 0
        await bring_back(made, file, replace=True)
        await start(made)
        await acme.leader(1 << 20)
        after = await until(counted, what="the GPU time behind the restore")
        assert after["rows"] == before["rows"]
        [[from_ms, _]] = after["restores"]
        assert from_ms >= before["until_ms"], "the time that nobody counted begins at the end of the old ledger"


async def test_of_a_ledger_that_nobody_has_led_there_is_no_backup(
    nats_server: Server, unique: str, tmp_path: Path
) -> None:
    """What is restored from one follows on nothing, so that workers which hold jobs could never join it."""
    async with stack(nats_server, unique) as made, await connect(made.ledger_url, "test") as schedulers:
        await Ledger(JetStream(schedulers), made.subjects, 1).ensure()
        with pytest.raises(BackupRefused, match="no scheduler has led the ledger"):
            await take(made, tmp_path)
        assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------- an older backup, put there by hand


@pytest.mark.slow
async def test_a_servers_folder_from_an_older_backup_is_led_by_no_scheduler(
    mortal_server: MortalServer, fresh_data_dir: Path, unique: str, tmp_path: Path
) -> None:
    """Not our restore: somebody copied JetStream's own folder back. Its workers know better, and say so."""
    assert isinstance(mortal_server, WheelServer)
    async with stack(mortal_server, unique) as made, caller(made) as acme:
        first = await a_leader(made, acme)
        pid_file = made.folder / "pid"
        await made.agent("w", "4xH100", worker="w1")
        await acme.workers_up("w1")
        await mortal_server.stop()
        older = tmp_path / "older"
        await asyncio.to_thread(copy_tree, fresh_data_dir / "jetstream", older)
        await mortal_server.start()
        await acme.leader()
        await first.kill()
        second = await start(made)
        await acme.leader(2)
        await acme.submit("new", "/bin/sh", "-c", f"echo $$ > {pid_file}; exec sleep 600", run={"grace_s": 0.2})
        await acme.reaches("new", "RUNNING")
        third = await start(made)
        await second.kill()
        await acme.leader(3)
        await acme.submit("told")  # who is up may not have been answered yet; who ran it has heard of this term
        await acme.reaches("told", "SUCCEEDED")

        await mortal_server.stop()
        await third.kill()
        await asyncio.to_thread(replace_tree, older, fresh_data_dir / "jetstream")
        await mortal_server.start()
        refusing = await start(made)
        await refusing.process.wait()
        assert "older backup" in refusing.words()
        assert "moorage admin restore" in refusing.words()
        # and for good: each further try would have come nearer to the workers' number
        again = await start(made)
        await again.process.wait()
        assert "leading epoch" not in again.words()

        # the operator's word: this is all there is
        file = await take(made, tmp_path)
        await bring_back(made, file, replace=True)
        await start(made)
        await acme.leader(1 << 20)
        await acme.workers_up("w1")
        await until(lambda: not is_alive(int(pid_file.read_text())), what="what nobody knows any more ended")
        assert await acme.state("new") == ""
        await acme.submit("after")
        await acme.reaches("after", "SUCCEEDED")


def copy_tree(source: Path, target: Path) -> None:
    import shutil

    shutil.copytree(source, target)


def replace_tree(source: Path, target: Path) -> None:
    import shutil

    shutil.rmtree(target)
    shutil.copytree(source, target)
