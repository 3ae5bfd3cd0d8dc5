#!/usr/bin/env bash
# Behaviour: Slurm 22.05.8 of Debian 12 gives a job a whole GPU of which another job has a shard; it gives no shard of a GPU that is taken whole.
# Versions: slurmctld, slurmd, slurm-client and slurm-wlm-basic-plugins 22.05.8-4+deb12u3, libhwloc15 2.9.0-1
# Guess: A GPU is shared or whole: with a shard on GPU 0, `--gres=gpu:1` gets GPU 1, and `--gres=gpu:2` waits.
# Seen: `gpu:1` gets GPU 0, the one with the shard, although GPU 1 is idle, and `gpu:2` gets both. The other way round the shard waits. Slurm 24.11.5 of Debian 13 keeps both, seen the same day with the same jobs.
# Date: 2026-11-29
. "$(dirname "$0")/common.sh"

debian_packages 12 slurmctld=22.05.8-4+deb12u3 slurmd=22.05.8-4+deb12u3 slurm-client=22.05.8-4+deb12u3 \
    slurm-wlm-basic-plugins=22.05.8-4+deb12u3 libhwloc15=2.9.0-1
packages
bounded 120 <<'EOF'
from findings.slurm import cluster
from findings.verdict import verdict

with cluster(gpus=2, shards=8) as slurm:

    def given(*asked):
        """Return which GPUs jobs got that were submitted one after the other; None for one that waits."""
        jobs = [slurm.placed(slurm.submit(f"--gres={each}")) for each in asked]
        slurm.cancel_all()
        return jobs

    seen = {
        "a shard, then one GPU": given("shard:1", "gpu:1"),
        "a shard, then both GPUs": given("shard:1", "gpu:2"),
        "one GPU, then a shard": given("gpu:1", "shard:1"),
        "both GPUs, then a shard": given("gpu:2", "shard:1"),
    }

verdict(
    seen
    == {
        "a shard, then one GPU": ["0", "0"],
        "a shard, then both GPUs": ["0", "0-1"],
        "one GPU, then a shard": ["0", "1"],
        "both GPUs, then a shard": ["0-1", None],
    },
    seen,
)
EOF
