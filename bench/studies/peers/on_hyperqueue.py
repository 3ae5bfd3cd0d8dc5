"""HyperQueue, run by the Python of its own environment: `on_hyperqueue.py processes|array SLOTS FOLDER STICK...`.

Prints one JSON object; STICK is the job that says when it began, less its last argument (see `stick.py`).

Fair settings: server and worker of its own package, no journal (it would write one more file), as many CPU slots as
told standing in for GPUs, tasks of one job each handed over in one call, no output files.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from hyperqueue import Client, Job, LocalCluster
from hyperqueue.cluster import WorkerConfig
from hyperqueue.ffi import get_version

TASKS = 2_000
WAITS = 200
REPLICAS = 10_000
PAUSE_S = 0.05  # it hands the next job out 20 ms later where the one before has just ended


def run(client: Client, folder: str, count: int, command: list[str]) -> None:
    """One job of that many tasks, until each is over."""
    job = Job(default_workdir=folder)
    for _ in range(count):
        job.program(command, stdout=None, stderr=None)
    client.connection.wait_for_jobs([client.submit(job).id], lambda _: None)


def array(slots: int, stick: list[str]) -> dict[str, float]:
    """10,000 tasks of one job, each the stick: how many a second, submitted to ended."""
    with tempfile.TemporaryDirectory() as name, LocalCluster(f"{name}/hq", WorkerConfig(cores=slots)) as cluster:
        client = cluster.client()
        for count in (slots * 2, REPLICAS):
            began = time.monotonic()
            run(client, name, count, [*stick, "/dev/null"])
            rate = count / (time.monotonic() - began)
    return {"replicas/s": rate}


def processes(slots: int, stick: list[str]) -> dict[str, float]:
    """The stick as a process a task, and /bin/true: how many a second; and submit to start of the stick."""
    with tempfile.TemporaryDirectory() as name, LocalCluster(f"{name}/hq", WorkerConfig(cores=slots)) as cluster:
        client = cluster.client()
        figures = {}
        for figure, command in {"jobs/s": [*stick, "/dev/null"], "/bin/true a second": ["/bin/true"]}.items():
            run(client, name, 100, command)
            began = time.monotonic()
            run(client, name, TASKS, command)
            figures[figure] = TASKS / (time.monotonic() - began)
        waits = []
        for number in range(WAITS):
            stamp = Path(name) / f"began-{number}"
            submitted = time.time_ns()
            job = Job(default_workdir=name)
            job.program([*stick, str(stamp)], stdout=None, stderr=None)
            client.submit(job)
            while not (stamp.exists() and stamp.read_text()):  # its own wait never returns if the job is over already
                time.sleep(0.001)
            time.sleep(PAUSE_S)
            waits.append((int(stamp.read_text()) - submitted) / 1e6)
    waits.sort()
    return {**figures, "p50 ms": statistics.median(waits), "p99 ms": waits[len(waits) * 99 // 100]}


if __name__ == "__main__":
    measure = {"processes": processes, "array": array}[sys.argv[1]]
    print(json.dumps({**measure(int(sys.argv[2]), sys.argv[4:]), "version": get_version()}))
