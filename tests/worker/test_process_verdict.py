"""What a start that failed says to whoever reads the job's story: which step of it, and what to look at."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from moorage.worker.drivers.process import ProcessDriver, _verdict
from moorage.worker.drivers.supervisor_link import Listener, SupervisorLink
from moorage.worker.supervisor.protocol import Ended, Event


@pytest.mark.parametrize(
    ("stage", "number", "said", "code", "words"),
    [
        ("exec", errno.ENOENT, "no program x in PATH /bin", 127, "no program x in PATH /bin"),
        ("exec", errno.ENOENT, "", 127, "exec: No such file or directory"),
        ("exec", errno.EACCES, "", 126, "exec: Permission denied"),
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
        message=said or os.strerror(number),  # a supervisor of the release before says no more than that
    )
    assert _verdict(ended) == (code, f"start-failed: {words}")


def test_a_start_whose_launcher_died_is_lost_as_it_may_have_run() -> None:
    ended = Ended(key="a/b/0/1/2", reason="start-failed", proof="cgroup", errno=errno.ECHILD, stage="launcher")
    assert _verdict(ended) == (-9, "lost")


class Remembering(SupervisorLink):
    """Of a supervisor that has ended one member while no agent heard it."""

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
        ("exec", errno.ENOENT, "exited"),
    ],
)
async def test_an_agent_that_starts_anew_knows_what_its_host_could_not_start(
    tmp_path: Path, stage: str, number: int, phase: str
) -> None:
    ended = Ended(key="a/b/0/1/2", reason="start-failed", proof="never-ran", errno=number, stage=stage)
    (living,) = await ProcessDriver(Remembering(tmp_path, ended), "w1").open()
    assert (living.name, living.phase) == (("a", "b", 0, 1, 2), phase)
