"""Where the peers live: an environment each, made from its own package on first use, under `.cache/peers`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from bench.studies.peers.stick import stick

HERE = Path(__file__).resolve().parent
CACHE = HERE.parents[2] / ".cache" / "peers"
INSTALL_S_MAX = 600
RUN_S_MAX = 300
SLURM = ("slurmctld", "slurmd", "sbatch", "munged")


class NoPeer(Exception):
    """A peer cannot be installed or did not run here: what, why, and what to do about it."""


def python_of(package: str) -> str:
    """The Python of a package's own environment. Raises `NoPeer`."""
    home = CACHE / package
    python = home / "bin" / "python"
    if (home / "installed").exists():
        return str(python)
    venv.create(home, clear=True, with_pip=True)
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", package]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S_MAX)
    except subprocess.TimeoutExpired:
        raise NoPeer(f"pip installed {package} for over {INSTALL_S_MAX} s; try `{' '.join(command)}` by hand") from None
    if done.returncode:
        why = done.stderr.strip().splitlines()[-1:] or ["no word"]
        raise NoPeer(f"pip cannot install {package} ({why[0]}); is the index reachable? try `{' '.join(command)}`")
    (home / "installed").touch()
    return str(python)


def slurm() -> str:
    """This Python, where Debian's Slurm is there. Raises `NoPeer`."""
    missing = [name for name in SLURM if shutil.which(name, path="/usr/bin:/usr/sbin:/bin:/sbin") is None]
    if missing:
        packages = "slurmctld slurmd slurm-client munge"
        raise NoPeer(f"{', '.join(missing)} not found; try `apt-get install --no-install-recommends {packages}`")
    return sys.executable


def measured(python: str, runner: str, figure: str, slots: int) -> dict[str, float]:
    """What a runner of this folder prints, by name; `version` is left out. Raises `NoPeer`."""
    with tempfile.TemporaryDirectory(prefix="peer-") as folder:
        command = [python, str(HERE / runner), figure, str(slots), folder, *stick()]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S_MAX, cwd=folder)
        except subprocess.TimeoutExpired:
            raise NoPeer(f"{runner} {figure} took over {RUN_S_MAX} s") from None
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise NoPeer(f"{runner} {figure} failed: {done.stderr.strip()[-500:]}")
    found = json.loads(lines[-1])
    versions[runner] = found.pop("version")
    return {name: float(value) for name, value in found.items()}


#: by runner, as it told
versions: dict[str, str] = {}
