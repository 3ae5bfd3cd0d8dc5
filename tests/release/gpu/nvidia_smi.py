"""What nvidia-smi says of the devices of this host, to hold against what we read."""

from __future__ import annotations

import csv
import subprocess


class NoGpu(Exception):
    """This host has no NVIDIA GPU that nvidia-smi lists."""


def fields_of(query: str) -> list[list[str]]:
    """The fields of `query` of each device, in its order. Raises NoGpu."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        raise NoGpu("nvidia-smi is not here") from None
    if answer.returncode:
        raise NoGpu(f"nvidia-smi says {answer.stdout.strip() or answer.stderr.strip()}")
    return [[field.strip() for field in row] for row in csv.reader(answer.stdout.splitlines())]
