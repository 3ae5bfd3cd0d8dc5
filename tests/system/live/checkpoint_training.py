"""A little training that saves its state, the job of the tests of checkpoints, and the death of its host."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from typing import Any, Final

from moorage.worker.supervisor.client import SupervisorError
from tests.system.live.stack import Caller, RealProcess, Stack

#: regression by momentum: each step needs all steps before it, and the state is replaced as a whole
TRAIN: Final = """
import hashlib, json, os, sys, time
import numpy as np

steps, pause_s, size = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
os.makedirs("ck", exist_ok=True)
rng = np.random.default_rng(5)
data = rng.standard_normal((64, size)); wanted = data @ rng.standard_normal(size)
state = {"step": np.array(0), "w": np.zeros(size), "v": np.zeros(size), "losses": np.zeros(0)}
saved = sorted(name for name in os.listdir("ck") if name.endswith(".npz"))
if saved:
    with np.load(f"ck/{saved[-1]}") as file:
        state = {name: file[name] for name in file.files}
first = int(state["step"])
print("from step", first, flush=True)
for step in range(first + 1, steps + 1):
    pick = np.random.default_rng(step).integers(0, 64, 16)
    off = data[pick] @ state["w"] - wanted[pick]
    state["v"] = 0.9 * state["v"] - 0.01 * (data[pick].T @ off) / 16
    state["w"] = state["w"] + state["v"]
    state["losses"] = np.append(state["losses"], float(off @ off))
    state["step"] = np.array(step)
    time.sleep(pause_s)
    if step % 5 == 0 and step < steps:
        with open("ck/new", "wb") as file:
            np.savez(file, **state)
        os.replace("ck/new", f"ck/step-{step:06}.npz")
        for old in sorted(os.listdir("ck"))[:-2]:
            os.unlink(f"ck/{old}")
        with open(os.environ["MOORAGE_CHECKPOINT_NOW"], "w"):
            pass
print("digest", hashlib.sha256(state["losses"].tobytes()).hexdigest(), flush=True)
"""


def training(steps: int, pause_s: float, size: int = 64) -> list[str]:
    return [sys.executable, "-c", TRAIN, str(steps), str(pause_s), str(size)]


async def undisturbed(acme: Caller, steps: int) -> str:
    """The digest of the losses of a training that nothing ends, as a job: how sums are rounded depends on where a
    process runs, and on its variables."""
    await acme.submit("undisturbed", *training(steps, 0), run=asked())
    await acme.reaches("undisturbed", "SUCCEEDED")
    first, digest = said((await acme.api("logs", {"job": "undisturbed"}))["data"]["text"])
    assert (first, len(digest)) == ([0], 64)
    return digest


async def lose_host(made: Stack, agent: RealProcess, state: str) -> None:
    """The host dies with all that it ran, and its disk: agent, supervisor, jobs, state folder."""
    pid = 0
    with contextlib.suppress(SupervisorError, OSError):
        supervised = await made.supervisor(state)
        pid = supervised.identity.pid
        supervised.close()
    await agent.kill()
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # what it ran dies with it
    shutil.rmtree(made.folder / state, ignore_errors=True)


def said(shown_log: str) -> tuple[list[int], str]:
    """The steps from which the attempts of this output began, and the digest at its end."""
    lines = shown_log.splitlines()
    first = [int(line.rpartition(" ")[2]) for line in lines if line.startswith("from step")]
    digest = next((line.rpartition(" ")[2] for line in lines if line.startswith("digest")), "")
    return first, digest


def asked(**more: Any) -> dict[str, Any]:
    """What a training asks for beside its command."""
    return {"checkpoint": "ck", "checkpoint_step": r"step-(\d+)", "grace_s": 1.0, **more}
