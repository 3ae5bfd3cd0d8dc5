"""`moorage admin nats-config`: accounts, users, permissions, keys and contexts for nats-server, in one folder."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, NamedTuple

import msgspec

from moorage.cli.fleet import site_tls
from moorage.cli.fleet.site_tls import CA, TLS, OwnCertificates, day
from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import emit, print_err, print_out
from moorage.cli.framework.files import cannot_write
from moorage.cli.framework.options import Options, guarded
from moorage.schemas.subjects import PREFIX_DEFAULT
from moorage.schemas.units import many

if TYPE_CHECKING:
    from moorage.bus.site import Identity, Server, Site

KEYS: Final = "keys"
#: for the workers' folders of secrets: the keys with which jobs answer calls, as `calls/<tenant>`
SECRETS: Final = "secrets"
#: as the `nats` tool lays its contexts out below XDG_CONFIG_HOME
CONTEXTS: Final = "nats/context"
#: settings for the workers' moorage.toml; a site has users of its own, so its jobs are not root's
WORKER: Final = "worker.toml"
WORKER_SETTINGS: Final = """\
# For moorage.toml on the workers' hosts.
[worker]
# An agent that runs as root starts no job's process as root: set run_as or run_as_for.
root_jobs = "refuse"
"""
#: for those behind a leaf node, besides: gangs stay in one place by this label, and a cut of the link is outlived
LEAF_SETTINGS: Final = """\
labels = {{ site = "{0}" }}
# Jobs go on for so long without an answer of a scheduler, within the bounds of its lease_s and lease_most.
lease_s = "10m"
"""
#: settings for the schedulers of several servers: with the default, their ledger would be on one of them alone
SCHEDULERS: Final = "moorage.toml"
SCHEDULER_SETTINGS: Final = """\
# For every scheduler: name this file with MOORAGE_SETTINGS or --settings. nats-config never writes over it.
[scheduler]
# A copy of the ledger on each of the {0} servers: it takes records while more than half of them run.
replicas = {0}
"""
ACCOUNTS: Final = "accounts.conf"
#: nats-server 2.15 passes on what a new account imports only once it reads its files for the second time
RELOADS: Final = 2
_SERVER: Final = re.compile(r"(?:\[(?P<six>[0-9a-fA-F:.]+)\]|(?P<host>[A-Za-z0-9_.-]+))(?::(?P<port>[0-9]{1,5}))?")
#: users left out that a line names
GONE_MAX: Final = 8


def nats_config(
    *,
    out: Annotated[Path, Parameter(help="Folder to write to; created if missing.")],
    tenant: Annotated[list[str], Parameter(help="A tenant; may be repeated.", value="NAME")],
    worker: Annotated[
        list[str] | None,
        Parameter(
            help="A worker's id, behind which leaf node it is, and the tenants whose jobs it runs; all by default. May "
            "be repeated.",
            value="ID[@SITE][=TENANT,...]",
        ),
    ] = None,
    leaf: Annotated[
        list[str] | None,
        Parameter(
            help="Another place with a nats-server of its own, which is a leaf node of --server, and that server's "
            "address there, by default 127.0.0.1:4222. May be repeated.",
            value="SITE[=HOST:PORT]",
        ),
    ] = None,
    pool: Annotated[
        list[str] | None,
        Parameter(
            help="Workers that come and go: so many keys are made ahead, which machines get by a join token. May be "
            "repeated.",
            value="NAME:COUNT",
        ),
    ] = None,
    operator: Annotated[list[str] | None, Parameter(help="An operator; may be repeated.", value="NAME")] = None,
    person: Annotated[
        list[str] | None,
        Parameter(
            help="A person of a tenant, with a key of their own and the tenant's rights; may be repeated.",
            value="TENANT/NAME",
        ),
    ] = None,
    caller: Annotated[
        list[str] | None,
        Parameter(
            help="Who calls a tenant's services, and may do nothing else, as a door; may be repeated.",
            value="TENANT.NAME",
        ),
    ] = None,
    observer: Annotated[list[str] | None, Parameter(help="A dashboard; may be repeated.", value="NAME")] = None,
    scheduler: Annotated[
        list[str] | None, Parameter(help="A scheduler; may be repeated. By default one, main.", value="NAME")
    ] = None,
    server: Annotated[
        list[str] | None,
        Parameter(
            help="Address of a nats-server; 3 or 5 of them make a cluster. By default 127.0.0.1:4222.",
            value="HOST:PORT",
        ),
    ] = None,
    auth: Annotated[
        Literal["nkey", "mtls", "env"],
        Parameter(help="How users authenticate: NKeys, certificates, or passwords in the server's environment."),
    ] = "nkey",
    shared: Annotated[bool, Parameter(help="All tenants share one account, and have no durable queue.")] = False,
    no_results: Annotated[
        bool, Parameter(help="Tenants get no room on the server for results of functions and files of jobs.")
    ] = False,
    exec: Annotated[
        list[str] | None,
        Parameter(help="A tenant that may run commands in its running jobs; may be repeated.", value="TENANT"),
    ] = None,
    monitor: Annotated[
        bool,
        Parameter(
            help="Open nats-server's monitoring port on its machine: the server's port and 4000, on 127.0.0.1. Every "
            "user of that machine can read it, jobs too."
        ),
    ] = False,
    no_monitor: Annotated[
        bool, Parameter(help="Close the monitoring port that an earlier run of this command opened.")
    ] = False,
    tls: Annotated[
        bool,
        Parameter(
            help="Add TLS to a site without it; until --tls-only, clients may come without it. A new site of more than "
            "one machine has TLS without being asked."
        ),
    ] = False,
    tls_only: Annotated[bool, Parameter(help="After --tls: no client comes without TLS any more.")] = False,
    plaintext: Annotated[
        bool,
        Parameter(help="No TLS: whoever can listen on the network reads requests, output and files of every tenant."),
    ] = False,
    cert: Annotated[
        list[Path] | None,
        Parameter(
            help="A certificate of your own authority, for all servers or, repeated, for each in turn. By default the "
            "folder has an authority of its own.",
            value="FILE",
        ),
    ] = None,
    key: Annotated[list[Path] | None, Parameter(help="The key of --cert; as often as that.", value="FILE")] = None,
    ca: Annotated[
        Path | None,
        Parameter(help="The authority of --cert. By default those that each machine trusts.", value="FILE"),
    ] = None,
    store: Annotated[
        Path | None, Parameter(help="JetStream's folder on the server. Default: data, below --out.")
    ] = None,
    prefix: Annotated[
        str, Parameter(help="Beginning of every subject, one word or several, as gpu.eu.", value="WORD")
    ] = PREFIX_DEFAULT,
    json: Annotated[bool, Parameter(help="Print what was written, as one JSON object.")] = False,
) -> int:
    """Write nats-server's configuration for these tenants, workers and people, with a key and a nats context for each.

    With --auth mtls each has a certificate in place of a key; with --auth env, a variable for its password and no
    context. Run it again with all names, the old and the new: configuration and contexts are written again, keys and
    certificates are kept, and a user that is not named loses access. Each person of --person has a key beside their
    tenant's, with its rights: so jobs tell who submitted them. Each tenant has an account, and the ledger has one that
    only schedulers use. The permissions come from the same table as docs/reference/permissions.md. With several
    servers it also writes the schedulers' settings, moorage.toml, if there is no such file: a copy of the ledger on
    each server.

    More than one server, or one on another address than loopback, gets TLS for clients and routes: an authority of the
    folder's own signs the servers' certificates, and each context names that authority's file. A site that is there
    stays as it is, with or without TLS.
    """

    def act() -> int:
        from moorage.bus.site import Site
        from moorage.client.errors import rejected
        from moorage.schemas.subjects import is_prefix

        if not is_prefix(prefix):
            raise rejected(
                "invalid-argument", f"{prefix!r} is not a valid prefix", found=prefix, next="for example moorage"
            )
        if monitor and no_monitor:
            raise rejected("invalid-argument", "--monitor and --no-monitor exclude each other", next="give one of them")
        was_open, took_leaves = _monitored(out), _takes_leaves(out)
        workers = [_worker(each) for each in worker or ()]
        try:
            site = Site(
                tenants=tuple(tenant),
                workers=tuple(each.name for each in workers),
                serves={each.name: each.serves for each in workers if each.serves is not None},
                behind={each.name: each.place for each in workers if each.place is not None},
                leaves=dict(map(_leaf, leaf or ())),
                pools=dict(map(_pool, pool or ())),
                schedulers=tuple(scheduler or ("main",)),
                operators=tuple(operator or ()),
                observers=tuple(observer or ()),
                persons=tuple(map(_person, person or ())),
                callers=tuple(caller or ()),
                servers=tuple(map(_server, server or ["127.0.0.1:4222"])),
                prefix=prefix,
                auth=auth,
                shared=shared,
                results=not no_results,
                execs=tuple(exec or ()),
                monitor=monitor or (was_open and not no_monitor),
            )
            asked, tls_before = site_tls.Asked(tls, tls_only, plaintext), site_tls.before(site, out)
            site = msgspec.structs.replace(site, tls=site_tls.now(site, tls_before, asked, has_cert=bool(cert)))
            own = site_tls.own(site, cert or [], key or [], ca)
        except ValueError as error:
            raise rejected("invalid-argument", str(error), next="moorage admin nats-config --help") from None
        is_first = not (out / ACCOUNTS).exists()
        try:
            written = write(site, out.absolute(), store, own)
        except OSError as error:
            raise cannot_write(error.filename or out, error.strerror, "name another folder with --out") from None
        switches = tls_before is not None and site.encryption != tls_before
        changes = not is_first and site.monitor != was_open
        leaves_change = not is_first and bool(site.leaves) != took_leaves
        if json:
            found = {"kind": "nats-config", "folder": str(out.absolute()), **msgspec.to_builtins(written)}
            emit(
                {
                    **found,
                    "monitor": site.monitor,
                    "tls": site.encryption,
                    "restart": changes or switches or leaves_change,
                }
            )
        else:
            _print_written(site, out, written, is_first=is_first, needs_restart=changes or switches or leaves_change)
            _print_monitoring(site, asked=monitor, changes=changes)
            _print_leaves(site, out.absolute(), changes=leaves_change)
            for name, count in site.pools.items():
                print_err(
                    f"pool {name}: {many(count, 'key')} for new machines; moorage admin joiner {out} hands them out,"
                    f" by moorage admin token {out} pool={name} --uses NUMBER --until WHEN > FILE"
                )
            site_tls.print_tls(site, out.absolute(), tls_before if switches else None, is_meant=plaintext)
        return 0

    return guarded(Options(json=json), act)


def _monitored(folder: Path) -> bool:
    """Return whether a configuration of an earlier run opens a server's monitoring port."""
    from moorage.bus.site import MONITORING

    texts = (file.read_text(encoding="utf-8") for file in folder.glob("server*.conf"))
    return any(line.startswith(MONITORING) for text in texts for line in text.splitlines())


def _takes_leaves(folder: Path) -> bool:
    """Return whether a configuration of an earlier run has a server take leaf nodes."""
    from moorage.bus.site import takes_leaves

    return any(takes_leaves(file.read_text(encoding="utf-8")) for file in folder.glob("server*.conf"))


def _shares_host(site: Site, at: int) -> bool:
    """Return whether another server stands on the same machine, by its address."""
    hosts = [each.host for each in site.servers]
    return hosts.count(hosts[at]) > 1


class Written(msgspec.Struct, frozen=True):
    """What was written, by kind: paths, and names of contexts and variables. `certificates_end` is the day on which the
    first certificate ends, "" without one."""

    configuration: list[str]
    contexts: list[str]
    secrets: list[str]
    keys: list[str]  # new ones only
    variables: list[str]
    left_out: list[str]  # users of contexts of an earlier run that are no longer in the site
    certificates_end: str = ""


def write(site: Site, folder: Path, store: Path | None = None, own: OwnCertificates | None = None) -> Written:
    """Write everything that a site needs into `folder` (mode 0700). `own` are certificates for its servers.

    With several servers, `configuration` has the schedulers' settings if there were none. Raises OSError, MoorageError.
    """
    from moorage.bus import certificates, identities, issued_keys
    from moorage.bus.site import accounts, pool_workers, server, server_name
    from moorage.bus.target import UP_CONTEXTS
    from moorage.system.private_files import replace_private

    for each in (folder, folder / KEYS, folder / CONTEXTS, folder / TLS):
        if each.name != TLS or site.encrypts:
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
    before = {path.name for path in (folder / KEYS).iterdir()}
    known = {path.stem for path in (folder / CONTEXTS).glob("[!.]*.json") if not path.stem.startswith(UP_CONTEXTS)}
    public: dict[Identity, str] = {}
    users = [*site.identities, *([site.system] if site.system is not None else [])]
    accounts_before = _read(folder / ACCOUNTS)
    if site.auth == "nkey":
        public = {identity: identities.nkey(folder / KEYS, identity) for identity in users}
    if own is not None:
        certificates.take(folder / TLS, site, own.pairs, own.authority)
    elif site.encrypts:
        certificates.certificates(folder / TLS, site)
    has_ca = (folder / TLS / CA).exists()
    password = identities.route_password(folder / KEYS) if site.clustered and site.auth != "mtls" else ""
    configuration = {ACCOUNTS: accounts(site, public), WORKER: WORKER_SETTINGS}
    for at in range(len(site.servers)):
        where = store or folder / ("data" if not site.clustered else f"data-{at + 1}")
        if store is not None and _shares_host(site, at):
            where = store / str(at + 1)  # two servers in one folder destroy each other's streams
        text = server(site, at, store=str(where), folder=str(folder / TLS), route_password=password, has_ca=has_ca)
        configuration[server_name(site, at)] = text
    if site.clustered and not (folder / SCHEDULERS).exists():
        configuration[SCHEDULERS] = SCHEDULER_SETTINGS.format(len(site.servers))
    for name, text in configuration.items():
        replace_private(folder / name, text)
    issued_keys.keep(folder, accounts_before)
    of_pools = {
        name for pool, count in site.pools.items() for name in pool_workers(pool, count)
    }  # by join tokens alone
    people = [each for each in users if each.role != "leaf" and not (each.role == "worker" and each.name in of_pools)]
    contexts = {} if site.auth == "env" else {each.key: _context(site, each, folder) for each in people}
    for name, fields in contexts.items():
        _write_context(folder, name, fields)
    at_leaves = [path for place in site.leaves for path in _write_leaf(site, place, folder, public, has_ca=has_ca)]
    secrets = {} if site.auth == "env" else _call_keys(site, folder)
    for path, key in secrets.items():
        for each in (folder / SECRETS, path.parent):
            each.mkdir(mode=0o700, exist_ok=True)
        replace_private(path, key)
    return Written(
        configuration=[*(str(folder / name) for name in configuration), *at_leaves],
        contexts=sorted(contexts),
        secrets=[str(path) for path in secrets],
        keys=sorted({path.name for path in (folder / KEYS).iterdir()} - before),
        variables=[each.variable for each in site.identities] if site.auth == "env" else [],
        left_out=sorted(known - {each.key for each in users}),
        certificates_end=day(certificates.ends(folder / TLS)[0].at_s) if site.encrypts else "",
    )


def _write_context(folder: Path, name: str, fields: dict[str, str]) -> None:
    from moorage.system.private_files import replace_private

    text = msgspec.json.format(msgspec.json.encode(fields)).decode() + "\n"
    replace_private(folder / CONTEXTS / f"{name}.json", text)


def _write_leaf(site: Site, place: str, folder: Path, public: dict[Identity, str], *, has_ca: bool) -> list[str]:
    """Write what the machines of another place need into a folder of its own; return the paths, without contexts."""
    from moorage.bus import identities
    from moorage.bus.site import leaf_accounts, leaf_server
    from moorage.system.private_files import replace_private

    own = folder / leaf_folder(place)
    (own / CONTEXTS).mkdir(mode=0o700, parents=True, exist_ok=True)
    leaves = site.leaves_at(place)
    seeds = {leaf: identities.seed_of(folder / KEYS, leaf).decode() for leaf in leaves}
    files = {
        "server.conf": leaf_server(site, place, seeds, folder=str(folder / TLS), has_ca=has_ca),
        ACCOUNTS: leaf_accounts(site, place, public),
        WORKER: WORKER_SETTINGS + LEAF_SETTINGS.format(place),
    }
    for name, text in files.items():
        replace_private(own / name, text)
    for leaf in leaves:
        for each in site.users_behind(leaf):
            _write_context(own, each.key, _context(site, each, folder, (site.leaves[place],)))
    return [str(own / name) for name in files]


def leaf_folder(place: str) -> str:
    return f"leaf-{place}"


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""


def _call_keys(site: Site, folder: Path) -> dict[Path, str]:
    """Return the files for the workers' secrets, with their content: one key for each tenant's services, and one for
    its jobs that call them, where the site has such a caller."""
    keys = {each: secret for each in site.identities if (secret := _secret_of(each.role, each.name))}
    is_certificate = site.auth == "mtls"
    return dict(_call_key(folder, each, secret, is_certificate=is_certificate) for each, secret in keys.items())


def _secret_of(role: str, name: str) -> str:
    """Return which of the workers' secrets is the key of this user; "" if none is."""
    from moorage.schemas.service import CALLER_OF_JOBS, CALLER_SECRETS, call_secret

    tenant, _, own = name.partition(".")
    if role == "caller" and own == CALLER_OF_JOBS:
        return f"{CALLER_SECRETS}/{tenant}"
    return call_secret(name) if role == "service" else ""


def _call_key(folder: Path, user: Identity, secret: str, *, is_certificate: bool) -> tuple[Path, str]:
    parts = [folder / KEYS / f"{user.key}.nk"]
    if is_certificate:
        parts = [folder / TLS / name for name in (f"{user.key}.pem", f"{user.key}.key", CA)]
    return folder / SECRETS / secret, "".join(part.read_text() for part in parts)


def give_call_keys(folder: Path, names: Sequence[str]) -> None:
    """Write the workers' secrets anew for services whose certificate is among `names`. Raises OSError."""
    from moorage.bus.site import Identity
    from moorage.system.private_files import replace_private

    for name in names:
        role, _, own = name.partition(".")
        if secret := _secret_of(role, own):
            user = Identity("service" if role == "service" else "caller", own)
            replace_private(*_call_key(folder, user, secret, is_certificate=True))


def _context(site: Site, identity: Identity, folder: Path, servers: Sequence[Server] | None = None) -> dict[str, str]:
    from moorage.bus.site import url_of
    from moorage.schemas.roles import RESULT_API

    servers = servers or site.servers
    fields = {"description": f"{identity.role} {identity.name}", "url": url_of(servers)}
    if own := site.inbox_of(identity):
        fields["inbox_prefix"] = own
    if identity.role == "submitter" and site.has_buckets:
        fields["jetstream_api_prefix"] = RESULT_API
    if site.encrypts:
        fields["url"] = url_of(servers, "tls")
        if (folder / TLS / CA).exists():
            fields["ca"] = str(folder / TLS / CA)
    if site.auth == "nkey":
        fields["nkey"] = str(folder / KEYS / f"{identity.key}.nk")
    else:
        fields |= {"cert": str(folder / TLS / f"{identity.key}.pem"), "key": str(folder / TLS / f"{identity.key}.key")}
    return fields


def _person(text: str) -> str:
    """Return TENANT.NAME of `vision/lena`. Raises ValueError."""
    tenant, sign, name = text.partition("/")
    if not sign or "." in tenant or "." in name:
        raise ValueError(f"a person is TENANT/NAME, as vision/lena: found {text[:80]!r}")
    return f"{tenant}.{name}"


class _Worker(NamedTuple):
    """A worker's id, the leaf node that it is behind (None: none), and the tenants whose jobs it runs (None: all)."""

    name: str
    place: str | None
    serves: tuple[str, ...] | None


def _worker(text: str) -> _Worker:
    """Read `n01`, `n01=speech,vision` or `n01@lyon=speech,vision`."""
    who, sign, tenants = text.partition("=")
    name, at, place = who.partition("@")
    serves = tuple(dict.fromkeys(each.strip() for each in tenants.split(",") if each.strip())) if sign else None
    return _Worker(name, place if at else None, serves)


def _leaf(text: str) -> tuple[str, Server]:
    """Return the name and the address of `lyon` or `lyon=10.1.0.5:4222`. Raises ValueError."""
    place, sign, address = text.partition("=")
    return place, _server(address if sign else "127.0.0.1:4222")


def _pool(text: str) -> tuple[str, int]:
    """Return the name and the count of `spot:50`. Raises ValueError."""
    name, _, count = text.partition(":")
    if not count.isdecimal():
        raise ValueError(f"a pool is NAME:COUNT, as spot:50: found {text[:80]!r}")
    return name, int(count)


def _server(text: str) -> Server:
    """Return host and port of `host` or `host:port`. An address of IPv6 stands in brackets. Raises ValueError."""
    from moorage.bus.site import MONITOR_BEHIND, PORT_DEFAULT, Server

    port_max = 65535 - MONITOR_BEHIND
    found = _SERVER.fullmatch(text)
    port = int(found["port"] or PORT_DEFAULT) if found else 0
    if found is None or not 0 < port <= port_max or not _is_address(found["six"]):
        raise ValueError(
            f"{text!r} is not the address of a server: write HOST, HOST:PORT or [IPV6]:PORT, the port at most "
            f"{port_max}"
        )
    return Server(found["six"] or found["host"], port)


def _is_address(text: str | None) -> bool:
    try:
        return text is None or bool(ipaddress.IPv6Address(text))
    except ValueError:
        return False


def _print_written(site: Site, out: Path, written: Written, *, is_first: bool, needs_restart: bool) -> None:
    for path in written.configuration:
        print_out(path)
    for name in written.contexts:
        print_out(f"{out.absolute() / CONTEXTS}/{name}.json")
    for path in written.secrets:
        print_out(path)
    for name in written.variables:
        print_out(f"${name}")
    print_err(f"configuration for {many(len(site.identities), 'user')}, {many(len(written.keys), 'new key')}")
    if gone := written.left_out:
        names = ", ".join(gone[:GONE_MAX]) + (f" and {len(gone) - GONE_MAX} more" if len(gone) > GONE_MAX else "")
        print_err(
            "warning: users that are no longer in the configuration lose access when the server reads it: "
            f"{names}; to keep a user, name it again"
        )
    if site.clustered:
        print_err(
            "note: with several servers, submitters may submit to the scheduler only, not to the durable queue: in a "
            "replicated stream one message with a wrong header stops the queue"
        )
    elif site.shared:
        print_err(
            "note: submitters may submit to the scheduler only, not to the durable queue, which needs an account "
            "for each tenant"
        )
    if site.shared and site.execs:
        print_err(
            "warning: with --shared and --exec together, who has the keys of a worker and of a tenant that may run "
            "commands can publish as anyone; leave out --shared"
        )
    settings = out.absolute() / SCHEDULERS
    if site.clustered:
        _print_copies(len(site.servers), settings, is_new=str(settings) in written.configuration)
    [first, *_] = (path for path in written.configuration if Path(path).name.startswith("server"))
    print_err(f"next: nats-server -c {first}")
    if site.clustered:
        print_err(f"      and on the other machines so, each with its own file, up to server-{len(site.servers)}.conf")
    if not is_first and not needs_restart:
        again = " && ".join(["nats-server --signal reload"] * RELOADS)
        print_err(
            f"      or, where nats-server runs already: {again} (twice: a new tenant works after the second reload)"
        )
        if site.system is not None:
            print_err(
                f"      a reload cuts off no leaf node whose key is gone; this does: moorage admin keys {out} --cut"
            )
    if site.auth != "env":
        scheduler = site.schedulers[0]
        settings_of = f"MOORAGE_SETTINGS={settings} " if site.clustered else ""
        print_err(
            f"      XDG_CONFIG_HOME={out} MOORAGE_LEDGER_URL=ledger.{scheduler} {settings_of}moorage scheduler"
            f" --nats scheduler.{scheduler}"
        )
        print_err(
            f"      XDG_CONFIG_HOME={out} moorage ls --nats submitter.{site.tenants[0]} --tenant {site.tenants[0]}"
        )


def _print_monitoring(site: Site, *, asked: bool, changes: bool) -> None:
    """Print who reads the monitoring port, and what nats-server needs where the port changed."""
    if site.monitor and not asked:
        print_err(
            "warning: the servers' monitoring port stays open, as it was: every user of a server's machine can read "
            "it, and every job there; --no-monitor closes it"
        )
    if changes:
        print_err(
            f"warning: the servers' monitoring port {'opens' if site.monitor else 'closes'} with this configuration: a "
            "nats-server that runs already refuses to reload it, and so all that is new in it, such as keys; restart "
            "the servers, one after another"
        )


def _print_leaves(site: Site, out: Path, *, changes: bool) -> None:
    """Print what each leaf node's machine needs, and what the site's servers need where leaf nodes begin or cease."""
    for place in site.leaves:
        own = out / leaf_folder(place)
        print_err(
            f"site {place}: nats-server -c {own}/server.conf, on a machine there; its users: XDG_CONFIG_HOME={own}"
        )
    for own in sorted(out.glob(f"{leaf_folder('*')}/server.conf")):
        if (place := own.parent.name.removeprefix(leaf_folder(""))) not in site.leaves:
            print_err(f"warning: the leaf node {place} is no longer in the configuration: {own.parent} leads nowhere")
    if changes:
        print_err(
            "warning: the port for leaf nodes opens or closes with this configuration: a nats-server that runs already "
            "refuses to reload it; restart the servers, one after another"
        )


def _print_copies(servers: int, settings: Path, *, is_new: bool) -> None:
    """Print how many copies a new ledger gets, and warn if settings that were there have another number."""
    from moorage.schemas.settings import read_file

    if is_new:
        print_err(
            f"note: {settings} says replicas = {servers}: a copy of the ledger on each server, with every scheduler"
        )
        return
    found = read_file(settings).table("scheduler").get("replicas")
    said = "no replicas" if found is None else f"replicas = {found}"
    left = f"{settings} was there and is left as it is; it says {said}"
    if found == servers:
        print_err(f"note: {left}")
    else:
        print_err(
            f"warning: {left}: for a copy of a new ledger on each server, write replicas = {servers} under [scheduler]"
        )
