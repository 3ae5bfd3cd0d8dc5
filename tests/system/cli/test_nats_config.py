"""`moorage admin nats-config`: what it writes, what it never touches again, and what it refuses."""

from __future__ import annotations

import json
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Final

import msgspec
import pytest
from cryptography import x509

from moorage.bus.contexts import load_context
from moorage.bus.embedded import find_binary
from moorage.bus.site import shipped
from moorage.cli.fleet.nats_config import write
from moorage.cli.main import run
from moorage.scheduler.settings import scheduler_settings
from moorage.schemas.optional import install_extra
from moorage.schemas.settings import read_file
from tests.sites import running
from tests.waiting import until

ROOT: Final = Path(__file__).resolve().parents[3]
NAMES: Final = ("--tenant", "acme", "--tenant", "beta", "--worker", "w1", "--operator", "ana", "--observer", "graf")


def make(out: Path, *more: str) -> int:
    return run(["admin", "nats-config", "--out", str(out), *NAMES, *more])


def is_valid(configuration: Path) -> bool:
    done = subprocess.run([find_binary(), "-t", "-c", str(configuration)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return True


def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    assert make(tmp_path / "site", "--auth", "mtls") == 1
    said = capsys.readouterr().err
    assert "error[failed-precondition]: the package cryptography is missing" in said
    assert f"fix: {install_extra('nats-config')}" in said


def test_a_leaf_node_has_a_folder_of_its_own_with_the_users_behind_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    far, out = ("--leaf", "lyon=10.1.0.5:4300", "--worker", "w2@lyon=acme"), tmp_path / "site"
    assert make(out, "--server", "10.0.0.4:4222") == 0
    capsys.readouterr()
    assert make(out, "--server", "10.0.0.4:4222", *far) == 0
    assert "the port for leaf nodes opens or closes with this configuration" in capsys.readouterr().err
    hub, leaf = (out / "server.conf").read_text(), (out / "leaf-lyon" / "server.conf").read_text()
    assert 'advertise: "10.0.0.4:7422"' in hub
    assert leaf.count('urls: ["tls://10.0.0.4:7422"]') == 3, "one for its workers, and one for each tenant"
    assert all(map(is_valid, (out / "server.conf", out / "leaf-lyon" / "server.conf")))
    contexts = out / "leaf-lyon" / "nats" / "context"
    assert sorted(each.stem for each in contexts.iterdir()) == [
        "service.acme", "service.beta", "submitter.acme", "submitter.beta", "worker.w2",
    ]  # fmt: skip
    context = json.loads((contexts / "worker.w2.json").read_text())
    assert (context["url"], context["nkey"]) == ("tls://10.1.0.5:4300", str(out / "keys" / "worker.w2.nk"))
    certificate = x509.load_pem_x509_certificate((out / "tls" / "leaf.lyon.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "10.1.0.5" in map(str, names.get_values_for_type(x509.IPAddress))
    assert not list((out / "nats" / "context").glob("leaf.*")), "no program connects as a leaf node"
    assert all(stat.S_IMODE(each.stat().st_mode) == 0o600 for each in (out / "leaf-lyon").glob("*.*"))
    assert make(out, "--server", "10.0.0.4:4222", *far) == 0
    assert "the port for leaf nodes" not in capsys.readouterr().err
    assert make(out, "--server", "10.0.0.4:4222") == 0
    assert "the leaf node lyon is no longer in the configuration" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (("--worker", "w2@lyon"), "worker w2 is behind a leaf of the site, found 'lyon', which is none"),
        (("--leaf", "ly.on"), "a leaf has a name that matches"),
        (("--leaf", "lyon=nowhere:x"), "'nowhere:x' is not the address of a server"),
        (("--leaf", "lyon", "--shared"), "a leaf needs an account for each tenant, and NKeys"),
        (("--leaf", "lyon", "--auth", "mtls"), "a leaf needs an account for each tenant, and NKeys"),
        (("--leaf", "lyon", "--worker", "w2@"), "worker w2 is behind a leaf of the site, found ''"),
    ],
)
def test_a_leaf_node_that_cannot_be_is_refused(
    more: tuple[str, ...], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert make(tmp_path / "site", *more) == 2
    assert why in capsys.readouterr().err
    assert not (tmp_path / "site").exists()


@pytest.mark.parametrize("more", [(), ("--shared",), ("--auth", "mtls"), ("--no-results",), ("--prefix", "gpu.eu")])
def test_a_server_takes_what_is_written_and_every_user_has_a_context(
    more: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert make(tmp_path / "site", *more) == 0
    assert is_valid(tmp_path / "site" / "server.conf")
    said = capsys.readouterr()
    assert "9 users" in said.err
    assert f"next: nats-server -c {tmp_path}/site/server.conf\n" in said.err
    for key in (
        "submitter.acme",
        "submitter.beta",
        "service.acme",
        "worker.w1",
        "scheduler.main",
        "operator.ana",
        "ledger.main",
    ):
        context = load_context(key, {"XDG_CONFIG_HOME": str(tmp_path / "site")})
        role, _, name = key.partition(".")
        prefix = "gpu.eu" if "--prefix" in more else "moorage"
        named = {"ledger": "_INBOX", "service": f"{prefix}.calls.acme.~"}.get(role, f"_INBOX.{role}.{name}")
        assert context.inbox_prefix == named
        assert bool(context.nkey) != bool(context.cert)
        assert f"{key}.json" in said.out


def test_a_cluster_has_a_file_for_each_server_and_no_queue(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    servers = [word for at in (1, 2, 3) for word in ("--server", f"127.0.0.1:{14_000 + at}")]
    assert make(tmp_path / "site", *servers) == 0
    for at in (1, 2, 3):
        assert is_valid(tmp_path / "site" / f"server-{at}.conf")
    accounts = (tmp_path / "site" / "accounts.conf").read_text()
    assert "moorage.request.acme" not in accounts
    assert "one message with a wrong header" in capsys.readouterr().err


def test_three_servers_get_settings_for_three_copies_that_are_never_written_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the pages alone the ledger of three servers had one copy."""
    settings = tmp_path / "site" / "moorage.toml"
    servers = [word for at in (1, 2, 3) for word in ("--server", f"127.0.0.1:{14_000 + at}")]
    assert make(tmp_path / "site", "--server", "h1") == 0
    assert not settings.exists(), "of one server there is nothing to say"
    assert "MOORAGE_SETTINGS" not in capsys.readouterr().err
    assert make(tmp_path / "site", *servers) == 0
    assert scheduler_settings({}, env={}, file=read_file(settings))[0].replicas == 3
    said = capsys.readouterr()
    assert f"{settings}\n" in said.out
    assert f"{settings} says replicas = 3: a copy of the ledger on each server" in said.err
    start = f"MOORAGE_LEDGER_URL=ledger.main MOORAGE_SETTINGS={settings} moorage scheduler --nats scheduler.main\n"
    assert start in said.err
    assert "each with its own file, up to server-3.conf\n" in said.err
    settings.write_text("[scheduler]\nreplicas = 3 # ours\n")
    assert make(tmp_path / "site", *servers) == 0
    assert settings.read_text().endswith("# ours\n")
    said = capsys.readouterr()
    assert f"{settings}\n" not in said.out
    assert "is left as it is; it says replicas = 3" in said.err
    settings.write_text('[scheduler]\nname = "s1"\n')
    assert make(tmp_path / "site", *servers) == 0
    assert f"warning: {settings} was there and is left as it is; it says no replicas:" in capsys.readouterr().err


def test_servers_of_one_machine_have_a_folder_each(tmp_path: Path) -> None:
    """One folder for all made each server write into the streams of the others."""

    def stores(hosts: list[str]) -> list[str]:
        servers = [word for at, host in enumerate(hosts) for word in ("--server", f"{host}:{14_000 + at}")]
        assert make(tmp_path / hosts[0], *servers, "--store", "/srv/js") == 0
        texts = [(tmp_path / hosts[0] / f"server-{at}.conf").read_text() for at in (1, 2, 3)]
        return [line.strip() for text in texts for line in text.splitlines() if "store_dir" in line]

    assert stores(["127.0.0.1"] * 3) == [f'store_dir: "/srv/js/{at}"' for at in (1, 2, 3)]
    assert stores(["h1", "h2", "h3"]) == ['store_dir: "/srv/js"'] * 3


def test_keys_are_private_and_never_made_again(tmp_path: Path) -> None:
    site = tmp_path / "site"
    for first in ([], ["--auth", "mtls"], ["--server", "h1", "--server", "h2", "--server", "h3"]):
        assert make(site, *first) == 0
    private = [path for path in site.rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in private} == {0o600}
    assert stat.S_IMODE(site.stat().st_mode) == 0o700
    before = {
        path: path.read_bytes()
        for folder in ("keys", "tls")
        for path in (site / folder).iterdir()
        if path.stem != "server.1"  # which is at another address in what follows
    }
    assert not [path for path, text in before.items() if path.suffix == ".nk" and text != text.strip()], (
        "a client that takes a file as it is finds the seed alone"
    )
    assert len(before) > 20
    for again in ([], ["--auth", "mtls", "--worker", "w9"]):
        assert make(site, *again) == 0
    assert {path: path.read_bytes() for path in before} == before
    assert (site / "tls" / "worker.w9.pem").exists()


def test_a_certificate_is_signed_by_the_authority_that_is_there_or_not_at_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once its key was off the servers, as the page says, the next worker had one that no server trusts."""
    site = tmp_path / "site"
    tls, key = site / "tls", tmp_path / "ca.key"
    assert make(site, "--auth", "mtls") == 0
    (tls / "ca.key").rename(key)
    assert make(site, "--auth", "mtls") == 0, "for what is there already nobody has to sign"
    assert make(site, "--auth", "mtls", "--worker", "w9") == 1
    assert "worker.w9 has no certificate" in capsys.readouterr().err
    assert not list(tls.glob("worker.w9.*"))
    assert not (tls / "ca.key").exists()
    assert make(tmp_path / "other", "--auth", "mtls") == 0
    (tls / "ca.key").write_bytes((tmp_path / "other" / "tls" / "ca.key").read_bytes())
    assert make(site, "--auth", "mtls", "--worker", "w9") == 1, "the key of another authority"
    (tls / "ca.key").write_bytes(key.read_bytes())
    (tls / "worker.w1.pem").unlink()
    assert make(site, "--auth", "mtls", "--worker", "w9") == 0
    authority = x509.load_pem_x509_certificate((tls / "ca.pem").read_bytes())
    for name in ("worker.w1", "worker.w9"):
        x509.load_pem_x509_certificate((tls / f"{name}.pem").read_bytes()).verify_directly_issued_by(authority)


def test_who_is_not_named_again_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = tmp_path / "site"
    assert make(site, "--worker", "w9", "--operator", "joe") == 0
    assert "no longer in the configuration" not in capsys.readouterr().err
    assert make(site, "--worker", "w10") == 0
    assert (
        "no longer in the configuration lose access when the server reads it: operator.joe, worker.w9;"
    ) in capsys.readouterr().err
    assert make(site, "--json") == 0
    assert json.loads(capsys.readouterr().out)["left_out"] == ["operator.joe", "worker.w10", "worker.w9"]


def test_one_account_with_commands_is_warned_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """There a worker's key and a tenant's are together every key."""
    for number, (more, is_told) in enumerate(
        [(("--shared", "--exec", "acme"), True), (("--shared",), False), (("--exec", "acme"), False)]
    ):
        assert make(tmp_path / f"site{number}", *more) == 0
        assert ("can publish as anyone" in capsys.readouterr().err) == is_told


def test_no_secret_is_in_a_configuration_or_in_what_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert make(tmp_path / "site") == 0
    said = capsys.readouterr()
    seeds = [path.read_text().strip() for path in (tmp_path / "site" / "keys").glob("*.nk")]
    assert len(seeds) == 10  # and the key of the servers' own account
    shown = said.out + said.err + "".join(path.read_text() for path in (tmp_path / "site").glob("*.conf"))
    assert not [seed for seed in seeds if seed in shown]
    assert not [seed for seed in seeds if seed[:2] != "SU"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--tenant", "Acme"), "tenants must have names that match [a-z0-9-]{1,32}, found 'Acme'"),
        (("--tenant", "acme"), "tenants names acme twice"),
        (("--worker", "a.b"), "workers must have names that match [A-Za-z0-9_-]{1,64}, found 'a.b'"),
        (("--worker", "*"), "workers must have names that match [A-Za-z0-9_-]{1,64}, found '*'"),
        (("--server", "h1", "--server", "h2"), "1, 3 or 5 different servers, found 2"),
        (("--server", "h1:0"), "'h1:0' is not the address of a server"),
        (("--server", "nats://h1"), "'nats://h1' is not the address of a server"),
        (("--server", "::1"), "'::1' is not the address of a server: write HOST, HOST:PORT or [IPV6]:PORT"),
        (("--server", "::1:4222"), "'::1:4222' is not the address of a server"),
        (("--server", "[::1"), "'[::1' is not the address of a server"),
        (("--server", "[h1]:4222"), "'[h1]:4222' is not the address of a server"),
        (("--server", "[:]:4222"), "'[:]:4222' is not the address of a server"),
        (("--server", "[fe80::1%eth0]"), "is not the address of a server"),
        (("--server", "h1,h2"), "'h1,h2' is not the address of a server"),
        (("--server", "h1:61536"), "the port at most 61535"),
        (("--prefix", "a b"), "'a b' is not a valid prefix"),
        (("--auth", "env", "--worker", "w-1", "--worker", "w_1"), "the same variable"),
    ],
)
def test_what_cannot_be_is_refused_and_writes_nothing(
    words: tuple[str, ...], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert make(tmp_path / "site", *words) == 2
    assert why in capsys.readouterr().err
    assert not (tmp_path / "site").exists()


def test_json_names_what_was_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert make(tmp_path / "site", "--json", "--auth", "env") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["kind"] == "nats-config"
    assert told["variables"][0] == "SUBMITTER_ACME_PASSWORD"
    assert told["contexts"] == []


def test_no_server_is_monitored_unless_that_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    conf = tmp_path / "site/server.conf"
    assert make(tmp_path / "site") == 0
    assert "http" not in conf.read_text()
    assert "monitoring" not in capsys.readouterr().err
    assert make(tmp_path / "site", "--monitor", "--no-monitor") == 2
    assert "exclude each other" in capsys.readouterr().err

    assert make(tmp_path / "site", "--monitor") == 0
    assert 'http: "127.0.0.1:8222"\n' in conf.read_text()
    said = capsys.readouterr().err
    assert "monitoring port opens" in said
    assert "restart the servers, one after another" in said
    assert "--signal reload" not in said, "the server refuses a reload, and the new keys with it"

    assert make(tmp_path / "site") == 0, "a site of an earlier release: its servers reload for a new key"
    assert 'http: "127.0.0.1:8222"\n' in conf.read_text()
    said = capsys.readouterr().err
    assert "stays open" in said
    assert "--signal reload" in said

    assert make(tmp_path / "site", "--no-monitor", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["monitor"], told["restart"]) == (False, True)
    assert "http" not in conf.read_text()


def test_a_worker_may_be_for_some_tenants(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert make(tmp_path, "--worker", "w2=beta") == 0
    accounts = (tmp_path / "accounts.conf").read_text()
    [w2] = re.findall(r"# worker w2\n.*?\n      # ", accounts, re.DOTALL)
    assert "beta" in w2
    assert "acme" not in w2
    assert "moorage.log.*" not in w2
    for wrong, told in (("w3=gamma", "found 'gamma', which is none"), ("w3=", "found none"), ("w2", "names w2 twice")):
        assert make(tmp_path, "--worker", "w2=beta", "--worker", wrong) == 2
        assert told in capsys.readouterr().err


THREE: Final = tuple(word for host in ("h1", "h2", "10.0.0.3") for word in ("--server", host))


def named(certificate: Path) -> set[str]:
    found = x509.load_pem_x509_certificate(certificate.read_bytes())
    return {str(each.value) for each in found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value}


def test_more_than_one_machine_has_tls_for_clients_and_routes_and_one_machine_has_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert make(tmp_path / "one") == 0
    assert not (tmp_path / "one/tls").exists()
    assert "tls" not in (tmp_path / "one/server.conf").read_text()
    assert "encrypted" not in capsys.readouterr().err
    assert make(tmp_path / "host", "--server", "h1") == 0
    assert load_context("worker.w1", {"XDG_CONFIG_HOME": str(tmp_path / "host")}).url == "tls://h1:4222"

    site = tmp_path / "site"
    assert make(site, *THREE) == 0
    told = capsys.readouterr().err
    assert "ends on 20" in told
    assert f"before that: moorage admin renew {site}" in told
    assert f"each user's context names {site}/tls/ca.pem: copy that file along with it" in told
    assert [named(site / f"tls/server.{at}.pem") for at in (1, 2, 3)] == [{"h1"}, {"h2"}, {"10.0.0.3"}]
    assert not list((site / "tls").glob("worker*")), "users have their keys"
    for at in (1, 2, 3):
        text = (site / f"server-{at}.conf").read_text()
        assert text.count("tls {") == 2, "for clients and for routes"
        assert is_valid(site / f"server-{at}.conf")
    context = load_context("submitter.acme", {"XDG_CONFIG_HOME": str(site)})
    assert (context.url, context.ca) == ("tls://h1:4222,tls://h2:4222,tls://10.0.0.3:4222", f"{site}/tls/ca.pem")
    assert context.nkey

    assert make(tmp_path / "plain", *THREE, "--plaintext") == 0
    assert "tls" not in (tmp_path / "plain/server-1.conf").read_text()
    assert "nothing is encrypted" not in capsys.readouterr().err, "that is meant"


def test_a_site_without_tls_stays_so_until_it_is_asked_for_and_then_keeps_every_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = tmp_path / "site"
    assert make(site, *THREE, "--plaintext") == 0
    keys = {path: path.read_bytes() for path in (site / "keys").iterdir()}
    capsys.readouterr()
    assert make(site, *THREE) == 0
    told = capsys.readouterr().err
    assert "warning: nothing is encrypted: whoever can listen" in told
    assert "--signal reload" in told

    steps = {"": "offered", "--tls-only": "only"}
    for asked in ("--tls", *steps):
        assert make(site, *THREE, *filter(None, [asked]), "--json") == 0
        told_json = json.loads(capsys.readouterr().out)
        assert told_json["tls"] == steps.get(asked, "offered")
        assert told_json["restart"] == bool(asked)
        both = "allow_non_tls: true\n" in (site / "server-1.conf").read_text()
        assert both == (asked != "--tls-only")
        assert is_valid(site / "server-1.conf")
    assert {path: path.read_bytes() for path in keys} == keys
    assert make(site, *THREE, "--plaintext") == 0
    told = capsys.readouterr().err
    assert "encryption changes" in told
    assert "--signal reload" not in told, "the server refuses to reload this"
    assert load_context("worker.w1", {"XDG_CONFIG_HOME": str(site)}).ca == ""


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--tls", "--plaintext"), "exclude each other"),
        (("--tls-only", "--tls"), "exclude each other"),
        (("--plaintext", "--auth", "mtls"), "leave out --plaintext"),
        (("--plaintext", "--cert", "c", "--key", "k"), "leave out --plaintext"),
        (("--key", "k"), "--key and --ca are of --cert"),
        (("--ca", "k"), "--key and --ca are of --cert"),
        (("--cert", "c"), "found 1 and 0"),
        ((*THREE, "--cert", "c", "--cert", "c", "--key", "k", "--key", "k"), "given once, or 3 times"),
        (("--cert", "c", "--key", "k", "--auth", "mtls"), "each user shows a certificate"),
    ],
)
def test_what_excludes_each_other_about_tls_is_refused_and_writes_nothing(
    words: tuple[str, ...], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert make(tmp_path / "site", *words) == 2
    assert why in capsys.readouterr().err
    assert not (tmp_path / "site").exists()


def test_certificates_of_an_authority_of_ones_own_are_checked_and_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of another site of ours stand for them here."""
    other, site = tmp_path / "other", tmp_path / "site"
    assert make(other, "--server", "h1", "--server", "h2", "--server", "h3") == 0
    tls = other / "tls"

    def pair(at: int) -> list[str]:
        return ["--cert", f"{tls}/server.{at}.pem", "--key", f"{tls}/server.{at}.key"]

    pairs, three = [*pair(1), *pair(2), *pair(3)], ("--server", "h1", "--server", "h2", "--server", "h3")
    for words, why in (
        (["--cert", f"{tls}/server.1.pem", "--key", f"{tls}/server.2.key"], "is not the key of"),
        ([*pair(2), *pair(1), *pair(3)], "does not name the server h1"),
        (["--cert", f"{tls}/server.1.key", "--key", f"{tls}/server.1.key"], "holds no certificate in PEM"),
        (["--cert", f"{tls}/server.1.pem", "--key", f"{tls}/server.1.pem"], "holds no key that can be used"),
    ):
        capsys.readouterr()
        assert make(tmp_path / "refused", *three, *words) == 1
        assert why in capsys.readouterr().err
    assert make(site, *three, *pairs, "--ca", f"{tls}/ca.pem") == 0
    assert "before that: this command with the new --cert" in capsys.readouterr().err
    for name in ("server.1.pem", "server.3.key", "ca.pem"):
        assert (site / "tls" / name).read_bytes() == (tls / name).read_bytes()
        assert stat.S_IMODE((site / "tls" / name).stat().st_mode) == 0o600
    assert not (site / "tls/ca.key").exists()
    assert is_valid(site / "server-1.conf")
    assert make(site, *three) == 0, "they are kept"
    assert make(site, *three, *pairs) == 0, "an authority that each machine trusts"
    assert load_context("worker.w1", {"XDG_CONFIG_HOME": str(site)}).ca == ""
    assert "ca_file" not in (site / "server-1.conf").read_text()
    assert run(["admin", "renew", str(site), "--all"]) == 1
    assert "no authority that could sign" in capsys.readouterr().err


def test_a_server_at_another_address_has_another_certificate(tmp_path: Path) -> None:
    assert make(tmp_path, "--server", "h1") == 0
    authority = (tmp_path / "tls/ca.pem").read_bytes()
    assert make(tmp_path, "--server", "h7") == 0
    assert named(tmp_path / "tls/server.1.pem") == {"h7"}
    assert (tmp_path / "tls/ca.pem").read_bytes() == authority


def test_what_has_no_certificates_is_not_renewed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert make(tmp_path) == 0
    assert run(["admin", "renew", str(tmp_path)]) == 1
    assert f"{tmp_path} has no certificates" in capsys.readouterr().err


def test_a_service_whose_certificate_is_renewed_has_it_among_the_workers_secrets(tmp_path: Path) -> None:
    assert make(tmp_path, "--auth", "mtls") == 0
    assert run(["admin", "renew", str(tmp_path), "--all", "--json"]) == 0
    key = (tmp_path / "secrets/calls/acme").read_text()
    parts = [(tmp_path / "tls" / name).read_text() for name in ("service.acme.pem", "service.acme.key", "ca.pem")]
    assert key == "".join(parts)


async def test_a_server_refuses_to_reload_another_monitoring_port() -> None:
    """So nats-config has to say that the servers are restarted."""
    async with running(tenants=("acme",)) as site:
        ports = {line.split()[3].rpartition(":")[2] for line in listeners(site.processes[0].pid)}
        assert ports == {str(site.site.servers[0].port)}, "the clients' port alone"
        write(msgspec.structs.replace(site.site, monitor=True), site.folder)
        site.processes[0].send_signal(signal.SIGHUP)
        log = site.folder / "server-0.log"
        await until(lambda: "config reload not supported for HTTPPort" in log.read_text(), what="the server refuses")


def listeners(pid: int) -> list[str]:
    done = subprocess.run(["ss", "--listening", "--tcp", "--numeric", "--processes"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if f"pid={pid}," in line]


@pytest.mark.parametrize("folder", ["one-server", "shared-account", "cluster"])
def test_what_ships_is_what_is_made(folder: str) -> None:
    for name, text in shipped()[folder].items():
        assert (ROOT / "deploy" / "nats" / folder / name).read_text() == text, "make docs"
