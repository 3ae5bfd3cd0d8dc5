"""`moorage explain`: why a job is where it is, or what a code means."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import Parameter

from moorage.cli.console import emit, say, tell
from moorage.cli.options import DEFAULTS, Options, guarded, with_client
from moorage.cli.render import age, facts, ordinal

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient

#: what helps against a reason, where a line can say it; {job} and {asks} are filled in
FIXES: Final[dict[str, str]] = {
    "no-worker": "start one: moorage worker",
    "driver": "ask for a driver that moorage fleet --json shows, or start a worker that offers it",
    "label": "ask for labels that moorage fleet --json shows",
    "model": "ask for a model that moorage fleet shows",
    "memory": "ask for less memory than {asks}; moorage fleet shows the models",
    "count": "ask for fewer GPUs a replica: all of them must be on one host",
    "gang-size": "ask for fewer replicas, or smaller ones",
    "closed": "moorage fleet shows who is cordoned or draining; moorage uncordon WORKER opens one",
    "sick": "moorage fleet shows the sick GPUs",
    "busy": "wait, or cancel what you need no longer: moorage ls --state RUNNING",
    "reserved": "a smaller request may fit beside the reservation",
    "contended": "moorage fleet shows what local claims hold",
}


def explain(
    what: Annotated[str, Parameter(help="A job's id, or the code of an error or of a reason.")],
    /,
    *,
    options: Options = DEFAULTS,
) -> int:
    """Why a job waits, or what a code means."""
    if (meaning := _meaning(what)) is not None:
        return guarded(options, lambda: tell(meaning))

    async def work(client: AsyncClient) -> int | None:
        answer = await client.answer("explain", {"job": client.job(what).id})
        if options.json:
            emit(answer)
        else:
            _explain(answer.data)
        return None

    return with_client(options, work)


def _meaning(code: str) -> str | None:
    """What a code means, from the tables that the reference is made of."""
    from moorage.bus.errors import BUS_CODES
    from moorage.client.errors import CLIENT_CODES
    from moorage.schemas.errors import CODES

    if (known := {**CODES, **BUS_CODES, **CLIENT_CODES}.get(code)) is not None:
        return f"{code}: {known[1]} (fault: {known[0]})"
    if not code.replace("-", "").isalpha() or not code.islower():
        return None
    from moorage.scheduler.core.explain import REASONS

    reason = REASONS.get(code)
    return None if reason is None else f"{code}: {reason}"


def _explain(data: dict[str, Any]) -> None:
    left = data.get("workers_left", {})
    tell(
        facts(
            [
                ("job", data["job"]),
                ("state", data["state"]),
                ("asks", data.get("asks")),
                ("place", f"{ordinal(data['position'])} of {data['queued']}" if "position" in data else ""),
                ("waits", data.get("waiting_replicas")),
                ("reason", f"{data['reason']}: {data['means']}" if "reason" in data else data.get("why")),
                ("starts", f"not before {age(data['starts_in_ms'])} from now" if "starts_in_ms" in data else ""),
                ("workers", " > ".join(f"{name} {number}" for name, number in left.items())),
                *[("held by", holder) for holder in data.get("held_by", [])],
            ]
        )
    )
    fix = FIXES.get(data.get("reason", ""))
    if fix:
        say("fix: " + fix.format(job=data["job"], asks=data.get("asks", "")))
