"""The controller's process: what it gives to segments by what NVML says, and when it begins, ends and begins again."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from moorage.schemas.errors import Refused
from moorage.system.proctree import read_process
from moorage.worker.settings import settings_from
from moorage.worker.sharing.limiter import __main__ as process
from moorage.worker.sharing.limiter import control as module
from moorage.worker.sharing.limiter import keeper, segment
from moorage.worker.sharing.limiter.control import RATE, Control
from moorage.worker.sharing.limiter.controller import ControllerSettings
from moorage.worker.sharing.limiter.keeper import ControllerProcess
from moorage.worker.sharing.limiter.meter import HELD_S, RETRY_S, Meter, Unmeasured
from moorage.worker.sharing.limiter.owners import Owners
from moorage.worker.sharing.limiter.segment import TOKEN, Part, Segment, owner_of
from tests.waiting import until

GPU = "GPU-11111111-1111-1111-1111-111111111111"
OTHER = "GPU-22222222-2222-2222-2222-222222222222"
STEP_S = 0.1


class Used:
    """What tells what processes use, in the place of NVML; text is why it cannot."""

    def __init__(self) -> None:
        self.of: dict[str, dict[int, float] | str] = {}

    def used(self, uuid: str, now_s: float) -> dict[int, float]:
        found = self.of.get(uuid, {})
        if isinstance(found, str):
            raise Unmeasured(found)
        return found


class Scene:
    """A controller's process that is none: its steps are at times of the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "segments"
        self.folder.mkdir()
        self.used, self.owners, self.said = Used(), Owners(), list[str]()
        self.now_s = 1000.0
        self.control = Control(self.folder, ControllerSettings(), self.used, self.owners, self.said.append)

    def attempt(self, name: str, *parts: Part) -> Segment:
        return Segment.create(self.folder / name, parts)

    def step(self, passed_s: float = STEP_S) -> None:
        self.now_s += passed_s
        self.control.step(self.now_s)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def holds(one: Segment, number: int, owner: int, pid_ns: int, used: int = 0) -> None:
    """Have a slot of a segment be a process's, as the limiter does."""
    place = segment._AT_SLOTS + number * segment._SLOT_BYTES
    for at, value in ((0, owner), (8, pid_ns), (segment._LINE + 8, used)):
        one._write(place + at, value)
    one._write(segment._AT_COUNTS + 8, max(one.counts().high, number + 1))


def own_ticks() -> int:
    found = read_process(os.getpid())
    assert found is not None
    return found.start_ticks


def here() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def takes(one: Segment, device: int, tokens: float) -> float:
    """Have launches take so many tokens, as far as they are there; returns how many."""
    left = one.refill(device, 0, 0)
    taken = max(0.0, min(tokens, left))
    one._write(segment._AT_BUCKETS + device * segment._LINE, one.taken(device) + round(taken * TOKEN))
    return taken


# -------------------------------------------------------------------------------------------------------- its steps


@pytest.mark.parametrize("percent", [10, 30, 70])
def test_a_job_that_always_has_work_comes_to_rest_at_its_part(scene: Scene, percent: int) -> None:
    """A device does 4,000 tokens of work a second; the job is one of two processes, and a neighbour counts for none."""
    busiest = 4000 * STEP_S
    one = scene.attempt("one", Part(GPU, rate=RATE * percent / 100))
    holds(one, 0, owner_of(os.getpid(), own_ticks()), here())
    used: list[float] = []
    for _ in range(600):
        one._granted[0] = one._read(segment._AT_GRANTED)[0]
        used.append(takes(one, 0, busiest) / busiest)
        scene.used.of[GPU] = {os.getpid(): used[-1], 1: 1.0 - used[-1]}
        scene.step()
    assert sum(used[-300:]) / 300 == pytest.approx(percent / 100, abs=0.05)
    one.close()


def test_a_share_that_is_changed_holds_from_the_next_step(scene: Scene) -> None:
    one = scene.attempt("one", Part(GPU, rate=RATE * 0.7))
    scene.step()
    scene.step()
    [attempt] = scene.control._attempts.values()
    assert attempt.controllers[0].target == pytest.approx(0.7)
    one.set_rate(0, RATE * 0.2)
    scene.step()
    assert attempt.controllers[0].target == pytest.approx(0.2)
    one.set_rate(0, 0)
    scene.step()
    assert not attempt.controllers, "it has all of it"
    one.close()


def test_fact_59_the_heartbeat_is_of_each_step_and_of_every_attempt(scene: Scene) -> None:
    made = [scene.attempt(str(number), Part(GPU)) for number in range(3)]
    before_ns = time.monotonic_ns()
    scene.step()
    assert all(before_ns <= one._read(segment._AT_HEARTBEAT)[0] <= time.monotonic_ns() for one in made)
    for one in made:
        one.close()


def test_where_nvml_tells_nothing_tokens_come_at_a_constant_rate_and_it_is_said_once(scene: Scene) -> None:
    one = scene.attempt("one", Part(GPU, rate=1000), Part(OTHER, rate=3))
    scene.used.of[GPU] = scene.used.of[OTHER] = "Not Supported"
    for _ in range(30):
        scene.step()
    found = Segment.adopt(one.path)
    assert found.refill(0, 0, 0) == pytest.approx(2000), "room for two seconds"
    assert found.refill(1, 0, 0) == pytest.approx(29 * STEP_S * 3), "less than the dearest launch"
    assert len(scene.said) == 2
    assert "device 11111111-1111-1111-1111-111111111111: Not Supported" in scene.said[0] + scene.said[1]
    assert "GPU-" not in scene.said[0] + scene.said[1], "it may be a MIG slice"
    for uuid in (GPU, OTHER):
        scene.used.of[uuid] = {}
    scene.step()
    assert sum("is known again" in line for line in scene.said) == 2
    [attempt] = scene.control._attempts.values()
    assert set(attempt.controllers) == {0, 1}
    found.close()
    one.close()


def test_a_job_whose_processes_cannot_be_told_has_a_constant_rate(scene: Scene) -> None:
    """Of another PID namespace, and not found here: they seem to use nothing, and would get all of the GPU."""
    one = scene.attempt("one", Part(GPU, rate=1000))
    holds(one, 0, owner_of(7, 1), 4)
    scene.owners.sees_all_pids = False
    for _ in range(3):
        scene.step()
    found = Segment.adopt(one.path)
    assert found.refill(0, 0, 0) == pytest.approx(200)
    found.close()
    one.close()


def test_what_cannot_be_read_costs_its_own_attempt_alone(scene: Scene) -> None:
    (scene.folder / "broken").write_bytes(b"x")
    one = scene.attempt("one", Part(GPU))
    for _ in range(30):
        scene.step()
    assert len(scene.said) == 1
    assert "broken is cut short" in scene.said[0]
    assert one._read(segment._AT_HEARTBEAT)[0]
    one.path.unlink()
    scene.step()
    assert not scene.control._attempts, "it goes with its file"
    one.close()


@pytest.mark.parametrize("is_measured", [True, False])
def test_what_a_job_writes_into_its_segment_costs_it_alone(scene: Scene, is_measured: bool) -> None:
    forged = scene.attempt("forged", Part(GPU, rate=1000))
    one = scene.attempt("one", Part(GPU, rate=1000))
    for at in range(segment._AT_HEARTBEAT, segment._AT_UUID, 8):
        forged._write(at, 2**64 - 1)
    forged._write(segment._AT_COUNTS + 8, 2**64 - 1)
    forged._write(segment._AT_BUCKETS, 2**64 - 1)
    if not is_measured:
        scene.used.of[GPU] = "Not Supported"
    for _ in range(200):
        scene.step()
    assert one._read(segment._AT_HEARTBEAT)[0]
    assert one._read(segment._AT_GRANTED)[0], "its neighbour has its tokens"
    forged.close()
    one.close()


def test_without_a_free_descriptor_it_goes_on_with_the_segments_that_it_has(scene: Scene, tmp_path: Path) -> None:
    one = scene.attempt("one", Part(GPU))
    scene.step()
    one.beat(1)
    token = tmp_path / "token"
    token.write_text("own")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
    try:
        scene.step()
        has_token = process._is_ours(token, "own")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert has_token
    assert one._read(segment._AT_HEARTBEAT)[0] > 1
    token.unlink()
    assert not process._is_ours(token, "own")
    one.close()


def test_a_folder_of_another_user_is_left_alone(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    one = scene.attempt("one", Part(GPU))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    scene.step()
    assert not one._read(segment._AT_HEARTBEAT)[0]
    one.close()


def test_what_dead_processes_held_is_given_back(scene: Scene) -> None:
    one = scene.attempt("one", Part(GPU))
    own, ticks = os.getpid(), own_ticks()
    scene.owners.sees_all_pids = True
    # a process of this namespace, one of its number that is over, one of another namespace that is found by its number
    # there, and one that is not
    mine, before = owner_of(own, ticks), owner_of(own, ticks - 1)
    for number, (owner, namespace) in enumerate(((mine, here()), (before, here()), (mine, 4), (owner_of(7, 1), 4))):
        holds(one, number, owner, namespace, 100 + number)
    assert one.used(0) == 406
    scene.step()
    scene.step(2.0)
    assert [slot.number for slot in one.slots()] == [0, 2]
    assert one.used(0) == 202
    assert scene.control.lived_s == scene.now_s
    assert [scene.owners.pid_of(slot) for slot in one.slots()] == [own, own]
    one.path.unlink()
    scene.step(2.0)
    assert not scene.owners._hosts, "nothing is kept of an attempt that is over"
    one.close()


# -------------------------------------------------------------------------------------------------- what NVML says


class Nvml:
    """NVML as pynvml shows it, with the samples that a test gives."""

    NVMLError = pynvml.NVMLError
    NVML_SUCCESS = pynvml.NVML_SUCCESS
    NVML_ERROR_NOT_FOUND = pynvml.NVML_ERROR_NOT_FOUND

    def __init__(self) -> None:
        self.empty = pynvml.NVML_ERROR_NOT_FOUND
        self.samples: list[Any] = []
        self.asked: list[int] = []
        self.error: Exception | None = None

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetProcessUtilization(self, handle: str, seen_us: int) -> list[Any]:
        self.asked.append(seen_us)
        if self.error is not None:
            raise self.error
        if not self.samples:
            raise pynvml.NVMLError(self.empty)
        return self.samples


def sample(pid: int, taken_us: int, sm: int, encoder: int = 0, decoder: int = 0) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, timeStamp=taken_us, smUtil=sm, encUtil=encoder, decUtil=decoder)


def test_the_newest_samples_count_and_no_process_has_more_than_all_of_a_gpu() -> None:
    api = Nvml()
    meter = Meter(api, sees_all_pids=True)
    late_us = time.time_ns() // 1000
    api.samples = [
        sample(5, late_us - 2, 90),
        sample(5, late_us, 20, 30, 5),
        sample(6, late_us, 4_000_000, 50),
        sample(7, 1, 9),
    ]
    assert meter.used(GPU, 1.0) == {5: 0.3, 6: 1.0}
    assert meter.used(GPU, 1.1) == {5: 0.3, 6: 1.0}, "no newer ones: they hold"
    assert api.asked[1] == late_us
    api.samples = []
    assert meter.used(GPU, 1.0 + HELD_S) == {5: 0.3, 6: 1.0}
    assert meter.used(GPU, 1.01 + HELD_S) == {}, "and no longer than a driver takes for the next"


def test_a_gpu_that_does_not_tell_is_asked_again_later() -> None:
    api = Nvml()
    meter = Meter(api, sees_all_pids=True)
    api.error = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    for now_s in (1.0, 1.1, 0.9 + RETRY_S):
        with pytest.raises(Unmeasured, match="Not Supported"):
            meter.used(GPU, now_s)
    assert len(api.asked) == 1
    api.error = None
    assert meter.used(GPU, 1.0 + RETRY_S) == {}


def test_numbers_of_another_pid_namespace_are_not_taken_for_processes_of_this_one() -> None:
    api = Nvml()
    late_us = time.time_ns() // 1000
    api.samples = [sample(2**22, late_us, 50)]  # beyond the greatest pid that there can be
    with pytest.raises(Unmeasured, match="not in the worker's PID namespace"):
        Meter(api, sees_all_pids=False).used(GPU, 1.0)
    assert Meter(api, sees_all_pids=True).used(GPU, 1.0) == {2**22: 0.5}


@pytest.mark.parametrize("empty", [pynvml.NVML_SUCCESS, pynvml.NVML_ERROR_NOT_FOUND])
def test_a_gpu_without_samples_is_idle_whatever_the_bindings_raise_for_that(empty: int) -> None:
    api = Nvml()
    api.empty = empty
    meter = Meter(api, sees_all_pids=True)
    assert meter.used(GPU, 1.0) == {}
    api.samples = [sample(5, time.time_ns() // 1000, 50)]
    assert meter.used(GPU, 1.1) == {5: 0.5}, "and it is asked again at once"


def test_samples_that_no_driver_took_change_nothing() -> None:
    api = Nvml()
    meter = Meter(api, sees_all_pids=False)
    mine = os.getpid()
    api.samples = [
        sample(mine, 1 << 62, 100),
        sample(mine, time.time_ns() // 1000, 50),
        sample(1 << 31, time.time_ns() // 1000, 100),
        sample(0, time.time_ns() // 1000, 100),
    ]
    assert meter.used(GPU, 1.0) == {mine: 0.5}
    api.samples = [sample(mine, time.time_ns() // 1000, 70)]
    assert meter.used(GPU, 1.1) == {mine: 0.7}, "what came after one from the future counts"


def test_after_the_clock_was_set_back_new_samples_count(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Nvml()
    meter = Meter(api, sees_all_pids=True)
    now_ns = time.time_ns()
    api.samples = [sample(5, now_ns // 1000, 50)]
    assert meter.used(GPU, 1.0) == {5: 0.5}
    hour_ns = 3600 * 10**9
    monkeypatch.setattr(time, "time_ns", lambda: now_ns - hour_ns)
    assert meter.used(GPU, 1.1) == {5: 0.5}
    monkeypatch.setattr(time, "time_ns", lambda: now_ns - hour_ns + 10**8)
    api.samples = [sample(5, (now_ns - hour_ns) // 1000 + 10**5, 80)]
    assert meter.used(GPU, 1.2) == {5: 0.8}


# ----------------------------------------------------------------------------------------------------- the process


def test_it_goes_on_without_an_agent_while_a_process_lives_and_no_longer(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "LINGER_S", 0.2)
    monkeypatch.setattr(module, "LOOK_S", 0.0)
    monkeypatch.setattr(process, "STEP_S", 0.01)
    agent, holder = os.pipe()
    one = scene.attempt("one", Part(GPU))
    holds(one, 0, owner_of(os.getpid(), own_ticks()), here())
    steps: list[float] = []
    step = scene.control.step

    def counted(now_s: float) -> None:
        steps.append(now_s)
        assert now_s < steps[0] + 30, "it goes on, though nothing lives"
        if len(steps) == 3:
            os.close(holder)
        step(now_s)
        if now_s > steps[0] + 0.8:
            one.path.unlink(missing_ok=True)

    monkeypatch.setattr(scene.control, "step", counted)
    process.serve(scene.control, tmp_path / "token", agent)
    os.close(agent)
    assert steps[-1] - steps[0] > 0.8, "a process of an attempt lived"
    one.close()


def test_the_newest_one_has_the_segments(scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent, holder = os.pipe()
    token = tmp_path / "token"
    steps: list[float] = []

    def step(now_s: float) -> None:
        assert not steps, "it goes on, though another one has the segments"
        steps.append(now_s)
        token.write_text("another one")

    monkeypatch.setattr(scene.control, "step", step)
    process.serve(scene.control, token, agent)
    assert token.read_text() == "another one"
    os.close(agent)
    os.close(holder)


def kept(folder: Path, program: str) -> ControllerProcess:
    made = ControllerProcess(settings_from({"state_dir": str(folder), "limiter": True}))
    made._command = [sys.executable, "-c", program]
    return made


async def test_one_that_ends_is_started_again_and_the_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(keeper, "PAUSE_S", 0.01)
    one = kept(tmp_path, "import sys; print(); print('a word', flush=True); sys.exit(3)")
    one.open()
    await until(lambda: caplog.text.count("the limiter's controller ended (exit status 3)") == 2, what="two ends")
    assert "started again in 0.01 s" in caplog.text
    assert "started again in 0.02 s" in caplog.text
    assert "the limiter: a word" in caplog.text
    await one.close()
    assert not one.pid


async def test_one_whose_output_cannot_be_read_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started: list[int] = []
    spawned = keeper._spawned

    def noted(command: list[str]) -> tuple[int, int, int]:
        found = spawned(command)
        started.append(found[0])
        return found

    async def fails(*_: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(keeper, "PAUSE_S", 60.0)
    monkeypatch.setattr(keeper, "_spawned", noted)
    monkeypatch.setattr(asyncio.get_running_loop(), "connect_read_pipe", fails)
    one = kept(tmp_path, "import time; time.sleep(600)")
    one.open()
    await until(lambda: "ended ([Errno 12] Cannot allocate memory)" in caplog.text, what="the log says so")
    left = [read_process(pid) for pid in started]
    await one.close()
    assert left == [None]


async def test_one_that_gives_no_sign_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(keeper, "SILENT_S", 0.05)
    one = kept(tmp_path, "import time; time.sleep(600)")
    one.open()
    await until(lambda: "it gave no sign for 0.05 s" in caplog.text, what="the log says so")
    await one.close()
    assert not one.pid


@pytest.mark.parametrize("has_attempts", [True, False])
async def test_an_agent_that_goes_leaves_it_to_attempts_that_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_attempts: bool
) -> None:
    monkeypatch.setattr(keeper, "folder_of", lambda state: tmp_path / "segments")
    (tmp_path / "segments").mkdir()
    if has_attempts:
        (tmp_path / "segments" / "one").touch()
    one = kept(tmp_path, "import sys; sys.stdin.read()")  # it ends when the agent has gone
    one.open()
    await until(lambda: one.pid, what="it runs")
    pid = one.pid
    await one.close()
    assert one.pid == (pid if has_attempts else 0)
    if has_attempts:
        async with asyncio.timeout(30):
            assert await asyncio.to_thread(os.waitpid, pid, 0) == (pid, 0), "it was not killed, and knows"


def test_the_ten_parameters_are_settings_of_the_worker(tmp_path: Path) -> None:
    made = settings_from({"state_dir": str(tmp_path)})
    assert made.controller == ControllerSettings()
    names = ControllerSettings.__struct_fields__
    given = {f"limiter_{name}": float(number + 1) / 16 for number, name in enumerate(names)}
    assert settings_from({"state_dir": str(tmp_path), **given}).controller == ControllerSettings(
        *[given[f"limiter_{name}"] for name in names]
    )
    with pytest.raises(Refused, match="limiter_rate_min must be above 0 and below limiter_rate_max"):
        settings_from({"state_dir": str(tmp_path), "limiter_rate_min": 5.0, "limiter_rate_max": 5.0})
