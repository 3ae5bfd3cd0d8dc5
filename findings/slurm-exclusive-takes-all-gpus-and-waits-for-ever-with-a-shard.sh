#!/usr/bin/env bash
# Behaviour: A job of Slurm 22.05.8 with `--exclusive` gets all GPUs of its node, also with `--gres=gpu:1` and `--gres=none`; one that asks for a shard waits on an idle node.
# Versions: slurmctld, slurmd, slurm-client and slurm-wlm-basic-plugins 22.05.8-4+deb12u3, libhwloc15 2.9.0-1
# Guess: `--exclusive` is about the node's CPUs and keeps others away; its GPUs are those of `--gres`: none, or the one asked for. With a shard it runs.
# Seen: On an idle node with two GPUs: both GPUs without --gres, with gpu:1, --gpus=1 and none. With shard:1 it is PENDING for Resources, as it also is a while later; the same job without --exclusive runs.
# Date: 2026-11-30
. "$(dirname "$0")/common.sh"

debian_packages 12 slurmctld=22.05.8-4+deb12u3 slurmd=22.05.8-4+deb12u3 slurm-client=22.05.8-4+deb12u3 \
    slurm-wlm-basic-plugins=22.05.8-4+deb12u3 libhwloc15=2.9.0-1
packages
bounded 120 <<'EOF'
import time

from findings.slurm import cluster
from findings.verdict import verdict

LATER_S = 10  # the scheduler looks at what waits every second

with cluster(gpus=2, shards=8) as slurm:

    def given(*asked):
        """Return the GPUs of a job on an idle node, or None if it waits now and later."""
        job = slurm.submit(*asked)
        placed = slurm.placed(job)
        if placed is None:
            time.sleep(LATER_S)
            assert slurm.shown(job)["JobState"] == "PENDING", "it runs later"
        slurm.cancel_all()
        return placed

    seen = {
        asked: given(*asked.split())
        for asked in (
            "--exclusive",
            "--exclusive --gres=gpu:1",
            "--exclusive --gpus=1",
            "--exclusive --gres=none",
            "--exclusive --gres=shard:1",
            "--gres=shard:1",
        )
    }

verdict(
    seen
    == {
        "--exclusive": "0-1",
        "--exclusive --gres=gpu:1": "0-1",
        "--exclusive --gpus=1": "0-1",
        "--exclusive --gres=none": "0-1",
        "--exclusive --gres=shard:1": None,
        "--gres=shard:1": "0",
    },
    seen,
)
EOF
