"""The keys of the door's callers: what one allows, how much of it, and what becomes of a file that changes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from moorage.cli.door.keys import Key, Keyring, hash_of, new_key, read_keys, write_keys
from moorage.cli.door.problems import DoorProblem
from moorage.schemas.errors import MoorageError


def made(path: Path, **fields: object) -> tuple[str, Key]:
    shown = new_key()
    key = Key("one", hash_of(shown), "acme", **fields)  # type: ignore[arg-type]
    write_keys(path, [key])
    return shown, key


def test_a_file_has_hashes_alone_and_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    shown, key = made(path)
    assert shown not in path.read_text()
    ring = Keyring(path)
    assert ring.find(shown) == key
    assert ring.find(shown + "x") is None
    assert ring.find("") is None
    other, _ = made(path)
    assert ring.find(shown) is None, "it was taken back"
    assert ring.find(other) is not None
    path.write_text("{")
    path.chmod(0o600)
    assert ring.find(other) is not None, "the keys stay as they were"
    with pytest.raises(MoorageError, match="is no file of keys"):
        Keyring(path)
    path.chmod(0o644)
    with pytest.raises(MoorageError, match="others may read"):
        read_keys(path)


def test_a_key_has_its_time_its_services_and_its_bounds(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    shown, _ = made(path, expires_s=time.time() - 1)
    assert Keyring(path).find(shown) is None
    _, key = made(path, services=("chat", "embed*"), at_once=2, per_minute=3)
    assert [key.may_call(name) for name in ("chat", "chat2", "embed-1", "x")] == [True, False, True, False]
    ring = Keyring(path)
    assert [ring.begin(key) for _ in range(2)] == [None, None]
    assert ring.begin(key) == ("has at most 2 calls at once", 1.0)
    ring.end(key)
    assert ring.begin(key) is None
    ring.end(key)
    bound = ring.begin(key)
    assert bound is not None
    assert bound.words == "begins at most 3 calls in a minute"
    assert 0 < bound.after_s <= 60


def test_an_error_says_whether_it_may_be_sent_again() -> None:
    later = DoorProblem(429, "key_limit", "x", again=True, after_s=0.2)
    assert later.headers["x-should-retry"] == "true"
    assert (later.headers["retry-after"], later.headers["retry-after-ms"]) == ("1", "200")
    never = DoorProblem(504, "timeout", "x")
    assert never.headers["x-should-retry"] == "false"
    assert "retry-after" not in never.headers
