"""The changes of a job's device share by operators, one row for each."""

from __future__ import annotations

from typing import NamedTuple


class Resize(NamedTuple):
    """The part of each device that a job has from a ledger millisecond on, and the record that gave it."""

    since_ms: int
    seq: int
    memory_mib: int
    compute_percent: int
