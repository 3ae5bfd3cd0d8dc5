"""The fleets that `moorage up` runs for this user are found from another folder: last of all, and only one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moorage.bus import own_fleets
from moorage.bus.contexts import Context, resolve
from moorage.bus.errors import BadContext
from moorage.bus.own_fleets import forget, is_served, own_fleet, remember, running
from moorage.bus.target import UP_FILE, Up, started_ticks
from moorage.schemas.codec import encode


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setattr(own_fleets, "is_served", lambda url: False)
    return {"XDG_STATE_HOME": str(tmp_path / "state"), "XDG_CONFIG_HOME": str(tmp_path / "config")}


def run(folder: Path, env: dict[str, str], *, port: int = 25200, lives: bool = True) -> Path:
    """Let a `moorage up` run on this folder: this process stands for it, or one that is gone."""
    folder.mkdir()
    up = Up(f"nats://127.0.0.1:{port}", os.getpid(), started_ticks(os.getpid()) - (not lives))
    (folder / UP_FILE).write_bytes(encode(up))
    remember(folder, env)
    return folder


def test_the_only_fleet_of_this_user_is_found_where_nothing_is_named(tmp_path: Path, env: dict[str, str]) -> None:
    folder = run(tmp_path / "one", env)
    [file] = Path(env["XDG_STATE_HOME"], "moorage", "up").iterdir()
    assert (file.stat().st_mode & 0o777, file.read_text()) == (0o600, f"{folder}\n")
    context, found = own_fleet(resolve(None, env), env)
    assert (context.url, found is not None and found.folder) == ("nats://127.0.0.1:25200", folder)
    for target in ("nats://127.0.0.1:9", Context(source="", url="nats://127.0.0.1:9")):
        assert own_fleet(resolve(target, env), env) == (resolve(target, env), None), "it is named"
    forget(folder, env)
    assert running(env) == []


def test_a_fleet_is_not_taken_where_the_default_server_answers(
    tmp_path: Path, env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path / "one", env)
    monkeypatch.setattr(own_fleets, "is_served", lambda url: url == "nats://127.0.0.1:4222")
    assert own_fleet(resolve(None, env), env) == (resolve(None, env), None)


def test_the_fleet_at_the_default_server_counts_as_found_elsewhere(
    tmp_path: Path, env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that changes something in any folder changed it, unasked."""
    default, _ = run(tmp_path / "one", env, port=4222), run(tmp_path / "two", env)
    monkeypatch.setattr(own_fleets, "is_served", lambda url: url == "nats://127.0.0.1:4222")
    context, found = own_fleet(resolve(None, env), env)
    assert (context, found is not None and found.folder) == (resolve(None, env), default)


def test_of_two_fleets_both_are_listed_and_none_is_taken(tmp_path: Path, env: dict[str, str]) -> None:
    one, two = run(tmp_path / "one", env), run(tmp_path / "two", env, port=25201)
    with pytest.raises(BadContext, match="2 fleets of yours run") as refused:
        own_fleet(resolve(None, env), env)
    for said in (one, two, "nats://127.0.0.1:25200", "nats://127.0.0.1:25201"):
        assert str(said) in str(refused.value)


def test_the_file_of_a_fleet_that_is_dead_is_removed(tmp_path: Path, env: dict[str, str]) -> None:
    run(tmp_path / "dead", env, lives=False)
    lives = run(tmp_path / "lives", env)
    (Path(env["XDG_STATE_HOME"]) / "moorage" / "up" / "link").symlink_to(tmp_path)
    assert [fleet.folder for fleet in running(env)] == [lives]
    names = {file.name for file in Path(env["XDG_STATE_HOME"], "moorage", "up").iterdir()}
    assert len(names) == 2, "and what is not this user's file is left alone"
    assert running({"XDG_STATE_HOME": os.devnull}) == []
    remember(lives, {"XDG_STATE_HOME": os.devnull})


def test_what_another_host_with_the_same_home_runs_is_left_alone(
    tmp_path: Path, env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(own_fleets, "_here", lambda: "0123456789abcdef")
        run(tmp_path / "theirs", env, lives=False)
    assert running(env) == []
    assert len(list(Path(env["XDG_STATE_HOME"], "moorage", "up").iterdir())) == 1
    remember(Path(os.fsdecode(bytes(tmp_path) + b"/\xe9")), env)


def test_a_server_answers_where_a_connection_is_accepted(nats_url: str) -> None:
    assert is_served(nats_url)
    assert not is_served("nats://127.0.0.1:1")


def test_root_leaves_nothing_in_the_home_of_another_user(
    tmp_path: Path, env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    if os.geteuid() == 0:
        os.chown(home, 12345, 12345)
    else:
        monkeypatch.setattr("os.geteuid", lambda: 12345)
    remember(tmp_path, {"HOME": str(home)})
    assert list(home.iterdir()) == []
