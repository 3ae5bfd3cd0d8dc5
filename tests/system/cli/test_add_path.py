"""`moorage add-path`: the command runs in its place, with the paths that a job would have."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest


def add_path(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "moorage.cli", "add-path", *words]
    return subprocess.run(line, env={**os.environ, **env}, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_the_command_runs_in_its_place_with_what_a_job_would_have(tmp_path: Path) -> None:
    tool = tmp_path / "tool"
    tool.write_text('#!/bin/sh\necho $PPID "$@"\necho $PATH $LD_LIBRARY_PATH\ngrep SigIgn /proc/$$/status\nexit 7\n')
    tool.chmod(0o755)
    more = {"PATH": "/usr/bin", "TF_PREPEND_PATH": str(tmp_path), "TF_PATH": "/x:/usr/bin", "LD_LIBRARY_PATH": "/a"}
    ran = add_path("--", "tool", "-x", "--json", TF_LD_LIBRARY_PATH="/b", **more)
    first, second, third = ran.stdout.split("\n")[:3]
    assert ran.returncode == 7, ran.stderr
    assert first.split() == [str(os.getpid()), "-x", "--json"], "it is this process's child: nothing between"
    assert second.split() == [f"{tmp_path}:/usr/bin:/x", "/a:/b"]
    ignored = int(third.split()[1], 16)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        assert not ignored >> number - 1 & 1, "Python ignores it, and the command must not"


@pytest.mark.slow
def test_a_command_that_is_missing_or_no_program_ends_as_in_a_shell(tmp_path: Path) -> None:
    none = add_path("--", "no-such-command")
    assert (none.returncode, none.stderr.startswith("error[failed-precondition]: no-such-command cannot be")) == (
        127,
        True,
    )
    (tmp_path / "plain").write_text("")
    assert add_path("--", str(tmp_path / "plain")).returncode == 126
    assert add_path().returncode == 2
