"""Programs for tests of MPS: the played control daemon, NVIDIA's own where it can be had, and a client."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from moorage.worker.mps.control import PROGRAM

_PACKAGE: Final = "nvidia-cuda-mps"
_KEYRING: Final = "/usr/share/keyrings/debian-archive-keyring.gpg"
_DOWNLOAD_S: Final = 120
#: a client: it connects, writes down what limits it has, and stays; without a daemon it ends with 3
CLIENT: Final = """
import os, signal, socket, sys
daemon = socket.socket(socket.AF_UNIX)
try:
    daemon.connect(os.environ["CUDA_MPS_PIPE_DIRECTORY"] + "/control")
    daemon.sendall(b"CLIENT %d\\n" % os.getpid())
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


@functools.cache
def real_program() -> tuple[str, str]:
    """Return the path of NVIDIA's own program, or "" and why it cannot be had. It is in a package of Debian's."""
    if found := shutil.which(PROGRAM):
        return found, ""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moorage-tests" / _PACKAGE
    program = cache / "usr/bin" / PROGRAM
    if not program.exists():
        if shutil.which("apt-get") is None or not Path(_KEYRING).exists():
            return "", "this is no Debian with its keyring"
        try:
            _unpack(cache)
        except (OSError, subprocess.SubprocessError) as error:
            return "", f"the package {_PACKAGE} cannot be had: {error}"
    return str(program), ""


def _unpack(cache: Path) -> None:
    fresh = cache.with_name(f"{cache.name}.{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        for folder in ("lists/partial", "archives/partial"):
            (fresh / folder).mkdir(parents=True)
        (fresh / "list").write_text(f"deb [signed-by={_KEYRING}] http://deb.debian.org/debian trixie non-free\n")
        options = [
            f"Dir::Etc::sourcelist={fresh}/list", "Dir::Etc::sourceparts=-", f"Dir::State::lists={fresh}/lists",
            f"Dir::Cache={fresh}", "Acquire::Languages=none", "APT::Sandbox::User=root",
        ]  # fmt: skip
        apt = ["apt-get", "-qq", *(word for option in options for word in ("-o", option))]
        for command in ([*apt, "update"], [*apt, "download", _PACKAGE]):
            subprocess.run(command, check=True, capture_output=True, timeout=_DOWNLOAD_S, cwd=fresh)
        [package] = fresh.glob("*.deb")
        subprocess.run(["dpkg-deb", "-x", package, fresh], check=True, capture_output=True, timeout=_DOWNLOAD_S)
        with contextlib.suppress(OSError):  # another process was faster
            fresh.rename(cache)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
