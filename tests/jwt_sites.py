"""A site as `use-the-nats-you-have.md` has it on a server with an operator: its accounts and users are JWTs.

Its accounts, rights, exports and imports are those that `nats-config` writes."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import re
import secrets
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import nkeys

from moorage.bus.contexts import Context
from moorage.bus.embedded import find_binary
from moorage.bus.site import Identity, Server, Site, accounts
from moorage.schemas.roles import Rights, _covers
from tests.leftover import ends_with_the_test
from tests.ports import free_ports
from tests.sites import HOST, RunningSite
from tests.waiting import until

#: as the page has it: a scheduler's JWT has the streams of each tenant
CONTROL_LINE: Final = "64KB"
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


def limits(site: Site, account: str) -> dict[str, Any]:
    """The limits of an account; those of tenants have no JetStream."""
    own = {site.account_of(Identity(role, "main")) for role in ("scheduler", "ledger")}
    return {**OF_ACCOUNT, **OF_JETSTREAM} if account in own else OF_ACCOUNT


def user_claims(may: Rights | None) -> dict[str, Any]:
    """The claims of a user with these rights; all rights in its account for None."""
    if may is None:
        return LIMITS
    publish = {"allow": list(may.publish), **({"deny": list(may.refused)} if may.refused else {})}
    claims: dict[str, Any] = {**LIMITS, "pub": publish if may.publish else {"deny": [">"]}}
    claims["sub"] = {"allow": list(may.subscribe), **({"deny": list(may.unheard)} if may.unheard else {})}
    if may.answers:
        claims["resp"] = {"max": may.answers, "ttl": 60_000_000_000}
    return claims


def crossings(site: Site, keys: dict[str, Key]) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """By account: the exports and imports of `nats-config`, as claims. Each import has the exporter's leave."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {name: {"exports": [], "imports": []} for name in keys}
    account = ""
    for line in accounts(site, dict.fromkeys(site.identities, "U")).splitlines():
        if (of := re.fullmatch(r'  "([^"]+)" \{', line)) is not None:
            account = of[1]
        elif account not in keys:
            continue
        elif (export := _EXPORT.match(line)) is not None:
            name = export["subject"]
            claims = {"name": name, "subject": name, "type": export["kind"], "token_req": True}
            mine = [each["subject"] for each in found[account]["exports"]]
            if not any(_covers(each, name) for each in mine):  # one export for all who import of it
                many = {"response_type": "Stream"} if "response_type: stream" in line else {}
                found[account]["exports"].append({**claims, **many})
        elif (asked := _IMPORT.match(line)) is not None:
            of_whom, name = keys[asked["account"]], asked["subject"]
            leave = {"subject": name, "kind": asked["kind"]}
            claims = {"name": name, "subject": name, "account": of_whom.public, "type": asked["kind"]}
            claims["token"] = of_whom.signed(keys[account].public, name, "activation", leave)
            claims |= {"local_subject": asked["here"]} if asked["here"] else {}
            found[account]["imports"].append({**claims, **({"share": True} if "share: true" in line else {})})
    return found


_EXPORT: Final = re.compile(r' +\{ (?P<kind>service|stream): "(?P<subject>[^"]+)", accounts')
_IMPORT: Final = re.compile(
    r' +\{ (?P<kind>service|stream): \{ account: "(?P<account>[^"]+)", subject: "(?P<subject>[^"]+)" \}'
    r'(?:, to: "(?P<here>[^"]+)")?'
)


def write_site(site: Site, folder: Path, port: int) -> None:
    """Write a server's configuration with JWT accounts, and a context with a creds file for each user, and for a user
    with every right in each account, its witness."""
    operator, keys = Key(nkeys.PREFIX_BYTE_OPERATOR), dict[str, Key]()
    contexts = folder / "nats" / "context"
    contexts.mkdir(parents=True)

    def make_creds(account: str, name: str, may: Rights | None) -> Path:
        user, issuer = Key(nkeys.PREFIX_BYTE_USER), keys.setdefault(account, Key(nkeys.PREFIX_BYTE_ACCOUNT))
        jwt = issuer.signed(user.public, name, "user", user_claims(may))
        creds = folder / f"{name}.creds"
        creds.write_text(
            f"-----{'BEGIN'} NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n"
            f"-----{'BEGIN'} USER NKEY SEED-----\n{user.seed}\n------END USER NKEY SEED------\n"
        )
        creds.chmod(0o600)
        return creds

    for each in site.identities:
        if each.role == "system":  # the accounts' operator has tools of its own
            continue
        creds = make_creds(site.account_of(each), each.key, site.rights_of(each))
        fields = {"url": f"nats://127.0.0.1:{port}", "creds": str(creds)}
        if own := site.inbox_of(each):
            fields["inbox_prefix"] = own
        (contexts / f"{each.key}.json").write_text(json.dumps(fields))
    for account in [*keys]:
        make_creds(account, f"witness.{account}", None)
    for name, key in keys.items():
        (folder / f"{name}.seed").write_text(key.seed)
    crossed, system = crossings(site, keys), Key(nkeys.PREFIX_BYTE_ACCOUNT)
    claims = {name: {"limits": limits(site, name), **crossed[name]} for name in keys}
    preload = "\n".join(
        f"  {key.public}: {operator.signed(key.public, name, 'account', claims.get(name, {'limits': OF_ACCOUNT}))}"
        for name, key in {**keys, "SYS": system}.items()
    )
    (folder / "server.conf").write_text(
        f'listen: "127.0.0.1:{port}"\nserver_name: "jwt"\nmax_control_line: {CONTROL_LINE}\n'
        f'jetstream {{ store_dir: "{folder / "data"}", sync_interval: always }}\n'
        f"operator: {operator.signed(operator.public, 'OURS', 'operator', {})}\n"
        f"system_account: {system.public}\nresolver: MEMORY\nresolver_preload: {{\n{preload}\n}}\n"
    )


class JwtSite(RunningSite):
    """The server of a site with JWTs, and who may connect to it."""

    def witness_context(self, account: str) -> Context:
        url = f"nats://{HOST}:{self.site.servers[0].port}"
        return Context(url=url, creds=str(self.folder / f"witness.{account}.creds"), source="test")


@contextlib.asynccontextmanager
async def running_jwt(**of: Any) -> AsyncIterator[JwtSite]:
    """As `tests.sites.running`, one server."""
    [port] = free_ports(1)
    site = Site(**{"tenants": ("acme", "beta"), "workers": ("w1", "w2"), "operators": ("ana",), "observers": ("graf",),
                   "servers": (Server(HOST, port),), **of})  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="moorage-jwt-") as name, contextlib.ExitStack() as ending:
        folder = Path(name)
        write_site(site, folder, port)
        with (folder / "server.log").open("wb") as log:
            configured = (find_binary(), "-c", str(folder / "server.conf"))
            server = ends_with_the_test(await asyncio.create_subprocess_exec(*configured, stdout=log, stderr=log))
        try:
            await until(lambda: "Server is ready" in (folder / "server.log").read_text(), what="the server")
            yield JwtSite(site, folder, {}, "", ending)
        except BaseException:
            print((folder / "server.log").read_text()[-3000:])
            raise
        finally:
            server.terminate()
            await server.wait()
