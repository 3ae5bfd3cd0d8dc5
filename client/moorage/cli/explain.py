"""`moorage explain`: why a job is where it is, or what a code means."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from moorage.cli.console import emit, say, tell
from moorage.cli.lookup import FIXES, code_of
from moorage.cli.options import DEFAULTS, Options, guarded, with_client
from moorage.cli.render import age, facts, ordinal
from moorage.cli.selectors import ask_each

if TYPE_CHECKING:
    from cyclopts import Parameter

    from moorage.client.client import AsyncClient
    from moorage.schemas.frames import Answer


def explain(
    *what: Annotated[str, Parameter(help="Jobs (see moorage show --help), or the code of an error or of a reason.")],
    options: Options = DEFAULTS,
) -> int:
    """Why a job waits, or what a code means."""
    if len(what) == 1 and (code := code_of(what[0])) is not None:
        return guarded(
            options, lambda: tell(f"{code.code}: {code.means}" + (f" (fault: {code.fault})" * bool(code.fault)))
        )

    async def work(client: AsyncClient) -> int | None:
        async def ask(name: str) -> Answer:
            return await client.answer("explain", {"job": name})

        for at, answer in enumerate(await ask_each(client, what, ask)):
            if options.json:
                emit(answer)
            else:
                if at:
                    tell("")
                _explain(answer.data)
        return None

    return with_client(options, work)


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
