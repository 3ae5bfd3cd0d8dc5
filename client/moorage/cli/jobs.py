"""The verbs that read and end jobs: show, ls, cancel."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import Parameter

from moorage.cli.console import emit, paint, say, tell
from moorage.cli.options import DEFAULTS, Options, with_client
from moorage.cli.render import age, facts, many, table
from moorage.schemas.job import TERMINAL

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient

_SIMULATED_UUID: Final = "SIM-"


def show(
    job: Annotated[str, Parameter(help="The job's id.")],
    /,
    *,
    watch: Annotated[bool, Parameter(negative="", help="Follow it: a line a transition, until it is over.")] = False,
    options: Options = DEFAULTS,
) -> int:
    """One job: request, state, transitions."""

    async def work(client: AsyncClient) -> int | None:
        if watch:
            async for event in client.job(job).events():
                if options.json:
                    emit(event)
                else:
                    for change in event.changes:
                        tell("\t".join(map(str, _change_row(_as_dict(change), None))))
            return None
        answer = await client.answer("show", {"job": client.job(job).id})
        if options.json:
            emit(answer)
        else:
            _show(answer.data)
        return None

    return with_client(options, work)


def _show(data: dict[str, Any]) -> None:
    changes = data.get("changes", [])
    began = changes[0]["time_ms"] if changes else None
    simulated = _simulated(changes)
    request = data.get("request", {})
    tell(
        facts(
            [
                ("job", data["job"]),
                ("tenant", data["tenant"]),
                ("state", data["state"]),
                ("simulated", "sim" if simulated else ""),
                ("gpu", data.get("gpu")),
                ("command", " ".join(request.get("run", {}).get("argv", []))),
                ("priority", data.get("priority")),
                ("age", age(data["age_ms"]) if "age_ms" in data else ""),
                ("worker", data.get("worker")),
                ("code", data.get("code")),
                ("why", data.get("why")),
                ("kept", "as a row: id, state and end; its story left memory" if data.get("compacted") else ""),
            ]
        )
    )
    if changes:
        tell("")
        tell(
            table(
                ["REV", "AFTER", "REPLICA", "TRY", "STATE", "WORKER", "CODE", "GPUS", "WHY"],
                [_change_row(change, began) for change in changes],
                numbers=("REV", "AFTER", "REPLICA", "TRY", "CODE"),
            )
        )


def _change_row(change: dict[str, Any], began_ms: int | None) -> list[Any]:
    return [
        change["rev"],
        change["time_ms"] if began_ms is None else age(change["time_ms"] - began_ms),
        change["replica"] if change["replica"] >= 0 else "-",
        change["attempt"],
        change["state"],
        change.get("worker") or "-",
        change.get("code") if change.get("code") is not None else "-",
        len(change.get("gpus", [])) or "-",
        change.get("why") or "-",
    ]


def _as_dict(change: Any) -> dict[str, Any]:
    import msgspec

    data: dict[str, Any] = msgspec.to_builtins(change)
    return data


def _simulated(changes: list[dict[str, Any]]) -> bool:
    return any(gpu.startswith(_SIMULATED_UUID) for change in changes for gpu in change.get("gpus", []))


def ls(
    *,
    state: Annotated[list[str] | None, Parameter(negative="", help="Only these, as RUNNING; may be repeated.")] = None,
    limit: Annotated[int, Parameter(help="At most so many, 1..1000.")] = 100,
    options: Options = DEFAULTS,
) -> int:
    """Your jobs, newest first."""

    async def work(client: AsyncClient) -> int | None:
        states = [name.upper().replace("-", "_") for name in state or ()]
        answer = await client.answer("ls", {"states": states, "limit": limit})
        if options.json:
            emit(answer)
            return None
        rows = answer.data["jobs"]
        if not rows:
            asked = f" in {', '.join(states)}" if states else ""
            say(f"no jobs of tenant {client.tenant}{asked} in memory")
            return None
        simulated = await _simulated_workers(client, rows)
        tell(
            table(
                ["JOB", "STATE", "GPU", "PRI", "TRY", "AGE", "CODE", "WORKER", "WHY"],
                [
                    [
                        row["job"],
                        row["state"],
                        row["gpu"],
                        row["priority"],
                        row["attempt"],
                        age(row["age_ms"]),
                        row["code"],
                        row["worker"] + (" sim" if row["worker"] in simulated else ""),
                        row["why"],
                    ]
                    for row in rows
                ],
                numbers=("PRI", "TRY", "AGE", "CODE"),
            )
        )
        if sys.stderr.isatty():
            counts = ", ".join(f"{number} {name}" for name, number in sorted(answer.data["counts"].items()))
            say(paint(counts, "dim", sys.stderr))
        return None

    return with_client(options, work)


async def _simulated_workers(client: AsyncClient, rows: list[dict[str, Any]]) -> set[str]:
    """Which of the rows' workers are simulated: every screen that shows one must say so."""
    if all("simulated" in row for row in rows):
        return {row["worker"] for row in rows if row["simulated"]}
    if not any(row["worker"] for row in rows):
        return set()
    from moorage.client.errors import ClientError

    try:
        workers = (await client.fleet())["workers"]
    except ClientError:  # a submitter may not ask for the fleet
        return set()
    return {worker["worker"] for worker in workers if worker["simulated"]}


def cancel(
    *jobs: Annotated[str, Parameter(help="Ids of the jobs.")],
    reason: Annotated[str, Parameter(help="For the job's story.")] = "",
    options: Options = DEFAULTS,
) -> int:
    """Cancel jobs, at any stage; answered once it is in the ledger.

    An id that is not known yet is remembered: its submit is then cancelled at once.
    """

    async def work(client: AsyncClient) -> int | None:
        if not jobs:
            from moorage.client.errors import rejected

            raise rejected("invalid-argument", "no job to cancel", next="moorage cancel JOB; moorage ls lists them")
        for name in jobs:
            answer = await client.answer("cancel", {"job": client.job(name).id, "reason": reason})
            if options.json:
                emit(answer)
                continue
            was = answer.data["was"]
            if was == "UNKNOWN":
                tell(f"{name}\tremembered: no such job yet, its submit will be cancelled")
            elif was in TERMINAL:
                tell(f"{name}\twas over already: {was}")
            else:
                tell(f"{name}\t{'cancelling' if answer.data['cancelled'] else 'unchanged'}, was {was}")
        if len(jobs) > 1 and not options.json:
            say(many(len(jobs), "job"))
        return None

    return with_client(options, work)
