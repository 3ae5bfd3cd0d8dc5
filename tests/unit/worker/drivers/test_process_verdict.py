"""What a start that failed says to whoever reads the job's history: which step of it, and what to look at."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest

from moorage.schemas.errors import Refused
from moorage.schemas.frames import Device
from moorage.schemas.gpu import GpuSpec
from moorage.schemas.job import Request, Run
from moorage.system.descriptors import trouble_with_descriptors
from moorage.worker.attempt.attempt_folders import AttemptFolders
from moorage.worker.driver import CODE_LOST, Assignment
from moorage.worker.drivers.container.verdict import verdict
from moorage.worker.drivers.process.driver import ProcessDriver, _verdict
from moorage.worker.drivers.supervisor_link import Listener, SupervisorLink, owner_of
from moorage.worker.session.attempt_messages import NotStarted
from moorage.worker.settings import WorkerSettings
from moorage.worker.supervisor.protocol import Ended, Event, MemoryAtEnd
from tests.unit.worker.drivers.process_kit import kit_of


@pytest.mark.parametrize(
    ("stage", "number", "said", "code", "words"),
    [
        ("exec", errno.ENOENT, "no program x in PATH /bin", 127, "no program x in PATH /bin"),
        ("cwd", errno.ENOENT, "no folder /x", 126, "no folder /x"),
        ("user", errno.EINVAL, "no such user: x", 126, "user: no such user: x"),
    ],
)
def test_a_start_that_failed_says_what_its_supervisor_says_and_at_least_the_step(
    stage: str, number: int, said: str, code: int, words: str
) -> None:
    ended = Ended(
        key="a/b/0/1/2",
        reason="start-failed",
        proof="never-ran",
        errno=number,
        stage=stage,
        message=said or os.strerror(number),
    )
    assert _verdict(ended) == (code, f"start-failed: {words}")


def test_a_start_whose_launcher_died_is_lost_as_it_may_have_run() -> None:
    ended = Ended(key="a/b/0/1/2", reason="start-failed", proof="cgroup", errno=errno.ECHILD, stage="launcher")
    assert _verdict(ended) == (-9, "lost")


GIB = 1 << 30


@pytest.mark.parametrize(
    ("memory", "says"),
    [
        (MemoryAtEnd(oom_kills=1, at_limit=True, peak_bytes=32 * GIB - 100 * 1024**2, max_bytes=32 * GIB),
         "out of memory: 31.9 of 32.0 GiB, it was killed by the kernel; fix: --memory 48Gi"),
        (MemoryAtEnd(oom_kills=1, at_limit=True, max_bytes=1 * GIB),
         "out of memory: its limit is 1.0 GiB, it was killed by the kernel; fix: --memory 2Gi"),
        (MemoryAtEnd(oom_kills=2, peak_bytes=3 * GIB),
         "out of memory: it was killed by the kernel, as its host had none left, and it held 3.0 GiB; "
         "fix: say --memory"),
        (MemoryAtEnd(oom_kills=1),
         "out of memory: it was killed by the kernel, as its host had none left; fix: say --memory"),
        (MemoryAtEnd(peak_bytes=GIB), "exit"),
        (None, "exit"),
    ],
)  # fmt: skip
def test_a_process_that_the_kernel_killed_for_its_memory_says_so(memory: MemoryAtEnd | None, says: str) -> None:
    """It read as any SIGKILL: it ended by itself, by signal 9."""
    ended = Ended(key="a/b/0/1/2", reason="exit", proof="cgroup", signal=9, memory=memory)
    assert _verdict(ended) == (-9, says)
    shell = Ended(key="a/b/0/1/2", reason="exit", proof="cgroup", exit_code=137, memory=memory)
    assert _verdict(shell) == (137, says.replace("it was", "a process of it was"))
    well = Ended(key="a/b/0/1/2", reason="exit", proof="cgroup", exit_code=0, memory=memory)
    assert _verdict(well) == (0, "exit"), "a process of it was killed, and it made do without"
    asked = Ended(key="a/b/0/1/2", reason="timeout", proof="cgroup", signal=9, memory=memory)
    assert _verdict(asked) == (-9, "timeout")


@pytest.mark.parametrize(("why", "reason"), [("cancelled", "end"), ("fence", "fence")])
def test_an_end_that_no_leader_has_asked_for_says_so(why: str, reason: str) -> None:
    ended = Ended(key="a/b/0/1/2", reason="end", proof="cgroup", signal=15, why=why)
    assert _verdict(ended) == (-15, reason)
    assert verdict(ended, None) == (CODE_LOST, reason)


class Remembering(SupervisorLink):
    """The link to a supervisor that has ended one attempt while no agent was connected."""

    def __init__(self, state: Path, ended: Ended) -> None:
        super().__init__(state)
        self._ended = ended

    async def open(self, worker: str, listener: Listener) -> list[tuple[str, str, Event | None]]:
        return [(self._ended.key, "ended", self._ended)]


@pytest.mark.parametrize(
    ("stage", "number", "phase"),
    [
        ("journal", errno.ENOSPC, "refused"),
        ("cgroup", errno.EMFILE, "refused"),
        ("clone", errno.EAGAIN, "refused"),
        ("request", errno.EAGAIN, "refused"),
        ("request", errno.EMFILE, "refused"),
        ("request", errno.ENFILE, "refused"),
        ("request", errno.ENOMEM, "refused"),
        ("exec", errno.ENFILE, "refused"),
        ("request", errno.EINVAL, "exited"),
        ("exec", errno.ENOMEM, "exited"),
        ("exec", errno.ENOENT, "refused"),
        ("user", errno.EINVAL, "refused"),
        ("cwd", errno.ENOENT, "refused"),
    ],
)
async def test_an_agent_that_starts_anew_knows_what_its_host_could_not_start(
    tmp_path: Path, stage: str, number: int, phase: str
) -> None:
    ended = Ended(key="a/b/0/1/2", reason="start-failed", proof="never-ran", errno=number, stage=stage)
    (living,) = await ProcessDriver(kit_of(Remembering(tmp_path, ended))).open()
    assert (living.name, living.phase) == (("a", "b", 0, 1, 2), phase)


def mps_request(folder: Path) -> Request:
    gpu = GpuSpec(sharing="mps", mps_pipe_dir=str(folder / "pipe"), mps_log_dir=str(folder / "log"))
    return Request(gpu=gpu, run=Run(argv=["true"]))


def test_a_host_without_what_a_sharing_mode_needs_refuses_the_placement(tmp_path: Path) -> None:
    driver, request = ProcessDriver(kit_of(SupervisorLink(tmp_path))), mps_request(tmp_path)
    with pytest.raises(Refused) as refused:
        driver.check(request)
    assert refused.value.problem.fault == "fleet"  # so the job goes elsewhere, and is not at fault
    assert f"mps is unavailable on {os.uname().nodename}: the directory {tmp_path}/pipe" in str(refused.value)
    (tmp_path / "pipe").mkdir()
    (tmp_path / "log").mkdir()
    driver.check(request)
    ProcessDriver(kit_of(SupervisorLink(tmp_path), simulated=True)).check(mps_request(tmp_path / "none"))


def test_a_start_that_finds_it_gone_since_is_this_hosts_fault(tmp_path: Path) -> None:
    driver, told = ProcessDriver(kit_of(SupervisorLink(tmp_path))), list[object]()
    driver.attach(told.append, lambda *_: None)
    device = Device(0, "nvidia", "NVIDIA H100", "GPU-0", 81559)
    driver.start([Assignment(("a", "b", 0, 1, 2), mps_request(tmp_path), [device], "mps")])
    (report,) = told
    assert isinstance(report, NotStarted)
    assert report.items[0][1].startswith("start-failed: mps is unavailable on ")


def test_a_limit_of_open_files_below_what_the_slots_need_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 400))
    assert not trouble_with_descriptors(64, ("exclusive",), {})
    trouble = trouble_with_descriptors(64, ("exclusive", "time-slice"), {"time-slice": 2})
    assert "the limit of open files is 400; the 128 jobs that 64 GPUs may get need 640" in trouble
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, resource.RLIM_INFINITY))
    assert not trouble_with_descriptors(64, ("exclusive", "mps"), {})


async def test_a_failed_start_of_a_job_that_keeps_files_is_still_its_hosts_fault(tmp_path: Path) -> None:
    name = ("a", "b", 0, 1, 2)
    folders = AttemptFolders(WorkerSettings(tmp_path), owner_of("w1", "process"))
    folders.make(name, 1.0, ["*"])
    ended = Ended(key="a/b/0/1/2", reason="start-failed", proof="cgroup", errno=errno.EMFILE, stage="exec")
    driver = ProcessDriver(kit_of(Remembering(tmp_path, ended)))
    (living,) = await driver.open()
    await driver.close()
    assert (living.name, living.phase) == (name, "refused")
