#!/usr/bin/env bash
# Behaviour: Snakemake runs a job that asks for more GPUs than `--resources` allows, with as many as are allowed, and says nothing.
# Versions: snakemake 9.27.1
# Guess: It refuses at the start a rule that can never have its GPUs: `resources:` is a request, as `mem_mb` is to a cluster.
# Seen: `gpu=2` with `--resources gpu=1` runs, one at a time, and the shell command sees `{resources.gpu}` as 1; the log has no warning. With 2 it sees 2. Without the option both jobs run at once, with 2 each.
# Date: 2026-11-30
. "$(dirname "$0")/common.sh"

packages snakemake==9.27.1
cat >"$scratch/Snakefile" <<'EOF'
rule all:
    input: "a.txt", "b.txt"
rule train:
    output: "{name}.txt"
    resources: gpu=2
    shell: "python3 task.py {resources.gpu} > {output}"
EOF
bounded 180 <<'EOF'
import os
import subprocess
import sys
from pathlib import Path

from findings.verdict import verdict

FOLDER = Path(os.environ["TMPDIR"])
(FOLDER / "task.py").write_text("""
import sys, time
begun = time.monotonic()
time.sleep(1.5)
print(sys.argv[1], begun, time.monotonic())
""")


def ran(*options):
    """Return the exit code, the GPUs that each job saw, whether they ran side by side, and what the log warns of."""
    for each in FOLDER.glob("*.txt"):
        each.unlink()
    done = subprocess.run(
        [Path(sys.executable).with_name("snakemake"), "--cores", "4", "--directory", FOLDER, *options],
        capture_output=True,
        text=True,
        cwd=FOLDER,
        env={**os.environ, "XDG_CACHE_HOME": str(FOLDER), "HOME": str(FOLDER)},
    )
    (one, *first), (other, *second) = ((FOLDER / f"{name}.txt").read_text().split() for name in "ab")
    beside = max(float(first[0]), float(second[0])) < min(float(first[1]), float(second[1]))
    told = [line for line in done.stderr.splitlines() if "warn" in line.lower() or "exceed" in line.lower()]
    return done.returncode, [one, other], "side by side" if beside else "one after the other", told


seen = {
    "--resources gpu=1": ran("--resources", "gpu=1"),
    "--resources gpu=2": ran("--resources", "gpu=2"),
    "no --resources": ran(),
}
expected = {
    "--resources gpu=1": (0, ["1", "1"], "one after the other", []),
    "--resources gpu=2": (0, ["2", "2"], "one after the other", []),
    "no --resources": (0, ["2", "2"], "side by side", []),
}
verdict(seen == expected, seen)
EOF
