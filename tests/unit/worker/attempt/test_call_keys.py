"""The key of an attempt that answers calls: whose it is, who may read it, and when it is gone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec
import pytest

from moorage.bus.call_key import context_of_key
from moorage.bus.contexts import Context
from moorage.bus.target import find_context
from moorage.schemas.job import Request
from moorage.schemas.service import BatchSpec, QueueSpec, ServiceSpec
from moorage.worker.attempt.attempt_folders import AttemptFolders
from moorage.worker.attempt.call_keys import CallKeys
from moorage.worker.attempt.secret_files import SecretRefused, trouble_with_secrets
from moorage.worker.driver import Assignment
from moorage.worker.drivers.call_access import call_access
from moorage.worker.settings import WorkerSettings

PLAIN = Context(url="nats://h1:4222,nats://worker:pw@h2:4222")
KEYED = Context(url="nats://h1:4222", nkey="/etc/moorage/worker.nk")
NAME = ("acme", "embed", 0, 1, 7)


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    folder = tmp_path / "secrets"
    (folder / "calls").mkdir(parents=True, mode=0o700)
    os.chmod(folder, 0o700)
    (folder / "calls" / "acme").write_text("SUAKEY\n")
    (folder / "calls" / "acme").chmod(0o600)
    return folder


def test_a_tenants_key_is_its_own_file_and_the_servers_address_has_no_login(secrets: Path) -> None:
    keys = CallKeys(KEYED, "gpu.eu", secrets)
    assert keys.key("acme") == b"SUAKEY\n"
    with pytest.raises(SecretRefused, match="secret 'calls/beta': there is no such file"):
        keys.key("beta")
    service = ServiceSpec("embed", 8, batch=BatchSpec(32, 5))
    assert keys.variables("acme", service, 10.0, "/x.key") == {
        "MOORAGE_NATS_URL": "nats://h1:4222",
        "MOORAGE_NATS_CREDS": "/x.key",
        "MOORAGE_CALL_SUBJECT": "gpu.eu.call.acme.embed",
        "MOORAGE_CALL_CONCURRENCY": "8",
        "MOORAGE_CALL_BATCH": "32,5",
        "MOORAGE_CALL_GRACE": "10s",
        "MOORAGE_CALL_INPUT_BYTES": "67108864",
        "MOORAGE_CALL_OUTPUT_BYTES": "67108864",
    }
    waiting = ServiceSpec("embed", queue=QueueSpec(200, 10.0))
    assert keys.variables("acme", waiting, 10.0, None)["MOORAGE_CALL_QUEUE"] == "200,10"
    assert trouble_with_secrets(secrets) == ""


def test_a_worker_without_a_key_of_its_own_gives_none_and_never_its_password(secrets: Path) -> None:
    with pytest.raises(SecretRefused):
        CallKeys(PLAIN, "moorage", None).key("acme")
    told = CallKeys(PLAIN, "moorage", None).variables("acme", ServiceSpec("embed"), 1.5, None)
    assert told["MOORAGE_NATS_URL"] == "nats://h1:4222,nats://h2:4222"
    assert "MOORAGE_NATS_CREDS" not in told
    free = CallKeys(Context(url="nats://h1:4222"), "moorage", None, "nats://gateway:4222")
    assert free.key("acme") is None
    assert free.variables("acme", ServiceSpec("embed"), 1.5, None)["MOORAGE_NATS_URL"] == "nats://gateway:4222"
    assert CallKeys(Context(), "moorage", secrets).key("acme") == b"SUAKEY\n", "there is one"


MARK = "-" * 5
PEM = f"{MARK}BEGIN CERTIFICATE{MARK}\nauthority\n{MARK}END CERTIFICATE{MARK}\n"
KEY = f"{MARK}BEGIN PRIVATE KEY{MARK}\nkey\n{MARK}END PRIVATE KEY{MARK}\n"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("SUAKEY\n", {"user_seed": "SUAKEY"}),
        (f"{MARK}BEGIN NATS USER JWT{MARK}\nx\n", {"creds": "FILE"}),
        ('{"user": "acme", "password": "word"}\n', {"user": "acme", "password": "word"}),
        (PEM.replace("authority", "own") + KEY, {"cert": "FILE"}),
        (KEY + PEM.replace("authority", "own"), {"cert": "FILE"}),
    ],
)
def test_behind_a_key_stands_the_authority_by_which_the_worker_trusts_the_servers(
    secrets: Path, tmp_path: Path, text: str, found: dict[str, str]
) -> None:
    """A job has no other file of its worker, so its member could not connect to a server with TLS."""
    authority = tmp_path / "ca.pem"
    authority.write_text(PEM)
    (secrets / "calls" / "acme").write_text(text)
    tls = Context(url="tls://h1:4222", nkey="/etc/moorage/worker.nk", ca=str(authority))
    keys = CallKeys(tls, "moorage", secrets)
    key = keys.key("acme")
    assert key is not None
    assert key.decode().count("BEGIN CERTIFICATE") == 1
    file = tmp_path / "key"
    file.write_bytes(key)
    read = context_of_key(file, "tls://h1:4222", "_INBOX")
    expected = {name: value.replace("FILE", str(file)) for name, value in found.items()}
    plain = Context(url="tls://h1:4222", source="MOORAGE_NATS_URL", ca=str(file))
    assert read == msgspec.structs.replace(plain, **expected)
    assert keys.context("acme").ca in (str(authority), str(secrets / "calls" / "acme"))
    authority.unlink()
    with pytest.raises(SecretRefused, match="the file `ca` of the worker's nats context"):
        keys.key("acme")


def test_a_server_that_asks_for_tls_and_no_key_gives_its_authority_alone(tmp_path: Path) -> None:
    authority = tmp_path / "ca.pem"
    authority.write_text(PEM)
    assert CallKeys(Context(url="tls://h1:4222", ca=str(authority)), "moorage", None).key("acme") == PEM.encode()
    assert context_of_key(authority, "tls://h1:4222", "_INBOX").cert == ""


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_a_key_that_others_may_read_is_refused(secrets: Path, mode: int) -> None:
    (secrets / "calls" / "acme").chmod(mode)
    with pytest.raises(SecretRefused, match="readable by its owner alone"):
        CallKeys(KEYED, "moorage", secrets).key("acme")


async def test_the_copy_is_its_users_alone_and_gone_with_the_attempt(tmp_path: Path) -> None:
    settings = WorkerSettings(tmp_path / "state", "w1")
    folders = AttemptFolders(settings, "w1.process")
    folder = Path(folders.make(NAME, 10.0, ["**"]))
    user = "daemon" if os.geteuid() == 0 else None
    path = Path(folders.give_key(NAME, b"SUAKEY\n", user))
    folders.give_key(NAME, b"SUAKEY\n", user)
    assert not path.is_relative_to(folder), "a job keeps files of its folder, and its key would be among them"
    about = path.stat()
    assert stat.S_IMODE(about.st_mode) == 0o600
    assert (about.st_uid == 0) is (user is None and os.geteuid() == 0)
    folders.attempt_ended(NAME)
    assert not path.exists()


async def test_the_next_agent_removes_the_keys_of_attempts_that_have_ended(tmp_path: Path) -> None:
    settings = WorkerSettings(tmp_path / "state", "w1")
    other = ("acme", "embed", 1, 1, 8)
    before = AttemptFolders(settings, "w1.process")
    paths = {}
    for name in (NAME, other):
        before.make(name, 10.0)
        paths[name] = Path(before.give_key(name, b"SUAKEY\n", None))
    after = AttemptFolders(settings, "w1.process")
    after.begin([other])
    assert (paths[NAME].exists(), paths[other].exists()) == (False, True)
    after.attempt_ended(other)
    assert not paths[other].exists()


def test_an_attempt_is_told_of_which_version_of_its_service_it_is(tmp_path: Path) -> None:
    keys = CallKeys(Context(url="nats://h1:4222"), "moorage", None)
    folders = AttemptFolders(WorkerSettings(tmp_path), "w1")

    def told(label: str, command: str = "true", **names: str) -> list[str]:
        body = {"run": {"argv": [command]}, "service": {"name": "embed"}, "labels": {"version": label}, **names}
        request = msgspec.convert(body, Request)
        variables, _ = call_access(keys, folders, Assignment(NAME, request, [], "none"), None)
        return variables["MOORAGE_CALL_VERSION"].split(",")

    first, again, other = told("2.1.0"), told("2.1.0"), told("2.1.0", "false")
    assert first == again
    assert first == told("2.1.0", job="embed-3", instead_of="embed-2"), "all replicas say the same"
    assert (len(first[0]), first[1]) == (16, "2.1.0")
    assert other[0] != first[0]


def test_a_job_that_calls_gets_its_tenants_key_for_callers_and_never_that_of_members(secrets: Path) -> None:
    keys, folders = CallKeys(KEYED, "gpu.eu", secrets), AttemptFolders(WorkerSettings(secrets.parent / "state"), "w1")
    request = msgspec.convert({"run": {"argv": ["true"], "calls": True}}, Request)
    with pytest.raises(SecretRefused, match="secret 'callers/acme'"):
        call_access(keys, folders, Assignment(NAME, request, [], "none"), None)
    (secrets / "callers").mkdir(mode=0o700)
    (secrets / "callers" / "acme").write_text("SUACALLER\n")
    (secrets / "callers" / "acme").chmod(0o600)
    folders.make(NAME, 10.0)
    variables, file = call_access(keys, folders, Assignment(NAME, request, [], "none"), None)
    assert Path(file).read_text() == "SUACALLER\n"
    assert variables == {
        "MOORAGE_NATS_URL": "nats://h1:4222",
        "MOORAGE_NATS_CREDS": file,
        "MOORAGE_CALL_SUBJECT": "gpu.eu.call.acme.*",
        "MOORAGE_INBOX_PREFIX": "_INBOX.submitter.acme.caller-jobs",
    }
    found = find_context(env=variables)
    assert (found.url, found.nkey, found.inbox_prefix) == ("nats://h1:4222", file, variables["MOORAGE_INBOX_PREFIX"])
    assert find_context(env={**variables, "NATS_URL": "nats://other:4222"}).url == "nats://other:4222"
    assert trouble_with_secrets(secrets) == ""
