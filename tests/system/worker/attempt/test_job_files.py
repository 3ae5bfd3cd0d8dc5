"""Files of a job on their way from the tenant's bucket into the attempt's folder, over a real nats-server."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import os
import tarfile
import threading
import zlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moorage.bus.connection import connect
from moorage.bus.errors import JetStreamRefused, StreamGap
from moorage.bus.jetstream import JetStream
from moorage.bus.object_store import CHUNK_BYTES, ObjectStore
from moorage.schemas.subjects import Subjects
from moorage.testing.conformance.leader import ScriptedLeader
from moorage.worker.attempt import job_files
from moorage.worker.attempt.attempt_folders import FOLDERS
from moorage.worker.attempt.job_files import CACHE, FilesRefused, FilesUnavailable, JobFiles
from tests.system.worker.agent.test_agent_process import name_of, worker
from tests.system.worker.attempt.test_attempt_folders import OTHER_USER, placed
from tests.waiting import until

MIB = 1 << 20


def never_over(monkeypatch: pytest.MonkeyPatch, step: str) -> asyncio.Event:
    """Let this method of `JobFiles` never end; return what is set once it is reached."""
    reached = asyncio.Event()

    async def never(*_: object) -> None:
        reached.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(JobFiles, step, never)
    return reached


def tar(**files: bytes) -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name.replace("_", "/"))
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return held.getvalue()


def gzipped(data: bytes) -> bytes:
    deflater = zlib.compressobj(1, wbits=31)
    return deflater.compress(data) + deflater.flush()


@contextlib.asynccontextmanager
async def bucket(
    nats_url: str, prefix: str, tenant: str = "acme", *, checkpoints: bool = False, **config: Any
) -> AsyncIterator[ObjectStore]:
    connection, subjects = await connect(nats_url, "files"), Subjects(prefix)
    jetstream = JetStream(connection)
    name = subjects.checkpoints_bucket(tenant) if checkpoints else subjects.files_bucket(tenant)
    try:
        yield ObjectStore(jetstream, name, {"discard": "old", "max_bytes": 64 * MIB, **config})
    finally:
        with contextlib.suppress(JetStreamRefused):
            await jetstream.delete_stream(f"OBJ_{name}")
        await connection.close()


async def sent(store: ObjectStore, data: bytes, address: str = "") -> str:
    address = address or hashlib.sha256(data).hexdigest()
    packed = gzipped(data)
    await store.put(address, [packed[at : at + 100_000] for at in range(0, len(packed), 100_000)], {}, lambda _: None)
    return address


@contextlib.asynccontextmanager
async def bringing(nats_url: str, prefix: str, state: Path, **bounds: int) -> AsyncIterator[JobFiles]:
    connection = await connect(nats_url, "worker")
    files = JobFiles(
        JetStream(connection),
        prefix,
        state,
        bounds.get("bytes_max", 8 * MIB),
        bounds.get("cache", 64 * MIB),
        bounds.get("checkpoint_bytes", 8 * MIB),
    )
    files.open()
    try:
        yield files
    finally:
        await files.close()
        await connection.close()


def fresh(root: Path, number: int = 0) -> str:
    into = root / f"into-{number}"
    into.mkdir()
    return str(into)


async def test_an_object_of_many_pieces_is_read_as_it_was_written(nats_url: str, unique: str) -> None:
    data = os.urandom(3 * CHUNK_BYTES + 777)
    told: list[int] = []
    async with bucket(nats_url, unique) as store:
        assert await store.find("x") is None
        await store.put("x", [data[:10], data[10:]], {"Content-Type": "application/gzip"}, told.append)
        info = await store.find("x")
        assert info is not None
        assert (info.size, info.headers["Content-Type"]) == (len(data), ["application/gzip"])
        assert b"".join([piece async for piece in store.get(info)]) == data
        assert told == sorted(told)
        assert told[-1] == len(data)
        await store.put("empty", [], {}, told.append)
        empty = await store.find("empty")
        assert empty is not None
        assert [piece async for piece in store.get(empty)] == []


async def test_other_clients_of_the_object_store_read_it_too(nats_url: str, unique: str) -> None:
    import nats

    client = await nats.connect(nats_url)
    data = os.urandom(CHUNK_BYTES + 5)
    async with bucket(nats_url, unique) as store:
        await store.put("x", [data], {}, lambda _: None)
        theirs = await client.jetstream().object_store(Subjects(unique).files_bucket("acme"))
        assert (await theirs.get("x")).data == data
        await theirs.put("y", data)
        info = await store.find("y")
        assert info is not None
        assert b"".join([piece async for piece in store.get(info)]) == data
    await client.close()


@pytest.mark.parametrize(
    "description",
    [
        b"",
        b"{}",
        b'{"nuid":"\xff"}',
        b'{"nuid":"a","headers":{"Moorage-First":[]}}',
        b'{"nuid":"a","headers":{"Moorage-First":["x"]}}',
        b'{"nuid":"a","headers":{"Moorage-First":["-1"]}}',
        b'{"nuid":"a","headers":{"Moorage-First":["%d"]}}' % 10**30,
    ],
)
async def test_files_with_a_bad_description_are_not_there_until_they_are_sent_again(
    nats_url: str, unique: str, tmp_path: Path, description: bytes
) -> None:
    async with bucket(nats_url, unique) as store, bringing(nats_url, unique, tmp_path) as files:
        address = await sent(store, tar(a=b"x"))
        await store.append(store._description(address), description)
        with pytest.raises(FilesRefused, match="submit the job again"):
            await files.bring("acme", address, fresh(tmp_path), None)
        await sent(store, tar(a=b"x"))
        await files.bring("acme", address, fresh(tmp_path, 1), None)


async def test_an_object_whose_first_pieces_were_pushed_out_is_not_there(nats_url: str, unique: str) -> None:
    async with bucket(nats_url, unique, max_bytes=4 * MIB) as store:
        await store.put("old", [os.urandom(2 * MIB)], {}, lambda _: None)
        info = await store.find("old")
        assert info is not None
        for name in ("new", "newer"):
            await store.put(name, [os.urandom(MIB + 1000)], {}, lambda _: None)
        assert await store.find("newer") is not None
        assert await store.find("old") is None
        with pytest.raises(StreamGap):
            [_ async for _ in store.get(info)]


async def test_replicas_on_one_worker_share_one_download_and_the_next_job_has_none(
    nats_url: str, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tar(train=b"x" * 100_000, lib_a=b"a")
    reads: list[str] = []
    plain = ObjectStore.get

    def get(store: ObjectStore, info: Any) -> AsyncIterator[bytes]:
        reads.append(info.nuid)
        return plain(store, info)

    monkeypatch.setattr(ObjectStore, "get", get)
    async with bucket(nats_url, unique) as store, bringing(nats_url, unique, tmp_path) as files:
        address = await sent(store, data)
        folders = [fresh(tmp_path, number) for number in range(20)]
        await asyncio.gather(*(files.bring("acme", address, folder, None) for folder in folders))
        assert {Path(folder, "lib/a").read_bytes() for folder in folders} == {b"a"}
        assert len(reads) == 1
    async with bringing(nats_url, unique, tmp_path) as files:
        await files.bring("acme", address, fresh(tmp_path, 99), None)  # though the bucket is gone
        assert len(reads) == 1
        with pytest.raises(FilesRefused, match="not, or no longer, in the tenant's bucket"):
            await files.bring("other", address, fresh(tmp_path, 98), None)  # another tenant, who knows the address


async def test_the_cache_keeps_its_bound_and_what_was_used_last(nats_url: str, unique: str, tmp_path: Path) -> None:
    async with bucket(nats_url, unique) as store, bringing(nats_url, unique, tmp_path, cache=5 * MIB) as files:
        addresses = [await sent(store, tar(file=os.urandom(2 * MIB))) for _ in range(3)]
        for number, at in enumerate((0, 1, 0, 2)):
            await files.bring("acme", addresses[at], fresh(tmp_path, number), None)
            await asyncio.sleep(0.02)
        kept = {path.name.partition(".")[2] for path in (tmp_path / CACHE).iterdir()}
        assert kept == {addresses[0], addresses[2]}
        assert sum(path.stat().st_size for path in (tmp_path / CACHE).iterdir()) <= 5 * MIB


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (tar(a=bytes(9 * MIB)), "unpacks to more than"),
        (b"no tar file", "not a tar file"),
        (tar(**{".._x": b"x"}), "leaves the folder"),
    ],
)
async def test_files_that_no_worker_could_give_a_job_are_the_requests_fault(
    nats_url: str, unique: str, tmp_path: Path, data: bytes, why: str
) -> None:
    async with bucket(nats_url, unique) as store, bringing(nats_url, unique, tmp_path) as files:
        with pytest.raises(FilesRefused, match=why):
            await files.bring("acme", await sent(store, data), fresh(tmp_path), None)
        assert not list((tmp_path / CACHE).glob("*.part"))


async def test_what_is_not_what_its_address_says_is_refused_and_not_kept(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    async with bucket(nats_url, unique) as store, bringing(nats_url, unique, tmp_path) as files:
        address = await sent(store, tar(a=b"other"), hashlib.sha256(tar(a=b"asked for")).hexdigest())
        with pytest.raises(FilesRefused, match="does not match their address"):
            await files.bring("acme", address, fresh(tmp_path), None)
        assert list((tmp_path / CACHE).iterdir()) == []


async def test_a_fetch_that_takes_too_long_or_a_disk_that_refuses_is_this_workers_affair(
    nats_url: str, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bucket(nats_url, unique) as store, bringing(nats_url, unique, tmp_path) as files:
        address = await sent(store, tar(a=b"a"))
        with pytest.raises(FilesUnavailable):
            await files.bring("acme", address, str(tmp_path / CACHE / f"acme.{address}" / "x"), None)
        monkeypatch.setattr(job_files, "FETCH_S_MAX", 0.0)
        other = await sent(store, tar(b=b"b"))
        with pytest.raises(FilesUnavailable, match="not fetched within"):
            await files.bring("acme", other, fresh(tmp_path), None)


async def test_an_earlier_agents_half_of_a_download_is_removed(nats_url: str, unique: str, tmp_path: Path) -> None:
    (tmp_path / CACHE).mkdir()
    (tmp_path / CACHE / "acme.0.part").touch()
    async with bringing(nats_url, unique, tmp_path):
        assert list((tmp_path / CACHE).iterdir()) == []


async def test_a_job_finds_its_files_in_its_folder_before_it_starts(nats_url: str, unique: str) -> None:
    user = {"user": OTHER_USER} if os.geteuid() == 0 else {}
    async with (
        bucket(nats_url, unique) as store,
        ScriptedLeader(nats_url, unique) as leader,
        worker(nats_url, unique, leader),
    ):
        address = await sent(store, tar(src_train=b"echo trained; touch made; stat -c %u train"))
        name, plain = name_of(), name_of("plain", fence=11)
        request = placed(name, "", argv=["sh", "train"], cwd="src", files=address, **user)
        other = msgspec.structs.replace(placed(plain, "echo alone; ls"), slots=[1])
        await leader.want("w1", request, other)
        exited = await leader.await_report("w1", "exited", name)
        assert (exited.code, exited.detail) == (0, "exit"), leader.text(name, "err")
        uid = OTHER_USER if user else str(os.geteuid())
        await until(lambda: leader.text(name) == f"trained\n{uid}\n", what="its words")
        await until(lambda: leader.text(plain) == "alone\n", what="the other's words")
        await leader.await_report("w1", "freed", name)
        assert leader.seat("w1").kinds(name) == ["claimed", "started", "exited", "freed"]


async def test_missing_files_fail_the_job_with_the_reason_and_leave_no_folder(nats_url: str, unique: str) -> None:
    async with ScriptedLeader(nats_url, unique) as leader, worker(nats_url, unique, leader) as (_, agent):
        name = name_of()
        await leader.want("w1", placed(name, "true", files="0" * 64))
        exited = await leader.await_report("w1", "exited", name)
        assert exited.code == 126
        assert exited.detail.startswith("start-failed: files: they are not, or no longer, in the tenant's bucket")
        await leader.await_report("w1", "freed", name)
        folders = agent.settings.state_dir / FOLDERS / "w1"
        await until(lambda: list(folders.iterdir()) == [], what="no folder is left")


async def test_a_job_that_is_ended_while_its_files_come_never_starts(
    nats_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moorage.schemas.frames import End

    reached = never_over(monkeypatch, "bring")
    async with ScriptedLeader(nats_url, unique) as leader, worker(nats_url, unique, leader) as (_, agent):
        name = name_of()
        await leader.want("w1", placed(name, "true", files="0" * 64))
        await asyncio.wait_for(reached.wait(), 60)
        await leader.want("w1", End(*name, why="cancelling"))
        exited = await leader.await_report("w1", "exited", name)
        assert (exited.code, exited.detail) == (-15, "end")
        assert "started" not in leader.seat("w1").kinds(name)
        folders = agent.settings.state_dir / FOLDERS / "w1"
        await until(lambda: list(folders.iterdir()) == [], what="no folder is left")


async def test_pieces_are_made_outside_the_loop(nats_url: str, unique: str) -> None:
    threads: set[int] = set()

    def pieces() -> Iterator[bytes]:
        for _ in range(3):
            threads.add(threading.get_ident())
            yield bytes(CHUNK_BYTES)

    async with bucket(nats_url, unique) as store:
        await store.put("x", pieces(), {}, lambda _: None)
    assert threads
    assert threading.get_ident() not in threads


async def test_what_was_damaged_on_the_disk_is_fetched_once_more(nats_url: str, unique: str, tmp_path: Path) -> None:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as archive:
        link, large = tarfile.TarInfo("link"), tarfile.TarInfo("large")
        link.type, link.linkname, large.size = tarfile.SYMTYPE, "large", 100_000
        archive.addfile(link)
        archive.addfile(large, io.BytesIO(bytes(large.size)))
    async with bucket(nats_url, unique) as store, bringing(nats_url, unique, tmp_path) as files:
        address = await sent(store, held.getvalue())
        await files.bring("acme", address, fresh(tmp_path, 1), None)
        for number, size in enumerate((0, 50_000), start=2):
            os.truncate(tmp_path / CACHE / f"acme.{address}", size)
            folder = Path(fresh(tmp_path, number))
            await files.bring("acme", address, str(folder), None)
            assert (folder / "link").read_bytes() == bytes(large.size)


async def test_what_is_fetched_is_on_the_disk_before_it_has_its_name(
    nats_url: str, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[bool, int]] = []

    def fsync(descriptor: int) -> None:
        synced.append((kept.exists(), os.fstat(descriptor).st_size))

    data = tar(a=b"a")
    async with bucket(nats_url, unique) as store, bringing(nats_url, unique, tmp_path) as files:
        kept = tmp_path / CACHE / f"acme.{await sent(store, data)}"
        monkeypatch.setattr(os, "fsync", fsync)
        await files.bring("acme", kept.name.partition(".")[2], fresh(tmp_path), None)
        assert synced == [(False, len(data))]


async def test_another_fetch_may_remove_what_is_looked_at_for_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = JobFiles(None, "moorage", tmp_path, MIB, 1)  # type: ignore[arg-type]
    files.open()
    (tmp_path / CACHE / "acme.a").write_bytes(b"12")
    (tmp_path / CACHE / "acme.gone").symlink_to("none")  # as what goes between the listing and the look at it
    files._make_room(0)
    assert not (tmp_path / CACHE / "acme.a").exists()
