"""Which attempt a process is charged to."""

from __future__ import annotations

import os
import subprocess
import time

import pytest

from moorage.schemas.attempt import AttemptName
from moorage.system.proctree import read_environ
from moorage.worker.sharing.attempt_processes import AttemptProcesses

NAME: AttemptName = ("acme", "victim", 0, 1, 7)
MARKS = {
    "MOORAGE_TENANT": "acme",
    "MOORAGE_JOB": "victim",
    "MOORAGE_REPLICA": "0",
    "MOORAGE_ATTEMPT": "1",
    "MOORAGE_FENCE": "7",
}


def until_marked(pid: int) -> None:
    """Wait until the exec of a process is over: before that, its environment is empty."""
    ends_s = time.monotonic() + 30
    while not read_environ(pid):
        assert time.monotonic() < ends_s
        time.sleep(0.001)


def test_marks_count_only_below_the_supervisor() -> None:
    with (
        subprocess.Popen(["sleep", "1000"], env={}, start_new_session=True) as victim,
        subprocess.Popen(["sleep", "1000"], env=MARKS, start_new_session=True) as other,
    ):
        until_marked(other.pid)
        attempts = AttemptProcesses()
        attempts.started(NAME, victim.pid)
        below = attempts.attempts_of([victim.pid, other.pid], supervisor=os.getpid())
        elsewhere = attempts.attempts_of([victim.pid, other.pid], supervisor=victim.pid)
        victim.kill()
        other.kill()
    assert below == {victim.pid: NAME, other.pid: NAME}
    assert elsewhere == {victim.pid: NAME}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of another user")
def test_marks_of_another_user_s_process_are_not_believed() -> None:
    with (
        subprocess.Popen(["sleep", "1000"], env={}, start_new_session=True) as victim,
        subprocess.Popen(["sleep", "1000"], env=MARKS, start_new_session=True, user=65534) as forger,
    ):
        until_marked(forger.pid)
        attempts = AttemptProcesses()
        attempts.started(NAME, victim.pid)
        found = attempts.attempts_of([victim.pid, forger.pid], supervisor=os.getpid())
        victim.kill()
        forger.kill()
    assert found == {victim.pid: NAME, forger.pid: None}
