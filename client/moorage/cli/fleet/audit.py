"""`moorage audit`: the ledger against what each worker says it holds, and that against what its host really runs."""

from __future__ import annotations

import asyncio
from collections.abc import Container, Iterable
from typing import TYPE_CHECKING, Annotated, Any, Final

from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import say, tell
from moorage.cli.framework.exit_codes import EXIT_DRIFT
from moorage.cli.framework.options import ROWS, RowOptions, with_client
from moorage.schemas.units import many

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient
    from moorage.schemas.frames import Answer

#: between the two looks: two renewals of one node (2 s each, and what their answer may wait), more than one of a
#: cluster (3 s)
APART_S: Final = 4.5

#: what a kind of drift means
KINDS: Final[dict[str, str]] = {
    "ledger-only": "the ledger says that the attempt runs there, but the worker does not have it",
    "worker-only": "the worker has the attempt, but the ledger does not",
    "nothing-runs": "the worker has the attempt, but nothing of it runs there; the worker ends it as lost",
    "silent": "the worker has not renewed its lease since this scheduler became leader",
    "nvml-foreign": "a process uses a device that is not leased",
    "nvml-memory": "memory is in use on a device that is not leased, but NVML shows no process there",
    "nvml-missing": "a leased device does not answer its driver",
}
SILENT_SHOWN_MAX: Final = 5

_Key = tuple[str, str, str]


def audit(
    *,
    quick: Annotated[bool, Parameter(help="Ask once; a difference that is found may be gone a moment later.")] = False,
    watch: Annotated[bool, Parameter(help="Repeat, and print a line when a difference appears or disappears.")] = False,
    options: RowOptions = ROWS,
) -> int:
    """Compare the ledger with what each worker says that it holds, and its devices with its leases.

    Each worker asks its supervisor and its container engine what really runs of its attempts. It checks its devices:
    are there processes or memory in use without a lease, and do all leased devices answer? The audit runs twice, two
    renewals apart. A difference counts as drift only if both runs find it. The exit
    code is 10 if there is drift.
    """

    async def work(client: AsyncClient) -> int | None:
        if watch:
            return await _watch(client, options)
        answer = await client._wire.operate("audit")
        standing = drift_of(answer.data)
        if standing and not quick:
            await asyncio.sleep(APART_S)
            answer = await client._wire.operate("audit")
            standing = in_both(standing, drift_of(answer.data))
        drift = list(standing.values())
        frame = _frame(answer, drift)
        if not options.shown(frame, drift):
            for worker, kind, member in standing:
                tell(f"{worker}\t{kind}\t{member or '-'}\t{KINDS.get(kind, kind)}")
        if not standing:
            say(_no_drift(answer.data))
            _tell_silent(answer.data)
            return 0
        found = "found once" if quick else "drift"
        differ = f"{many(len(standing), 'difference')} between ledger, workers and devices"
        say(f"{found}: {differ}; compared {_summary(answer.data)}")
        _tell_silent(answer.data)
        say(_fix_after_once() if quick else _fix(standing))
        return EXIT_DRIFT

    return with_client(options, work)


async def _watch(client: AsyncClient, options: RowOptions) -> int:
    """Audit again and again until Ctrl-C. A difference comes once two audits in a row have it, and goes when an audit
    lacks it."""
    standing: dict[_Key, dict[str, Any]] = {}
    seen = drift_of((await client._wire.operate("audit")).data)
    while True:
        await asyncio.sleep(APART_S)
        answer = await client._wire.operate("audit")
        found = drift_of(answer.data)
        now = in_both(seen, found)
        changes = [{**row, "change": "comes"} for key, row in now.items() if key not in standing]
        changes += [{**row, "change": "goes"} for key, row in standing.items() if key not in now]
        if changes and not options.shown(_frame(answer, changes), changes):
            for row in changes:
                tell("\t".join((row["change"], row["worker"], row["kind"], row.get("member", "") or "-")))
        standing, seen = now, found


def _frame(answer: Answer, drift: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the answer as a frame, with these rows of drift in place of those of the last audit."""
    return {"kind": "answer", "verb": "audit", "ledger": answer.ledger, "data": {**answer.data, "drift": drift}}


def drift_of(data: dict[str, Any]) -> dict[_Key, dict[str, Any]]:
    """Return an audit's rows by worker, kind and member: rows of two audits with the same key are the same difference,
    even if their memory differs."""
    return {(row["worker"], row["kind"], row.get("member", "")): row for row in data["drift"]}


def in_both(before: Container[_Key], now: dict[_Key, dict[str, Any]]) -> dict[_Key, dict[str, Any]]:
    """Return the rows of this audit that the one before had, too. A difference of one audit alone may be a frame on its
    way."""
    return {key: row for key, row in now.items() if key in before}


def _tell_silent(data: dict[str, Any]) -> None:
    silent = data.get("not_looked", [])
    if silent:
        shown = ", ".join(silent[:SILENT_SHOWN_MAX]) + (", …" if len(silent) > SILENT_SHOWN_MAX else "")
        say(f"warning[audit]: {many(len(silent), 'worker')} did not check their devices in time: {shown}")
    if data.get("left_out"):
        say(f"warning[audit]: {data['left_out']} more differences on devices are not shown")


def _summary(data: dict[str, Any]) -> str:
    parts = (
        many(data["workers"], "worker"),
        many(data["members"], "attempt"),
        f"{data['leases']} GPUs leased",
        *([f"{data['without_lease']} frozen without a lease"] if data.get("without_lease") else []),
    )
    return ", ".join(parts)


def _no_drift(data: dict[str, Any]) -> str:
    """Return that two audits show no drift, and how many differences only the second one found."""
    once = len(drift_of(data))
    return f"no drift: {_summary(data)}" + (f"; {many(once, 'difference')} found only once" if once else "")


def _fix_after_once() -> str:
    return (
        "fix: run moorage audit without --quick: it compares twice, calls a difference that is "
        "there both times drift, and prints a fix"
    )


def _fix(standing: Iterable[_Key]) -> str:
    worker, kind, member = next(iter(standing))
    if kind == "nvml-foreign":
        return (
            "fix: end that process, or let it borrow the GPU from the worker; until then moorage cordon "
            f"{worker} keeps new jobs away"
        )
    if kind in ("nvml-memory", "nvml-missing"):
        return (
            f"fix: moorage cordon {worker} keeps new jobs away; run nvidia-smi on that host to see the state of "
            f"{member}"
        )
    return f"fix: moorage cordon {worker} keeps new jobs away; read that worker's log, then restart its agent"
