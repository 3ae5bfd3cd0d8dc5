"""What a start that failed says to whoever reads the job's story: which step of it, and what to look at."""

from __future__ import annotations

import errno
import os

import pytest

from moorage.worker.drivers.process import _verdict
from moorage.worker.supervisor.protocol import Ended


@pytest.mark.parametrize(
    ("stage", "number", "code", "words"),
    [
        ("exec", errno.ENOENT, 127, "no such program on the worker; a job has a PATH of its own"),
        ("exec", errno.EACCES, 126, "exec: Permission denied"),
        ("cwd", errno.ENOENT, 126, "cwd: No such file or directory"),
    ],
)
def test_a_start_that_failed_names_its_step(stage: str, number: int, code: int, words: str) -> None:
    ended = Ended(
        key="a/b/0/1/2",
        reason="start-failed",
        proof="never-ran",
        errno=number,
        stage=stage,
        message=os.strerror(number),
    )
    assert _verdict(ended) == (code, f"start-failed: {words}")
