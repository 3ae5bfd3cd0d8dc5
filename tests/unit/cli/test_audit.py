"""Drift is what two looks show that are some renewals apart."""

from __future__ import annotations

from msgspec.structs import replace

from moorage.cli.fleet.audit import _no_drift, drift_of, in_both
from moorage.schemas.answers.operators import Audit, Drift


def test_only_what_both_looks_show_is_drift() -> None:
    came = Drift(worker="n1", kind="ledger-only", member="a/b/0")
    stays = Drift(worker="n2", kind="nvml-memory", member="GPU-1", memory_mib=100)
    grown = replace(stays, memory_mib=200)
    new = Drift(worker="n3", kind="silent")
    first, second = drift_of(Audit(drift=[came, stays])), drift_of(Audit(drift=[grown, new]))
    assert list(in_both(first, second).values()) == [grown]


def test_the_summary_counts_attempts() -> None:
    data = Audit(workers=1, members=2, leases=3)
    assert _no_drift(data) == "no drift: 1 worker, 2 attempts, 3 GPUs leased"


def test_what_only_the_second_look_shows_is_no_drift_and_is_counted() -> None:
    data = Audit(workers=1, members=2, leases=3, drift=[Drift(worker="n3", kind="silent")])
    assert _no_drift(data) == "no drift: 1 worker, 2 attempts, 3 GPUs leased; 1 difference found only once"
