"""What a start that failed says to whoever reads the job's story: which step of it, and what to look at."""

from __future__ import annotations

import errno
import os

import pytest

from moorage.worker.drivers.process import _verdict
from moorage.worker.supervisor.protocol import Ended


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
