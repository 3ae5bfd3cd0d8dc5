"""The lines of `moorage replay`: columns for a person, tabs and exact values for a script."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from moorage.cli.framework.options import OF_LEDGER
from moorage.cli.study.replay import show

PLACED: dict[str, Any] = {
    "kind": "transition", "ledger": 12, "time_ms": 1_795_232_162_507, "tenant": "acme", "job": "train", "replica": 0,
    "state": "PLACED", "worker": "n01", "gpus": ["GPU-a", "GPU-b"], "workers_known": 4, "free_left": 2,
    "placed_together": 1, "waited_ms": 1500,
}  # fmt: skip
LIMIT: dict[str, Any] = {"kind": "act", "ledger": 13, "time_ms": 1_795_232_162_600, "act": "limit", "gpus": 2}
UNRECORDED: dict[str, Any] = {**PLACED, "ledger": 0, "time_ms": None, "worker": "", "gpus": []}


def test_a_script_gets_tabs_milliseconds_and_names(capsys: pytest.CaptureFixture[str]) -> None:
    show(PLACED, OF_LEDGER)
    show(LIMIT, OF_LEDGER)
    assert capsys.readouterr().out.splitlines() == [
        "12\t1795232162507\tacme/train/0\tPLACED\tn01\tGPU-a,GPU-b\t4 workers known, 2 left free; waited 1.5 s",
        "13\t1795232162600\tlimit\tgpus 2",
    ]


def test_a_person_gets_columns_a_time_and_how_many(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    show(PLACED, OF_LEDGER)
    show(LIMIT, OF_LEDGER)
    show(UNRECORDED, OF_LEDGER)
    first, act, last = capsys.readouterr().out.splitlines()
    assert first.split() == [
        "12", "2026-11-21T03:36:02.507Z", "acme/train/0", "PLACED", "n01", "2", "GPUs",
        "4", "workers", "known,", "2", "left", "free;", "waited", "1.5", "s",
    ]  # fmt: skip
    assert act.index("limit") == first.index("acme/train/0")
    assert last.split()[:3] == ["-", "-", "acme/train/0"]
