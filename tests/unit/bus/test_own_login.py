"""The password of this user's `moorage up` is found by those who may read it, and offered to clients of NATS alone."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from moorage.bus.contexts import Context, load_context, resolve, selected_context
from moorage.bus.own_fleets import remember
from moorage.bus.own_login import PASSWORD_FILE, SERVER_FOLDER, offer, own_login, with_own_login, withdraw
from moorage.bus.target import UP_FILE, Up, find_context, started_ticks
from moorage.schemas.codec import encode

URL = "nats://127.0.0.1:25200"


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "home").mkdir()
    return {"HOME": str(tmp_path / "home"), "MOORAGE_HOME": str(tmp_path / "none")}


def run(folder: Path, env: dict[str, str], *, port: int = 25200, lives: bool = True) -> Path:
    """Let a `moorage up` run on this folder: this process stands for it, or one that is gone."""
    (folder / SERVER_FOLDER).mkdir(parents=True)
    (folder / SERVER_FOLDER / PASSWORD_FILE).write_text(f"secret of {folder.name}\n")
    up = Up(f"nats://127.0.0.1:{port}", os.getpid(), started_ticks(os.getpid()) - (not lives))
    (folder / UP_FILE).write_bytes(encode(up))
    remember(folder, env)
    return folder


def contexts(env: dict[str, str]) -> list[str]:
    return sorted(file.name for file in Path(env["HOME"], ".config/nats/context").glob("*"))


def test_the_password_goes_to_the_own_server_alone_and_to_no_context_with_a_login(
    tmp_path: Path, env: dict[str, str]
) -> None:
    run(tmp_path / "up", env)
    for url in (URL, "nats://localhost:25200", "127.0.0.1:25200"):
        found = with_own_login(resolve(url, env), env)
        assert (found.user, found.password, found.url) == ("moorage", "secret of up", resolve(url, env).url)
    for other in ("nats://127.0.0.1:25201", "nats://192.0.2.1:25200", "nats://up.example:25200", f"{URL},{URL}",
                  "nats://ana:hers@127.0.0.1:25200", "nats://token@127.0.0.1:25200"):  # fmt: skip
        assert own_login(Context(url=other), env) is None
    for context in (Context(url=URL, user="a", password="b"), Context(url=URL, nkey="k"), Context(url=URL, creds="c"),
                    Context(url=URL, cert="c"), Context(url=URL, token="t")):  # fmt: skip
        assert own_login(context, env) is None


def test_the_password_of_a_folder_is_found_by_its_folder_where_no_state_is_kept(tmp_path: Path) -> None:
    folder = run(tmp_path / "up", {"XDG_STATE_HOME": os.devnull})
    env = {"XDG_STATE_HOME": os.devnull, "HOME": str(tmp_path)}
    assert own_login(Context(url=URL), {**env, "MOORAGE_HOME": str(folder)}) is not None
    assert own_login(Context(url=URL), {**env, "MOORAGE_HOME": str(tmp_path / "other")}) is None


def test_a_password_of_another_user_is_not_taken(
    tmp_path: Path, env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would lead commands to another user's fleet."""
    folder = run(tmp_path / "up", env)
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    assert own_login(Context(url=URL), {**env, "MOORAGE_HOME": str(folder)}) is None


def test_a_context_for_other_clients_is_there_while_it_runs_and_selected_if_none_is(
    tmp_path: Path, env: dict[str, str]
) -> None:
    folder = run(tmp_path / "up", env)
    assert offer(folder, URL, env) == "moorage-up-25200"
    [name] = contexts(env)
    file = Path(env["HOME"], ".config/nats/context", name)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert load_context("moorage-up-25200", env).login == ("moorage", "secret of up", "")
    assert selected_context(env) == "moorage-up-25200"
    found = find_context(None, env)
    assert (found.source, found.password) == ("default", ""), "of several fleets none is taken for being selected"

    second = run(tmp_path / "second", env, port=25201)
    assert offer(second, "nats://127.0.0.1:25201", env) == "moorage-up-25201"
    assert selected_context(env) == "moorage-up-25200", "what is selected stays"
    withdraw(env, folder)
    assert (contexts(env), selected_context(env)) == (["moorage-up-25201.json"], "")


def test_what_a_killed_one_left_goes_and_a_context_of_the_users_own_stays(tmp_path: Path, env: dict[str, str]) -> None:
    killed = run(tmp_path / "killed", env)
    offer(killed, URL, env)
    own = Path(env["HOME"], ".config/nats/context/moorage-up-mine.json")
    own.write_text(json.dumps({"url": URL, "description": "my own"}))
    (killed / UP_FILE).write_bytes(encode(Up(URL, os.getpid(), 1)))
    again = run(tmp_path / "again", env, port=25202)
    assert offer(again, "nats://127.0.0.1:25202", env) == "moorage-up-25202"
    assert contexts(env) == ["moorage-up-25202.json", "moorage-up-mine.json"]
    assert selected_context(env) == "moorage-up-25202"
    Path(env["HOME"], ".config/nats/context.txt").write_text("work")
    withdraw(env, again)
    assert selected_context(env) == "work"


def test_no_context_is_written_where_no_home_is(tmp_path: Path, env: dict[str, str]) -> None:
    folder = run(tmp_path / "up", env)
    missing = tmp_path / "missing"
    assert offer(folder, URL, {**env, "XDG_CONFIG_HOME": str(missing / "config")}) == ""
    assert offer(folder, URL, {"HOME": str(missing)}) == ""
    assert not missing.exists()
    (tmp_path / "file").write_text("")
    assert offer(folder, URL, {**env, "XDG_CONFIG_HOME": str(tmp_path / "file")}) == ""
