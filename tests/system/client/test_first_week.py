"""An ML engineer's first week: a job that waits, a sweep of which some fail, a notebook. It takes some 12 s."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from tests.system.cli.node import Ran, moorage, start_node
from tests.system.client.kernel import Cell, Notebook, notebook_in

SWEEP: Final = "lr,seed\n0.1,1\n0.1,2\n9.0,1\n9.0,2\n"
TRAIN: Final = """
import os, sys
from pathlib import Path
lr, seed = float(sys.argv[1]), os.environ["MOORAGE_ITEM_SEED"]
if lr > float(os.environ.get("LR_MAX", "1")):
    sys.exit(f"diverged at lr {lr}")
Path("out").mkdir()
Path("out/loss").write_text(f"{lr / 2} of seed {seed}")
"""
OF_THE_SWEEP: Final = """
from moorage.client import Client, JobFailed
m = Client().open()
try:
    m.job("lr").result()
except JobFailed as failed:
    print([each.item for each in failed.failed])
m.job("lr-again-1").result()
"""
A_FUNCTION: Final = """
def train(lr):
    return 1 / lr
job = m.map(train, [1, 2, 0], gpu="1xH100", how="cloudpickle", job="inverse")
for answer in job.answers(errors="return"):
    print(answer)
"""
Type = Callable[..., Ran]


@pytest.mark.slow
def test_from_the_first_job_to_a_sweep_and_a_notebook(tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "sweep.csv").write_text(SWEEP)
    (code / "train.py").write_text(TRAIN)
    with asyncio.Runner() as runner:
        node = runner.run(start_node(tmp_path / "fleet", simulate="4x8xH100"))
        env = {"NATS_URL": node.url}

        def run(*words: str) -> Ran:
            return runner.run(moorage(*words, env=env, cwd=code))

        try:
            first_jobs(run)
            sweep(run, code)
            with notebook_in(code, env) as notebook:
                cells(notebook)
        finally:
            assert runner.run(node.stop()) == 0


def first_jobs(run: Type) -> None:
    """The session of the README, and a slip of an id."""
    hello = run("run", "--gpu", "2xH100", "--job", "hello", "--", "sh", "-c", "echo two GPUs for $MOORAGE_JOB")
    assert (hello.code, hello.out) == (0, "two GPUs for hello\n"), hello.err
    assert run("submit", "--gpu", "8xH100", "--replicas", "4", "--job", "hog", "--", "sleep", "600").code == 0
    assert run("submit", "--gpu", "2xH100", "--job", "small", "--", "true").code == 0
    small = run("explain", "small").rows
    assert dict(small)["reason"].startswith("busy: ")
    assert ["held by", "job hog: 32 GPUs"] in small
    assert run("cancel", "hogg").code == 3
    assert run("cancel", "hog").code == 0
    assert run("wait", "small").code == 0


def sweep(run: Type, code: Path) -> None:
    """A plan, four configurations of which two fail, and those two once more, into the same folder of results."""
    assert run("plan", "--gpu", "1xH100", "--each", "sweep.csv", "--", "python3", "train.py", "{lr}").code == 0
    asked = ("--each", "sweep.csv", "--with", "train.py", "--keep", "out/loss", "--", "python3", "train.py", "{lr}")
    assert "one for each item" in run("submit", "--job", "lr", "--gpu", "4x1xH100", *asked).err
    submitted = run("submit", "--job", "lr", "--gpu", "1xH100", "--max-running", "3", *asked)
    assert (submitted.code, submitted.out) == (0, "lr\n"), submitted.err
    assert run("wait", "lr").code == 1
    rows = run("show", "lr", "--failed").rows
    assert rows[1:] == [
        ["2", "lr=9.0 seed=1", "FAILED", "1", "diverged at lr 9.0"],
        ["3", "lr=9.0 seed=2", "FAILED", "1", "diverged at lr 9.0"],
    ]
    assert run("get", "lr", "--out", "results").code == 0
    assert run("again", "lr", "--failed", "--env", "LR_MAX=10").out == "lr-again-1\n"
    assert run("wait", "lr-again-1").code == 0
    assert run("get", "lr-again-1", "--out", "results", "--merge").code == 0
    found = [(code / "results" / str(number) / "out/loss").read_text() for number in range(4)]
    assert found == ["0.05 of seed 1", "0.05 of seed 2", "4.5 of seed 1", "4.5 of seed 2"]
    parts = run("run", "--job", "parts", "--array", "1-4%2", "--", "sh", "-c", "echo part $MOORAGE_INDEX")
    assert sorted(parts.out.splitlines()) == [f"[{part}] part {part}" for part in range(1, 5)], parts.err


def cells(notebook: Notebook) -> None:
    """What failed in the sweep, the result of its second run, and a function over inputs."""
    shown = notebook.run(OF_THE_SWEEP)
    assert shown.error == ""
    assert shown.printed == "[{'lr': '9.0', 'seed': '1'}, {'lr': '9.0', 'seed': '2'}]\n"
    assert shown.pictures[0]["text/plain"].startswith("<Result lr-again-1  SUCCEEDED  code 0  ")
    failed = "item 2 of job inverse failed: ZeroDivisionError: division by zero"
    assert notebook.run(A_FUNCTION) == Cell(f"1.0\n0.5\n{failed}\n", "", [])
    assert notebook.run("m.close()").error == ""
