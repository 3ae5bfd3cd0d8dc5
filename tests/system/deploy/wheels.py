"""The wheels that moorage needs on Debian 13's Python, for machines and images without a network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

CONSTRAINTS: Final = Path(__file__).resolve().parents[3] / "constraints.txt"
COMMAND_S_MAX: Final = 300.0


def bring_wheels(dist: Path) -> None:
    """Put into the folder of `make dist` the wheels of all that the wheel with the programs needs."""
    platforms = [*(f"manylinux_2_{minor}" for minor in range(5, 41)), "manylinux1", "manylinux2010", "manylinux2014"]
    target = ("--python-version=3.13", "--only-binary=:all:", *(f"--platform={each}_x86_64" for each in platforms))
    _pip("wheel", "--no-deps", "--wheel-dir", str(dist), "nkeys")  # the index has only its sources
    [wheel] = dist.glob("moorage-*-manylinux*.whl")
    beside = f"{dist} {os.environ.get('PIP_FIND_LINKS', '')}"
    wanted = f"{wheel}[server,metrics,page,kubernetes,nats-config]"
    _pip("download", *target, "--dest", str(dist), wanted, PIP_FIND_LINKS=beside)


def _pip(verb: str, *words: str, **env: str) -> None:
    command = [sys.executable, "-m", "pip", verb, "--quiet", "-c", str(CONSTRAINTS), *words]
    done = subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, timeout=COMMAND_S_MAX, check=False
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
