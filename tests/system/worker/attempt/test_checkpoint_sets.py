"""Checkpoints that are stored while their job runs: whole or not at all, and only what is new of them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moorage.bus.checkpoint_manifest import Manifest
from moorage.bus.object_store import ObjectStore
from moorage.scheduler.buckets.sweeping import drop_of_gangs, sweep
from moorage.schemas.frames import End, GangSets, Place
from moorage.schemas.subjects import Subjects
from moorage.system.archives import BadArchive
from moorage.testing.conformance.leader import ScriptedLeader
from moorage.worker.attempt import checkpoint_sets, checkpoint_watch
from moorage.worker.attempt.checkpoint_sets import KeptSet, NotKept, Pace, SetsStore
from tests.system.worker.agent.test_agent_process import agent_process, body, place, state_folder, worker
from tests.system.worker.attempt.test_attempt_folders import OTHER_USER, placed
from tests.system.worker.attempt.test_job_files import bringing, bucket, fresh, sent, tar
from tests.waiting import until

MIB = 1 << 20
OBJECT = "checkpoint.x.7.0.1"
FREE = Pace(0)


@contextlib.asynccontextmanager
async def sets(
    nats_url: str, unique: str, root: Path, checkpoint_bytes: int = 64 * MIB, **config: Any
) -> AsyncIterator[tuple[SetsStore, ObjectStore, Callable[..., Any]]]:
    """The sets of a tenant, their bucket, and how a checkpoint is brought, as a worker does it."""
    (root / "state").mkdir()
    async with (
        bucket(nats_url, unique, checkpoints=True, **config) as store,
        bringing(nats_url, unique, root / "state", checkpoint_bytes=checkpoint_bytes) as files,
    ):
        await store.make()

        async def brought(number: int, sought: dict[str, str | None] | None = None) -> dict[str, bytes]:
            into = fresh(root, number)
            await files.bring_checkpoint("acme", sought or {OBJECT: None}, into, "ck", None)
            return tree(Path(into) / "ck")

        yield files.sets("acme"), store, brought


def tree(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def written(root: Path, count: int = 20, size: int = 50_000) -> Path:
    (folder := Path(fresh(root, 100)) / "ck" / "deep").mkdir(parents=True)
    for number in range(count):
        (folder / f"part-{number}").write_bytes(os.urandom(size))
    return folder.parent


async def used(store: ObjectStore) -> int:
    return int((await store._jetstream.stream_info(store._stream)).size_bytes)


async def put(of: SetsStore, ck: Path, last: KeptSet | None = None, place: str = "a", pace: Pace = FREE) -> KeptSet:
    kept = await of.put(f"{OBJECT}.{place}", str(ck.parent), "ck", last and last.manifest, pace, None)
    assert kept is not None
    return kept


async def test_a_set_comes_back_as_it_was_and_only_what_changed_is_sent_again(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    ck = written(tmp_path)
    (ck / "empty").mkdir()
    (ck / "run.sh").write_text("true")
    (ck / "run.sh").chmod(0o755)
    (ck / "last").symlink_to("deep/part-3")
    os.utime(ck / "deep/part-1", ns=(5, 1_234_567_890_123_456_789))
    async with sets(nats_url, unique, tmp_path) as (of, store, brought):
        first = await put(of, ck)
        before = await used(store)
        (ck / "deep/part-7").write_bytes(os.urandom(50_000))
        (ck / "deep/part-8").write_bytes((ck / "deep/part-8").read_bytes())  # written anew, with the same content
        second = await put(of, ck, first, "b")
        assert 50_000 < await used(store) - before < 60_000
        assert await brought(1) == tree(ck)
        into = tmp_path / "into-1" / "ck"
        assert (into / "deep/part-1").stat().st_mtime_ns == 1_234_567_890_123_456_789
        assert ((into / "run.sh").stat().st_mode & 0o777, os.readlink(into / "last")) == (0o755, "deep/part-3")
        assert (into / "empty").is_dir()
        assert not (tmp_path / "into-1" / checkpoint_sets._PART).exists()
        assert (await brought(2, {OBJECT: first.digest}))["deep/part-7"] != tree(ck)["deep/part-7"]
        # without what both have, the first one goes
        await of.drop(first, [second.manifest])
        assert await brought(3) == tree(ck)
        assert await brought(4, {OBJECT: first.digest}) == {}


class Meddling(Pace):
    """What the job does to its files while they are read."""

    def __init__(self, does: Callable[[], None], times: int = 1) -> None:
        super().__init__(0)
        self._does, self._left = does, times

    def take(self, size: int) -> None:
        if self._left:
            self._left -= 1
            self._does()


async def test_a_set_is_the_folder_as_it_was_at_one_moment_whatever_is_replaced_meanwhile(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    ck = written(tmp_path, count=5)
    was = tree(ck)

    def replace() -> None:
        for path in (ck / "deep").iterdir():
            (new := path.with_suffix(".new")).write_bytes(b"step 2")
            new.rename(path)
        (ck / "deep/part-4").unlink()
        (ck / "more").touch()

    async with sets(nats_url, unique, tmp_path) as (of, _, brought):
        await put(of, ck, pace=Meddling(replace))
        assert await brought(1) == was


async def test_a_file_that_is_written_in_place_is_read_again_and_then_told(
    nats_url: str, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_sets, "AGAIN_S", 0.0)
    ck = written(tmp_path, count=3)

    def append() -> None:
        with (ck / "deep/part-2").open("ab") as file:
            file.write(b"more")

    async with sets(nats_url, unique, tmp_path) as (of, store, brought):
        first = await put(of, ck, pace=Meddling(append))
        assert await brought(1) == tree(ck)
        was = tree(ck)
        held = await used(store)
        (ck / "deep/part-0").write_bytes(b"x" * 50_000)
        append()
        with pytest.raises(NotKept, match="'deep/part-2' changed each time"):
            await put(of, ck, first, "b", Meddling(append, 1_000))
        assert await used(store) < held + 5_000, "what was sent for it is gone"
        assert await brought(2) == was


async def test_a_bucket_without_room_or_a_bound_that_is_exceeded_leaves_the_last_whole_set(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    ck = written(tmp_path, count=2, size=MIB)
    async with sets(nats_url, unique, tmp_path, 5 * MIB, max_bytes=4 * MIB) as (of, store, brought):
        first = await put(of, ck)
        was = tree(ck)
        (ck / "more").write_bytes(os.urandom(2 * MIB))
        with pytest.raises(NotKept, match=r"it needs \d+ bytes, and its bucket has room for \d+"):
            await put(of, ck, first, "b")
        (ck / "more").write_bytes(os.urandom(4 * MIB))
        with pytest.raises(NotKept, match=r"take \d+ bytes together, checkpoint_bytes is 5242880"):
            await put(of, ck, first, "b")
        assert await brought(1) == was
        assert await used(store) < 3 * MIB


async def test_what_the_job_could_not_read_is_not_read_for_it_and_a_set_lacks_nothing(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    ck = written(tmp_path, count=1)
    async with sets(nats_url, unique, tmp_path) as (of, _, brought):
        await put(of, ck)
        was = tree(ck)
        (ck / "out").symlink_to("../../secret")
        with pytest.raises(NotKept, match="'out', a link that leaves the checkpoint"):
            await put(of, ck)
        (ck / "out").unlink()
        os.mkfifo(ck / "pipe")
        with pytest.raises(NotKept, match="'pipe', neither a file nor a folder nor a link"):
            await put(of, ck)
        (ck / "pipe").unlink()
        ck.rename(ck.with_name("elsewhere"))
        ck.symlink_to("../elsewhere")
        with pytest.raises(NotKept, match="a link that leaves the attempt's folder"):
            await put(of, ck)
        assert await brought(1) == was


async def test_a_set_of_which_a_piece_is_gone_gives_way_to_the_one_before(
    nats_url: str, unique: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ck = written(tmp_path, count=3)
    async with sets(nats_url, unique, tmp_path) as (of, _, brought):
        first = await put(of, ck)
        was = tree(ck)
        (ck / "deep/part-1").write_bytes(os.urandom(50_000))
        second = await put(of, ck, first, "b")
        await of.forget(second.manifest.contents.keys() - first.manifest.contents.keys())
        assert await brought(1) == was
        assert f"the checkpoint {OBJECT}.b cannot be used" in caplog.text


async def test_a_file_is_sent_again_before_the_bucket_drops_it(
    nats_url: str, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ck = written(tmp_path, count=2)
    async with sets(nats_url, unique, tmp_path) as (of, _, _):
        first = await put(of, ck)
        assert (await put(of, ck, first, "b")).manifest.contents == first.manifest.contents
        monkeypatch.setattr(checkpoint_sets, "ANEW_S", -1.0)
        assert not (await put(of, ck, first, "b")).manifest.contents.keys() & first.manifest.contents.keys()


async def test_a_sweep_removes_what_no_checkpoint_names_and_nothing_else(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    ck = written(tmp_path, count=3)
    async with sets(nats_url, unique, tmp_path) as (of, store, brought):
        first = await put(of, ck)
        was, held = tree(ck), await used(store)
        await store.put("checkpoint.y.7.0.1", [os.urandom(10_000)], {}, lambda _: None)
        left = await store.put_content([os.urandom(500_000)], lambda _: None)  # its worker died before it had a name

        async def swept(old_s: float) -> int:
            return await sweep(store._jetstream, Subjects(unique), "acme", old_s)

        assert await swept(3_600.0) == 0, "it may have one soon"
        assert await swept(-1.0) == 1
        assert await used(store) < held + 20_000
        assert await brought(1) == was
        assert await store.find("checkpoint.y.7.0.1") is not None
        await of.forget({info.nuid for name, info in await store.stored() if name.startswith(OBJECT)})
        assert await swept(-1.0) == len(first.manifest.contents)
        assert left.nuid not in first.manifest.contents


RUN: dict[str, Any] = {"checkpoint": "ck", "grace_s": 60.0} | ({"user": OTHER_USER} if os.geteuid() == 0 else {})
ASKS = 'touch "$MOORAGE_CHECKPOINT_NOW"; while [ -e "$MOORAGE_CHECKPOINT_NOW" ]; do sleep 0.05; done; echo stored;'


def told(leader: ScriptedLeader, name: Any) -> list[str]:
    """The digests that the worker has reported while the attempt runs, in order."""
    return [
        report.checkpoint
        for report in leader.seat("w1").reports
        if report.kind == "started" and report.attempt == name[3] and report.checkpoint
    ]


async def test_the_next_attempt_has_what_one_that_was_lost_stored_while_it_ran(
    nats_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_watch, "LOOK_S", 0.02)
    async with (
        bucket(nats_url, unique, checkpoints=True),
        ScriptedLeader(nats_url, unique) as leader,
        worker(nats_url, unique, leader),
    ):

        async def attempt(number: int, script: str, known: list[tuple[int, str]], until_said: str) -> list[str]:
            name = ("acme", "a", 0, number, 10 + number)
            run = {**RUN, "checkpoint_step": r"step-(\d+)"}
            of = place(name, body(script, run=run), (number,))
            await leader.want("w1", msgspec.structs.replace(of, accepted_ms=7, checkpoints=known, untold=0))
            await until(lambda: said(number) == until_said, what="its output")
            return told(leader, name)

        def said(number: int) -> str:
            return "".join(frame["text"] for _, frame in leader.output if frame["attempt"] == number)

        first = await attempt(
            1, f"mkdir ck; echo 1 > ck/step-10; {ASKS} echo 2 > ck/step-20; {ASKS} echo 3 > ck/n; sleep 600", [],
            "stored\nstored\n",
        )  # fmt: skip
        assert len(first) == 2
        steps = [report.code for report in leader.seat("w1").reports if report.checkpoint]
        assert steps == [10, 20]
        # its host is cut off: it runs on, and the leader knows what was reported
        second = await attempt(
            2, f"cat ck/*; {ASKS} echo 4 > ck/n; {ASKS} sleep 600", [(1, first[-1])], "1\n2\nstored\nstored\n"
        )
        assert second == second[-1:], "nothing had changed at first, so nothing more was stored"
        third = await attempt(3, "cat ck/*; sleep 600", [(1, first[-1]), (2, second[-1])], "4\n1\n2\n")
        assert third == []


async def test_a_checkpoint_is_stored_once_it_is_due_and_quiet_and_again_by_the_next_agent(
    nats_url: str, unique: str
) -> None:
    name = ("acme", "a", 0, 1, 11)
    async with (
        bucket(nats_url, unique, checkpoints=True) as store,
        ScriptedLeader(nats_url, unique) as leader,
        state_folder() as state,
    ):
        async with agent_process(state, nats_url, unique):
            await leader.joined("w1")
            script = "mkdir ck; echo 1 > ck/n; while [ ! -e ck/go ]; do sleep 0.05; done; sleep 600"
            run = {**RUN, "checkpoint_every_s": 1.0}
            await leader.want("w1", msgspec.structs.replace(placed(name, script, **run), accepted_ms=7))
            await until(lambda: told(leader, name), what="the first")
        folder = next(path for path in state.rglob("acme.a.0.1.11") if path.is_dir())
        async with agent_process(state, nats_url, unique):
            (folder / "ck/go").touch()
            os.chown(folder / "ck/go", folder.stat().st_uid, folder.stat().st_gid)
            await until(lambda: len(set(told(leader, name))) == 2, what="the second")
            await leader.want("w1", End(*name, why="cancel", grace_s=5.0))
            exited = await leader.await_report("w1", "exited", name)
            assert exited.checkpoint == told(leader, name)[-1], "it has not changed since"
            assert await store.find("checkpoint.a.7.0.1") is None


async def test_a_folder_that_is_never_quiet_is_stored_all_the_same(nats_url: str, unique: str) -> None:
    async with (
        bucket(nats_url, unique, checkpoints=True),
        ScriptedLeader(nats_url, unique) as leader,
        worker(nats_url, unique, leader),
    ):
        name = ("acme", "a", 0, 1, 11)
        script = "mkdir ck; while :; do date +%N > new; mv new ck/n; sleep 0.3; done"
        of = placed(name, script, **RUN, checkpoint_every_s=1.0)
        await leader.want("w1", msgspec.structs.replace(of, accepted_ms=7))
        await until(lambda: len(told(leader, name)) > 1, what="two sets")


async def test_the_end_stores_only_what_changed_since_and_success_leaves_nothing(
    nats_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_watch, "LOOK_S", 0.02)
    async with (
        bucket(nats_url, unique, checkpoints=True) as store,
        ScriptedLeader(nats_url, unique) as leader,
        worker(nats_url, unique, leader),
    ):

        async def attempt(number: int, script: str, code: int) -> str | None:
            name = ("acme", "a", 0, number, 10 + number)
            await leader.want("w1", msgspec.structs.replace(placed(name, script, **RUN), accepted_ms=7))
            exited = await leader.await_report("w1", "exited", name)
            assert (exited.code, exited.detail) == (code, "exit")
            return exited.checkpoint

        big = "mkdir -p ck; head -c 3000000 /dev/urandom > ck/big;"
        digest = await attempt(1, f"{big} {ASKS} echo 2 > ck/n; exit 3", 3)
        assert digest != told(leader, ("acme", "a", 0, 1, 11))[-1]
        assert await used(store) < 3_100_000
        assert await attempt(2, f"test -s ck/big && cat ck/n && {ASKS} echo 3 > ck/n; {ASKS} exit 0", 0) is not None

        async def none_left() -> bool:
            names = [f"checkpoint.a.7.0.{each}{place}" for each in (1, 2) for place in ("", ".a", ".b", ".end")]
            return not any([await store.find(each) for each in names]) and await used(store) < 100_000

        await until(none_left, what="they go once it has succeeded")


async def test_no_set_is_written_before_the_ledger_has_the_one_before(
    nats_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader that hears nothing: what the attempt stores next may not take the place of what counts."""
    monkeypatch.setattr(checkpoint_watch, "LOOK_S", 0.02)
    async with (
        bucket(nats_url, unique, checkpoints=True) as store,
        ScriptedLeader(nats_url, unique) as leader,
        worker(nats_url, unique, leader) as (_, agent),
    ):
        name, asked = ("acme", "a", 0, 1, 11), list[str]()
        again = "date +%N > new; mv new ck/n; touch $MOORAGE_CHECKPOINT_NOW; sleep 0.2;"
        script = f"mkdir ck; echo x > ck/n; {ASKS} while [ ! -e go ]; do sleep 0.02; done; while :; do {again} done"
        await leader.want("w1", msgspec.structs.replace(placed(name, script, **RUN), accepted_ms=7))
        await until(lambda: leader.text(name) == "stored\n")
        [first] = told(leader, name)
        monkeypatch.setattr(leader, "on_asked", lambda worker, verb, data: asked.append(verb))
        leader.mute.add("fact")
        folder = next(path for path in agent.settings.state_dir.rglob("acme.a.0.1.11") if path.is_dir())
        (folder / "go").touch()
        await until(lambda: asked.count("fact") > 2, what="the report of the second set, sent again")
        assert await store.find("checkpoint.a.7.0.1.b") is not None
        info = await store.find("checkpoint.a.7.0.1.a")
        assert info is not None
        assert info.digest == first
        leader.mute.clear()
        await until(lambda: len(set(told(leader, name))) > 2, what="it goes on")


async def test_why_a_checkpoint_could_not_be_stored_is_reported(
    nats_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_watch, "LOOK_S", 0.02)
    async with (
        bucket(nats_url, unique, checkpoints=True),
        ScriptedLeader(nats_url, unique) as leader,
        worker(nats_url, unique, leader, checkpoint_bytes=MIB),
    ):
        name = ("acme", "a", 0, 1, 11)
        script = 'mkdir ck; head -c 2000000 /dev/zero > ck/n; touch "$MOORAGE_CHECKPOINT_NOW"; sleep 600'
        await leader.want("w1", msgspec.structs.replace(placed(name, script, **RUN), accepted_ms=7))

        def why() -> list[str]:
            reports = leader.seat("w1").reports
            return [each.detail for each in reports if each.kind == "started" and each.checkpoint == ""]

        await until(why)
        assert why()[0].startswith("checkpoint-not-stored: files: it and the one before take 2000000 bytes together")


def test_no_more_is_read_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    pace = Pace(1_000)
    for _ in range(4):
        pace.take(500)
    assert slept == [0.0, 0.5, 1.0, 1.5]


async def test_a_checkpoint_may_be_a_file_or_a_link_to_a_file_or_a_folder_and_comes_back_as_such(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    def make(form: str, own: Path) -> None:
        (own / "runs" / "step-2").mkdir(parents=True)
        (own / "runs" / "step-2" / "w").write_text("weights")
        if form == "file":
            (own / "ck").write_text("state")
        elif form == "link to a file":
            (own / "last.pt").write_text("state")
            (own / "ck").symlink_to("last.pt")
        else:
            (own / "ck").symlink_to("runs/step-2")

    made = {"file": {"ck": "state"}, "link to a file": {"last.pt": "state"}, "link": {"runs/step-2/w": "weights"}}
    async with sets(nats_url, unique, tmp_path) as (of, _store, _):
        for number, (form, content) in enumerate(made.items()):
            own = Path(fresh(tmp_path, number))
            make(form, own)
            kept = await of.put(f"{OBJECT}.a", str(own), "ck", None, FREE, None)
            assert kept is not None
            into = Path(fresh(tmp_path, 50 + number))
            (into / "ck").write_text("of the job's files")  # is replaced
            await of.restore(kept, str(into), "ck", MIB, None)
            assert {p.relative_to(into).as_posix(): p.read_text() for p in into.rglob("*") if p.is_file()} == {
                **content,
                **({"ck": "state"} if form == "link to a file" else {}),
            }
            if form != "file":
                assert os.readlink(into / "ck") == os.readlink(own / "ck")
        own = Path(fresh(tmp_path, 90))
        (own / "ck").symlink_to("/etc")
        with pytest.raises(NotKept, match="a link that leaves the attempt's folder"):
            await of.put(f"{OBJECT}.a", str(own), "ck", None, FREE, None)
        (own / "ck").unlink()
        (own / "other").symlink_to("runs")
        (own / "ck").symlink_to("other")
        with pytest.raises(NotKept, match="a link to another link"):
            await of.put(f"{OBJECT}.a", str(own), "ck", None, FREE, None)
        evil = KeptSet("x", "", Manifest(0, [], link="../../up"))
        with pytest.raises(BadArchive, match="a link that leaves the folder"):
            await of.restore(evil, str(own), "ck", MIB, None)


def gang(number: int, script: str, checkpoints: Sequence[tuple[int, str]] = (), **more: Any) -> Place:
    """The placement of rank 0 of a gang of two, which begins at once."""
    run = {**RUN, "checkpoint_step": r"step-(\d+)", **more}
    request = body(script, run=run, gpu={"scheduling": "gang"}, replicas=2)
    of = place(("acme", "a", 0, number, 10 + number), request, (number % 4,))
    return msgspec.structs.replace(of, accepted_ms=7, checkpoints=[*checkpoints], untold=0)


async def test_a_rank_of_a_gang_writes_over_no_set_that_may_count(
    nats_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_watch, "LOOK_S", 0.02)
    async with (
        bucket(nats_url, unique, checkpoints=True),
        ScriptedLeader(nats_url, unique) as leader,
        worker(nats_url, unique, leader),
    ):
        name = ("acme", "a", 0, 1, 11)
        script = "mkdir ck; for n in 1 2 3 4; do : > ck/step-$n; " + ASKS + " done; sleep 600"
        await leader.want("w1", gang(1, script))
        await until(lambda: len(set(told(leader, name))) == 3, what="three places are full")
        first, second, third = told(leader, name)
        renewals = len(leader.seat("w1").renewals)
        leader.sets = [GangSets(*name, [first, third])]
        await until(lambda: len(set(told(leader, name))) == 4, 60, "the second counts no more, so its place is free")
        assert len(leader.seat("w1").renewals) > renewals
        fourth = told(leader, name)[-1]
        await leader.want("w1", End(*name, why="cancel", grace_s=5.0))
        exited = await leader.await_report("w1", "exited", name)
        assert exited.checkpoint == fourth, "it has not changed since"
        for number, (digest, steps) in enumerate(((first, "1"), (third, "3"), (fourth, "4")), 2):
            await leader.want("w1", gang(number, "ls ck | tail -1; exit 0", [(1, digest)]))
            await leader.await_report("w1", "exited", ("acme", "a", 0, number, 10 + number))
            output = "".join(frame["text"] for _, frame in leader.output if frame["attempt"] == number)
            assert output == f"step-{steps}\n"
        await leader.want("w1", gang(5, "true", [(1, second)]))
        refused = await leader.await_report("w1", "refused", ("acme", "a", 0, 5, 15))
        assert refused.detail.startswith("not-here: checkpoint-refused: that of attempt 1 is not the one")


async def test_a_rank_of_a_gang_whose_set_is_gone_refuses_its_start_by_name(nats_url: str, unique: str) -> None:
    async with (
        bucket(nats_url, unique, checkpoints=True),
        ScriptedLeader(nats_url, unique) as leader,
        worker(nats_url, unique, leader),
    ):
        await leader.want("w1", gang(2, "true", [(1, "SHA-256=none")]))
        refused = await leader.await_report("w1", "refused", ("acme", "a", 0, 2, 12))
        told = "not-here: checkpoint-refused: that of attempt 1 is not there; all ranks of a gang begin at one step"
        assert refused.detail == told
        await leader.want("w1", msgspec.structs.replace(gang(3, "true"), untold=None))
        refused = await leader.await_report("w1", "refused", ("acme", "a", 0, 3, 13))
        assert "a new leader does not know with which step the other ranks begin" in refused.detail


async def test_the_first_attempt_of_a_gang_that_brings_files_begins_without_a_checkpoint(
    nats_url: str, unique: str
) -> None:
    async with (
        bucket(nats_url, unique) as store,
        ScriptedLeader(nats_url, unique) as leader,
        worker(nats_url, unique, leader),
    ):
        address = await sent(store, tar(code=b"ok"))
        of = gang(1, "cat code; mkdir ck; : > ck/step-1; exit 75", files=address)
        await leader.want("w1", msgspec.structs.replace(of, untold=None))
        exited = await leader.await_report("w1", "exited", ("acme", "a", 0, 1, 11))
        assert exited.code == 75


async def test_a_rank_of_a_gang_tells_the_step_of_its_end_and_refuses_a_folder_without_one(
    nats_url: str, unique: str
) -> None:
    async with (
        bucket(nats_url, unique, checkpoints=True),
        ScriptedLeader(nats_url, unique) as leader,
        worker(nats_url, unique, leader),
    ):
        await leader.want("w1", gang(1, "mkdir ck; : > ck/step-7; exit 75"))
        exited = await leader.await_report("w1", "exited", ("acme", "a", 0, 1, 11))
        [report] = [each for each in leader.seat("w1").reports if each.kind == "started" and each.checkpoint]
        assert (report.code, report.checkpoint) == (7, exited.checkpoint)
        await leader.want("w1", gang(2, "mkdir ck; : > ck/last; exit 75"))
        exited = await leader.await_report("w1", "exited", ("acme", "a", 0, 2, 12))
        assert exited.checkpoint == ""
        assert "checkpoint-not-stored: files: no name in ck has a step, by checkpoint_step" in exited.detail


async def test_once_all_ranks_of_a_gang_have_ended_well_a_sweep_removes_what_they_stored(
    nats_url: str, unique: str
) -> None:
    async with (
        bucket(nats_url, unique, checkpoints=True) as store,
        ScriptedLeader(nats_url, unique) as leader,
        worker(nats_url, unique, leader),
    ):
        jetstream, subjects = store._jetstream, Subjects(unique)
        for rank in (0, 1):
            for number, code in ((1, 75), (2, 0)):
                of = gang(number, f"mkdir -p ck; : > ck/step-{number}; exit {code}")
                fence = 20 + 2 * rank + number
                await leader.want("w1", msgspec.structs.replace(of, replica=rank, fence=fence))
                await leader.await_report("w1", "exited", ("acme", "a", rank, number, fence))
            assert await drop_of_gangs(jetstream, subjects, "acme") == (0 if rank == 0 else 4)
        assert await sweep(jetstream, subjects, "acme", -1.0) >= 0
        assert [name for name, _ in await store.stored() if await store.find(name) is not None] == []


async def test_what_an_earlier_attempts_set_has_stays_while_that_set_counts(
    nats_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_watch, "LOOK_S", 0.02)
    async with (
        bucket(nats_url, unique, checkpoints=True),
        ScriptedLeader(nats_url, unique) as leader,
        worker(nats_url, unique, leader),
    ):
        name = ("acme", "a", 0, 2, 12)
        await leader.want("w1", gang(1, "mkdir ck; echo one > ck/step-1; exit 75"))
        first = (await leader.await_report("w1", "exited", ("acme", "a", 0, 1, 11))).checkpoint
        assert first
        steps = f"for n in 2 3 4 5; do echo $n > ck/step-$n; rm -f ck/step-$((n - 2)); {ASKS} done; sleep 600"
        await leader.want("w1", gang(2, steps, [(1, first)]))
        await until(lambda: len(set(told(leader, name))) == 3, what="three sets, of which the first one has step-1")
        leader.sets = [GangSets(*name, told(leader, name)[1:], earlier=True)]
        await until(lambda: len(set(told(leader, name))) == 4, 60, "the place of the first one is written again")
        await leader.want("w1", End(*name, why="cancel", grace_s=5.0))
        await leader.await_report("w1", "exited", name)
        await leader.want("w1", gang(3, "cat ck/step-1; exit 0", [(1, first)]))
        assert (await leader.await_report("w1", "exited", ("acme", "a", 0, 3, 13))).code == 0
        assert "one\n" in [frame["text"] for _, frame in leader.output if frame["attempt"] == 3]


async def test_ranks_without_steps_store_what_was_quiet_at_moments_and_what_they_leave_as_they_exit_by_themselves(
    nats_url: str, unique: str
) -> None:
    def by_moments(number: int, script: str, checkpoints: Sequence[tuple[int, str]] = ()) -> Place:
        return gang(number, script, checkpoints, checkpoint_step=None, checkpoint_every_s=1.0)

    def steps(number: int) -> list[int]:
        reports = [each for each in leader.seat("w1").reports if each.attempt == number]
        return [each.code or 0 for each in reports if each.kind == "started" and each.checkpoint]

    async with (
        bucket(nats_url, unique, checkpoints=True),
        ScriptedLeader(nats_url, unique) as leader,
        worker(nats_url, unique, leader),
    ):
        busy = "mkdir ck; for n in $(seq 70); do echo $n >> ck/last; sleep 0.05; done"
        await leader.want("w1", by_moments(1, f"{busy}; sleep 600"))
        name = ("acme", "a", 0, 1, 11)
        refused = "it changed shortly before each of 3 moments"
        await until(lambda: any(refused in each.detail for each in leader.seat("w1").reports), what="that none counts")
        assert steps(1) == []
        await until(lambda: len(steps(1)) == 3, what="each place has a moment")
        one, two, three = steps(1)
        assert one < two < three < checkpoint_watch.AT_END
        await leader.want("w1", End(*name, why="cancel", grace_s=5.0))
        exited = await leader.await_report("w1", "exited", name)
        assert exited.checkpoint
        assert len(steps(1)) == 3, "it was ended, perhaps as it wrote"
        await leader.want("w1", by_moments(2, "[ -s ck/last ] && echo 2 > ck/last; exit 75", [(1, exited.checkpoint)]))
        exited = await leader.await_report("w1", "exited", ("acme", "a", 0, 2, 12))
        assert steps(2)[-1] == checkpoint_watch.AT_END
        assert exited.checkpoint
        await leader.want("w1", by_moments(3, "cat ck/last; exit 1", [(2, exited.checkpoint)]))
        await leader.await_report("w1", "exited", ("acme", "a", 0, 3, 13))
        output = "".join(frame["text"] for _, frame in leader.output if frame["attempt"] == 3)
        assert output == "2\n"
        assert checkpoint_watch.AT_END not in steps(3)
