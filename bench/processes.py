"""A loop that gives each child what a job gets: session, death signal, cgroup, output file; beside it a bare one."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from moorage.system.cgroup import cgroup_of

COMMAND = ["/bin/true"]


def bare(count: int) -> float:
    """Children a second, one after the other, nothing given."""
    began = time.perf_counter()
    for _ in range(count):
        subprocess.run(COMMAND, check=True, stdin=subprocess.DEVNULL)
    return count / (time.perf_counter() - began)


def with_the_same_gifts(count: int) -> float:
    """The same loop with a session, PDEATHSIG, a cgroup of its own and an output file for each child."""
    libc = ctypes.CDLL(None)
    mount = cgroup_of()
    root = Path(tempfile.mkdtemp(prefix="moorage-bench-", dir=mount)) if mount is not None else None
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        for number in range(count):
            group = root / f"j{number}" if root is not None else None
            if group is not None:
                group.mkdir()

            def gifts(group: Path | None = group) -> None:
                libc.prctl(1, signal.SIGKILL)
                if group is not None:
                    (group / "cgroup.procs").write_text(str(os.getpid()))

            with open(f"{folder}/{number}", "wb") as output:
                subprocess.run(
                    COMMAND,
                    check=True,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    preexec_fn=gifts,
                )
            if group is not None:
                group.rmdir()
        rate = count / (time.perf_counter() - began)
    if root is not None:
        root.rmdir()
    return rate
