"""HyperQueue, run by the Python of its own environment: `on_hyperqueue.py processes SLOTS FOLDER STICK...`.

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

from hyperqueue import Job, LocalCluster
from hyperqueue.cluster import WorkerConfig
from hyperqueue.ffi import get_version

TASKS = 2_000
WAITS = 200


def processes(slots: int, stick: list[str]) -> dict[str, float]:
    """The stick as a process a task, and /bin/true: how many a second; and submit to start of the stick."""
    with tempfile.TemporaryDirectory() as name, LocalCluster(f"{name}/hq", WorkerConfig(cores=slots)) as cluster:
        client = cluster.client()

        def run(count: int, command: list[str]) -> None:
            job = Job(default_workdir=name)
            for _ in range(count):
                job.program(command, stdout=None, stderr=None)
            client.connection.wait_for_jobs([client.submit(job).id], lambda _: None)

        figures = {}
        for figure, command in {"jobs/s": [*stick, "/dev/null"], "/bin/true a second": ["/bin/true"]}.items():
            run(100, command)
            began = time.monotonic()
            run(TASKS, command)
            figures[figure] = TASKS / (time.monotonic() - began)
        waits = []
        for number in range(WAITS):
            stamp = Path(name) / f"began-{number}"
            submitted = time.time_ns()
            run(1, [*stick, str(stamp)])
            waits.append((int(stamp.read_text()) - submitted) / 1e6)
    waits.sort()
    return {**figures, "p50 ms": statistics.median(waits), "p99 ms": waits[len(waits) * 99 // 100]}


if __name__ == "__main__":
    print(json.dumps({**processes(int(sys.argv[2]), sys.argv[4:]), "version": get_version()}))
