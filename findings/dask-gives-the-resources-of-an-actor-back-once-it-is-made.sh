#!/usr/bin/env bash
# Behaviour: An actor of Dask has its worker's resources only while it is made: further actors and tasks that ask for the same GPU run beside it.
# Versions: distributed 2026.8.0
# Guess: An actor made with resources={"GPU": 1} holds them as long as it lives, as one of Ray does; the next one waits for a free worker.
# Seen: On one worker with one GPU three actors that ask for it are made and live at once, and a task that asks for it runs. Of tasks, one runs at a time.
# Date: 2026-11-29
. "$(dirname "$0")/common.sh"

packages distributed==2026.8.0
bounded 120 <<'EOF'
from distributed import Client, Event, LocalCluster
from findings.verdict import verdict

WAIT_S, SETTLE_S = 30, 2


class Model:
    def lives(self):
        return True


def task(began, goes_on):
    Event(began).set()
    return Event(goes_on).wait(WAIT_S)


asked = {"resources": {"GPU": 1}, "pure": False}
settings = {"n_workers": 1, "threads_per_worker": 4, "processes": False, "dashboard_address": None}
with LocalCluster(resources={"GPU": 1}, **settings) as cluster, Client(cluster) as client:
    tasks = [client.submit(task, f"began-{number}", "goes-on", **asked) for number in range(2)]
    began = [Event(f"began-{number}") for number in range(2)]
    first = began[0].wait(WAIT_S)
    second = began[1].wait(SETTLE_S)
    Event("goes-on").set()
    client.gather(tasks)

    actors = [client.submit(Model, actor=True, **asked).result(WAIT_S) for _ in range(3)]
    beside = client.submit(task, "began-beside", "goes-on", **asked).result(WAIT_S)
    living = [actor.lives().result(WAIT_S) for actor in actors]
verdict(
    (first, second, living, beside) == (True, False, [True] * 3, True),
    {"a second task beside the first": second, "actors at once": living, "a task beside them": beside},
)
EOF
