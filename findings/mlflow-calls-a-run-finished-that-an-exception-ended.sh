#!/usr/bin/env bash
# Behaviour: A run of MLflow that was begun without `with` is FINISHED also if an exception or sys.exit(1) ended its program; one in a `with` is FAILED also after sys.exit(0).
# Versions: mlflow-skinny 3.17.2
# Guess: FAILED where the program fails, FINISHED after sys.exit(0), and KILLED after a Ctrl-C, with or without `with`.
# Seen: After start_run(), a ValueError, sys.exit(1), a KeyboardInterrupt and a SIGTERM whose handler exits with 143 all leave FINISHED. In a `with` each of these is FAILED, and sys.exit(0), too. SIGTERM without a handler leaves RUNNING.
# Date: 2026-11-29
. "$(dirname "$0")/common.sh"

packages mlflow-skinny==3.17.2
bounded 240 <<'EOF'
import os
import subprocess
import sys
import tempfile

from findings.verdict import verdict

HANDLER = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); "
ASKED_TO_END = "os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)"
PROGRAMS = {
    "raises": "raise ValueError",
    "exits with 1": "sys.exit(1)",
    "exits with 0": "sys.exit(0)",
    "is interrupted": "raise KeyboardInterrupt",
    "exits with 143 on SIGTERM": HANDLER + ASKED_TO_END,
    "dies of SIGTERM": ASKED_TO_END,
}
FORMS = {"plain": "mlflow.start_run(run_name=name)\n", "in a with": "with mlflow.start_run(run_name=name):\n    "}
BEGINS = "import os, signal, sys, time, mlflow\nname = sys.argv[1]\n"
LOOKS = """
import mlflow
for run in mlflow.search_runs(search_all_experiments=True, output_format="list"):
    print(run.info.run_name, run.info.status, sep=":")
"""
FOLDER = tempfile.mkdtemp()
ENVIRONMENT = os.environ | {
    "MLFLOW_TRACKING_URI": f"file:{FOLDER}/runs",
    "MLFLOW_EXPERIMENT_NAME": "training",
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "GIT_PYTHON_REFRESH": "quiet",
}


def python(text, *arguments):
    command = [sys.executable, "-c", text, *arguments]
    done = subprocess.run(command, cwd=FOLDER, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    return done.stdout.splitlines()


python("import mlflow\nmlflow.set_experiment('training')")
for ends, program in PROGRAMS.items():
    for form, begins in FORMS.items():
        python(BEGINS + begins + program, f"{ends}, {form}")
found = dict(line.rsplit(":", 1) for line in python(LOOKS))
seen = {ends: tuple(found.get(f"{ends}, {form}") for form in FORMS) for ends in PROGRAMS}
verdict(
    seen
    == {
        "raises": ("FINISHED", "FAILED"),
        "exits with 1": ("FINISHED", "FAILED"),
        "exits with 0": ("FINISHED", "FAILED"),
        "is interrupted": ("FINISHED", "FAILED"),
        "exits with 143 on SIGTERM": ("FINISHED", "FAILED"),
        "dies of SIGTERM": ("RUNNING", "RUNNING"),
    },
    {f"{name}: plain, in a with": each for name, each in seen.items()},
)
EOF
