#!/usr/bin/env bash
# Behaviour: Slurm removes CUDA_VISIBLE_DEVICES from a job and from a step that have no GPU, also where the user sets it in --export, even to nothing.
# Versions: slurmctld, slurmd, slurm-client and slurm-wlm-basic-plugins 22.05.8-4+deb12u3, libhwloc15 2.9.0-1
# Guess: A job without GPUs has the variable of the shell that submitted it, as all others; what --export sets is set.
# Seen: Unset in a job without --gres, with gpu:0, with --export=ALL,CUDA_VISIBLE_DEVICES=5 and with an empty value, which hides all GPUs, while another variable of the same --export arrives. Unset, too, in a step with --gres=none of a job that has GPU 0. An unset variable hides none.
# Date: 2026-11-30
. "$(dirname "$0")/common.sh"

debian_packages 12 slurmctld=22.05.8-4+deb12u3 slurmd=22.05.8-4+deb12u3 slurm-client=22.05.8-4+deb12u3 \
    slurm-wlm-basic-plugins=22.05.8-4+deb12u3 libhwloc15=2.9.0-1
packages
bounded 120 <<'EOF'
import os

from findings.slurm import cluster
from findings.verdict import verdict

SHOW = 'echo "${CUDA_VISIBLE_DEVICES-unset}" "${OTHER-unset}"'
os.environ |= {"CUDA_VISIBLE_DEVICES": "1", "OTHER": "of the shell"}

with cluster(gpus=2, shards=2) as slurm:

    def saw(*options, script=SHOW):
        """Return what a job saw of the two variables."""
        told = slurm.folder / "told"
        done = slurm.run("sbatch", "--wait", "--parsable", f"--output={told}", *options, f"--wrap={script}")
        assert done.returncode == 0, done.stderr
        return told.read_text().strip()

    seen = {
        "no GPU": saw(),
        "--gres=gpu:0": saw("--gres=gpu:0"),
        "set by --export": saw("--export=ALL,CUDA_VISIBLE_DEVICES=5,OTHER=set"),
        "empty by --export": saw("--export=ALL,CUDA_VISIBLE_DEVICES=,OTHER=set"),
        "one GPU": saw("--gres=gpu:1"),
        "a step without the job's GPU": saw("--gres=gpu:1", script=f"srun --gres=none sh -c '{SHOW}'"),
    }

verdict(
    seen
    == {
        "no GPU": "unset of the shell",
        "--gres=gpu:0": "unset of the shell",
        "set by --export": "unset set",
        "empty by --export": "unset set",
        "one GPU": "0 of the shell",
        "a step without the job's GPU": "unset of the shell",
    },
    seen,
)
EOF
