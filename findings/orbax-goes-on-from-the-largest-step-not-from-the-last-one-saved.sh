#!/usr/bin/env bash
# Behaviour: Orbax's CheckpointManager saves nothing at a step below the newest one, and says so by False alone; forced, it is the newest until the next process, which goes on from the largest step.
# Versions: orbax-checkpoint 0.12.8, jax 0.10.2
# Guess: A lower step is not saved without force; a step that is there raises StepAlreadyExistsError; what latest_step says is the largest step, in each process the same.
# Seen: After 10, 20 and 30, a save of 15 is False, and one of 30 again, too. With force 15 is saved, and latest_step is 15, then 16 after a plain save. Reopened, latest_step is 30, and 17 is not saved. Once 31 is saved, max_to_keep takes 15 away.
# Date: 2026-11-29
. "$(dirname "$0")/common.sh"

packages orbax-checkpoint==0.12.8 jax==0.10.2
bounded 120 <<'EOF'
import logging
import os
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
logging.disable(logging.CRITICAL)

import orbax.checkpoint as orbax
from findings.verdict import verdict

FOLDER = tempfile.mkdtemp()


def opened():
    return orbax.CheckpointManager(FOLDER, options=orbax.CheckpointManagerOptions(max_to_keep=3))


def save(step, **options):
    saved = manager.save(step, args=orbax.args.JsonSave({"step": step}), **options)
    manager.wait_until_finished()
    return saved


def steps():
    return manager.latest_step(), list(manager.all_steps())


manager = opened()
seen = {"10, 20, 30": [save(step) for step in (10, 20, 30)], "15 and 30 again": [save(15), save(30)]}
seen["15 forced"] = save(15, force=True), *steps()
seen["then 16"] = save(16), *steps()
manager.close()
manager = opened()
seen["opened again"] = steps()
seen["then 17"] = save(17), *steps()
seen["then 31"] = save(31), *steps()
manager.close()
verdict(
    seen
    == {
        "10, 20, 30": [True, True, True],
        "15 and 30 again": [False, False],
        "15 forced": (True, 15, [20, 30, 15]),
        "then 16": (True, 16, [30, 15, 16]),
        "opened again": (30, [15, 16, 30]),
        "then 17": (False, 30, [15, 16, 30]),
        "then 31": (True, 31, [16, 30, 31]),
    },
    seen,
)
EOF
