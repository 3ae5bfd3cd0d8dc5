"""joblib and Hydra themselves, over moorage: their tasks are calls of an executor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moorage.client import Client
from moorage.schemas.job import TERMINAL
from tests.system.cli.node import Node

joblib = pytest.importorskip("joblib")
pytest.importorskip("hydra")

WAIT_S = 100.0
APP = """
import os

import hydra
from omegaconf import DictConfig


@hydra.main(version_base=None, config_path="conf", config_name="config")
def train(config: DictConfig) -> float:
    if config.lr > 1:
        raise ValueError("it diverged")
    with open("seen", "w") as file:
        file.write(f"{config.lr} {os.environ['CUDA_VISIBLE_DEVICES'].isdigit()}")
    return config.lr / 2


if __name__ == "__main__":
    train()
"""


def squared(number: int) -> int:
    if number < 0:
        raise ValueError("below zero")
    return number**2


def test_joblib_runs_its_tasks_as_calls_and_ends_them_when_one_fails(node: Node, unique: str) -> None:
    from moorage.contrib.joblib_backend import register

    register()
    options = {"target": node.url, "tenant": unique, "gpu": 1}
    with joblib.parallel_config("moorage", n_jobs=3, **options):
        tasks = [joblib.delayed(squared)(number) for number in range(8)]
        assert joblib.Parallel()(tasks) == [0, 1, 4, 9, 16, 25, 36, 49]
        assert list(joblib.Parallel(return_as="generator")(tasks[:2])) == [0, 1]
        with pytest.raises(ValueError, match="below zero"):
            joblib.Parallel()(joblib.delayed(squared)(number) for number in (-1, 1, 2))
        with pytest.raises(ValueError, match="has no meaning"):
            joblib.Parallel(n_jobs=0)(tasks)
    with Client(node.url, tenant=unique) as client:
        rows = client.ls().jobs
        assert {row.gpu.rpartition("x")[0][-1:] for row in rows} == {"1"}
        assert all(row.state in TERMINAL for row in rows)


@pytest.mark.slow
def test_hydra_launches_a_multirun_as_one_job(node: Node, unique: str, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text("lr: 0.1\n")
    launcher = [f"hydra.launcher.{each}" for each in (f"target={node.url}", f"tenant={unique}", "gpu=1xH100")]

    def run(rates: str) -> subprocess.CompletedProcess[str]:
        more = ["+hydra.launcher.fields.keep=['multirun/**']"]
        words = [sys.executable, "app.py", "-m", f"lr={rates}", "hydra/launcher=moorage", *launcher, *more]
        return subprocess.run(words, cwd=tmp_path, env={**os.environ}, capture_output=True, text=True, timeout=WAIT_S)

    ran = run("0.25,0.5")
    assert ran.returncode == 0, ran.stderr
    failed = run("0.5,2")
    assert failed.returncode == 1
    assert "ValueError: it diverged" in failed.stderr
    with Client(node.url, tenant=unique) as client:
        second, first = client.ls().jobs
        info = client.job(first.job).show()
        assert (info.asked["replicas"], info.state) == (2, "SUCCEEDED")
        client.job(first.job).files(tmp_path / "kept")
        assert second.state == "SUCCEEDED"  # Hydra has the task's exception as its value
    configs = sorted((tmp_path / "kept").glob("**/overrides.yaml"))
    assert [path.read_text() for path in configs] == ["- lr=0.25\n", "- lr=0.5\n"]
