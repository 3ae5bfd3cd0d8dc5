"""`moorage check worker`: whether a worker in another language keeps to the protocol."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import emit, print_err, print_out
from moorage.cli.framework.exit_codes import EXIT_FAILED
from moorage.cli.framework.options import LOCAL, LocalOptions, guarded
from moorage.client.durations import seconds
from moorage.client.errors import rejected
from moorage.client.tenant import TENANT_DEFAULT
from moorage.schemas.names import is_worker
from moorage.schemas.subjects import PREFIX_DEFAULT, Subjects
from moorage.schemas.units import many

if TYPE_CHECKING:
    from moorage.testing.worker_check import RuleChecked

#: how long a server that is named has for an answer
ASK_S: Final = 3.0


def check_worker(
    worker: Annotated[str, Parameter(help="The name under which the worker joins.")],
    /,
    *,
    server: Annotated[
        str | None,
        Parameter(help="An empty server of yours, nats://HOST:PORT. By default one is started here.", value="URL"),
    ] = None,
    short: Annotated[
        str, Parameter(help="Command of a job that ends at once with code 7. Default: sh -c 'exit 7'.", value="COMMAND")
    ] = "",
    long: Annotated[
        str, Parameter(help="Command of a job that runs for an hour. Default: sleep.", value="COMMAND")
    ] = "",
    within: Annotated[str, Parameter(help="How long to wait for the worker to join.", value="DURATION")] = "10m",
    options: LocalOptions = LOCAL,
) -> int:
    """Check that a worker in another language keeps to the protocol; exit code 1 if it breaks a rule.

    This starts a nats-server on loopback and a leader for it, and prints the address, with its password. Start the
    worker with that address: it joins, gets jobs, and the leader goes away for a while, longer than a lease, and comes
    back. Each rule is a line; a broken one says what was found and what is allowed. It takes a minute, and no rights on
    a fleet.
    """

    async def check() -> int:
        from moorage.testing.worker_check import WorkerCheck

        if not is_worker(worker):
            raise rejected(
                "invalid-argument", "a worker's name has other letters", found=worker, allowed="[A-Za-z0-9_-]{1,64}"
            )
        within_s = seconds(within)
        broken = 0
        async with _server(server) as url:
            checked = WorkerCheck(url, worker, shlex.split(short), shlex.split(long))
            async with checked:
                if options.json:
                    emit({"kind": "server", "url": url, "worker": worker})
                else:
                    print_out(f"start the worker {worker} with NATS_URL={url}")
                async for rule in checked.run(within_s):
                    broken += rule.verdict == "fail"
                    if options.json:
                        emit(rule)
                    else:
                        _show(rule)
        if not options.json:
            print_err("it keeps to the protocol" if not broken else f"{many(broken, 'rule')} broken")
        return EXIT_FAILED if broken else 0

    def act() -> int:
        from moorage.cli.framework.interrupts import run

        return run(check())

    return guarded(options, act)


def _show(rule: RuleChecked) -> None:
    print_out(f"{rule.verdict:4}  {rule.name:12}  {rule.rule}")
    for word, text in (("found", rule.found), ("allowed", rule.allowed), ("next", rule.next)):
        if text:
            print_out(f"      {word}: {text}")


@asynccontextmanager
async def _server(named: str | None) -> AsyncIterator[str]:
    """Yield the address of a server of our own, or of the one that is named. Raises `Rejected` if moorage is there."""
    if named is not None:
        await _refuse_fleet(named)
        yield named
        return
    from moorage.bus.embedded import EmbeddedServer

    with tempfile.TemporaryDirectory(prefix="moorage-check-") as folder:
        server = await EmbeddedServer.start(Path(folder), sync_always=False, anonymous=False)
        try:
            yield server.url
        finally:
            await server.stop()


async def _refuse_fleet(url: str) -> None:
    """Raise `Rejected` if the server has moorage's ledger or a scheduler that leads, `BusError` if there is none."""
    from moorage.bus.connection import connect
    from moorage.bus.errors import BusError, NoResponders

    subjects = Subjects(PREFIX_DEFAULT)
    found = ""
    async with await connect(url, "moorage check", give_up_after_s=ASK_S) as connection:
        with suppress(BusError):  # it has no JetStream
            stream = await connection.request(f"$JS.API.STREAM.INFO.{subjects.ledger_stream}", b"", ASK_S)
            found = "" if b'"error"' in stream.data else f"its stream {subjects.ledger_stream}"
        try:
            await connection.request(subjects.api(TENANT_DEFAULT, "ls"), b"{}", ASK_S)
            found = found or "a scheduler leads there"
        except NoResponders:
            pass
        except BusError as error:
            found = found or f"a question to a scheduler has no answer: {error}"
    if found:
        raise rejected(
            "failed-precondition",
            f"the server has a moorage ledger or scheduler: {found}",
            found=url,
            allowed="a server without moorage",
            next="leave out --server: a server is started then",
        )
