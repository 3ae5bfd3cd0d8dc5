"""The page's own commands, on five played machines: keys, units, each server killed in turn, a backup, a restore.

`played_machine.py` is what the commands meet in place of machines: real servers, schedulers and a worker by the units.
Each machine has `/etc/moorage` and `/var/lib/moorage` of its own at their real places, in a mount namespace, and so has
the one at which the page is typed: what a command finds there by itself, it finds here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest

from moorage.bus.embedded import find_binary
from moorage.bus.site import MONITOR_BEHIND
from moorage.worker.supervisor.client import Supervised, SupervisorError
from tests.sites import free_servers
from tests.unit.docs.markdown import DOCS, page

pytestmark = pytest.mark.slow

PAGE: Final = DOCS / "how-to" / "run-a-production-cluster.md"
PLAYED: Final = Path(__file__).with_name("played_machine.py")
WALK_S: Final = 600.0
SERVERS: Final = ("h1", "h2", "h3")
WORKERS: Final = ("n01", "n02")
#: the places where machines differ, and what stands there in the namespace: a copy, so that nothing of the host changes
REAL: Final = {"/etc": "real/etc", "/var/lib": "real/lib"}
PLAY: Final = ("unshare", "--mount", *(() if os.geteuid() == 0 else ("--map-root-user",)), sys.executable, "-S")
ALL_HAVE_STARTED: Final = "for each in $(jobs -p); do wait $each; done"


@contextlib.asynccontextmanager
async def played() -> AsyncIterator[Path]:
    """A folder with machines, short enough for sockets in it; nothing runs in them at the end."""
    with tempfile.TemporaryDirectory(prefix="cluster-") as name:
        async with _in_folder(Path(name)) as machines:
            yield machines


@contextlib.asynccontextmanager
async def _in_folder(folder: Path) -> AsyncIterator[Path]:
    ports = free_servers(len(SERVERS) + 3)
    found = {name: {"8222": each.port + MONITOR_BEHIND} for name, each in zip(SERVERS, ports, strict=False)}
    found[""] = {"9470": ports[-2].port, "9480": ports[-1].port}
    found["h2"] |= {"9470": ports[-3].port}  # beside that of h1, as all are one machine
    (folder / "ports.json").write_text(json.dumps(found))
    for name in (*SERVERS, *WORKERS, "mine"):
        for below in ("etc/moorage", "var/lib/moorage"):
            (folder / name / below).mkdir(parents=True)
    for real, moved in REAL.items():
        shutil.copytree(real, folder / moved, symlinks=True, ignore_dangling_symlinks=True) if real == "/etc" else None
        (folder / moved / "moorage").mkdir(parents=True)
    for below in ("pids", "bin"):
        (folder / below).mkdir()
    for name in ("ssh", "systemctl", "chown", "curl"):
        command = folder / "bin" / name
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -S {PLAYED} {name} "$@"\n')
        command.chmod(0o755)
    (folder / "bin/nats-server").symlink_to(find_binary())
    try:
        yield folder
    finally:
        for file in sorted((folder / "pids").iterdir(), reverse=True):  # workers, then what they ask
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(file.read_text()), signal.SIGKILL)
        for name in WORKERS:
            with contextlib.suppress(SupervisorError, OSError):
                state = folder / name / "var/lib/moorage/supervisor"
                await (await Supervised.connect(state, spawn_if_absent=False)).shutdown(0.0)


def typed(machines: Path, body: str) -> str:
    """The page's commands for these machines, whose units start side by side and are asked more often."""
    body = re.sub(r"^(  ssh .* enable .*)\ndone$", rf"\1 &\ndone\n{ALL_HAVE_STARTED}", body, flags=re.MULTILINE)
    body = body.replace("sleep 1", "sleep 0.2")
    ports = json.loads((machines / "ports.json").read_text())
    for name in SERVERS:
        body = body.replace(f"--server {name}", f"--server 127.0.0.1:{ports[name]['8222'] - MONITOR_BEHIND}")
    body = body.replace('run_as = "jobs"', 'simulate = "1x1xT4"').replace("-- nvidia-smi", "-- true")
    return body.replace("24222", str(free_servers(1)[0].port))


async def run(machines: Path, script: str) -> str:
    """What the commands print; the first that fails ends them."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("MOORAGE_", "NATS_"))}
    env |= {
        "PATH": f"{machines}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PLAYED": str(machines),
        "TMPDIR": str(machines),
        "HOME": str(machines),
    }
    said = machines / "said"
    with said.open("wb") as out:
        shell = await asyncio.create_subprocess_exec(
            *PLAY, str(PLAYED), "machine", "mine", "bash", "-e", "-o", "pipefail", "-c", script, env=env,
            stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=out,
        )  # fmt: skip
    try:
        code = await asyncio.wait_for(shell.wait(), WALK_S)
    except BaseException:
        shell.kill()
        print(said.read_text())
        raise
    assert code == 0, said.read_text() + "".join(log.read_text()[-1500:] for log in sorted(machines.glob("*.log")))
    return said.read_text()


async def test_three_servers_are_set_up_killed_in_turn_backed_up_and_restored_elsewhere() -> None:
    blocks = [block.body for block in page(PAGE).blocks if "test_production_cluster" in block.not_run]
    assert len(blocks) == 7
    if await (await asyncio.create_subprocess_exec(*PLAY, "-c", "")).wait():
        pytest.skip("no mount namespace may be made here")
    async with played() as machines:
        said = await run(machines, "\n".join([*(typed(machines, body) for body in blocks), "wait || true"]))
    assert "all 3 copies of the ledger are up to date" in said, said
    assert "encrypted; certificates of 3 servers read; the first to end, " in said, said
    assert said.count("SUCCEEDED  on n0") == 1 + len(SERVERS), said
    assert said.count('{"status":"ok"}') == len(SERVERS), said
    restored = said.rpartition("restored with")[2]
    assert "sim-0000\tcordoned" in restored, "an open host runs the jobs of the backup a second time"
    assert "settings: nothing of /etc/moorage/moorage.toml, which is the site's" in said, said
    assert restored.count("\tSUCCEEDED\t") == 1 + len(SERVERS), said
