"""`moorage audit`: the ledger against what each worker says it holds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Final

from moorage.cli.arguments import Parameter
from moorage.cli.console import EXIT_DRIFT, say, tell
from moorage.cli.options import ROWS, RowOptions, with_client
from moorage.cli.render import many

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient

#: between the two looks: two renewals of one node (2 s each, and what their answer may wait), more than one of a
#: cluster (3 s)
APART_S: Final = 4.5

#: what a kind of drift means
KINDS: Final[dict[str, str]] = {
    "ledger-only": "the ledger says it runs there, the worker does not hold it",
    "worker-only": "the worker holds it, the ledger does not know it",
    "silent": "the worker has not renewed in this reign",
}

_Drift = tuple[str, str, str]


def audit(
    *,
    quick: Annotated[bool, Parameter(help="One look: what is on its way counts as drift, too.")] = False,
    options: RowOptions = ROWS,
) -> int:
    """The ledger against what each worker's last renewal says it holds.

    Asks twice, two renewals apart: only what both show is drift. Exit code 10 when there is any.
    """

    async def work(client: AsyncClient) -> int | None:
        answer = await client.operate("audit")
        standing = drift_of(answer.data)
        if standing and not quick:
            await asyncio.sleep(APART_S)
            answer = await client.operate("audit")
            standing = [row for row in drift_of(answer.data) if row in standing]
        drift = [dict(zip(("worker", "kind", "member"), row, strict=True)) for row in standing]
        frame = {"kind": "answer", "verb": "audit", "ledger": answer.ledger, "data": {**answer.data, "drift": drift}}
        if not options.shown(frame, drift):
            for worker, kind, member in standing:
                tell(f"{worker}\t{kind}\t{member or '-'}\t{KINDS.get(kind, kind)}")
        if not standing:
            say(_summary(answer.data))
            return 0
        say(f"drift: {many(len(standing), 'difference')}; {_summary(answer.data)}")
        say(_fix(standing))
        return EXIT_DRIFT

    return with_client(options, work)


def drift_of(data: dict[str, Any]) -> list[_Drift]:
    return [(row["worker"], row["kind"], row.get("member", "")) for row in data["drift"]]


def _summary(data: dict[str, Any]) -> str:
    parts = (
        many(data["workers"], "worker"),
        many(data["members"], "member"),
        f"{data['leases']} GPUs leased",
    )
    return ("no drift: " if not data["drift"] else "looked at ") + ", ".join(parts)


def _fix(standing: Iterable[_Drift]) -> str:
    worker = next(iter(standing))[0]
    return f"fix: moorage cordon {worker} keeps new jobs away; look into the worker's log, then restart its agent"
