"""Slurm of Debian's packages, configured for this alone: `on_slurm.py processes SLOTS FOLDER STICK...`.

Prints one JSON object; STICK is what the job script runs to say when it began (see `stick.py`).

Fair settings: one node with as many CPUs as told standing in for GPUs, one submit of an array, the scheduler woken by
every event and looking at all of the queue, no accounting, no prolog, no cgroups. All it writes is in `FOLDER`.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

JOBS = 500
WAITS = 10
STARTS_WITHIN_S = 30

CONF = """
ClusterName=peer
SlurmctldHost={host}
SlurmctldPort={port}
SlurmdPort={slurmd_port}
SlurmUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_max_job_start=0,default_queue_depth=1000
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MaxJobCount=10000
MaxArraySize=10001
MinJobAge=300
ReturnToService=2
NodeName={host} CPUs={slots} CoresPerSocket={slots} ThreadsPerCore=1 RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


@contextlib.contextmanager
def cluster(slots: int, folder: Path) -> Iterator[None]:
    """munged, slurmctld and slurmd of this folder, gone at the end."""
    for name in ("state", "spool"):
        (folder / name).mkdir()
    host = os.uname().nodename.split(".")[0]
    settings = CONF.format(
        host=host, folder=folder, slots=slots, user=getpass.getuser(), port=_free_port(), slurmd_port=_free_port()
    )
    (folder / "slurm.conf").write_text(settings)
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    begun: list[subprocess.Popen[bytes]] = []
    try:
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        munge = [f"--{what}={folder}/munge.{end}" for what, end in files.items()]
        for command in (
            [_found("munged"), "--foreground", "--force", *munge],
            [_found("slurmctld"), "-D", "-c"],
            [_found("slurmd"), "-D", "-N", host],
        ):
            begun.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            time.sleep(1.0)
        ends_s = time.monotonic() + STARTS_WITHIN_S
        while "idle" not in subprocess.run(["sinfo", "-h", "-o", "%t"], capture_output=True, text=True).stdout:
            if time.monotonic() > ends_s:
                logs = "".join((folder / name).read_text()[-1500:] for name in ("slurmctld.log", "slurmd.log"))
                raise SystemExit(f"slurm's node did not come up within {STARTS_WITHIN_S} s:\n{logs}")
            time.sleep(0.2)
        yield
    finally:
        for process in reversed(begun):
            process.terminate()
            process.wait()


def _found(name: str) -> str:
    path = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if path is None:
        raise SystemExit(f"{name} is not there: apt-get install slurmctld slurmd slurm-client munge")
    return path


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def processes(slots: int, folder: Path, stick: list[str]) -> dict[str, float]:
    """A shell as a process a job: how many a second; and submit to start of the stick."""
    submit = ["sbatch", "--quiet", "--output=/dev/null", "--chdir", str(folder)]
    with cluster(slots, folder):
        done = folder / "done"
        began = time.monotonic()
        # each leaves a byte: `--wait` looks only every few seconds
        subprocess.run([*submit, f"--array=1-{JOBS}", "--wrap", f"echo >> {done}"], check=True)
        while not done.exists() or done.stat().st_size < JOBS:
            time.sleep(0.01)
        rate = JOBS / (time.monotonic() - began)
        waits = []
        for number in range(WAITS):
            stamp = folder / f"began-{number}"
            submitted = time.time_ns()
            subprocess.run([*submit, "--wrap", shlex.join([*stick, str(stamp)])], check=True)
            while not stamp.exists() or not stamp.read_text().endswith("\n"):
                time.sleep(0.01)
            waits.append((int(stamp.read_text()) - submitted) / 1e6)
    waits.sort()
    return {"jobs/s": rate, "p50 ms": statistics.median(waits), "p99 ms": waits[-1]}


if __name__ == "__main__":
    where = Path(sys.argv[3])
    version = subprocess.run([_found("slurmctld"), "-V"], capture_output=True, text=True).stdout.split()[-1]
    print(json.dumps({**processes(int(sys.argv[2]), where, sys.argv[4:]), "version": version}))
