"""`moorage api`: sends one frame as it is and prints the answer as it came, for authors of clients."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Annotated, Final

from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.exit_codes import EXIT_FAILED, exit_code_of
from moorage.cli.framework.files import cannot_read, read_within
from moorage.cli.framework.options import DEFAULTS, Options, guarded, with_client
from moorage.client.errors import error_of, rejected, unanswered
from moorage.schemas.codec import FRAME_BYTES_MAX

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient

ADMIN: Final = "admin."
_VERB: Final = re.compile(r"(admin\.)?[a-z]+(-[a-z]+)*", re.ASCII)
#: first bytes of JSON; an answer in msgpack begins with none of them
_JSON_FIRST: Final = (b"{", b"[")


def api(
    verb: Annotated[str, Parameter(help="show, submit, …; an operator's with admin. before it, as admin.fleet.")],
    frame: Annotated[str, Parameter(help="The frame to send, unchanged; - is stdin.", value="JSON")] = "{}",
    /,
    *,
    options: Options = DEFAULTS,
) -> int:
    """Send one frame of the protocol, and print its answer as it comes.

    The frame goes to moorage.api.TENANT.VERB or moorage.admin.OPERATOR.VERB. It is sent once; without an answer,
    not again. OPERATOR is the name in your key, _ without keys.
    docs/protocol.md says which verbs there are and what each takes. An error exits with the code that other verbs have
    for it.
    """

    async def work(client: AsyncClient) -> int | None:
        from moorage.bus.errors import BusError
        from moorage.bus.inbox import Mux
        from moorage.schemas.subjects import READ_VERBS

        wire, admin = client._wire, verb.startswith(ADMIN)
        subject = (
            wire.subjects.admin(verb.removeprefix(ADMIN), wire.operator)
            if admin
            else wire.subjects.api(wire.tenant, verb)
        )
        if verb.removeprefix(ADMIN) not in READ_VERBS:
            wire.refuse_found()
        mux = await Mux.open(wire.link)
        try:
            answer = await mux.request(subject, payload, wire.timeout_s)
        except BusError as error:
            raise unanswered(error, wire.context.where if wire.context else "", wire.timeout_s) from None
        finally:
            await mux.close()
        return _show(answer)

    payload = b""

    def act() -> int:
        nonlocal payload
        if not _VERB.fullmatch(verb):
            raise rejected(
                "invalid-argument", f"{verb!r} is not a verb", found=verb, next="show, submit, admin.fleet, …"
            )
        payload = _payload(frame)
        return with_client(options, work)

    return guarded(options, act)


def _payload(frame: str) -> bytes:
    """Return the frame to send: the argument, or the content of stdin for `-`. Raises `Rejected`."""
    if frame != "-":
        return frame.encode()
    try:
        return read_within(frame, FRAME_BYTES_MAX)
    except OSError as error:
        raise cannot_read("stdin", error.strerror, "give the frame as an argument") from None


def _show(answer: bytes) -> int:
    """Print the answer. Returns the exit code of the first error in it; 0 if there is none."""
    import msgspec

    from moorage.schemas.errors import Problem

    json = answer.startswith(_JSON_FIRST)
    sys.stdout.buffer.write(answer + b"\n" if json else answer)
    found = msgspec.json.decode(answer) if json else msgspec.msgpack.decode(answer)
    for frame in found if isinstance(found, list) else [found]:
        if frame.get("kind") == "error":
            return exit_code_of(error_of(msgspec.convert(frame, Problem))) or EXIT_FAILED
    return 0
