"""`moorage audit`: the ledger against what each worker says it holds, and that against what its host really runs."""

from __future__ import annotations

import asyncio
from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import msgspec

from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import print_err, print_out
from moorage.cli.framework.exit_codes import EXIT_DRIFT
from moorage.cli.framework.options import ROWS, RowOptions, with_client
from moorage.schemas.answers.operators import Audit, Drift
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
        told = msgspec.convert(answer.data, Audit)
        standing = drift_of(told)
        if standing and not quick:
            await asyncio.sleep(APART_S)
            answer = await client._wire.operate("audit")
            told = msgspec.convert(answer.data, Audit)
            standing = in_both(standing, drift_of(told))
        drift = list(standing.values())
        frame = _frame(answer, drift)
        if not options.shown(frame, drift):
            for worker, kind, member in standing:
                print_out(f"{worker}\t{kind}\t{member or '-'}\t{KINDS.get(kind, kind)}")
        if not standing:
            print_err(_no_drift(told))
            _print_silent(told)
            return 0
        found = "found once" if quick else "drift"
        differ = f"{many(len(standing), 'difference')} between ledger, workers and devices"
        print_err(f"{found}: {differ}; compared {_summary(told)}")
        _print_silent(told)
        print_err(_fix_after_once() if quick else _fix(standing))
        return EXIT_DRIFT

    return with_client(options, work)


async def _watch(client: AsyncClient, options: RowOptions) -> int:
    """Audit again and again until Ctrl-C. A difference comes once two audits in a row have it, and goes when an audit
    lacks it."""
    standing: dict[_Key, Drift] = {}
    seen = drift_of(await client.fleet.audit())
    while True:
        await asyncio.sleep(APART_S)
        answer = await client._wire.operate("audit")
        found = drift_of(msgspec.convert(answer.data, Audit))
        now = in_both(seen, found)
        changes = [_Change(row, "comes") for key, row in now.items() if key not in standing]
        changes += [_Change(row, "goes") for key, row in standing.items() if key not in now]
        rows = [{**msgspec.to_builtins(each.row), "change": each.change} for each in changes]
        if rows and not options.shown(_frame(answer, rows), rows):
            for row, change in changes:
                print_out("\t".join((change, row.worker, row.kind, row.member or "-")))
        standing, seen = now, found


class _Change(NamedTuple):
    """A difference that comes or goes."""

    row: Drift
    change: str


def _frame(answer: Answer, drift: Sequence[Drift | dict[str, Any]]) -> dict[str, Any]:
    """Return the answer as a frame, with these rows of drift in place of those of the last audit."""
    return {"kind": "answer", "verb": "audit", "ledger": answer.ledger, "data": {**answer.data, "drift": drift}}


def drift_of(told: Audit) -> dict[_Key, Drift]:
    """Return an audit's rows by worker, kind and attempt: rows of two audits with the same key are the same difference,
    even if their memory differs."""
    return {(row.worker, row.kind, row.member): row for row in told.drift}


def in_both(before: Container[_Key], now: dict[_Key, Drift]) -> dict[_Key, Drift]:
    """Return the rows of this audit that the one before had, too. A difference of one audit alone may be a frame on its
    way."""
    return {key: row for key, row in now.items() if key in before}


def _print_silent(audit: Audit) -> None:
    silent = audit.not_looked
    if silent:
        shown = ", ".join(silent[:SILENT_SHOWN_MAX]) + (", …" if len(silent) > SILENT_SHOWN_MAX else "")
        print_err(f"warning[audit]: {many(len(silent), 'worker')} did not check their devices in time: {shown}")
    if audit.left_out:
        print_err(f"warning[audit]: {audit.left_out} more differences on devices are not shown")


def _summary(told: Audit) -> str:
    parts = (
        many(told.workers, "worker"),
        many(told.members, "attempt"),
        f"{told.leases} GPUs leased",
        *([f"{told.without_lease} frozen without a lease"] if told.without_lease else []),
    )
    return ", ".join(parts)


def _no_drift(told: Audit) -> str:
    """Return that two audits show no drift, and how many differences only the second one found."""
    once = len(drift_of(told))
    return f"no drift: {_summary(told)}" + (f"; {many(once, 'difference')} found only once" if once else "")


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
