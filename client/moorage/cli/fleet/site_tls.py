"""TLS of a site as `moorage admin nats-config` sets it up: whether, by which certificates, and in which steps."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from moorage.cli.framework.console import print_err

if TYPE_CHECKING:
    from moorage.bus.site import Site, Tls

#: the folder of certificates, and the authority's own in it
TLS: Final = "tls"
CA: Final = "ca.pem"


class OwnCertificates(NamedTuple):
    """Certificates of another authority than the folder's, each with its key; `authority` None: one that machines
    trust."""

    pairs: tuple[tuple[Path, Path], ...]
    authority: Path | None


def before(site: Site, folder: Path) -> Tls | None:
    """Return how the servers of an earlier run for as many servers encrypt; None without such a run."""
    from moorage.bus.site import server_name, tls_of

    file = folder / server_name(site, 0)
    return tls_of(file.read_text(encoding="utf-8")) if file.exists() else None


class Asked(NamedTuple):
    """What the options ask for."""

    offered: bool
    only: bool
    none: bool


def now(site: Site, was: Tls | None, asked: Asked, *, has_cert: bool) -> Tls:
    """Return how the servers are to encrypt; `was` is how they do. Raises ValueError for options that exclude each
    other."""
    if sum(asked) > 1:
        raise ValueError("--tls, --tls-only and --plaintext exclude each other")
    if asked.none:
        if site.auth == "mtls" or has_cert:
            raise ValueError("certificates are of TLS: leave out --plaintext")
        return "off"
    if site.auth == "mtls" or asked.only:
        return "only"
    if was is None:
        return "only" if site.has_network or asked.offered or has_cert else "off"
    if was == "off" and asked.offered:
        return "offered"
    if was == "off" and has_cert:
        raise ValueError("--cert is of a site with TLS: give --tls, too")
    return was


def own(
    site: Site, certificates: Sequence[Path], keys: Sequence[Path], authority: Path | None
) -> OwnCertificates | None:
    """Return the files of --cert, --key and --ca; None without them. Raises ValueError."""
    if not certificates:
        if keys or authority is not None:
            raise ValueError("--key and --ca are of --cert")
        return None
    if site.auth == "mtls":
        raise ValueError("--cert is for servers alone, and here each user shows a certificate, too: put them into tls")
    if site.leaves:
        raise ValueError("--cert is for servers alone, and the authority of the folder signs those of leaf nodes, too")
    if len(keys) != len(certificates) or len(certificates) not in (1, len(site.servers)):
        raise ValueError(
            f"--cert and --key are given once, or {len(site.servers)} times, as --server; found "
            f"{len(certificates)} and {len(keys)}"
        )
    return OwnCertificates(tuple(zip(certificates, keys, strict=True)), authority)


def day(at_s: float) -> str:
    return f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%d}"


def print_tls(site: Site, out: Path, was: Tls | None, *, is_meant: bool) -> None:
    """Print who encrypts and until when. `was` is how the servers encrypted, if that changes: then what to restart, in
    which order. `is_meant` is whether the user asked for no encryption."""
    is_on = site.encryption != "off"
    if is_on:
        _print_ends(out / TLS)
    elif site.has_network and not is_meant:
        print_err(
            "warning: nothing is encrypted: whoever can listen on the network reads requests, output and files of "
            "every tenant; --tls adds TLS while jobs run, --plaintext says that this is meant"
        )
    if site.encryption == "offered":
        print_err("note: clients may come without TLS, until you run this with --tls-only")
    if was == "offered" and site.encryption == "only":
        print_err(
            "warning: once you have restarted the servers, one after another, each with its new file, no client "
            "without TLS comes in; `moorage admin keys` lists those without"
        )
    elif was is not None:
        _print_steps(site, out / TLS)


def _print_ends(folder: Path) -> None:
    from moorage.bus import certificates

    first = certificates.ends(folder)[0]
    fix = f"moorage admin renew {folder.parent}"
    if not (folder / "ca.key").exists():
        fix = "this command with the new --cert"
    print_err(
        f"note: clients and servers speak TLS; the first certificate to end, {first.name}, ends on {day(first.at_s)}; "
        f"before that: {fix}"
    )
    if (folder / CA).exists():
        print_err(f"      each user's context names {folder / CA}: copy that file along with it")


def _print_steps(site: Site, folder: Path) -> None:
    is_on = site.encryption != "off"
    own = f", and from {folder} its server.N.pem, server.N.key and {CA}" if is_on else ""
    contexts = f"the new contexts, with {CA}," if is_on else "the new contexts"
    steps = [
        f"put on each server its new file{own}; keep lines of your own, as max_file_store",
        "stop all servers, then start them all: one that encrypts and one that does not refuse each other. The fleet "
        "stands still meanwhile, and jobs go on if that is shorter than their worker's lease",
        f"put {contexts} where they are used, and restart schedulers, workers, metrics and page, one after another",
    ]
    if site.encryption == "offered":
        steps.append("once `moorage admin keys` lists no connection without TLS, run this with --tls-only")
    else:
        steps[2] += "; until then their old contexts are refused" + (", as they are not with --tls" if is_on else "")
    print_err("warning: encryption changes; do this in this order:")
    for at, step in enumerate(steps, 1):
        print_err(f"      {at}. {step}")
