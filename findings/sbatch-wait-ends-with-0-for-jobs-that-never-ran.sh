#!/usr/bin/env bash
# Behaviour: `sbatch --wait` ends with 0 for a job that was cancelled before it ran, and with 1 for one that a signal killed.
# Versions: slurmctld, slurmd, slurm-client and slurm-wlm-basic-plugins 22.05.8-4+deb12u3, libhwloc15 2.9.0-1
# Guess: It ends with 0 for success alone: 1 for a job that never ran, and 128 and the number for a signal, as srun.
# Seen: 0 for a job that was cancelled while it waited, for one that Slurm took away because its dependency failed, and for one that was cancelled and then ended with 0. 1 for kill -9, of which srun says 137. An exit code of its own is passed on. Slurm 24.11.5 of Debian 13 says the same, seen the same day.
# Date: 2026-11-29
. "$(dirname "$0")/common.sh"

debian_packages 12 slurmctld=22.05.8-4+deb12u3 slurmd=22.05.8-4+deb12u3 slurm-client=22.05.8-4+deb12u3 \
    slurm-wlm-basic-plugins=22.05.8-4+deb12u3 libhwloc15=2.9.0-1
packages
bounded 120 <<'EOF'
from findings.slurm import cluster
from findings.verdict import verdict

TRAPS = "trap 'exit 0' TERM; touch up; sleep 600 & wait"

with cluster(gpus=2, shards=8) as slurm:
    holds = slurm.submit("--gres=gpu:2")
    slurm.placed(holds)
    fails = slurm.submit(script="exit 1")
    seen = {
        "exit 3": slurm.wait(script="exit 3"),
        "kill -9": slurm.wait(script="kill -9 $$"),
        "kill -9, by srun": slurm.run("srun", "sh", "-c", "kill -9 $$").returncode,
        "cancelled while it waits": slurm.wait("--gres=gpu:2", script="true", cancel="PENDING"),
        "cancelled while it runs": slurm.wait(script="sleep 600", cancel="RUNNING"),
        "cancelled while it runs, ends with 0": slurm.wait(script=TRAPS, cancel="up"),
        "its dependency failed": slurm.wait(f"--dependency=afterok:{fails}", "--kill-on-invalid-dep=yes", script="true"),
    }

verdict(
    seen
    == {
        "exit 3": 3,
        "kill -9": 1,
        "kill -9, by srun": 137,
        "cancelled while it waits": 0,
        "cancelled while it runs": 1,
        "cancelled while it runs, ends with 0": 0,
        "its dependency failed": 0,
    },
    seen,
)
EOF
