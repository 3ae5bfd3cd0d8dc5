"""Where a server is found when nobody names one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from moorage.bus.errors import BadContext
from moorage.bus.target import Up, find_context, find_home, home, read_up, started_ticks
from moorage.schemas.codec import encode


def _not_ours(path: Path, *words: Any, **named: Any) -> Any:
    """As `Path.open` for who may not read up.json; root may read every file, so no mode can stand for it."""
    if path.name == "up.json":
        raise PermissionError(13, "Permission denied")
    return open(path, *words, **named)


def test_where_a_server_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"MOORAGE_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "none")}
    assert find_context(None, env).source == "default"
    here = Up("nats://127.0.0.1:5", os.getpid(), started_ticks(os.getpid()))
    (tmp_path / "up.json").write_bytes(encode(here))
    assert find_context(None, env).url == "nats://127.0.0.1:5"
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", _not_ours)  # root may open every file
        with pytest.raises(BadContext, match="another user's") as refused:
            find_context(None, env)
    assert "NATS_URL" in refused.value.problem.next
    assert find_context(None, {**env, "NATS_URL": "nats://elsewhere:1"}).url == "nats://elsewhere:1"
    assert find_context("nats://said:2", env).url == "nats://said:2"
    (tmp_path / "up.json").write_bytes(encode(Up("nats://127.0.0.1:5", os.getpid(), 1)))
    assert read_up(tmp_path) is None  # the pid belongs to somebody else by now
    for data in ((tmp_path / "up.json").read_bytes(), b"{half", b"", b'{"url":"\xff"}'):
        (tmp_path / "up.json").write_bytes(data)
        assert read_up(tmp_path) is None
        with pytest.raises(BadContext, match="was killed") as refused:
            find_context(None, env)
        assert f"moorage up --data {tmp_path}" in refused.value.problem.next
        assert find_context("nats://said:2", env).url == "nats://said:2"
    (tmp_path / "up.json").unlink()  # one that ends in order takes it along
    assert find_context(None, env).source == "default"


def test_the_up_of_this_folder_goes_before_a_selected_context_and_is_found_from_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config" / "nats"
    (config / "context").mkdir(parents=True)
    (config / "context" / "prod.json").write_text('{"url": "nats://prod:4222"}')
    (config / "context.txt").write_text("prod")
    env = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    below = tmp_path / "work" / "a" / "b"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    assert find_context(None, env).url == "nats://prod:4222"
    (tmp_path / "work" / ".moorage").mkdir()
    up = tmp_path / "work" / ".moorage" / "up.json"
    up.write_bytes(encode(Up("nats://127.0.0.1:5", os.getpid(), started_ticks(os.getpid()))))
    assert find_context(None, env).where == f"nats://127.0.0.1:5 (from {up})"
    assert find_context(None, {**env, "NATS_URL": "nats://said:1"}).url == "nats://said:1"
    assert find_context(None, {**env, "NATS_CONTEXT": "prod"}).url == "nats://prod:4222"
    assert find_home({**env, "MOORAGE_HOME": str(tmp_path / "other")}) == tmp_path / "other"
    assert home(env=env) == below / ".moorage", "a new one is made here"
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: 12345)  # above this folder, another user's is left alone
        assert find_context(None, env).url == "nats://prod:4222"
    up.write_bytes(encode(Up("nats://127.0.0.1:5", os.getpid(), 1)))  # it was killed
    assert find_context(None, env).url == "nats://prod:4222"
