#!/usr/bin/env bash
# Behaviour: submitit's local executor and Parsl's workers set CUDA_VISIBLE_DEVICES to numbers from 0, whatever it was when they began.
# Versions: submitit 1.5.4, parsl 2026.10.26
# Guess: What is handed on is what the variable has: within 2,3 the GPUs of tasks are 2 and 3, and a uuid stays one.
# Seen: Within CUDA_VISIBLE_DEVICES=2,3 a task of submitit with 2 GPUs gets 0,1, one without gets the empty text, and Parsl's two workers get 0 and 1. Both take 2 and 3 if these are named, but submitit no uuid: within GPU-… a task gets 0.
# Date: 2026-11-29
. "$(dirname "$0")/common.sh"

packages submitit==1.5.4 parsl==2026.10.26
bounded 180 <<'EOF'
import os
import sys
import tempfile
from pathlib import Path

import parsl
import submitit
from parsl.config import Config
from parsl.executors import HighThroughputExecutor
from parsl.providers import LocalProvider
from findings.verdict import verdict

os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
GIVEN, UUID = "2,3", "GPU-00000000-0000-0000-0000-000000000002"


def visible():
    import os
    import time

    time.sleep(0.5)  # so that both workers have a task
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def by_submitit(given, **parameters):
    os.environ["CUDA_VISIBLE_DEVICES"] = given
    executor = submitit.LocalExecutor(tempfile.mkdtemp())
    executor.update_parameters(**parameters)
    return executor.submit(visible).result()


def by_parsl(accelerators):
    os.environ["CUDA_VISIBLE_DEVICES"] = GIVEN
    workers = HighThroughputExecutor(
        address="127.0.0.1",
        available_accelerators=accelerators,
        encrypted=False,
        provider=LocalProvider(init_blocks=1, max_blocks=1),
    )
    with parsl.load(Config(executors=[workers], run_dir=tempfile.mkdtemp())):
        task = parsl.python_app(visible)
        seen = {each.result(60) for each in [task() for _ in range(4)]}
    parsl.clear()
    return ",".join(sorted(seen))


seen = {
    "submitit, two": by_submitit(GIVEN, gpus_per_node=2),
    "submitit, none": by_submitit(GIVEN),
    "submitit, one of a uuid": by_submitit(UUID, gpus_per_node=1),
    "submitit, named": by_submitit(GIVEN, gpus_per_node=2, visible_gpus=[2, 3]),
    "parsl, two": by_parsl(2),
    "parsl, named": by_parsl(GIVEN.split(",")),
}
verdict(list(seen.values()) == ["0,1", "", "0", "2,3", "0,1", "2,3"], seen)
EOF
