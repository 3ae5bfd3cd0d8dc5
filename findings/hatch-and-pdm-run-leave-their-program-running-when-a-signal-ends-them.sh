#!/usr/bin/env bash
# Behaviour: `hatch run` and `pdm run` die of SIGUSR1 and leave their program running, which never gets it; `hatch run` dies so of SIGTERM, too. `uv run` passes both on.
# Versions: hatch 1.18.2, pdm 2.29.4, uv 0.13.8
# Guess: pdm run becomes the program (exec), so signals are the program's; hatch passes SIGTERM on and dies of SIGUSR1. After a SIGKILL of the program the code is 137.
# Seen: pdm waits for a child and passes SIGTERM on, alone of the two; it ends with 247 if SIGKILL ends the program. hatch is gone after either, and its program goes on without a signal. uv ends with 137.
# Date: 2026-11-29
. "$(dirname "$0")/common.sh"

packages hatch==1.18.2 pdm==2.29.4 uv==0.13.8
bounded 150 <<'EOF'
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from findings.verdict import verdict

WAIT_S, POLL_S, SETTLE_S = 30, 0.1, 1
FOLDER = Path(tempfile.mkdtemp())
ENVIRONMENT = os.environ | {
    "HOME": str(FOLDER),
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "PDM_CHECK_UPDATE": "0",
}
PROJECT = """
[project]
name = "training"
version = "1.0"
requires-python = ">=3.11"
[tool.hatch.envs.default]
skip-install = true
"""
PROGRAM = """
import os, signal
from pathlib import Path

def note(number, frame):
    with open("heard", "a") as file:
        file.write(signal.Signals(number).name)

for each in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(each, note)
Path("pid.new").write_text(str(os.getpid()))
os.rename("pid.new", "pid")
while True:
    signal.pause()
"""
RUNNERS = {
    "hatch": ["hatch", "run", "python", "train.py"],
    "pdm": ["pdm", "run", "python", "train.py"],
    "uv": ["uv", "run", "--offline", "--no-project", "--python", sys.executable, "python", "train.py"],
}


def until(true, what):
    ends = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < ends, what
        time.sleep(POLL_S)


def after(runner, number):
    """Signal the runner; return its code if it ends, what its program hears, and the code once SIGKILL ends that."""
    pid, heard = FOLDER / "pid", FOLDER / "heard"
    pid.unlink(missing_ok=True)
    heard.write_text("")
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(RUNNERS[runner], cwd=FOLDER, env=ENVIRONMENT, start_new_session=True, **quiet)
    try:
        until(pid.exists, f"{runner} starts nothing")
        time.sleep(SETTLE_S)  # so that the runner waits for its program
        process.send_signal(number)
        until(lambda: process.poll() is not None or heard.read_text(), f"{runner} does nothing")
        time.sleep(SETTLE_S)
        code, name = process.poll(), heard.read_text()
        os.kill(int(pid.read_text()), signal.SIGKILL)  # raises if the program ended, too
        return code, name, process.wait(WAIT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


(FOLDER / "pyproject.toml").write_text(PROJECT)
(FOLDER / "train.py").write_text(PROGRAM)
subprocess.run(["pdm", "use", "-f", sys.executable], cwd=FOLDER, env=ENVIRONMENT, capture_output=True, timeout=WAIT_S)
seen = {
    f"{runner} run, {number.name}": after(runner, number)
    for runner in RUNNERS
    for number in (signal.SIGUSR1, signal.SIGTERM)
}
verdict(
    seen
    == {
        "hatch run, SIGUSR1": (-10, "", -10),
        "hatch run, SIGTERM": (-15, "", -15),
        "pdm run, SIGUSR1": (-10, "", -10),
        "pdm run, SIGTERM": (None, "SIGTERM", 247),
        "uv run, SIGUSR1": (None, "SIGUSR1", 137),
        "uv run, SIGTERM": (None, "SIGTERM", 137),
    },
    {f"{name}: its end, heard by the program, its end after a SIGKILL of that": each for name, each in seen.items()},
)
EOF
