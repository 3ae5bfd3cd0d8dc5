#!/usr/bin/env bash
# Behaviour: Slurm runs a job with `--dependency=afterok:ID` at once if it does not know the ID: that of a job that failed and was forgotten (MinJobAge, 300 s unless set), or one that never was.
# Versions: slurmctld, slurmd, slurm-client and slurm-wlm-basic-plugins 22.05.8-4+deb12u3, libhwloc15 2.9.0-1
# Guess: sbatch refuses it ("Job dependency problem"), or the job never runs; --kill-on-invalid-dep takes it away.
# Seen: It runs, and no dependency is shown, with afterok and aftercorr, and with --kill-on-invalid-dep=yes, too. A job that waited when the other failed is never satisfied, also once the other is forgotten.
# Date: 2026-11-29
. "$(dirname "$0")/common.sh"

debian_packages 12 slurmctld=22.05.8-4+deb12u3 slurmd=22.05.8-4+deb12u3 slurm-client=22.05.8-4+deb12u3 \
    slurm-wlm-basic-plugins=22.05.8-4+deb12u3 libhwloc15=2.9.0-1
packages
bounded 120 <<'EOF'
import time

from findings.slurm import POLL_S, WAIT_S, cluster
from findings.verdict import verdict

RAN, NEVER = 42, 424242
SUBMITTED_LATER = {
    "afterok": ["--dependency=afterok:{failed}"],
    "afterok, kill on invalid": ["--dependency=afterok:{failed}", "--kill-on-invalid-dep=yes"],
    "aftercorr": ["--dependency=aftercorr:{failed}"],
    "afterok of one that never was": [f"--dependency=afterok:{NEVER}"],
}

with cluster(gpus=1, shards=1, more="MinJobAge=2\n") as slurm:
    failed = slurm.submit(script="exit 1")
    waits = slurm.submit("--dependency=afterok:" + failed, script="true")
    ends = time.monotonic() + WAIT_S * 2
    while slurm.run("scontrol", "show", "job", failed).returncode == 0:
        assert time.monotonic() < ends, "the job is never forgotten"
        time.sleep(POLL_S)
    waiting = slurm.shown(waits)
    seen = {
        name: slurm.wait(*(option.format(failed=failed) for option in options), script=f"exit {RAN}")
        for name, options in SUBMITTED_LATER.items()
    }
    later = slurm.submit(f"--dependency=afterok:{NEVER}", "--begin=now+1hour", script="true")
    kept = slurm.shown(later)["Dependency"]

verdict(
    set(seen.values()) == {RAN}
    and (waiting["JobState"], waiting["Reason"]) == ("PENDING", "DependencyNeverSatisfied")
    and kept == "(null)",
    {**seen, "submitted before": waiting["Reason"], "its dependency, shown": kept},
)
EOF
