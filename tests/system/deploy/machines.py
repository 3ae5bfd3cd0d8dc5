"""An empty machine, as far as a folder can be one: its own home, its own environment of Python, a short PATH."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[3]
COMMAND_S_MAX: Final = 300.0
END_S_MAX: Final = 60.0
#: how this machine reaches its package index, which an empty home would lose
INDEX: Final = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_"))}


class Machine:
    """`here` is the folder where commands run, whose environment of Python is `venv` in it."""

    def __init__(self, here: Path, home: Path, venv: str) -> None:
        self.here = here
        self.env = {**INDEX, "HOME": str(home), "PATH": f"{here}/{venv}/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
        home.mkdir(exist_ok=True)

    def run(self, *command: str) -> str:
        """Run a command to its end; it must end well. Returns what it wrote to its output."""
        done = subprocess.run(
            command, env=self.env, cwd=self.here, capture_output=True, text=True, timeout=COMMAND_S_MAX, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @contextmanager
    def up(self, *command: str) -> Iterator[None]:
        """`moorage up …`, from when it is up until the block ends."""
        with subprocess.Popen(command, env=self.env, cwd=self.here, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert process.stderr is not None
                assert any(line.startswith("Ctrl-C ends") for line in process.stderr), "it is up"
                yield
            finally:
                process.terminate()
                process.communicate(timeout=END_S_MAX)


def installed(folder: Path, requirement: str, **env: str) -> Machine:
    """A machine on which this was installed into an empty environment, and nothing else."""
    machine = Machine(folder, folder, "venv")
    machine.env |= env
    machine.run(sys.executable, "-m", "venv", "venv")
    machine.run("venv/bin/pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), requirement)
    return machine
