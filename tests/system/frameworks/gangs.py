"""Gangs of two replicas on two hosts, whose ranks say what their framework told them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from tests.system.cli.node import Node
from tests.unit.docs.markdown import DOCS, page

HERE: Final = Path(__file__).parent
#: what the ranks of one world of two say, each with the sum that an all-reduce gave it
ONE_WORLD: Final = ["rank 0 of 2, sum 3", "rank 1 of 2, sum 3"]


def home() -> Path:
    """Return the folder that `build` makes, with an environment for torch and one for each MPI."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "moorage-tests/frameworks"


def why_no_frameworks() -> str:
    """Return "" where they are of the versions of `pins.txt`; else one line that says what is missing."""
    built = home() / "pins.txt"
    if built.exists() and built.read_text() == (HERE / "pins.txt").read_text():
        return ""
    return f"no {home()} with these versions: tests/system/frameworks/build brings it"


def from_page(name: str, title: str) -> str:
    """Return the file with this title of a how-to page."""
    (body,) = [block.body for block in page(DOCS / "how-to" / f"{name}.md").blocks if block.title == title]
    return body


def variables(venv: str) -> dict[str, str]:
    """Return those by which a job finds the commands of an environment, and may start mpirun as root."""
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {"PATH": f"{home() / venv / 'bin'}:/usr/bin:/bin", **allowed}


async def run_gang(node: Node, tenant: str, folder: Path, *argv: str, venv: str = "torch") -> list[str]:
    """Run a command in each replica, in `folder`, to its end; what ranks said, sorted, without what libraries said."""
    options = ["--hosts", "2", "--gpu", "1xH100", "--cwd", str(folder)]
    options += [f"--env={name}={value}" for name, value in variables(venv).items()]
    ran = await node.run("run", *options, "--", *argv, tenant=tenant)
    assert ran.code == 0, ran.out + ran.err
    return sorted(line.partition("] ")[2] for line in ran.out.splitlines() if ", sum " in line)
