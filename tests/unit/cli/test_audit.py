"""Drift is what two looks show that are some renewals apart."""

from __future__ import annotations

from moorage.cli.fleet.audit import _no_drift, drift_of, in_both


def test_only_what_both_looks_show_is_drift() -> None:
    came = {"worker": "n1", "kind": "ledger-only", "member": "a/b/0"}
    stays = {"worker": "n2", "kind": "nvml-memory", "member": "GPU-1", "memory_mib": 100}
    grown = {**stays, "memory_mib": 200}
    new = {"worker": "n3", "kind": "silent"}
    first, second = drift_of({"drift": [came, stays]}), drift_of({"drift": [grown, new]})
    assert list(in_both(first, second).values()) == [grown]


def test_the_summary_counts_attempts() -> None:
    data = {"workers": 1, "members": 2, "leases": 3, "drift": []}
    assert _no_drift(data) == "no drift: 1 worker, 2 attempts, 3 GPUs leased"


def test_what_only_the_second_look_shows_is_no_drift_and_is_counted() -> None:
    data = {"workers": 1, "members": 2, "leases": 3, "drift": [{"worker": "n3", "kind": "silent"}]}
    assert _no_drift(data) == "no drift: 1 worker, 2 attempts, 3 GPUs leased; 1 difference found only once"
