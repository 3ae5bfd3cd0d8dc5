"""The key with which a job answers calls: one file, in any of the forms in which NATS keys come, and what it means."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from moorage.bus.contexts import Context
from moorage.bus.errors import BadContext
from moorage.schemas.unreadable import UNREADABLE

#: the variables of an attempt that answers calls: its key's file ("" where the server wants none), where the server is,
#: and the subject of the calls
CREDS_VARIABLE: Final = "MOORAGE_NATS_CREDS"
URL_VARIABLE: Final = "MOORAGE_NATS_URL"
SUBJECT_VARIABLE: Final = "MOORAGE_CALL_SUBJECT"
_KEY_BYTES_MAX: Final = 64 * 1024
_FORMS: Final = "an NKey seed, NATS credentials, PEM of a certificate, its key and the authority, or JSON with a user"


class _Login(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    user: str = ""
    password: str = ""
    token: str = ""


def context_of_key(file: Path | None, url: str, inbox_prefix: str) -> Context:
    """Return the context of a key's file: an NKey seed, NATS credentials, a PEM file, or `{"user", "password"}`.

    `file` None stands for a server that asks for no key. Raises BadContext.
    """
    context = Context(url=url, source=URL_VARIABLE, inbox_prefix=inbox_prefix)
    if file is None:
        return context
    try:
        with file.open("rb") as opened:
            text = opened.read(_KEY_BYTES_MAX).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise BadContext(f"the key {file} cannot be read: {error}", next_step=f"see {CREDS_VARIABLE}") from None
    if text.startswith("SU"):
        return msgspec.structs.replace(context, nkey=str(file))
    if "BEGIN NATS USER JWT" in text:
        return msgspec.structs.replace(context, creds=str(file))
    if "BEGIN CERTIFICATE" in text:
        # one file for all three: the library of TLS takes from it what it is to have
        return msgspec.structs.replace(context, cert=str(file), ca=str(file))
    try:
        login = msgspec.json.decode(text, type=_Login)
    except UNREADABLE:
        raise BadContext(f"the key {file} has none of the known forms", next_step=f"make it {_FORMS}") from None
    return msgspec.structs.replace(context, user=login.user, password=login.password, token=login.token)
