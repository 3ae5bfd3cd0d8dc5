"""Makes the configuration of nats-server for a site: its accounts, users and permissions, and a file for each server.

It makes text alone: `identities` makes the keys, and the command writes the files. The rights come from
`schemas.roles`, and so from the table of subjects.

Two choices give three layouts. *One server or a cluster*: in a cluster, submitters have the endpoint and no right on
the durable queue, because on a replicated stream of server 2.14 and 2.15 one publish with a wrong header stops the
queue for good (ledger-rules H17). *An account for each tenant, or one for all*: in an account of its own, a submitter
can name no other tenant's subject as its reply subject, whatever service answers. In the users' account the server
itself would answer there, so the queue and the results of functions are not for submitters there (H37).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from typing import Final, Literal, NamedTuple

import msgspec

from moorage.bus.embedded import ACCOUNT, MAX_PAYLOAD_BYTES, MAX_PENDING_BYTES, PING_INTERVAL_S, quoted
from moorage.bus.leaf_names import leaf_name
from moorage.bus.server_users import EXPORTS, RIGHTS, SYSTEM_ACCOUNT, SYSTEM_INBOX
from moorage.schemas.names import PERSON, TENANT, WORKER
from moorage.schemas.roles import (
    CALLER_ASKS,
    INBOX,
    JOINER,
    RESULT_API,
    Rights,
    Role,
    inbox,
    inbox_of,
    joiner_rights,
    joint,
    pool_inbox,
    pool_rights,
    rights,
    through_leaf,
)
from moorage.schemas.subjects import API_VERBS, PREFIX_DEFAULT, Subjects

#: how users show who they are: an NKey, a certificate, or a password that the server reads from its environment
Auth = Literal["nkey", "mtls", "env"]
#: whether servers encrypt: not at all, also for clients that ask for it (a site on its way to TLS), or always
Tls = Literal["off", "offered", "only"]
PORT_DEFAULT: Final = 4222
ORGANISATION: Final = "moorage"
#: a cluster port for each client port
ROUTES_BEHIND: Final = 2000
#: a port for leaf nodes, for each client port: 7422 for 4222, as nats-server has it
LEAVES_BEHIND: Final = 3200
#: a port for monitoring, on loopback, for each client port: 8222 for 4222, as nats-server's own pages have it
MONITOR_BEHIND: Final = 4000
#: the setting of a server that opens this port
MONITORING: Final = "http:"
#: how the blocks of a server that encrypts begin, and its setting for clients that do not
_TLS: Final = "tls {"
_LEAVES: Final = "leafnodes {"
_BOTH: Final = "allow_non_tls: true"
#: more than the 50 ms of `auto`: on a busy machine the first bytes of a client come later than that
FIRST_LINE_AFTER: Final = "200ms"
SERVERS_ALLOWED: Final = (1, 3, 5)
USERS_MAX: Final = 10_000
#: a page of output is read from a disk before it is answered
ANSWER_WITHIN: Final = "1m"
#: of each tenant's account: a program that opens connections without end takes no other tenant's, whatever the server
#: takes at most (65,536 connections by default). A member of a service has one
TENANT_CONNECTIONS: Final = 10_000
TENANT_SUBSCRIPTIONS: Final = 200_000
TENANT_LIMITS: Final = (
    f"max_connections: {TENANT_CONNECTIONS}, max_subscriptions: {TENANT_SUBSCRIPTIONS},"
    f" max_payload: {MAX_PAYLOAD_BYTES}"
)


class Identity(NamedTuple):
    """A user: its role and name. `key` is the name of its files. A person of a tenant is a submitter, TENANT.NAME."""

    role: Role | Literal["ledger", "system", "leaf", "pool", "joiner"]
    name: str

    @property
    def key(self) -> str:
        return f"{self.role}.{self.name}"

    @property
    def tenant(self) -> str:
        """The tenant of a submitter, caller or service: what stands before the dot, of those with a name of their
        own."""
        return self.name.partition(".")[0]

    @property
    def person(self) -> str:
        """The name of the person whose key a submitter's is; "" for the tenant's own key, and for other roles."""
        return self.name.partition(".")[2] if self.role == "submitter" else ""

    @property
    def subject(self) -> str:
        """The subject of its certificate, as the server writes it (RFC 2253)."""
        return f"CN={self.name},OU={self.role},O={ORGANISATION}"

    @property
    def variable(self) -> str:
        """The variable with its password, in the server's environment."""
        return f"{self.role}_{self.name}_PASSWORD".upper().replace("-", "_").replace(".", "_")


class Server(NamedTuple):
    """The address at which clients and other servers find a nats-server: a name, or an address of IPv4 or IPv6 without
    brackets."""

    host: str
    port: int = PORT_DEFAULT

    @property
    def is_loopback(self) -> bool:
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def listen(self, port: int) -> str:
        everywhere = "::" if ":" in self.host else "0.0.0.0"
        return _with_port(self.host if self.is_loopback else everywhere, port)

    def reached(self, port: int | None = None) -> str:
        return _with_port(self.host, self.port if port is None else port)


def _with_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """The users of a site and how they connect. Raises ValueError, naming the field that is wrong.

    With `shared`, all tenants are in one account. Otherwise, with `results`, results of functions and files of jobs
    pass between workers and submitters, in buckets that schedulers make. `execs` are the tenants whose submitters may
    run commands in their running jobs. `persons` are TENANT.NAME: each has a key with all rights of the tenant's own.
    `callers` are TENANT.NAME: they call that tenant's services alone, and those of a tenant have an account of
    their own, in which no reply subject leads to what the tenant may do. `serves` has the tenants of those workers that
    write for some alone. `leaves` are the nats-servers of other places by their names, each a leaf node of the site's
    servers, and `behind` the workers that are behind one of them. `pools` has how many workers of each pool have a key,
    POOL-1 and so on, which machines get by a join token from the joiner. With `monitor`, each server answers monitoring
    on loopback, to every user of its machine.
    """

    tenants: tuple[str, ...]
    workers: tuple[str, ...] = ()
    schedulers: tuple[str, ...] = ("main",)
    operators: tuple[str, ...] = ()
    observers: tuple[str, ...] = ()
    callers: tuple[str, ...] = ()
    persons: tuple[str, ...] = ()
    servers: tuple[Server, ...] = (Server("127.0.0.1"),)
    prefix: str = PREFIX_DEFAULT
    auth: Auth = "nkey"
    shared: bool = False
    results: bool = True
    execs: tuple[str, ...] = ()
    monitor: bool = False
    tls: Tls = "off"
    serves: dict[str, tuple[str, ...]] = {}
    leaves: dict[str, Server] = {}
    behind: dict[str, str] = {}
    pools: dict[str, int] = {}

    def __post_init__(self) -> None:
        if self.auth == "mtls" and self.tls == "offered":
            raise ValueError("users show certificates, so no client may come without TLS")
        if len(self.servers) not in SERVERS_ALLOWED or len(set(self.servers)) != len(self.servers):
            raise ValueError(f"a site has 1, 3 or 5 different servers, found {len(set(self.servers))}")
        for kind in ("tenants", "workers", "schedulers", "operators", "observers"):
            found: tuple[str, ...] = getattr(self, kind)
            if not found and kind in ("tenants", "schedulers"):
                raise ValueError(f"a site needs {kind}: name at least one")
            if len(set(found)) != len(found):
                raise ValueError(f"{kind} names {next(name for name in found if found.count(name) > 1)} twice")
            for name in found:
                allowed = TENANT if kind == "tenants" else WORKER
                if not allowed.fullmatch(name):
                    raise ValueError(f"{kind} must have names that match {allowed.pattern}, found {name[:80]!r}")
        for caller in self.callers:
            tenant, _, own = caller.partition(".")
            if tenant not in self.tenants or not WORKER.fullmatch(own) or self.callers.count(caller) > 1:
                raise ValueError(f"a caller is TENANT.NAME, each once, of a tenant of the site: found {caller[:80]!r}")
        for person in self.persons:
            tenant, _, own = person.partition(".")
            if tenant not in self.tenants or not PERSON.fullmatch(own) or self.persons.count(person) > 1:
                raise ValueError(
                    f"a person is TENANT/NAME, each once, of a tenant of the site, the name as {PERSON.pattern}: found"
                    f" {person.replace('.', '/', 1)[:80]!r}"
                )
        if self.persons and self.shared:
            raise ValueError("no server proves who sent what where all tenants share one account, so it has no persons")
        if unknown := sorted(set(self.execs) - set(self.tenants)):
            raise ValueError(f"execs names tenants of the site, found {unknown[0][:80]!r}, which is none")
        for worker, served in self.serves.items():
            if worker not in self.workers or not served or not set(served) <= set(self.tenants):
                other = next((each for each in served if each not in self.tenants), "")
                told = f"{other[:80]!r}, which is none" if served else "none"
                raise ValueError(f"worker {worker[:80]} serves tenants of the site, found {told}")
        for place in self.leaves:
            if not WORKER.fullmatch(place):
                raise ValueError(f"a leaf has a name that matches {WORKER.pattern}, found {place[:80]!r}")
        if self.leaves and (self.shared or self.auth != "nkey"):
            raise ValueError("a leaf needs an account for each tenant, and NKeys: leave out --shared and --auth")
        for worker, place in self.behind.items():
            if place not in self.leaves:
                raise ValueError(
                    f"worker {worker[:80]} is behind a leaf of the site, found {place[:80]!r}, which is none"
                )
        if self.pools and (self.auth != "nkey" or JOINER in self.operators):
            raise ValueError(f"a pool needs NKeys, and no operator who is called {JOINER}: leave out --auth")
        for pool, count in self.pools.items():
            if not WORKER.fullmatch(f"{pool}-{count}") or not 1 <= count <= USERS_MAX:
                raise ValueError(f"a pool is NAME:COUNT, the count 1..{USERS_MAX}, found {pool[:80]!r}:{count}")
            if taken := [name for name in pool_workers(pool, count) if name in self.workers]:
                raise ValueError(f"pool {pool} has a worker {taken[0]}, which is named as a worker, too")
        if len(self.identities) > USERS_MAX:
            raise ValueError(f"a site has at most {USERS_MAX} users, found {len(self.identities)}")
        variables = [each.variable for each in self.identities]
        if self.auth == "env" and len(set(variables)) != len(variables):
            raise ValueError("two users would have the same variable: names must differ in more than case, - and _")

    @property
    def subjects(self) -> Subjects:
        return Subjects(self.prefix)

    @property
    def clustered(self) -> bool:
        return len(self.servers) > 1

    @property
    def has_network(self) -> bool:
        """Whether servers, clients or other servers may be on different machines."""
        return self.clustered or not self.servers[0].is_loopback

    @property
    def encryption(self) -> Tls:
        """How the servers encrypt: with certificates in place of keys always, whatever `tls` says."""
        return "only" if self.auth == "mtls" else self.tls

    @property
    def encrypts(self) -> bool:
        return self.encryption != "off"

    @property
    def queue(self) -> bool:
        """Whether submitters may use the durable queue."""
        return not self.clustered and not self.shared

    @property
    def has_buckets(self) -> bool:
        """Whether tenants have buckets for results and files."""
        return self.results and not self.shared

    @property
    def system(self) -> Identity | None:
        """The user who may see and end connections, alone in an account; None where users show passwords."""
        return None if self.auth == "env" else Identity("system", "main")

    @property
    def identities(self) -> list[Identity]:
        """All users, those of the ledger's account last."""
        found = [Identity("submitter", name) for name in self.tenants]
        found += [Identity("submitter", name) for name in self.persons]
        found += [Identity("service", name) for name in self.tenants]
        found += [Identity("caller", name) for name in self.callers]
        found += [Identity("worker", name) for name in self.workers]
        found += [Identity("scheduler", name) for name in self.schedulers]
        found += [Identity("operator", name) for name in self.operators]
        found += [Identity("observer", name) for name in self.observers]
        for place in self.leaves:
            found += self.leaves_at(place)
        for pool, count in self.pools.items():
            found += [Identity("worker", name) for name in pool_workers(pool, count)]
            found.append(Identity("pool", pool))
        if self.pools:
            found.append(Identity("joiner", "main"))
        return found + [Identity("ledger", name) for name in self.schedulers]

    def rights_of(self, identity: Identity) -> Rights | None:
        """Return what a user may do; None for a user of the ledger's account, which only schedulers use."""
        if identity.role == "ledger":
            return None
        if identity.role == "system":
            return RIGHTS
        if identity.role == "pool":
            return pool_rights(identity.name, self.subjects)
        if identity.role == "joiner":
            return joiner_rights(self.subjects)
        if identity.role == "leaf":
            rights_of = [self.rights_of(each) for each in self.users_behind(identity)]
            return through_leaf(joint(each for each in rights_of if each is not None))
        results_of = self.tenants if self.has_buckets else ()
        queues_of = self.tenants if self.queue else ()
        return rights(
            identity.role,
            identity.name,
            self.subjects,
            queue=self.queue,
            results_of=results_of,
            queues_of=queues_of,
            execs=identity.tenant in self.execs,
            callers=self.callers,
            serves=self.serves.get(identity.name) if identity.role == "worker" else None,
        )

    def inbox_of(self, identity: Identity) -> str:
        """Return the inbox prefix of a user for its nats context; "" for one of the ledger's account, and a leaf's."""
        match identity.role:
            case "ledger" | "leaf":
                return ""
            case "system":
                return SYSTEM_INBOX
            case "pool":
                return pool_inbox(identity.name)
            case "joiner":
                return f"{INBOX}.{JOINER}.{identity.name}"
        return inbox_of(identity.role, identity.name, self.subjects)

    def leaves_at(self, place: str) -> list[Identity]:
        """Return the users by which the leaf node of a place connects: one for its workers, and one for each tenant."""
        return [Identity("leaf", place), *(Identity("leaf", f"{place}.{tenant}") for tenant in self.tenants)]

    def users_behind(self, leaf: Identity) -> list[Identity]:
        """Return for which users a leaf node passes on: the workers of its place, or of one tenant all but callers.

        It can do what they can, and no more.
        """
        place, _, tenant = leaf.name.partition(".")
        if tenant:
            return [Identity("submitter", tenant), Identity("service", tenant)]
        return [Identity("worker", name) for name in self.workers if self.behind.get(name) == place]

    def account_of(self, identity: Identity) -> str:
        upper = self.prefix.upper().replace(".", "_") if self.prefix != PREFIX_DEFAULT else ACCOUNT
        if identity.role == "ledger":
            return f"{upper}_LEDGER"
        if identity.role == "system":
            return f"{upper}_SYSTEM"
        if identity.role == "leaf":
            tenant = identity.name.partition(".")[2]
            return self.account_of(Identity("submitter", tenant)) if tenant else upper
        if self.shared or identity.role not in ("submitter", "caller", "service"):
            return upper
        kind = "CALLERS" if identity.role == "caller" else "TENANT"
        return f"{upper}_{kind}_{identity.tenant}"


def pool_workers(pool: str, count: int) -> list[str]:
    """Return the ids of the workers of a pool for which keys are made ahead."""
    return [f"{pool}-{number}" for number in range(1, count + 1)]


# --------------------------------------------------------------------------------------------------------- accounts


def accounts(site: Site, credentials: dict[Identity, str]) -> str:
    """Return `accounts.conf`: every account with its users. `credentials` are the public keys of nkeys. Nothing in it
    is secret."""
    by_account: dict[str, list[Identity]] = {}
    for identity in site.identities:
        by_account.setdefault(site.account_of(identity), []).append(identity)
    users = site.account_of(Identity("scheduler", ""))
    ledger = site.account_of(Identity("ledger", ""))
    tenants = [name for name in by_account if name not in (users, ledger)]
    exports, imports = _crossings(site, users)
    lines = ["# Made by `moorage admin nats-config`: make it anew rather than edit it.", "accounts {"]
    for account in (users, *tenants, ledger):
        lines.append(f"  {quoted(account)} {{")
        if account not in tenants:
            lines.append("    jetstream: enabled")
        lines.append("    users: [")
        for identity in by_account[account]:
            may = site.rights_of(identity)
            if may is not None and identity.role == "scheduler":
                may = may._replace(publish=(*may.publish, *_persons(site, credentials)))
            lines += _user(identity, may, site.auth, credentials.get(identity, ""))
        lines.append("    ]")
        if account in tenants:
            lines.append(f"    limits: {{ {TENANT_LIMITS} }}")
        for title, crossing in (
            ("exports", exports.get(account, [])),
            ("imports", imports.get(account, [])),
        ):
            if crossing:
                lines += [f"    {title}: [", *(f"      {line}" for line in crossing), "    ]"]
        lines.append("  }")
    exported = []
    if (system := site.system) is not None:
        account, own = site.account_of(system), _user(system, RIGHTS, site.auth, credentials.get(system, ""))
        lines += [f"  {quoted(account)} {{", "    users: [", *own, "    ]", "    imports: ["]
        for theirs, here in EXPORTS.items():
            service = f"{{ account: {quoted(SYSTEM_ACCOUNT)}, subject: {quoted(theirs)} }}"
            lines.append(f"      {{ service: {service}, to: {quoted(here)} }}")
        lines += ["    ]", "  }"]
        for theirs in EXPORTS:  # several servers answer
            allowed = f"accounts: [{quoted(account)}], response_type: stream"
            exported.append(f"      {{ service: {quoted(theirs)}, {allowed} }}")
    # also without exports: nats-server 2.15 ends itself at the second reload of a file that has lost its `$SYS`
    lines += [f"  {quoted(SYSTEM_ACCOUNT)} {{", "    exports: [", *exported, "    ]", "  }"]
    return "\n".join([*lines, "}", ""])


def leaf_accounts(site: Site, place: str, credentials: dict[Identity, str]) -> str:
    """Return `accounts.conf` of a leaf node: the accounts of the site with the users behind it, each with its rights.

    Nothing crosses between accounts here: that is for the site's servers. So what the users of one account ask each
    other, such as calls of a service, is answered here, whether or not these servers can be reached.
    """
    lines = ["# Made by `moorage admin nats-config`: make it anew rather than edit it.", "accounts {"]
    for leaf in site.leaves_at(place):
        lines += [f"  {quoted(site.account_of(leaf))} {{", "    users: ["]
        for identity in site.users_behind(leaf):
            lines += _user(identity, site.rights_of(identity), site.auth, credentials.get(identity, ""))
        lines.append("    ]")
        if "." in leaf.name:
            lines.append(f"    limits: {{ {TENANT_LIMITS} }}")
        lines.append("  }")
    return "\n".join([*lines, "}", ""])


def _persons(site: Site, credentials: dict[Identity, str]) -> list[str]:
    """Return the rights by which schedulers know whose keys are persons'."""
    persons = [each for each in site.identities if each.person]
    return [
        site.subjects.person(each.tenant, each.person, _name(each, site.auth, credentials.get(each, "")))
        for each in persons
    ]


def _name(identity: Identity, auth: Auth, credential: str) -> str:
    """Return what nats-server calls a user."""
    if auth == "nkey":
        return credential
    return identity.subject if auth == "mtls" else identity.key


def _user(identity: Identity, may: Rights | None, auth: Auth, credential: str) -> list[str]:
    name = _name(identity, auth, credential)
    who = f"nkey: {name}" if auth == "nkey" else f"user: {quoted(name)}"
    if auth == "env":
        who += f", password: ${identity.variable}"
    head = f"      # {identity.role} {identity.name}"
    if may is None:
        return [head, f"      {{ {who} }}"]
    if identity.role == "leaf":
        who += ', allowed_connection_types: ["LEAFNODE"]'
    lines = [head, f"      {{ {who}, permissions: {{"]
    for verb, subjects, refused in (("publish", may.publish, may.refused), ("subscribe", may.subscribe, may.unheard)):
        if not subjects:  # an empty list of what is allowed would allow everything
            lines.append(f'          {verb}: {{ deny: [">"] }}')
            continue
        denied = ["          ], deny: [", *_wrapped(refused)] if refused else []
        lines += [f"          {verb}: {{ allow: [", *_wrapped(subjects), *denied, "          ] }"]
    if may.answers:
        lines.append(f'          allow_responses: {{ max: {may.answers}, expires: "{ANSWER_WITHIN}" }}')
    return [*lines, "      } }"]


def _wrapped(subjects: Iterable[str]) -> list[str]:
    return [f"            {quoted(subject)}" for subject in subjects]


def _crossings(site: Site, users: str) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return what each account exports, and what it imports. The users' account exports to a tenant's its rights and
    nothing else. Calls of services stay in the tenant's account, where the members are; their loads and turns cross."""
    exports: dict[str, list[str]] = {}
    imports: dict[str, list[str]] = {}
    if site.shared:
        return exports, imports

    def cross(kind: str, subject: str, source: str, target: str, *, is_stamped: bool = False) -> None:
        many = ", response_type: stream" if subject.startswith(f"{RESULT_API}.DIRECT.GET.") else ""
        theirs = subject.replace(RESULT_API, "$JS.API", 1)
        exports.setdefault(source, []).append(f"{{ {kind}: {quoted(theirs)}, accounts: [{quoted(target)}]{many} }}")
        here = f", to: {quoted(subject)}" if theirs != subject else ""
        # the server then stamps who asks: account and key, see `schemas.ways`
        here += ", share: true" if is_stamped else ""
        imports.setdefault(target, []).append(
            f"{{ {kind}: {{ account: {quoted(source)}, subject: {quoted(theirs)} }}{here} }}"
        )

    for tenant in site.tenants:
        identity = Identity("submitter", tenant)
        account, may = site.account_of(identity), site.rights_of(identity)
        assert may is not None
        calls = site.subjects.call(tenant, ">")
        asked = {site.subjects.api(tenant, verb) for verb in ("*", *API_VERBS)}
        asked |= {site.subjects.request(tenant, verb) for verb in ("submit", "cancel")}
        for subject in may.publish:
            if subject != calls:
                cross("service", subject, users, account, is_stamped=subject in asked)
        cross("service", site.subjects.member(tenant, "*", "load"), users, account)
        cross("stream", site.subjects.member(tenant, "*", "turn"), users, account)
        for subject in may.subscribe:
            if subject.startswith(f"{site.prefix}."):
                cross("stream", subject, users, account)
        # A call crosses as a stream: the member sees the caller's own reply subject, and publishes there by its own
        # rights. As a service, the server itself would answer for it, and would name calls otherwise than callers do.
        for at, caller in enumerate(name for name in site.callers if name.partition(".")[0] == tenant):
            theirs = site.account_of(Identity("caller", caller))
            if not at:
                cross("stream", calls, theirs, account)
                for verb in CALLER_ASKS:
                    cross("service", site.subjects.api(tenant, verb), users, theirs, is_stamped=True)
            cross("stream", f"{inbox('caller', caller)}.>", account, theirs)
    return exports, imports


# ---------------------------------------------------------------------------------------------------------- servers


def server(site: Site, at: int, *, store: str, folder: str = "", route_password: str = "", has_ca: bool = True) -> str:
    """Return the text of the configuration file of server number `at` (from 0).

    `store` is its folder for JetStream, `folder` the one with the certificates. Without `has_ca`, the servers trust the
    authorities of their machine. Its limits are those of the embedded server. A text with `route_password` is private;
    a cluster whose users show certificates needs no such password.
    """
    me = site.servers[at]
    lines = [
        f"# Made by `moorage admin nats-config`: server {at + 1} of {len(site.servers)}.",
        f'server_name: "{ORGANISATION}-{at + 1}"',
        *_heard(site, me),
        "jetstream {",
        f"  store_dir: {quoted(store)}",
        "  # Each message is on disk before it is acknowledged: what moorage answers is recorded.",
        "  sync_interval: always",
        "}",
    ]
    own = [
        f"  cert_file: {quoted(f'{folder}/server.{at + 1}.pem')}",
        f"  key_file: {quoted(f'{folder}/server.{at + 1}.key')}",
    ]
    authority = [f"  ca_file: {quoted(f'{folder}/ca.pem')}"] if has_ca else []
    if site.encrypts:
        lines += [
            _TLS,
            *own,
            *(authority if site.auth == "mtls" else ()),
            "  # clients of moorage begin with TLS; others wait for the server's first line, which comes after this",
            f'  handshake_first: "{FIRST_LINE_AFTER}"',
        ]
        if site.auth == "mtls":
            lines += ["  # the subject of a client's certificate is the user's name", "  verify_and_map: true"]
        lines.append("}")
    if site.leaves:
        lines += [_LEAVES, f'  listen: "{me.listen(me.port + LEAVES_BEHIND)}"']
        if site.has_network:  # a server would name all of its addresses, also those that no leaf node reaches
            lines.append(f"  advertise: {quoted(me.reached(me.port + LEAVES_BEHIND))}")
        if site.encrypts:
            lines += ["  tls {", *(f"  {line}" for line in own), "  }"]
        lines.append("}")
    if site.encryption == "offered":
        lines += ["# clients may come without TLS, until `moorage admin nats-config --tls-only`", _BOTH]
    if site.clustered:
        user = f"route:{route_password}@" if route_password else ""
        routes = [f"nats-route://{user}{each.reached(each.port + ROUTES_BEHIND)}" for each in site.servers]
        if site.encrypts:  # by the name of its certificate, where the server would name all of its addresses
            lines.append(f"client_advertise: {quoted(me.reached())}")
        lines += ["cluster {", f'  name: "{ORGANISATION}"', f'  listen: "{me.listen(me.port + ROUTES_BEHIND)}"']
        if route_password:
            lines.append(f"  authorization {{ user: route, password: {quoted(route_password)} }}")
        if site.encrypts:
            lines += ["  tls {", *(f"  {line}" for line in own + authority), "    verify: true", "  }"]
        lines += ["  routes: [", *_wrapped(routes[:at] + routes[at + 1 :]), "  ]", "}"]
    return "\n".join([*lines, 'include "accounts.conf"', ""])


def leaf_server(site: Site, place: str, seeds: dict[Identity, str], *, folder: str = "", has_ca: bool = True) -> str:
    """Return the text of the configuration file of the leaf node of a place; it is private.

    `seeds` are the keys by which it connects, `folder` is the one with the certificates. It has no JetStream.
    """
    me = site.leaves[place]
    lines = [
        f"# Made by `moorage admin nats-config`: the leaf node {place}. It holds keys: give it to nobody.",
        f"server_name: {quoted(leaf_name(place))}",
        *_heard(site, me),
    ]
    if site.encrypts:
        own = [
            f"  cert_file: {quoted(f'{folder}/leaf.{place}.pem')}",
            f"  key_file: {quoted(f'{folder}/leaf.{place}.key')}",
        ]
        lines += [_TLS, *own, f'  handshake_first: "{FIRST_LINE_AFTER}"', "}"]
    scheme, tls = "nats-leaf", ""
    if site.encrypts:
        scheme, tls = "tls", f", tls {{ ca_file: {quoted(f'{folder}/ca.pem')} }}" if has_ca else ", tls {}"
    urls = ", ".join(quoted(f"{scheme}://{each.reached(each.port + LEAVES_BEHIND)}") for each in site.servers)
    lines += ["leafnodes {", '  reconnect: "1s"', "  remotes: ["]
    for leaf in site.leaves_at(place):
        lines.append(
            f"    {{ account: {quoted(site.account_of(leaf))}, urls: [{urls}], nkey: {quoted(seeds[leaf])}{tls} }}"
        )
    return "\n".join([*lines, "  ]", "}", 'include "accounts.conf"', ""])


def takes_leaves(text: str) -> bool:
    """Return whether the server of a configuration file that `server` made takes leaf nodes."""
    return _LEAVES in text.splitlines()


def _heard(site: Site, me: Server) -> list[str]:
    """Return where a server listens, and what it takes."""
    return [
        f'listen: "{me.listen(me.port)}"',
        *_monitoring(site, me),
        f"max_payload: {MAX_PAYLOAD_BYTES}",
        f"max_pending: {MAX_PENDING_BYTES}",
        f'ping_interval: "{PING_INTERVAL_S}s"',
        "ping_max: 2",
        'write_deadline: "10s"',
    ]


def tls_of(text: str) -> Tls:
    """Return how the server of a configuration file that `server` made encrypts."""
    lines = text.splitlines()
    return "off" if _TLS not in lines else "offered" if _BOTH in lines else "only"


def _monitoring(site: Site, me: Server) -> list[str]:
    if not site.monitor:
        return []
    return [
        "# monitoring, for every user of this machine, jobs too: /healthz, /jsz, /connz",
        f'{MONITORING} "127.0.0.1:{me.port + MONITOR_BEHIND}"',
    ]


def server_name(site: Site, at: int) -> str:
    """Return the name of the configuration file of server number `at`."""
    return f"server-{at + 1}.conf" if site.clustered else "server.conf"


def shipped() -> dict[str, dict[str, str]]:
    """Return the content of `deploy/nats`: folders of configuration files for invented names, without any key."""
    plain = Site(
        tenants=("vision", "speech"),
        workers=("n01", "n02"),
        operators=("ana",),
        observers=("grafana",),
        servers=(Server("0.0.0.0"),),
        auth="env",
    )
    three = tuple(Server(f"nats-{at}") for at in (1, 2, 3))
    of = {
        "one-server": plain,
        "shared-account": msgspec.structs.replace(plain, shared=True),
        "cluster": msgspec.structs.replace(plain, auth="mtls", servers=three),
    }
    made: dict[str, dict[str, str]] = {}
    for folder, site in of.items():
        made[folder] = {"accounts.conf": accounts(site, {})}
        for at in range(len(site.servers)):
            text = server(site, at, store="/data/jetstream", folder="/etc/nats/tls")
            made[folder][server_name(site, at)] = text
    return made


def url_of(servers: Sequence[Server], scheme: str = "nats") -> str:
    return ",".join(f"{scheme}://{each.reached()}" for each in servers)
