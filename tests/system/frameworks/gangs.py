"""Gangs of two replicas on two hosts, whose ranks say what their framework told them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from moorage.client import AsyncClient
from moorage.schemas.gpu import Distributed, GpuSpec
from tests.ports import free_ports
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
    """Run a command in each replica, in `folder`, to its end; what ranks said, sorted, without what libraries said.

    Its ranks meet at a port of their own: gangs of other tests run on other nodes of this machine, and each node
    believes that it has all of its ports."""
    meets = Distributed(master_port=free_ports(1)[0])
    gpu = GpuSpec(model="H100", scheduling="gang", distinct_hosts=True, distributed=meets)
    async with AsyncClient(node.url, tenant=tenant) as client:
        job = await client.submit(list(argv), gpu=gpu, replicas=2, cwd=folder, env=variables(venv))
        result = await job.result()
        pieces = [piece async for piece in job.logs()]
        assert result.state == "SUCCEEDED", "".join(piece.text for piece in pieces)
    said = ["".join(piece.text for piece in pieces if (piece.stream, piece.replica) == ("out", at)) for at in (0, 1)]
    return sorted(line for text in said for line in text.splitlines() if ", sum " in line)
