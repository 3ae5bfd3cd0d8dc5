"""`moorage cancel` and `moorage uncancel`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec

from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import fail, print_err, print_out, word_here
from moorage.cli.framework.interrupts import detachable
from moorage.cli.framework.options import ROWS, RowOptions, guarded, with_client
from moorage.cli.framework.render import age
from moorage.cli.jobs.acceptance import print_cancel_interrupted
from moorage.cli.jobs.selectors import (
    ANY_JOB,
    HELP,
    LISTED,
    Chosen,
    SomeReplicas,
    ids_to_cancel,
    replica_in,
    with_named,
)
from moorage.client.answers import Cancelled
from moorage.client.errors import NotFound
from moorage.client.login import who
from moorage.schemas.answers.jobs import Uncancelled
from moorage.schemas.job import TERMINAL
from moorage.schemas.names import EXACTLY
from moorage.schemas.ranges import RANGES_SAID, format_ranges
from moorage.schemas.units import many

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient


def cancel(
    *jobs: Annotated[str, Parameter(help=HELP, lists=LISTED)],
    chosen: Chosen = ANY_JOB,
    reason: Annotated[str, Parameter(help="Why, as text that the job's state changes show.")] = "",
    replica: SomeReplicas = None,
    before: Annotated[
        bool,
        Parameter(
            help="Remember the cancel of an id that is not known, as its submit may be on its way: it is then refused, "
            "for a day by default. moorage uncancel lifts that."
        ),
    ] = False,
    options: RowOptions = ROWS,
) -> int:
    """Cancel jobs, whether they wait or run; returns once the cancel is in the ledger.

    An id that is not known changes nothing, and the exit code is 3. Give an id that you chose in full; of an id that
    moorage made up, the beginning is enough.
    """

    asked_last: list[str] = []
    given: Sequence[str] = jobs
    numbers = replica

    async def work(client: AsyncClient) -> int | None:
        from moorage.client.replicas import field_of, replicas_of

        only, some = replicas_of(numbers), field_of(numbers)
        names, code, known = await ids_to_cancel(client, given, chosen), None, 0
        asked = {"reason": reason, "by": who(), **some, **({"before": True} if before else {})}
        for name in names:
            asked_last[:] = [name]
            try:
                answer = await client._wire.answer("cancel", {"job": name, **asked})
            except NotFound as error:  # the others are cancelled all the same
                code = fail(error, json=options.json)
                continue
            known += 1
            if options.shown(answer, [answer.data]):
                continue
            did = msgspec.convert(answer.data, Cancelled)
            was = did.was
            if was == "UNKNOWN":
                remembered = age(did.remembered_s * 1000)
                print_out(f"{name}\tno such job yet; its submit is refused for {remembered}")
                print_err(f"lift it: moorage uncancel {word_here(name)}")
            elif was in TERMINAL:
                print_out(f"{name}\tunchanged, the job had ended before: {was}")
            else:
                some_of = "" if only is None else f"replica {format_ranges(only, RANGES_SAID)}"
                if did.cancelled:
                    words = f"cancelling what goes on of {some_of}" if some_of else "cancelling"
                else:
                    words = f"unchanged, nothing goes on of {some_of}" if some_of else "unchanged"
                print_out(f"{name}\t{words}, the job was {was}")
        if len(names) != 1 and not (options.json or options.format):
            print_err(many(known, "job"))
        return code

    def detach() -> None:
        for name in asked_last:
            print_cancel_interrupted(name, before=before)

    def act() -> int:
        nonlocal given, numbers
        given, numbers = replica_in(jobs, replica)
        return with_named(options, given, lambda client: detachable(work(client), detach), chosen, sends=True)

    return guarded(options, act)


def uncancel(
    *jobs: Annotated[str, Parameter(help="Ids of jobs, in full.", value="JOB", one_at_least=True)],
    options: RowOptions = ROWS,
) -> int:
    """Undo cancel --before: jobs with these ids are accepted again."""

    async def work(client: AsyncClient) -> int | None:
        for name in jobs:
            answer = await client._wire.answer("uncancel", {"job": name.removeprefix(EXACTLY)})
            if not options.shown(answer, [answer.data]):
                done = msgspec.convert(answer.data, Uncancelled)
                lifted = "its submit is accepted again" if done.lifted else "unchanged, nothing is in its way"
                print_out(f"{done.job}\t{lifted}")
        return None

    return with_client(options, work, sends=True)
