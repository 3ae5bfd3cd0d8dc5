"""The key with which a job answers calls, or makes them: one file, in any of the forms in which NATS keys come, and
what it means."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from moorage.bus.contexts import INBOX_VARIABLE, Context
from moorage.bus.errors import BadContext
from moorage.schemas.unreadable import UNREADABLE

#: the variables of an attempt that answers calls: its key's file ("" where the server wants none), where the server is,
#: and the subject of the calls; one that makes calls has `*` there in place of a service, and the inbox of its key
CREDS_VARIABLE: Final = "MOORAGE_NATS_CREDS"
URL_VARIABLE: Final = "MOORAGE_NATS_URL"
SUBJECT_VARIABLE: Final = "MOORAGE_CALL_SUBJECT"
#: how a certificate begins. That of an authority may stand behind a key of any form: servers are trusted by it then
CERTIFICATE: Final = "BEGIN CERTIFICATE"
#: with the authorities of a whole machine behind the key
_KEY_BYTES_MAX: Final = 1024 * 1024
_FORMS: Final = "an NKey seed, NATS credentials, PEM of a certificate, its key and the authority, or JSON with a user"


class _Login(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    user: str = ""
    password: str = ""
    token: str = ""


def context_of_key(file: Path | None, url: str, inbox_prefix: str) -> Context:
    """Return the context of a key's file: an NKey seed, NATS credentials, a PEM file, or `{"user", "password"}`.

    Behind each there may be the certificate of the servers' authority. `file` None stands for a server that asks for
    no key. Raises BadContext.
    """
    context = Context(url=url, source=URL_VARIABLE, inbox_prefix=inbox_prefix)
    if file is None:
        return context
    try:
        with file.open("rb") as opened:
            text = opened.read(_KEY_BYTES_MAX).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise BadContext(f"the key {file} cannot be read: {error}", next_step=f"see {CREDS_VARIABLE}") from None
    # one file for all: the library of TLS takes from it what it is to have
    login, has_certificate, _ = text.partition(CERTIFICATE)
    login = login.rstrip("-").strip()
    if has_certificate:
        context = msgspec.structs.replace(context, ca=str(file))
    if text.startswith("SU"):
        seed = {"user_seed": login} if has_certificate else {"nkey": str(file)}
        return msgspec.structs.replace(context, **seed)
    if "BEGIN NATS USER JWT" in text:
        return msgspec.structs.replace(context, creds=str(file))
    if has_certificate and "PRIVATE KEY" in text:
        return msgspec.structs.replace(context, cert=str(file))
    if has_certificate and not login:
        return context
    try:
        found = msgspec.json.decode(login, type=_Login)
    except UNREADABLE:
        raise BadContext(f"the key {file} has none of the known forms", next_step=f"make it {_FORMS}") from None
    return msgspec.structs.replace(context, user=found.user, password=found.password, token=found.token)


def context_of_caller(env: Mapping[str, str]) -> Context | None:
    """Return how a job with `run.calls` connects, by its variables; None elsewhere. Raises BadContext."""
    url, inbox_prefix, key = (env.get(name) for name in (URL_VARIABLE, INBOX_VARIABLE, CREDS_VARIABLE))
    if not url or not inbox_prefix:
        return None
    return context_of_key(Path(key) if key else None, url, inbox_prefix)


def prefix_of_job(env: Mapping[str, str]) -> str:
    """Return what the subjects of the site begin with on which a job answers or makes calls; "" elsewhere."""
    return env.get(SUBJECT_VARIABLE, "").partition(".call.")[0]
