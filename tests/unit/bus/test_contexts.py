"""NATS contexts: precedence, every field, and errors that name file, field and what next."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import nkeys
import pytest

from moorage.bus.connection import connect
from moorage.bus.contexts import URL_DEFAULT, Context, _from_url, list_contexts, resolve, selected_context
from moorage.bus.errors import BadContext


class Home:
    """A user's configuration folder under a test's own."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.env = {"HOME": str(base)}
        (base / ".config" / "nats" / "context").mkdir(parents=True)

    def context(self, name: str, /, raw: Any = None, **fields: Any) -> Path:
        file = self.base / ".config" / "nats" / "context" / f"{name}.json"
        file.write_bytes(json.dumps(fields).encode() if raw is None else raw)
        return file

    def select(self, name: str) -> None:
        (self.base / ".config" / "nats" / "context.txt").write_text(name + "\n")

    def file(self, name: str, text: str = "x") -> str:
        (self.base / name).write_text(text)
        return str(self.base / name)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def test_precedence(home: Home) -> None:
    assert resolve(None, home.env).url == URL_DEFAULT
    env = {**home.env, "NATS_URL": "nats://by-url:4222"}
    assert resolve(None, env).url == "nats://by-url:4222"
    home.context("picked", url="nats://by-selection:4222", user="me", password="secret")
    home.select("picked")
    assert resolve(None, home.env).url == "nats://by-selection:4222"
    assert (resolve(None, env).url, resolve(None, env).user) == ("nats://by-url:4222", ""), "as `nats` does"
    home.context("named", url="nats://by-variable:4222", user="ana", password="secret")
    env["NATS_CONTEXT"] = "named"
    assert (resolve(None, env).url, resolve(None, env).user) == ("nats://by-url:4222", "ana"), "as `nats` does"
    del env["NATS_URL"]
    assert resolve(None, env).url == "nats://by-variable:4222"
    home.context("asked", url="nats://by-argument:4222")
    assert resolve("asked", env).url == "nats://by-argument:4222"
    assert resolve("nats://plain:1", env).url == "nats://plain:1"
    assert resolve("plain:1", env).url == "nats://plain:1"
    assert resolve(Context(url="nats://made:1"), env).url == "nats://made:1"
    assert list_contexts(home.env) == ["asked", "named", "picked"]
    assert selected_context(home.env) == "picked"


def test_a_byte_order_mark_before_a_context_or_its_name_is_skipped(home: Home) -> None:
    home.context("marked", raw=b'\xef\xbb\xbf{"url": "nats://marked:4222"}')
    home.select("\ufeffmarked")
    assert resolve(None, home.env).url == "nats://marked:4222"


def test_an_address_says_where_it_was_found(home: Home) -> None:
    file = home.context("picked", url="nats://h:4222")
    env = dict(home.env)
    assert resolve(None, env).where == "nats://127.0.0.1:4222 (the default)"
    assert resolve("nats://u:p@h:1", env).where == "nats://***@h:1 (as given)"
    assert resolve("picked", env).where == f"nats://h:4222 (from {file})"
    home.select("picked")
    assert resolve(None, env).where == f"nats://h:4222 (from {file}, the selected context)"
    assert (
        resolve(None, {**env, "NATS_CONTEXT": "picked"}).where == f"nats://h:4222 (from {file}, named by NATS_CONTEXT)"
    )
    assert resolve(None, {**env, "NATS_URL": "h:2"}).where == "nats://h:2 (from NATS_URL)"


def test_xdg_config_home_moves_the_folder(home: Home) -> None:
    home.context("here", url="nats://xdg:4222")
    env = {"HOME": "/nowhere", "XDG_CONFIG_HOME": str(home.base / ".config")}
    assert resolve("here", env).url == "nats://xdg:4222"


def test_every_field_is_read(home: Home) -> None:
    fields = {
        "url": "nats://a:4222, nats://b:4222",
        "user": "me",
        "password": "secret-1",
        "token": "secret-2",
        "creds": home.file("me.creds"),
        "nkey": home.file("me.nk"),
        "cert": home.file("cert.pem"),
        "key": home.file("key.pem"),
        "ca": home.file("ca.pem"),
        "inbox_prefix": "_INBOX.me",
        "jetstream_domain": "hub",
        "tls_first": True,
    }
    file = home.context("full", description="not ours", color_scheme="", **fields)
    context = resolve("full", home.env)
    assert {key: getattr(context, key) for key in fields} == fields
    assert context.servers == ["nats://a:4222", "nats://b:4222"]
    assert context.source == str(file)
    assert context.api_prefix == "$JS.hub.API"


def test_home_in_paths_is_expanded(home: Home) -> None:
    home.file("me.creds")
    home.context("tilde", creds="~/me.creds")
    assert resolve("tilde", home.env).creds == f"{home.base}/me.creds"


def test_nothing_shown_holds_a_secret(home: Home) -> None:
    secrets = {"password": "secret-1", "token": "secret-2", "user_jwt": "secret-3", "user_seed": "secret-4"}
    home.context("s", url="nats://u:secret-0@h:4222", user="me", **secrets)
    context = resolve("s", home.env)
    assert "secret" not in f"{context!r} {context} {context.safe_url} {[context]}"
    assert "h:4222" in context.safe_url


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("nats://u:hun/ter2@h:4222", "nats://***@h:4222"),
        ("nats://u:hun/t@er2@h:4222", "nats://***@h:4222"),
        ("nats://u:hun#ter2@h", "nats://***@h"),
        ("nats://u:hun?ter2@h", "nats://***@h"),
        ("nats://u:hunter2@[::1:4222", "nats://***@[::1:4222"),
        ("nats://u:hunter2,hunter2@h", "***"),
        ("u:hun/ter2@h:4222", "nats://***@h:4222"),
    ],
)
def test_a_url_that_is_none_is_refused_without_its_password(home: Home, url: str, shown: str) -> None:
    with pytest.raises(BadContext) as refused:
        resolve(url, home.env)
    problem = refused.value.problem
    assert repr(shown) in problem.message
    assert "ter2" not in f"{problem}"
    assert "%2F" in problem.next


@pytest.mark.parametrize(
    ("fields", "login"),
    [
        ({}, ("", "", "")),
        ({"url": "nats://u:p@a"}, ("u", "p", "")),
        ({"url": "nats://u%40x:p%2F%25@a"}, ("u@x", "p/%", "")),
        ({"url": "nats://to%23ken@a:4222"}, ("", "", "to#ken")),
        ({"url": "nats://u:p@a,u:p@b,nats://c"}, ("u", "p", "")),
        ({"url": "nats://u:p@a,nats://v:q@b"}, ("", "", "")),
        ({"url": "nats://u:p@a", "user": "me", "password": "mine"}, ("me", "mine", "")),
        ({"url": "nats://u:p@a", "token": "mine"}, ("", "", "mine")),
        ({"url": "nats://u:p@a", "user": "me"}, ("u", "p", "")),
    ],
)
def test_who_one_is(fields: dict[str, Any], login: tuple[str, str, str]) -> None:
    assert Context(**fields).login == login


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"url": "http://h:80"}, "url"),
        ({"url": "nats://:4222"}, "url"),
        ({"url": "nats://h:99999"}, "url"),
        ({"url": ","}, "url"),
        ({"url": 7}, "url"),
        ({"user": ["me"]}, "user"),
        ({"tls_first": "yes"}, "tls_first"),
        ({"creds": "/nowhere/me.creds"}, "creds"),
        ({"creds": "op://vault/me"}, "creds"),
        ({"nkey": "/nowhere/me.nk"}, "nkey"),
        ({"ca": "/nowhere/ca.pem"}, "ca"),
        ({"key": "KEY"}, "key"),
        ({"password": "p"}, "password"),
        ({"user_jwt": "j"}, "user_jwt"),
        ({"nsc": "nsc://o/a/u"}, "nsc"),
        ({"socks_proxy": "socks5://p"}, "socks_proxy"),
        ({"inbox_prefix": "_INBOX.>"}, "inbox_prefix"),
        ({"inbox_prefix": "a b"}, "inbox_prefix"),
    ],
)
def test_a_bad_field_is_named_with_its_file(home: Home, fields: dict[str, Any], key: str) -> None:
    if fields.get(key) == "KEY":
        fields = {key: home.file("key.pem")}
    file = home.context("bad", **fields)
    with pytest.raises(BadContext) as raised:
        resolve("bad", home.env)
    assert raised.value.key == key
    assert raised.value.file == file
    assert str(file) in str(raised.value)


SEED: Final = nkeys.encode_seed(bytes(range(32)), nkeys.PREFIX_BYTE_USER).decode()
OF_AN_ACCOUNT: Final = nkeys.encode_seed(bytes(range(32)), nkeys.PREFIX_BYTE_ACCOUNT).decode()
MARK: Final = 5 * "-"
CREDENTIALS: Final = (
    f"{MARK}BEGIN NATS USER JWT{MARK}\n{{jwt}}\n{MARK}-END NATS USER JWT{MARK}-\n\n"
    f"{MARK}BEGIN USER NKEY SEED{MARK}\n{{seed}}\n{MARK}-END USER NKEY SEED{MARK}-\n"
)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"nkey": ""}, "it holds no seed of a user"),
        ({"nkey": "SUAGARBAGE"}, "it holds no seed of a user"),
        ({"nkey": SEED[:-1]}, "it holds no seed of a user"),
        ({"nkey": "\xff\x00"}, "it holds no seed of a user"),
        ({"nkey": OF_AN_ACCOUNT}, "its seed is not that of a user"),
        ({"creds": ""}, "it holds no JWT of a user"),
        ({"creds": SEED}, "it holds no JWT of a user"),
        ({"creds": CREDENTIALS.format(jwt="eyJ0", seed="SUAGARBAGE")}, "it holds no seed of a user"),
        ({"creds": CREDENTIALS.format(jwt="eyJ0", seed=SEED)[:60]}, "it holds no seed of a user"),
        ({"user_jwt": "eyJ0", "user_seed": "SUAGARBAGE"}, "it holds no seed of a user"),
    ],
)
async def test_a_damaged_key_is_named_in_one_line(home: Home, fields: dict[str, str], why: str) -> None:
    key = list(fields)[-1]
    if key != "user_seed":
        fields = {key: home.file("me.key", fields[key])}
    home.context("damaged", url="nats://127.0.0.1:1", **fields)
    with pytest.raises(BadContext) as raised:
        await connect(resolve("damaged", home.env), "test", give_up_after_s=0.0)
    assert raised.value.key == key
    where = key if key == "user_seed" else f"{key} {fields[key]}"
    assert str(raised.value) == f"{where} is damaged: {why}"
    assert "copy the key again" in raised.value.problem.next


@pytest.mark.parametrize("key", ["nkey", "creds"])
async def test_a_whole_key_is_no_damaged_one(home: Home, key: str) -> None:
    text = f"{SEED}\n" if key == "nkey" else CREDENTIALS.format(jwt="eyJ0", seed=SEED)
    home.context("whole", **{key: home.file("me.key", text)})
    resolve("whole", home.env).check_login()
    resolve(None, {}).check_login()


def test_the_name_of_a_tenant_leads_to_the_contexts_of_its_keys(home: Home) -> None:
    """It led to service.vision, the key of the tenant's jobs."""
    for name in ("operator.ana", "service.vision", "submitter.vision"):
        home.context(name, url="nats://a:4222")
    with pytest.raises(BadContext) as raised:
        resolve("vision", home.env)
    assert raised.value.problem.next == "there are submitter.vision, service.vision"


@pytest.mark.parametrize("raw", [b"{", b"[]", b"null", b'{"url": "\xff"}', b"[" * 60_000, b"x" * 70_000])
def test_a_file_that_is_no_context(home: Home, raw: bytes) -> None:
    file = home.context("bad", raw=raw)
    with pytest.raises(BadContext) as raised:
        resolve("bad", home.env)
    assert raised.value.file == file


@pytest.mark.parametrize("name", ["../escape", "a/b", "", ".", "..", "a b", "x" * 300])
def test_names_that_are_none(home: Home, name: str) -> None:
    env = {**home.env, "NATS_CONTEXT": name or " "}
    with pytest.raises(BadContext, match="NATS_CONTEXT"):
        resolve(None, env)


def test_a_missing_context_says_who_named_it_and_what_is_near(home: Home) -> None:
    home.context("production", url="nats://h:4222")
    with pytest.raises(BadContext) as raised:
        resolve(None, {**home.env, "NATS_CONTEXT": "prodution"})
    assert "NATS_CONTEXT" in str(raised.value)
    assert "production" in raised.value.problem.next
    home.select("gone")
    with pytest.raises(BadContext, match=r"context\.txt"):
        resolve(None, home.env)


def test_a_bad_certificate_is_named(home: Home) -> None:
    context = Context(url="tls://h:4222", ca=home.file("ca.pem"))
    with pytest.raises(BadContext) as raised:
        context.tls()
    assert raised.value.key == "ca"
    assert Context(url="nats://h").tls() is None


@pytest.mark.parametrize(
    ("url", "meant"),
    [
        ("nats://::1:4222", "nats://[::1]:4222"),
        ("::1:4222", "nats://[::1]:4222"),
        ("::1", "nats://[::1]"),
        ("nats://[::1", "nats://[::1]"),
        ("tls://2001:db8::7:4222", "tls://[2001:db8::7]:4222"),
    ],
)
def test_an_ipv6_address_without_brackets_is_refused_with_what_is_meant(url: str, meant: str) -> None:
    with pytest.raises(BadContext) as refused:
        _from_url(url, "--nats")
    assert f"brackets: {meant}" in str(refused.value.problem.next)
