"""Programs for tests of MPS: the played control daemon, NVIDIA's own where it can be had, and a client."""

from __future__ import annotations

import contextlib
import shutil
import sys
from pathlib import Path
from typing import Final

from moorage.worker.sharing.mps.control import PROGRAM
from tests.nvidia.packages import unpacked

#: a client: it connects, writes down what limits it has, and stays; without a daemon it ends with 3. With the variable
#: KERNEL it has work on the GPU from then on
CLIENT: Final = """
import os, signal, socket, sys
daemon = socket.socket(socket.AF_UNIX)
try:
    daemon.connect(os.environ["CUDA_MPS_PIPE_DIRECTORY"] + "/control")
    daemon.sendall(b"CLIENT\\n")
    assert daemon.recv(10) == b"ok\\0"
    if "KERNEL" in os.environ:
        daemon.sendall(b"KERNEL\\n")
        assert daemon.recv(10) == b"ok\\0"
except OSError:
    sys.exit(3)
beside = sys.argv[1] + ".part"
with open(beside, "w") as file:
    file.write("\\n".join(f"{name}={value}" for name, value in os.environ.items() if "MPS" in name))
os.rename(beside, sys.argv[1])
signal.pause()
"""


class Played:
    """The played daemon's program in a folder of its own; see `mps_daemon.py`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        folder.chmod(0o755)
        self.program = folder / PROGRAM
        self.program.write_text(f"#!{sys.executable} -IS\n" + Path(__file__).with_name("mps_daemon.py").read_text())
        self.program.chmod(0o755)

    def feel(self, mood: str) -> None:
        """Have the daemon be in this mood from now on, also one that runs."""
        fresh = self.folder / "mood.new"
        fresh.write_text(mood)
        fresh.rename(self.folder / "mood")

    def lines(self, name: str) -> list[str]:
        """Return the lines of one of its files: commands or starts."""
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / name).read_text().splitlines()
        return []


def real_program() -> tuple[str, str]:
    """Return the path of NVIDIA's own program, or "" and why it cannot be had."""
    if found := shutil.which(PROGRAM):
        return found, ""
    cache, why = unpacked("nvidia-cuda-mps")
    return ("", why) if why else (str(cache / "usr/bin" / PROGRAM), "")
