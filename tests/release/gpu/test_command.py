"""The command for a real GPU, tried on the stub of NVIDIA's libraries: everything but the device is real."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.nvidia.mps import Played
from tests.nvidia.stub import Board, Stub

ROOT = Path(__file__).parents[3]
GPU = "GPU-11111111-2222-3333-4444-555555555555"
SMI = """#!/bin/sh
case "$*" in
  *index,uuid*) echo "0, {uuid}, {name}, 81559, 00000000:17:00.0" ;;
  *memory.used*) echo "1" ;;
  *driver_version*) echo "{name}, 550.54.15" ;;
  *) echo "GPU 0: {name} (UUID: {uuid})" ;;
esac
"""


def checked(tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | variables
    words = [sys.executable, "-m", "tests.release.gpu", "--launches", "400"]
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_check_is_made_and_prints_its_row(tmp_path: Path) -> None:
    (tmp_path / "stub").mkdir()
    (tmp_path / "stub").chmod(0o777)
    stub = Stub(tmp_path / "stub", Board(GPU), extra=("kernel us=1",))
    played = Played(tmp_path / "bin")
    smi = played.folder / "nvidia-smi"
    smi.write_text(SMI.format(uuid=GPU, name="NVIDIA H100 80GB HBM3"))
    smi.chmod(0o755)
    path = f"{played.folder}:{os.environ['PATH']}"
    ran = checked(tmp_path, PATH=path, **stub.environment)
    rows = [line.strip("| ").split(" | ") for line in ran.stdout.splitlines()[2:]]
    verdicts = {row[0]: row[1] for row in rows}
    assert (ran.returncode, "FAILED" in verdicts.values()) == (0, False), ran.stderr + ran.stdout
    not_tried = {row[0] for row in rows if row[1] == "not tried" and row[2] != "PyTorch is not here"}
    not_here = {"the kernel keeps a job to its GPUs", "a large job frozen and resumed", "mps"}
    not_here.add("two jobs on two GPUs")
    not_here.add("mps: a job that has its GPU alone is frozen")
    assert not_tried <= not_here, "no files of devices are here, and little memory"
    assert len(rows) == 27


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    ran = checked(tmp_path, PATH=str(tmp_path))
    assert (ran.returncode, ran.stdout, ran.stderr) == (2, "", "no GPU: nvidia-smi is not here\n")
