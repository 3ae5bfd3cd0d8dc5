"""Make the certificates of a site: of its servers, and of its users where they show one; and renew them.

The site has a small authority of its own in its folder `tls`: `ca.pem`, which everybody gets, and its key `ca.key`,
which stays there. Each certificate is `<name>.pem`, its key `<name>.key`, and every file is private (0600). With
certificates of the site's own authority, these files are copies of them and there is no `ca.key`.

Needs the package `cryptography`, the extra `nats-config`.
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from moorage.bus.site import ORGANISATION, Server, Site
from moorage.schemas.errors import MoorageError, problem
from moorage.schemas.optional import optional
from moorage.system.private_files import create_private, replace_private

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.x509 import Certificate

#: of a server's or a user's certificate, and of the authority's own; no certificate outlives its authority's
VALID_DAYS: Final = 825
AUTHORITY_DAYS: Final = 3650
#: `renew` makes those anew that end within so many days
RENEW_DAYS: Final = 60
AUTHORITY: Final = "ca"
#: a clock that is a little behind may see a certificate before it was made
_EARLIER: Final = timedelta(hours=1)
_Signer = tuple["Certificate", "EllipticCurvePrivateKey"]


class Ends(NamedTuple):
    """A certificate of the folder: the name of its files, and when it ends, in seconds since the epoch."""

    name: str
    at_s: float


def certificates(folder: Path, site: Site) -> None:
    """Make what is missing of an authority and of a certificate for each server and each leaf node, and for each user
    if they show one.

    A server whose address is not in its certificate gets another one. The authority's own key stays in `ca.key`: take
    it off the servers, and bring it back to make another certificate. Raises OSError, MoorageError.
    """
    optional("cryptography", extra="nats-config")
    wanted = [(_of_server(at), ("server", f"server-{at + 1}"), server.host) for at, server in enumerate(site.servers)]
    wanted += [(f"leaf.{place}", ("leaf", place), server.host) for place, server in site.leaves.items()]
    if site.auth == "mtls":
        users = [*site.identities, *([site.system] if site.system is not None else [])]
        wanted += [(identity.key, (identity.role, identity.name), "") for identity in users]
    missing = [each for each in wanted if not _is_there(folder, each[0], each[2])]
    if not missing:
        return
    authority = _authority(folder, missing[0][0])
    for key_name, (role, name), host in missing:
        _make(folder, key_name, _name(role, name), _alternatives(host), authority)


def take(folder: Path, site: Site, pairs: Sequence[tuple[Path, Path]], authority: Path | None) -> None:
    """Copy certificates and keys of the site's own authority: one pair for all servers, or one for each.

    Without `authority`, clients and servers trust the authorities of their machine. Raises OSError, MoorageError, if
    a pair does not belong together, has ended, or does not name its server.
    """
    optional("cryptography", extra="nats-config")
    for at, server in enumerate(site.servers):
        certificate, key = pairs[at if len(pairs) > 1 else 0]
        pem = _checked(certificate, key, server, is_of_cluster=site.clustered)
        replace_private(folder / f"{_of_server(at)}.pem", pem)
        replace_private(folder / f"{_of_server(at)}.key", key.read_bytes())
    (folder / f"{AUTHORITY}.key").unlink(missing_ok=True)
    if authority is None:
        (folder / f"{AUTHORITY}.pem").unlink(missing_ok=True)
    else:
        pem = authority.read_bytes()
        _loaded(authority)
        replace_private(folder / f"{AUTHORITY}.pem", pem)


def ends(folder: Path) -> list[Ends]:
    """Return when each certificate of the folder ends, the first to end first. Raises OSError, MoorageError."""
    optional("cryptography", extra="nats-config")
    found = [Ends(file.stem, _loaded(file).not_valid_after_utc.timestamp()) for file in _files(folder)]
    return sorted(found, key=lambda each: (each.at_s, each.name))


def renew(folder: Path, *, every: bool = False) -> list[Ends]:
    """Make certificates anew that end within `RENEW_DAYS`, or `every` one, each with a new key and the same names.

    The authority keeps its key: what it has signed stays valid, and its new certificate is trusted by those who have
    the old one, until that ends. It is made anew once it would end before what it signs. Returns what is new. Raises
    OSError, MoorageError.
    """
    optional("cryptography", extra="nats-config")
    from cryptography import x509

    until = datetime.now(UTC) + timedelta(days=RENEW_DAYS)
    of_folder = {file.stem: _loaded(file) for file in _files(folder)}
    if AUTHORITY not in of_folder:
        raise _not_ours(folder)
    due = sorted(
        name for name, each in of_folder.items() if name != AUTHORITY and (every or each.not_valid_after_utc < until)
    )
    certificate = of_folder[AUTHORITY]
    is_short = certificate.not_valid_after_utc < datetime.now(UTC) + timedelta(days=VALID_DAYS)
    if not due and not (is_short and certificate.not_valid_after_utc < until):
        return []
    if not (folder / f"{AUTHORITY}.key").exists():
        raise _not_ours(folder)
    certificate, key = _authority(folder, due[0] if due else AUTHORITY)
    if is_short:
        replace_private(folder / f"{AUTHORITY}.pem", _own(key, certificate.subject))
        certificate = _loaded(folder / f"{AUTHORITY}.pem")
    for name in due:
        was = of_folder[name]
        try:
            names = list(was.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
        except x509.ExtensionNotFound:
            names = []
        _make(folder, name, was.subject, names, (certificate, key))
    new = {*due, *([AUTHORITY] if is_short else [])}
    return [each for each in ends(folder) if each.name in new]


def _of_server(at: int) -> str:
    return f"server.{at + 1}"


def _files(folder: Path) -> Iterator[Path]:
    return (file for file in sorted(folder.glob("*.pem")) if not file.name.startswith("."))


def _loaded(file: Path) -> Certificate:
    """Return the first certificate of a file. Raises OSError, MoorageError."""
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificate(file.read_bytes())
    except ValueError as error:
        raise _refused(f"{file} holds no certificate in PEM: {error}", "name a file in PEM") from None


def _is_there(folder: Path, name: str, host: str) -> bool:
    """Return whether a certificate is there, and names this host. Raises OSError, MoorageError."""
    file = folder / f"{name}.pem"
    return file.exists() and (not host or _names(_loaded(file), host))


def _names(certificate: Certificate, host: str) -> bool:
    """Return whether a server with this certificate may be reached as `host`, by the rules of TLS clients."""
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return False
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host) in names.get_values_for_type(x509.IPAddress)
    host = host.lower().rstrip(".")
    known = {name.lower().rstrip(".") for name in names.get_values_for_type(x509.DNSName)}
    return host in known or f"*.{host.partition('.')[2]}" in known


def _checked(certificate: Path, key: Path, server: Server, *, is_of_cluster: bool) -> bytes:
    """Return a server's own certificate. Raises OSError, MoorageError, if the server cannot use it."""
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from cryptography.x509.oid import ExtendedKeyUsageOID

    pem, found = certificate.read_bytes(), _loaded(certificate)
    try:
        own = load_pem_private_key(key.read_bytes(), None)
    except (ValueError, TypeError) as error:
        raise _refused(f"{key} holds no key that can be used: {error}", "name one in PEM, without a password") from None
    if own.public_key() != found.public_key():
        raise _refused(f"{key} is not the key of {certificate}", "name the two files that belong together")
    if found.not_valid_after_utc < datetime.now(UTC):
        raise _refused(f"{certificate} has ended on {found.not_valid_after_utc:%Y-%m-%d}", "name one that is valid")
    if not _names(found, server.host):
        raise _refused(f"{certificate} does not name the server {server.host}", "name one that does, as an alternative")
    if is_of_cluster:
        usage = None
        with contextlib.suppress(x509.ExtensionNotFound):
            usage = found.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        if usage is not None and ExtendedKeyUsageOID.CLIENT_AUTH not in usage:
            raise _refused(
                f"{certificate} is for servers alone, and each server of a cluster is a client of the others",
                "have it made for clients, too (extended key usage), or leave out --cert for an authority of the site",
            )
    return pem


def _authority(folder: Path, needed_for: str) -> _Signer:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    from moorage.bus.identities import kept

    def make() -> bytes:
        if (folder / f"{AUTHORITY}.pem").exists():  # its key was taken away; no server would trust what another signs
            raise _no_key_of_authority(folder, needed_for)
        return _private_pem(ec.generate_private_key(ec.SECP256R1()))

    key = load_pem_private_key(kept(folder / f"{AUTHORITY}.key", make), None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise _refused(
            f"{folder / 'ca.key'} does not hold a key of an elliptic curve",
            "put the key back that was made with ca.pem",
        )
    pem = kept(folder / f"{AUTHORITY}.pem", lambda: _own(key, _name("authority", ORGANISATION)))
    certificate = x509.load_pem_x509_certificate(pem)
    if certificate.public_key() != key.public_key():
        raise _no_key_of_authority(folder, needed_for)
    return certificate, key


def _no_key_of_authority(folder: Path, needed_for: str) -> MoorageError:
    return _refused(
        f"{needed_for} has no certificate yet, and {folder / 'ca.key'} is missing or does not belong to ca.pem",
        f"put that key back until this is done; with an authority of your own, name {needed_for}'s certificate and key"
        f" with --cert and --key, or put {needed_for}.pem and {needed_for}.key into {folder}",
    )


def _not_ours(folder: Path) -> MoorageError:
    return _refused(
        f"{folder} has no authority that could sign: {AUTHORITY}.pem with {AUTHORITY}.key",
        "put ca.key back until this is done; certificates of your own authority are renewed there, and given to"
        " moorage admin nats-config with --cert, --key and --ca",
    )


def _refused(message: str, what_next: str) -> MoorageError:
    return MoorageError(problem("failed-precondition", message, next=what_next))


def _make(folder: Path, key_name: str, name: Any, names: Sequence[Any], authority: _Signer) -> None:
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    pem = _signed(name, key, authority, names)
    for file in (folder / f"{key_name}.pem", folder / f"{key_name}.key"):
        file.unlink(missing_ok=True)  # never a certificate beside the key of another one
    create_private(folder / f"{key_name}.key", _private_pem(key))
    create_private(folder / f"{key_name}.pem", pem)


def _name(role: str, name: str) -> Any:
    """Return a name of O, OU and CN in this order. The server writes them in the reverse order (RFC 2253)."""
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, ORGANISATION),
            x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, role),
            x509.NameAttribute(NameOID.COMMON_NAME, name),
        ]
    )


def _own(key: EllipticCurvePrivateKey, name: Any) -> bytes:
    """Return the authority's own certificate as PEM."""
    from cryptography import x509

    builder = _builder(name, name, key, key, AUTHORITY_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
    return _pem(builder.add_extension(_key_usage(signs=True), True), key)


def _signed(name: Any, key: EllipticCurvePrivateKey, authority: _Signer, names: Iterable[Any]) -> bytes:
    """Return a certificate as PEM: a server's, with the names at which it is reached, or without names a user's."""
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    issuer, by = authority
    names = list(names)
    builder = _builder(name, issuer.subject, key, by, VALID_DAYS, issuer.not_valid_after_utc)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
    # a server of a cluster is a client of the others
    usage = [ExtendedKeyUsageOID.CLIENT_AUTH] + ([ExtendedKeyUsageOID.SERVER_AUTH] if names else [])
    builder = builder.add_extension(x509.ExtendedKeyUsage(usage), False)
    builder = builder.add_extension(_key_usage(signs=False), True)
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), False)
    return _pem(builder, by)


def _builder(
    name: Any,
    issuer: Any,
    key: EllipticCurvePrivateKey,
    by: EllipticCurvePrivateKey,
    days: int,
    ends_at: datetime | None = None,
) -> Any:
    from cryptography import x509

    now = datetime.now(UTC)
    until = now + timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLIER)
        .not_valid_after(until if ends_at is None else min(until, ends_at))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(by.public_key()), False)
    )


def _pem(builder: Any, by: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.serialization import Encoding

    pem: bytes = builder.sign(by, hashes.SHA256()).public_bytes(Encoding.PEM)
    return pem


def _alternatives(host: str) -> list[Any]:
    """Return the names of a server: its host, and for an address of this machine `localhost`, as some clients ask."""
    from cryptography import x509

    if not host:
        return []
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return [x509.DNSName(host)]
    return [x509.IPAddress(address), *([x509.DNSName("localhost")] if address.is_loopback else [])]


def _key_usage(*, signs: bool) -> Any:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _private_pem(key: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
