"""What nvidia-smi says of the devices of this host, to hold against what we read."""

from __future__ import annotations

import csv
import subprocess

import pytest


def asked_of_nvidia_smi(query: str) -> list[list[str]]:
    """The fields of `query` of each device, in its order; skips the test where there is no GPU."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("no GPU: nvidia-smi is not here")
    if answer.returncode:
        pytest.skip(f"no GPU: nvidia-smi says {answer.stdout.strip() or answer.stderr.strip()}")
    return [[field.strip() for field in row] for row in csv.reader(answer.stdout.splitlines())]
