#!/usr/bin/env bash
# Behaviour: A task of submitit's local executor goes on after SIGTERM and SIGCONT, with a warning in its log; SIGUSR2 is what it saves or fails on.
# Versions: submitit 1.5.4
# Guess: SIGTERM ends a task. After SIGUSR2 it is run again if it has checkpoint(), and fails if not.
# Seen: After SIGTERM the task returns its result, and its log says "Bypassing signal SIGTERM"; so after SIGCONT. A handler that the function sets itself is called. After SIGUSR2 one with checkpoint() is run again at once with what that returned, and one without raises FailedJobError.
# Date: 2026-11-29
. "$(dirname "$0")/common.sh"

packages submitit==1.5.4
bounded 120 <<'EOF'
import os
import signal
import tempfile
import time
from pathlib import Path

import submitit
from findings.verdict import verdict

WAIT_S = 30


class Training:
    """It ends once the file `go on` is there; a later try ends at once."""

    def __init__(self, folder, first=True):
        self.folder, self.first = folder, first

    def __call__(self):
        import os
        import time

        (self.folder / "pid.new").write_text(str(os.getpid()))
        (self.folder / "pid.new").rename(self.folder / "pid")
        while self.first and not (self.folder / "go on").exists():
            time.sleep(0.05)
        return "the first try" if self.first else "the second try"


class Saving(Training):
    def checkpoint(self):
        return submitit.helpers.DelayedSubmission(Saving(self.folder, first=False))


class Heeding(Training):
    """It ends by a handler of its own."""

    def __call__(self):
        import signal

        signal.signal(signal.SIGTERM, lambda number, frame: (self.folder / "go on").touch())
        return super().__call__() + ", by itself"


def after(name, training):
    """Return how a task ended that got this signal, and what its log says of it."""
    folder = Path(tempfile.mkdtemp())
    job = submitit.LocalExecutor(folder / "log").submit(training(folder))
    ends = time.monotonic() + WAIT_S
    while not (folder / "pid").exists():
        assert time.monotonic() < ends, "the task does not start"
        time.sleep(0.05)
    os.kill(int((folder / "pid").read_text()), getattr(signal, name))
    while not job.done() and name not in (job.stderr() or ""):
        assert time.monotonic() < ends, "the log says nothing of the signal"
        time.sleep(0.05)
    (folder / "go on").touch()
    bypassed = f"Bypassing signal {name}" in (job.stderr() or "")
    try:
        return job.result(), bypassed
    except submitit.core.utils.FailedJobError as error:
        return type(error).__name__, bypassed


seen = {
    "SIGTERM": after("SIGTERM", Training),
    "SIGTERM, with checkpoint()": after("SIGTERM", Saving),
    "SIGTERM, with a handler": after("SIGTERM", Heeding),
    "SIGCONT": after("SIGCONT", Training),
    "SIGUSR2": after("SIGUSR2", Training),
    "SIGUSR2, with checkpoint()": after("SIGUSR2", Saving),
}
verdict(
    list(seen.values())
    == [
        ("the first try", True),
        ("the first try", True),
        ("the first try, by itself", False),
        ("the first try", True),
        ("FailedJobError", False),
        ("the second try", False),
    ],
    seen,
)
EOF
