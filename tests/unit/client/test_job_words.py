"""What a job says to its worker, by `moorage.job`."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from moorage.job import checkpoint


def test_a_checkpoint_is_asked_for_by_a_touch_and_is_stored_once_the_file_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MOORAGE_CHECKPOINT_NOW", raising=False)
    assert not checkpoint(), "it is no job, or one without a checkpoint"
    path = tmp_path / "now"
    monkeypatch.setenv("MOORAGE_CHECKPOINT_NOW", str(path))
    assert not checkpoint()
    first_ns = path.stat().st_mtime_ns
    assert not checkpoint(wait_s=0.01)
    assert path.stat().st_mtime_ns > first_ns, "the worker sees that it was asked again"
    worker = threading.Timer(0.05, path.unlink)
    worker.start()
    assert checkpoint(wait_s=60)
    worker.join()
