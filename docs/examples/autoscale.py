"""Add hosts to one pool while jobs wait that they would cure, and remove those that have been idle: a sample.

python autoscale.py --pool spot --shape 4xH100 --most 4 -- ./hook.sh

The hook is run as `hook.sh up COUNT POOL` and `hook.sh down WORKER`. A new host starts a worker with the label
`pool=POOL`; the scheduler's setting `growing` has the shape.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import time

from moorage.client import Client
from moorage.schemas.answers.operators import DemandRow

AWAY = ("left", "lost")
IDLE = "autoscale: idle"


def needed(rows: list[DemandRow], gpus: int) -> int:
    """Return how many new hosts with so many GPUs each the rows of a demand want."""
    hosts = 0.0
    for row in rows:
        each = row.gpus // row.replicas  # GPUs of one replica
        if row.more_hosts_help and each <= gpus:
            hosts += row.replicas / (gpus // each if each else 64)
    return math.ceil(hosts)


def turn(client: Client, asked: argparse.Namespace, coming: list[float], now: float) -> None:
    """Look once, and act. `coming` has when each host was asked for that has not joined yet."""
    demand, rows = client.admin.demand(), client.fleet.show().workers
    mine = [row for row in rows if row.labels.get("pool") == asked.pool and row.state not in AWAY]
    known = asked.seen | {row.worker for row in mine}
    joined, asked.seen = len(known) - len(asked.seen), known
    coming[:] = [at for at in coming[joined:] if now - at < asked.boot]  # one that does not come is asked for again
    wanted = needed(demand.rows, int(asked.shape.partition("x")[0]))
    leaving = [row for row in mine if row.why == IDLE]
    for row in leaving[:wanted]:  # a host that is still there is there sooner than a new one
        client.fleet.uncordon(row.worker, why="autoscale: jobs wait")
    up = min(wanted - len(leaving) - len(coming), asked.most - len(mine) - len(coming))
    if up > 0:
        print(f"up {up}: {demand.gpus} GPUs wait, {demand.largest} at most", flush=True)
        if not subprocess.run([*asked.hook, "up", str(up), asked.pool], check=False).returncode:
            coming += [now] * up
    if wanted:
        return
    for worker in client.fleet.drain_idle(asked.idle, pool=asked.pool, keep=asked.least, why=IDLE):
        print(f"down {worker}", flush=True)  # nothing begins there any more
        subprocess.run([*asked.hook, "down", worker], check=False)  # again, while it is there
    for row in rows:
        if row.labels.get("pool") == asked.pool and row.state == "left":
            client.fleet.forget(row.worker)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pool", required=True)
    parser.add_argument("--shape", required=True, help="GPUs of one host, as 8xH100")
    parser.add_argument("--least", type=int, default=0, help="hosts that stay")
    parser.add_argument("--most", type=int, default=1, help="hosts at most")
    parser.add_argument("--idle", type=float, default=600, help="seconds without a job, after which a host goes")
    parser.add_argument("--boot", type=float, default=600, help="seconds in which a new host must have joined")
    parser.add_argument("--every", type=float, default=15, help="seconds between two looks")
    parser.add_argument("--nats", help="URL or context of an operator")
    parser.add_argument("hook", nargs="+")
    asked = parser.parse_args(namespace=argparse.Namespace(seen=set()))
    coming: list[float] = []
    with Client(asked.nats) as client:
        while True:
            turn(client, asked, coming, time.monotonic())
            time.sleep(asked.every)


if __name__ == "__main__":
    main()
