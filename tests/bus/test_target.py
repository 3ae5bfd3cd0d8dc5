"""Where a server is found when nobody names one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from moorage.bus.errors import BadContext
from moorage.bus.target import Up, find_context, read_up, started_ticks
from moorage.schemas.codec import encode


def _not_ours(path: Path, *words: Any, **named: Any) -> Any:
    """As `Path.open` for who may not read up.json; root may read every file, so no mode can stand for it."""
    if path.name == "up.json":
        raise PermissionError(13, "Permission denied")
    return open(path, *words, **named)


def test_where_a_server_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = {"MOORAGE_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "none")}
    assert find_context(None, home).source == "default"
    here = Up("nats://127.0.0.1:5", os.getpid(), started_ticks(os.getpid()))
    (tmp_path / "up.json").write_bytes(encode(here))
    assert find_context(None, home).url == "nats://127.0.0.1:5"
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", _not_ours)  # root may open every file
        with pytest.raises(BadContext, match="another user's") as refused:
            find_context(None, home)
    assert "NATS_URL" in refused.value.problem.next
    assert find_context(None, {**home, "NATS_URL": "nats://elsewhere:1"}).url == "nats://elsewhere:1"
    assert find_context("nats://said:2", home).url == "nats://said:2"
    (tmp_path / "up.json").write_bytes(encode(Up("nats://127.0.0.1:5", os.getpid(), 1)))
    assert read_up(tmp_path) is None  # the pid belongs to somebody else by now
    for data in ((tmp_path / "up.json").read_bytes(), b"{half", b"", b'{"url":"\xff"}'):
        (tmp_path / "up.json").write_bytes(data)
        assert read_up(tmp_path) is None
        with pytest.raises(BadContext, match="was killed") as refused:
            find_context(None, home)
        assert f"moorage up --data {tmp_path}" in refused.value.problem.next
        assert find_context("nats://said:2", home).url == "nats://said:2"
    (tmp_path / "up.json").unlink()  # one that ends in order takes it along
    assert find_context(None, home).source == "default"
