#!/usr/bin/env bash
# Behaviour: Within CUDA_VISIBLE_DEVICES, Ray hands an actor its GPUs in an order that differs from process to process, and all of them to one that asked for none.
# Versions: ray 2.60.0
# Guess: Who has all GPUs has them in the order given, and each the same; one without GPUs has an empty CUDA_VISIBLE_DEVICES.
# Seen: Five actors, one after the other, have several orders, such as 2,3,0,1 and 1,0,3,2. One without GPUs has 3,1,0,2, unless RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO is 1. Where the variable is not set, four GPUs are 0,1,2,3 each time.
# Date: 2026-11-29
. "$(dirname "$0")/common.sh"

packages ray==2.60.0
bounded 300 <<'EOF'
import os
import tempfile

import ray
from findings.verdict import verdict

GIVEN = "3,1,0,2"
ACTORS = 5
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}


class Actor:
    def visible(self):
        return os.environ.get("CUDA_VISIBLE_DEVICES")


def sees(gpus):
    """Return what an actor with so many GPUs sees, which has a process of its own and ends."""
    actor = ray.remote(num_gpus=gpus, num_cpus=0)(Actor).remote()
    seen = ray.get(actor.visible.remote(), timeout=60)
    ray.kill(actor)
    return seen


def by_ray(given, actors=ACTORS, hide="0"):
    """Return what actors with four GPUs see, one after the other, and what one without sees."""
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = hide
    if given:
        os.environ["CUDA_VISIBLE_DEVICES"] = given
    ray.init(
        address="local",
        num_cpus=1,
        num_gpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=80 * 1024 * 1024,
        _temp_dir=tempfile.mkdtemp(),
        _node_ip_address="127.0.0.1",
    )
    seen = [sees(4) for _ in range(actors)]
    none = sees(0)
    ray.shutdown()
    return seen, none


within, none = by_ray(GIVEN)
without, _ = by_ray(None)
_, hidden = by_ray(GIVEN, actors=0, hide="1")
verdict(
    len(set(within)) > 1
    and all(sorted(each.split(",")) == sorted(GIVEN.split(",")) for each in within)
    and none == GIVEN
    and without == ["0,1,2,3"] * ACTORS
    and hidden == "",
    {"four of 3,1,0,2": within, "none of them": none, "four, not set": without, "none, hidden": hidden},
)
EOF
