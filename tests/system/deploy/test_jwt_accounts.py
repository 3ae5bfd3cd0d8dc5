"""moorage on a server whose accounts are JWTs: the users of a site with a creds file each, and one job."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import secrets
from pathlib import Path
from typing import Any

import nkeys
import pytest

from moorage.bus.embedded import find_binary
from moorage.bus.site import Server, Site
from moorage.schemas.roles import Rights, inbox_of, rights
from moorage.schemas.subjects import Subjects
from tests.leftover import ends_with_the_test
from tests.ports import free_ports
from tests.system.cli.node import moorage, start
from tests.waiting import until

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "use-the-nats-you-have.md"
#: no bound at all, in a JWT
ANY = -1
LIMITS = {"subs": ANY, "data": ANY, "payload": ANY}
OF_ACCOUNT = {**LIMITS, "imports": ANY, "exports": ANY, "wildcards": True, "conn": ANY, "leaf": ANY}
OF_JETSTREAM = {"mem_storage": ANY, "disk_storage": ANY, "streams": ANY, "consumer": ANY}


class Key:
    """An nkey: of an operator (O), an account (A) or a user (U)."""

    def __init__(self, kind: int) -> None:
        self.seed = nkeys.encode_seed(secrets.token_bytes(32), kind).decode()
        self._pair = nkeys.from_seed(bytearray(self.seed.encode()))
        self.public = self._pair.public_key.decode()

    def signed(self, subject: str, name: str, kind: str, claims: dict[str, Any]) -> str:
        """Return a JWT of this issuer (ADR-14) for the key `subject`."""
        nats = {**claims, "type": kind, "version": 2}
        body: dict[str, Any] = {"iat": 0, "iss": self.public, "name": name, "sub": subject, "nats": nats}
        body["jti"] = base64.b32encode(hashlib.sha256(json.dumps(body).encode()).digest()).decode().rstrip("=")
        head = {"typ": "JWT", "alg": "ed25519-nkey"}
        text = ".".join(map(_encoded, (json.dumps(head).encode(), json.dumps(body).encode())))
        return f"{text}.{_encoded(self._pair.sign(text.encode()))}"


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def limits(account: str) -> dict[str, Any]:
    """The limits of an account; the server's own has no JetStream."""
    return OF_ACCOUNT if account == "SYS" else {**OF_ACCOUNT, **OF_JETSTREAM}


def user_claims(may: Rights | None) -> dict[str, Any]:
    """The claims of a user with these rights; all rights in its account for None."""
    if may is None:
        return LIMITS
    publish = {"allow": list(may.publish), **({"deny": list(may.refused)} if may.refused else {})}
    claims: dict[str, Any] = {**LIMITS, "pub": publish if may.publish else {"deny": [">"]}}
    claims["sub"] = {"allow": list(may.subscribe)}
    if may.answers:
        claims["resp"] = {"max": may.answers, "ttl": 60_000_000_000}
    return claims


def write_site(site: Site, folder: Path, port: int) -> None:
    """Write a server's configuration with JWT accounts, and a context with a creds file for each user."""
    operator, accounts = Key(nkeys.PREFIX_BYTE_OPERATOR), dict[str, Key]()
    contexts = folder / "nats" / "context"
    contexts.mkdir(parents=True)
    for each in site.identities:
        account = accounts.setdefault(site.account_of(each), Key(nkeys.PREFIX_BYTE_ACCOUNT))
        user = Key(nkeys.PREFIX_BYTE_USER)
        jwt = account.signed(user.public, each.key, "user", user_claims(site.rights_of(each)))
        creds = folder / f"{each.key}.creds"
        creds.write_text(
            f"-----{'BEGIN'} NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n"
            f"-----{'BEGIN'} USER NKEY SEED-----\n{user.seed}\n------END USER NKEY SEED------\n"
        )
        creds.chmod(0o600)
        fields = {"url": f"nats://127.0.0.1:{port}", "creds": str(creds)}
        if each.role != "ledger" and each.role != "system":
            fields["inbox_prefix"] = inbox_of(each.role, each.name, site.subjects)
        (contexts / f"{each.key}.json").write_text(json.dumps(fields))
    system = accounts["SYS"] = Key(nkeys.PREFIX_BYTE_ACCOUNT)
    preload = "\n".join(
        f"  {key.public}: {operator.signed(key.public, name, 'account', {'limits': limits(name)})}"
        for name, key in accounts.items()
    )
    (folder / "server.conf").write_text(
        f'listen: "127.0.0.1:{port}"\nserver_name: "jwt"\n'
        f'jetstream {{ store_dir: "{folder / "data"}", sync_interval: always }}\n'
        f"operator: {operator.signed(operator.public, 'OURS', 'operator', {})}\n"
        f"system_account: {system.public}\nresolver: MEMORY\nresolver_preload: {{\n{preload}\n}}\n"
    )


def test_the_page_gives_a_tenant_its_rights_and_no_more() -> None:
    options = dict(re.findall(r"--((?:allow|deny)-\w+) '?([^'\s]+)'?", PAGE.read_text()))
    may = rights("submitter", "vision", Subjects())
    expected = {"allow-pub": may.publish, "allow-sub": may.subscribe, "deny-pub": may.refused}
    assert {name: tuple(sorted(words.split(","))) for name, words in options.items()} == expected


@pytest.mark.slow
async def test_a_job_runs_on_a_server_with_jwt_accounts_and_no_tenant_is_another(tmp_path: Path) -> None:
    [port] = free_ports(1)
    site = Site(
        tenants=("vision", "speech"), workers=("n01",), operators=("ana",), shared=True,
        servers=(Server("127.0.0.1", port),),
    )  # fmt: skip
    write_site(site, tmp_path, port)
    with (tmp_path / "server.log").open("wb") as log:
        configured = (find_binary(), "-c", str(tmp_path / "server.conf"))
        server = ends_with_the_test(await asyncio.create_subprocess_exec(*configured, stdout=log, stderr=log))
    env = {"XDG_CONFIG_HOME": str(tmp_path), "MOORAGE_LEDGER_URL": "ledger.main"}
    try:
        await until(lambda: "Server is ready" in (tmp_path / "server.log").read_text(), what="the server")
        scheduler = await start("scheduler", "--nats", "scheduler.main", env=env)
        state = str(tmp_path / "n01")
        words = ("worker", "--nats", "worker.n01", "--id", "n01", "--simulate", "1x2xT4", "--state", state)
        worker = await start(*words, env=env)
        run = ("run", "--gpu", "1xT4", "--job", "first", "--nats")
        ran = await moorage(*run, "submitter.vision", "--timeout", "60s", "--", "echo", "hello", env=env)
        assert (ran.code, ran.out) == (0, "hello\n"), (ran.err, (tmp_path / "server.log").read_text()[-2000:])
        foreign = await moorage("ls", "--nats", "submitter.speech", "--tenant", "vision", env=env)
        assert (foreign.code, "permission-refused" in foreign.err) == (4, True)
        assert (await moorage("fleet", "--nats", "operator.ana", env=env)).code == 0
        for process in (worker, scheduler):
            process.terminate()
            await process.communicate()
    finally:
        server.terminate()
        await server.wait()
