"""Drift is what two looks show that are some renewals apart."""

from __future__ import annotations

from moorage.cli.fleet.audit import _summary, drift_of, in_both


def test_only_what_both_looks_show_is_drift() -> None:
    came = {"worker": "n1", "kind": "ledger-only", "member": "a/b/0"}
    stays = {"worker": "n2", "kind": "nvml-memory", "member": "GPU-1", "memory_mib": 100}
    grown = {**stays, "memory_mib": 200}
    new = {"worker": "n3", "kind": "silent"}
    first, second = drift_of({"drift": [came, stays]}), drift_of({"drift": [grown, new]})
    assert list(in_both(first, second).values()) == [grown]


def test_the_summary_counts_attempts() -> None:
    assert (
        _summary({"workers": 1, "members": 2, "leases": 3, "drift": []})
        == "no drift: 1 worker, 2 attempts, 3 GPUs leased"
    )
