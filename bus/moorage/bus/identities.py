"""Make keys and certificates of a site's users: once, private (0600). Only a key without its certificate is replaced.

NKeys are Ed25519 keys in the spelling of NATS (nkeys.py). Certificates are for sites that have no authority of their
own, or want one for a test. Needs the package `cryptography`, the extra
`nats-config`.
"""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import nkeys

from moorage.bus.site import ORGANISATION, Identity, Site
from moorage.schemas.errors import MoorageError, problem
from moorage.schemas.optional import optional
from moorage.system.private_files import create_private

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.x509 import Certificate

#: of the certificates made here; who needs shorter ones has an authority of its own
VALID_DAYS: Final = 825
#: a clock that is a little behind may see a certificate before it was made
_EARLIER: Final = timedelta(hours=1)
_SEED_BYTES: Final = 32


def nkey(folder: Path, identity: Identity) -> str:
    """Return the public key of a user. If `<folder>/<key>.nk` does not exist, make a new seed there. Raises OSError."""
    seed = kept(
        folder / f"{identity.key}.nk",
        lambda: nkeys.encode_seed(secrets.token_bytes(_SEED_BYTES), nkeys.PREFIX_BYTE_USER),
    )
    pair = nkeys.from_seed(bytearray(seed.strip()))
    public: bytes = pair.public_key
    return public.decode()


def route_password(folder: Path) -> str:
    """Return the password that the servers of a cluster show each other; make it if there is none. Raises OSError."""
    return kept(folder / "route.password", lambda: secrets.token_hex(24).encode()).decode()


def kept(path: Path, make: Callable[[], bytes]) -> bytes:
    """Return the content of a private file. If the file does not exist, write what `make` returns into it. Raises
    OSError."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    content = make()
    create_private(path, content)
    return content


# ----------------------------------------------------------------------------------------------------- certificates


def certificates(folder: Path, site: Site) -> None:
    """Make what is missing of an authority and a certificate for each server and user: `<key>.pem` and `<key>.key`.

    The authority's own key stays in `ca.key`: take it off the servers, and bring it back to make another certificate.
    Raises OSError, MoorageError.
    """
    optional("cryptography", extra="nats-config")
    wanted = [
        (f"server.{at + 1}", ("server", f"server-{at + 1}"), server.host) for at, server in enumerate(site.servers)
    ]
    users = [*site.identities, *([site.system] if site.system is not None else [])]
    wanted += [(identity.key, (identity.role, identity.name), "") for identity in users]
    missing = [each for each in wanted if not (folder / f"{each[0]}.pem").exists()]
    if not missing:
        return
    authority = _authority(folder, missing[0][0])
    for key_name, who, host in missing:
        _certificate(folder, key_name, who, authority, host)


def _authority(folder: Path, needed_for: str) -> tuple[Certificate, EllipticCurvePrivateKey]:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    def make() -> bytes:
        if (folder / "ca.pem").exists():  # its key was taken away, and no server would trust what another one signs
            raise _no_key_of_authority(folder, needed_for)
        made = ec.generate_private_key(ec.SECP256R1())
        return _private_pem(made)

    key = load_pem_private_key(kept(folder / "ca.key", make), None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise MoorageError(
            problem(
                "failed-precondition",
                f"{folder / 'ca.key'} does not hold a key of an elliptic curve",
                next="put the key back that was made with ca.pem",
            )
        )
    pem = kept(folder / "ca.pem", lambda: _signed(_name(("authority", ORGANISATION)), key, None, key))
    certificate = x509.load_pem_x509_certificate(pem)
    if certificate.public_key() != key.public_key():
        raise _no_key_of_authority(folder, needed_for)
    return certificate, key


def _no_key_of_authority(folder: Path, needed_for: str) -> MoorageError:
    return MoorageError(
        problem(
            "failed-precondition",
            f"{needed_for} has no certificate yet, and {folder / 'ca.key'} is missing or does not belong to ca.pem",
            next=f"put that key back until this is done; with an authority of your own, put {needed_for}.pem and"
            f" {needed_for}.key into {folder}",
        )
    )


def _certificate(
    folder: Path,
    key_name: str,
    who: tuple[str, str],
    authority: tuple[Certificate, EllipticCurvePrivateKey],
    host: str = "",
) -> None:
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    with contextlib.suppress(FileNotFoundError):
        (folder / f"{key_name}.key").unlink()  # of a certificate that somebody has deleted
    create_private(folder / f"{key_name}.key", _private_pem(key))
    create_private(folder / f"{key_name}.pem", _signed(_name(who), key, authority[0], authority[1], host))


def _name(who: tuple[str, str]) -> Any:
    """Return a name of O, OU and CN in this order. The server writes them in the reverse order (RFC 2253)."""
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    role, name = who
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, ORGANISATION),
            x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, role),
            x509.NameAttribute(NameOID.COMMON_NAME, name),
        ]
    )


def _signed(
    name: Any, key: EllipticCurvePrivateKey, issuer: Certificate | None, by: EllipticCurvePrivateKey, host: str = ""
) -> bytes:
    """Return a certificate as PEM: the authority's own (without `issuer`), a server's with its host, or a user's."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.serialization import Encoding
    from cryptography.x509.oid import ExtendedKeyUsageOID

    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer.subject if issuer is not None else name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLIER)
        .not_valid_after(now + timedelta(days=VALID_DAYS))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=0 if issuer is None else None), True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(by.public_key()), False)
    )
    if issuer is None:
        builder = builder.add_extension(_key_usage(signs=True), True)
    else:
        # a server of a cluster is a client of the others
        usage = [ExtendedKeyUsageOID.CLIENT_AUTH] + ([ExtendedKeyUsageOID.SERVER_AUTH] if host else [])
        builder = builder.add_extension(x509.ExtendedKeyUsage(usage), False)
        builder = builder.add_extension(_key_usage(signs=False), True)
    if host:
        builder = builder.add_extension(x509.SubjectAlternativeName(_alternatives(host)), False)
    return builder.sign(by, hashes.SHA256()).public_bytes(Encoding.PEM)


def _alternatives(host: str) -> list[Any]:
    """Return the names of a server: its host, and for an address of this machine `localhost`, as some clients ask."""
    from cryptography import x509

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
