"""The limiter in a worker: real agents, supervisors and jobs, over NVML and CUDA as stubs in C."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import platform
import pwd
import stat
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moorage.schemas.attempt import AttemptName
from moorage.schemas.errors import Refused
from moorage.schemas.frames import Device
from moorage.schemas.gpu import GpuSpec, Share
from moorage.schemas.job import Request, Run
from moorage.system.proctree import read_process
from moorage.worker.attempt.attempt_folders import NoFolder
from moorage.worker.driver import Assignment
from moorage.worker.drivers.container.config import Image, config_of
from moorage.worker.drivers.container.docker import DockerSettings
from moorage.worker.drivers.container.podman import spec_of
from moorage.worker.settings import settings_from
from moorage.worker.sharing import memory_guard
from moorage.worker.sharing.limiter import feeder, segment
from moorage.worker.sharing.limiter import limits as module
from moorage.worker.sharing.limiter.limits import LIBRARY_AT, SEGMENT_AT, Limit, LimiterUnavailable, Limits
from moorage.worker.sharing.limiter.segment import Segment, owner_of
from tests.nvidia.limited import built, uuid_of
from tests.nvidia.stub import libraries
from tests.system.worker.drivers.container_rig import NO_RULES
from tests.system.worker.sharing.test_memory_guard import CONTEXT_MIB, GPU, HOLD, name_of, scene
from tests.unit.worker.sharing.test_feeder import holds
from tests.waiting import until

CHURN = Path(__file__).parents[3] / "nvidia" / "churn.py"
NAME: AttemptName = ("acme", "train", 0, 1, 10)
MIB = 1 << 20
pytestmark = pytest.mark.xdist_group("limiter")


@pytest.fixture(autouse=True)
def own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of /dev/shm, and a library that is none; no user but this one passes either."""
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setattr(module, "MEMORY", memory)
    library = tmp_path / "installed" / "limiter.bin"
    library.parent.mkdir(mode=0o700)
    library.write_bytes(b"a library")
    monkeypatch.setattr(module, "LIBRARY", library)
    return memory


def limits(folder: Path, **more: Any) -> Limits:
    (folder / "state").mkdir(parents=True, exist_ok=True)
    return Limits(settings_from({"state_dir": str(folder / "state"), "limiter": True, **more}), "w1")


def asks(share: Share | None, mode: str = "time-slice", vendor: str = "nvidia") -> tuple[Request, list[Device], str]:
    request = Request(gpu=GpuSpec(sharing="time-slice", share=share), run=Run(argv=["true"]))
    return request, [Device(0, vendor, "H100", uuid_of(0))], mode


HALF = asks(Share(memory_mib=4000, compute_percent=50))


def test_a_job_with_a_share_has_a_segment_of_its_own_and_others_have_none(tmp_path: Path, own_memory: Path) -> None:
    one = limits(tmp_path)
    for part in (asks(None), asks(Share(1), "exclusive"), asks(Share(1), vendor="amd")):
        assert one.of_process(NAME, *part, None) is None
    limit = one.of_process(NAME, *HALF, None)
    assert limit is not None
    found = Segment.adopt(Path(limit.segment))
    assert (found.limit(0), found.rate(0)) == (4000 * MIB, 25_000)
    found.close()
    path = Path(limit.segment)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o711
    one.remove(NAME)
    assert files_in(own_memory) == [], "it goes with the attempt"
    limit = one.of_process(NAME, *asks(Share(memory_mib=4000)), None)
    assert limit is not None
    assert one.segments[NAME].rate(0) == 0, "all of the compute is no part that is to be kept to"
    one.remove(NAME)
    limit = one.of_process(NAME, *asks(Share(4000, 50), "mps"), None)
    assert limit is not None
    found = one.segments[NAME]
    assert (found.limit(0), found.rate(0)) == (4000 * MIB, 0), "the active threads are its part of the compute"
    one.remove(NAME)


def test_a_share_is_changed_in_place(tmp_path: Path) -> None:
    one = limits(tmp_path)
    assert not one.change(NAME, Share(memory_mib=1)), "it is not limited"
    limit = one.of_process(NAME, *HALF, None)
    assert limit is not None
    seen = Segment.adopt(Path(limit.segment))
    for share, rate in ((Share(memory_mib=3000, compute_percent=20), 10_000), (Share(memory_mib=5000), 0)):
        assert one.change(NAME, share)
        assert (seen.limit(0), seen._read(segment._AT_RATE)[0]) == (share.memory_mib * MIB, rate * segment.TOKEN)
    seen.close()
    one.remove(NAME)


def test_only_a_job_whose_processes_all_obey_may_hold_more(tmp_path: Path) -> None:
    one = limits(tmp_path, limiter_context=300 * MIB)
    assert one.spare_mib(NAME, [os.getpid()]) == 0, "it is not limited"
    assert one.of_process(NAME, *HALF, None) is not None
    assert one.spare_mib(NAME, [os.getpid()]) == 0, "it has no slot"
    found = read_process(os.getpid())
    assert found is not None
    holds(one.segments[NAME], 0, owner_of(os.getpid(), found.start_ticks), os.stat("/proc/self/ns/pid").st_ino)
    assert one.spare_mib(NAME, [os.getpid()]) == 300
    assert one.spare_mib(NAME, [os.getpid(), 1]) == 0, "one of them does not obey"
    one.remove(NAME)


def test_what_a_job_preloads_itself_stays_before_the_limiter() -> None:
    limit = Limit("/segment", "/limiter.so")
    for own, of_image, merged in (
        (None, "", "/limiter.so"),
        ("/a.so /b.so", "", "/a.so:/b.so:/limiter.so"),
        ("/a.so:/limiter.so", "/image.so", "/a.so:/limiter.so"),
        (None, "/image.so", "/image.so:/limiter.so"),
    ):
        environment = {} if own is None else {"LD_PRELOAD": own}
        laid = limit.laid_over(environment, of_image)
        assert laid == {"LD_PRELOAD": merged, "MOORAGE_LIMITER": "/segment"}
        assert limit.laid_over(laid, of_image) == laid


def test_where_there_can_be_no_limiter_the_worker_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    with pytest.raises(Refused, match="C library is not glibc"):
        limits(tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(module, "LIBRARY", tmp_path / "nothing.so")
    with pytest.raises(Refused, match=r"there is no .*nothing\.so"):
        limits(tmp_path)


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


NOT_OURS = r"^start-failed: limiter: its segment .* is not the agent's own folder"


def test_a_folder_that_is_another_ones_is_not_used(tmp_path: Path, own_memory: Path) -> None:
    one = limits(tmp_path)
    one._folder.chmod(0o777)
    with pytest.raises(LimiterUnavailable, match=NOT_OURS):
        one.of_process(NAME, *HALF, None)
    one._folder.rmdir()
    one._folder.symlink_to(own_memory)
    with pytest.raises(LimiterUnavailable, match=NOT_OURS):
        one.of_process(NAME, *HALF, None)


def test_no_other_user_can_take_or_guess_its_names(tmp_path: Path, own_memory: Path) -> None:
    one, other = limits(tmp_path / "a"), limits(tmp_path / "b")
    assert one._folder != other._folder
    assert one._path(NAME).name != other._path(NAME).name
    assert one._folder.stat().st_mode & 0o777 == 0o711, "nobody else can list it"
    assert (tmp_path / "a" / "state" / module.SECRET_NAME).stat().st_mode & 0o777 == 0o600
    again = limits(tmp_path / "a")
    assert (again._folder, again._path(NAME)) == (one._folder, one._path(NAME)), "the next agent finds its own"
    one.close()
    one._folder.mkdir(mode=0o777)  # another user has seen the name, and took it while no agent ran
    one._folder.chmod(0o777)
    after = limits(tmp_path / "a")
    assert after._folder != one._folder
    assert after.of_process(NAME, *HALF, None) is not None
    after.remove(NAME)


def test_shared_memory_without_room_keeps_no_file(
    tmp_path: Path, own_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(LimiterUnavailable, match="no space left"):
        limits(tmp_path).of_process(NAME, *HALF, None)
    assert not [path for path in own_memory.rglob("*") if path.is_file()]


def test_the_next_agent_goes_on_with_what_lives(tmp_path: Path, own_memory: Path) -> None:
    one = limits(tmp_path)
    other: AttemptName = ("acme", "other", 0, 1, 10)
    for name in (NAME, other):
        assert one.of_process(name, *HALF, None) is not None
    one.segments[NAME].refill(0, 100, 1000)
    one.close()
    (one._folder / "other-driver.of-it").touch()
    again = limits(tmp_path)
    again.begin([NAME, ("acme", "never-limited", 0, 1, 10)])
    assert len(list(again._folder.iterdir())) == 2, "its own, and that of another driver"
    (one._folder / "other-driver.of-it").unlink()
    assert again.segments[NAME].refill(0, 100, 1000) == 200
    assert again.segments[NAME].uuids == [uuid_of(0)]
    again.remove(NAME)
    assert files_in(own_memory) == []
    again.close()
    assert list(own_memory.iterdir()) == []


def test_a_segment_that_its_job_cut_short_costs_that_job_alone(
    tmp_path: Path, own_memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = limits(tmp_path)
    names: list[AttemptName] = [("acme", job, 0, 1, 10) for job in ("cut", "second", "third")]
    for name in names:
        assert one.of_process(name, *HALF, None) is not None
    os.truncate(one.segments[names[0]].path, 10)
    one.close()
    again = limits(tmp_path)
    again.begin(names)
    assert list(again.segments) == names[1:]
    assert "job cut: the limiter cannot use the segment of an earlier agent" in caplog.text
    for name in names:
        again.remove(name)
    limits(tmp_path).begin([])
    assert files_in(own_memory) == [], "the next agent removes the one that was cut"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has jobs of other users")
def test_another_user_reaches_its_segment_and_the_library(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o755)
    one = limits(tmp_path)
    (tmp_path / "state").chmod(0o700)
    parents = [each for each in tmp_path.parents if not each.stat().st_mode & stat.S_IXOTH]
    if parents:
        with pytest.raises(NoFolder, match="lets no other user enter"):
            one.of_process(NAME, *HALF, "nobody")
        one.segments[NAME].close()
        for each in parents:
            assert each.stat().st_uid == 0
        return
    limit = one.of_process(NAME, *HALF, "nobody")
    assert limit is not None
    assert Path(limit.library).read_bytes() == b"a library"
    assert Path(limit.library) != module.LIBRARY
    assert all(each.stat().st_mode & stat.S_IXOTH for each in Path(limit.library).parents)
    assert os.stat(limit.segment).st_uid == pwd.getpwnam("nobody").pw_uid
    one.remove(NAME)


def test_a_container_has_its_segment_and_the_library_mounted(tmp_path: Path) -> None:
    one = limits(tmp_path)
    request, given, mode = HALF
    request = msgspec.structs.replace(request, run=Run(argv=["x"], driver="docker", image="a", env={}))
    asked = Assignment(NAME, request, given, mode)
    limit = one.of_container(NAME, *asked.part)
    assert limit is not None
    image = Image.of({"Config": {"Env": ["PATH=/bin", "LD_PRELOAD=/image.so"]}})
    config = config_of(asked, DockerSettings(), NO_RULES, None, image, labels={}, log_bytes=1 << 20, limit=limit)
    assert f"LD_PRELOAD=/image.so:{LIBRARY_AT}" in config["Env"]
    assert f"MOORAGE_LIMITER={SEGMENT_AT}" in config["Env"]
    path = one.segments[NAME].path
    assert spec_of(config, "c", ())["mounts"] == [
        {"type": "bind", "source": str(module.LIBRARY), "destination": LIBRARY_AT, "options": ["rbind", "ro"]},
        {"type": "bind", "source": str(path), "destination": SEGMENT_AT, "options": ["rbind", "U"]},
    ]
    if os.geteuid() == 0:
        one.give(NAME, (65534, 65533))
        assert (path.stat().st_uid, path.stat().st_gid, stat.S_IMODE(path.stat().st_mode)) == (65534, 65533, 0o600)
    one.give(NAME, None, all_users=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666, "a rootless engine numbers users anew"
    one.remove(NAME)


@pytest.mark.slow
async def test_a_job_gets_no_more_than_its_share_and_its_guard_is_not_called(
    nats_url: str, unique: str, tmp_path: Path, own_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LIBRARY", built() / "limiter.bin")
    more = {"limiter": True, "limiter_context": CONTEXT_MIB * MIB, "guard_grace_s": 0.0}
    async with scene(nats_url, unique, tmp_path, **more) as one:
        await one.hold("fits", 4000 - CONTEXT_MIB, 4000)
        argv = [sys.executable, HOLD, "hold", str(tmp_path / "greedy"), str(4000 - CONTEXT_MIB + 1)]
        await one.run("greedy", argv, {"sharing": "time-slice", "share": {"memory_mib": 4000}})
        exited = await one.leader.await_report("w1", "exited", name_of("greedy"))
        assert (exited.code, exited.detail) == (1, "exit"), "the allocation failed, and the job was not ended"
        await one.leader.await_report("w1", "freed", name_of("greedy"))
        assert not (tmp_path / "greedy").exists()
        assert one.agent.attempts.held[name_of("fits")].phase == "running"
        [path] = next(own_memory.iterdir()).iterdir()
        found = Segment.adopt(path)
        assert found.used(0) == (4000 - CONTEXT_MIB) * MIB, "the neighbour's memory is counted"
        [slot] = found.slots()
        at = segment._AT_TOLD + slot.number * segment._TOLD_BYTES
        told = (slot.owner, CONTEXT_MIB * MIB)
        await until(lambda: found._read(at, 2) == told, what="and its context is measured")
        beat = found._read(segment._AT_HEARTBEAT)[0]
        await until(lambda: found._read(segment._AT_HEARTBEAT)[0] > beat, what="a heartbeat")
        found.close()


@pytest.mark.long
@pytest.mark.slow
async def test_a_job_that_obeys_is_never_ended_however_it_takes_its_memory(
    nats_url: str, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ten thousand times: memory, pools that keep it, graphs and modules, up to what its part has room for."""
    monkeypatch.setattr(module, "LIBRARY", built() / "limiter.bin")
    for each in (memory_guard, feeder):
        monkeypatch.setattr(each, "LOOK_S", 0.1)
    part_mib = 3000
    async with scene(nats_url, unique, tmp_path, limiter=True, guard_grace_s=0.0) as one:
        argv = [sys.executable, str(CHURN), str(tmp_path / "churned"), "10000", str(part_mib)]
        await one.run("churns", argv, {"sharing": "time-slice", "share": {"memory_mib": part_mib}})
        exited = await one.leader.await_report("w1", "exited", name_of("churns"), deadline_s=540)
        assert (exited.code, exited.detail) == (0, "exit")
        came = json.loads((tmp_path / "churned").read_text())
        assert came["most"] <= part_mib, "it never held more than its part, by the driver's own count"
        assert came["refused"] > 500
        assert came["full"] > 500, "it often held nearly all of it"
        assert "over-grant" not in caplog.text


@pytest.mark.slow
async def test_a_job_that_clears_ld_preload_is_ended(
    nats_url: str, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How soon is the guard's own test, in virtual time."""
    monkeypatch.setattr(module, "LIBRARY", built() / "limiter.bin")
    async with scene(nats_url, unique, tmp_path, limiter=True) as one:
        await one.begin("clears", 4000, 3000, "/usr/bin/env", "-u", "LD_PRELOAD")
        exited = await one.leader.await_report("w1", "exited", name_of("clears"))
        assert exited.detail == f"over-memory: it holds {4000 + CONTEXT_MIB} MiB of GPU 0, 3000 are granted"


@pytest.mark.slow
async def test_a_job_that_launches_without_end_comes_to_rest_at_its_share(
    nats_url: str, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By the stub's own count. Without an agent the job is not throttled; under the next one it is again."""
    monkeypatch.setattr(module, "LIBRARY", built() / "limiter.bin")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(libraries()))
    more = {"limiter": True, "limiter_context": CONTEXT_MIB * MIB, "guard": False, "extra": ("kernel us=2000",)}
    async with scene(nats_url, unique, tmp_path, **more) as one:

        async def used(seconds: float = 2.0) -> float:
            began_s, before = time.monotonic(), one.stub.busy_us(GPU)
            await asyncio.sleep(seconds)
            return (one.stub.busy_us(GPU) - before) / 1e6 / (time.monotonic() - began_s)

        async def comes_to(low: float, high: float, what: str) -> None:
            seen: list[float] = []
            async with asyncio.timeout(90):
                while not low <= sum(seen[-2:]) / 2 <= high or len(seen) < 2:
                    seen.append(await used())
            assert seen, what

        argv = [sys.executable, HOLD, "launch", str(tmp_path / "launches")]
        share = {"memory_mib": 4000, "compute_percent": 30}
        await one.run("launches", argv, {"sharing": "time-slice", "share": share})
        await until(lambda: (tmp_path / "launches").exists(), what="the job has begun")
        await comes_to(0.22, 0.38, "it has its share")
        await one.running.stop()
        await comes_to(0.5, 1.1, "without an agent it goes on unthrottled")
        await one.start()
        await until(lambda: "launches were not throttled" in caplog.text, what="the log says how many")
        await comes_to(0.22, 0.38, "it has its share again")
