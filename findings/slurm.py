"""What the findings about Slurm share: a controller and a node on loopback, of Debian's packages in a folder.

It uses nothing of moorage. The GPUs are links to /dev/null, as Slurm names no file to a job that is no device. Nothing
opens them. Every wait is bounded.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shlex
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

#: Bounds a start, a command and the wait for a state.
WAIT_S = 30.0
POLL_S = 0.1
_CONF = """
ClusterName=finding
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmdPort={node_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
PluginDir={plugins}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=1
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
GresTypes=gpu,shard
NodeName={host} NodeAddr=127.0.0.1 CPUs=16 CoresPerSocket=16 ThreadsPerCore=1 RealMemory=1000 Gres={gres} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


class Slurm:
    """A controller and its one node."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.environment = folder, environment

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command of Slurm to its end."""
        return subprocess.run(
            command, env=self.environment, cwd=self.folder, capture_output=True, text=True, timeout=WAIT_S * 3
        )

    def submit(self, *options: str, script: str = "sleep 600") -> str:
        """Return the number of a new job."""
        done = self.run("sbatch", "--parsable", "--output=/dev/null", *options, f"--wrap={script}")
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def shown(self, job: str) -> dict[str, str]:
        """Return what `scontrol show job` says of a job, by key."""
        words = shlex.split(self.run("scontrol", "--details", "show", "job", job).stdout.replace("\n", " "))
        return dict(word.split("=", 1) for word in words if "=" in word)

    def placed(self, job: str) -> str | None:
        """Return the numbers of the GPUs a job got, or None once it waits for resources."""
        ends = time.monotonic() + WAIT_S
        while time.monotonic() < ends:
            shown = self.shown(job)
            if shown["JobState"] == "RUNNING" and "(IDX:" in shown.get("GRES", ""):
                return shown["GRES"].split("(IDX:")[1].split(")")[0]
            if shown["JobState"] == "PENDING" and shown["Reason"] == "Resources":
                return None
            time.sleep(POLL_S)
        raise SystemExit(f"job {job} is neither placed nor waits for resources")

    def wait(self, *options: str, script: str, cancel: str = "") -> int:
        """Return the code of `sbatch --wait`; `cancel` is a state or a file of the job's, and it is cancelled then."""
        command = ["sbatch", "--wait", "--parsable", "--output=/dev/null", *options, f"--wrap={script}"]
        with subprocess.Popen(
            command, env=self.environment, cwd=self.folder, stdout=subprocess.PIPE, text=True
        ) as waiting:
            assert waiting.stdout is not None
            job = waiting.stdout.readline().strip()
            ends = time.monotonic() + WAIT_S
            while cancel and self.shown(job)["JobState"] != cancel and not (self.folder / cancel).exists():
                assert time.monotonic() < ends, f"job {job} is never {cancel}"
                time.sleep(POLL_S)
            if cancel:
                self.run("scancel", job)
            return waiting.wait(WAIT_S * 2)

    def cancel_all(self) -> None:
        """End all jobs, and wait until the node is free."""
        self.run("scancel", "--user", getpass.getuser())
        ends = time.monotonic() + WAIT_S
        while self.run("squeue", "--noheader").stdout.strip():
            assert time.monotonic() < ends, "jobs do not end"
            time.sleep(POLL_S)


@contextlib.contextmanager
def cluster(*, gpus: int, shards: int, more: str = "") -> Iterator[Slurm]:
    """Yield a Slurm with so many GPUs, each with as many of the shards; it ends with the block.

    `more` are lines of its slurm.conf.
    """
    root, folder = Path(os.environ["DEBIAN_ROOT"]), Path(tempfile.mkdtemp())
    plugins = next(root.glob("usr/lib/*/slurm-wlm"))
    host = os.uname().nodename.split(".")[0]
    for name in ("state", "spool"):
        (folder / name).mkdir()
    for number in range(gpus):
        (folder / f"gpu{number}").symlink_to(os.devnull)
    settings = {
        "host": host,
        "folder": folder,
        "user": getpass.getuser(),
        "plugins": plugins,
        "port": _free_port(),
        "node_port": _free_port(),
        "gres": f"gpu:{gpus},shard:{shards}",
    }
    (folder / "slurm.conf").write_text(_CONF.format(**settings) + more)
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-{gpus - 1}]\nName=shard Count={shards}\n")
    environment = {
        **os.environ,
        "SLURM_CONF": str(folder / "slurm.conf"),
        "LD_LIBRARY_PATH": f"{plugins}:{plugins.parent}",
        "PATH": f"{root}/usr/bin:{root}/usr/sbin:{os.environ['PATH']}",
    }
    slurm = Slurm(folder, environment)
    begun = []
    try:
        for name, *options in (["slurmctld", "-c"], ["slurmd", "-N", host, "-d", f"{root}/usr/sbin/slurmstepd-wlm"]):
            program = folder / name  # a program that is called otherwise does not know that it is the controller
            program.symlink_to(root / "usr/sbin" / f"{name}-wlm")
            begun.append(
                subprocess.Popen(
                    [program, "-D", *options],
                    env=environment,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )
        ends = time.monotonic() + WAIT_S
        while slurm.run("sinfo", "--noheader", "--format=%t").stdout.strip() != "idle":  # "idle*" has not answered
            if time.monotonic() > ends:
                logs = (path.read_text()[-1000:] for path in folder.glob("*.log"))
                raise SystemExit("the node does not come up:\n" + "\n".join(logs))
            time.sleep(POLL_S)
        yield slurm
        slurm.cancel_all()
    finally:
        for process in reversed(begun):
            process.terminate()
            process.wait()
