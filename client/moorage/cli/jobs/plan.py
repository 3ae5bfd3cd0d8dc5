"""`moorage plan`: asks the leader what would happen to a job; nothing is submitted, and nothing changes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec

from moorage.cli.framework.arguments import WORKERS_LISTED, Parameter
from moorage.cli.framework.console import print_err, print_error, print_out
from moorage.cli.framework.exit_codes import EXIT_FAILED, EXIT_NEVER, EXIT_NOT_NOW
from moorage.cli.framework.options import ROWS, RowOptions, guarded, with_client
from moorage.cli.framework.render import age, facts, waits
from moorage.cli.jobs.acceptance import print_warning
from moorage.cli.jobs.bringing import kept_data, packed_data, with_data
from moorage.cli.jobs.explain import explained_rows, fix_lines, foreseen
from moorage.cli.jobs.job_flags import NO_FLAGS, JobFlags, drivers_of, needs_argv, offered, request_of
from moorage.cli.jobs.newest import with_any, with_newest
from moorage.cli.jobs.right_size import advice_of
from moorage.cli.jobs.sweep_flags import sweep_of
from moorage.client.errors import rejected
from moorage.schemas.answers.jobs import Explained
from moorage.schemas.frames import Answer
from moorage.schemas.items import PLACEHOLDER
from moorage.schemas.plan import PlannedJobs
from moorage.schemas.units import many

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient
    from moorage.client.planning import Quota, Share
    from moorage.schemas.job import Request
    from moorage.schemas.plan import Plan

#: the warnings that are printed as such; what else a plan warns of is told in rows of its own
WARNED: Final = ("no-match:", "duplicate:", "reserved-variable", "joins-mps", "secret:", "deadline:", PLACEHOLDER)
#: as `admin limit --gpus none`
NO_LIMIT: Final = "none"
#: in place of a command that is not named
_ANYTHING: Final = ("true",)
_EXITS: Final = {"later": EXIT_NOT_NOW, "unknown": EXIT_NOT_NOW, "never": EXIT_NEVER, "refused": EXIT_FAILED}


def plan(
    *command: Annotated[str, Parameter(help="What the job would run, after --.", command=True)],
    drain: Annotated[
        list[str] | None, Parameter(help="Plan as if this worker were drained.", value="WORKER", lists=WORKERS_LISTED)
    ] = None,
    add: Annotated[
        str | None,
        Parameter(
            help="Plan as if the fleet had these hosts too: 2x8xA100 is two hosts with 8 A100 each.", value="HOSTS"
        ),
    ] = None,
    quota: Annotated[
        list[str] | None,
        Parameter(
            help="Plan as if a tenant were limited to this many GPUs; none removes the "
            "limit; a number without a tenant is for your own.",
            value="TENANT=GPUS",
        ),
    ] = None,
    share: Annotated[
        list[str] | None,
        Parameter(
            help="Plan as if a tenant had this weight and, after a colon, these guaranteed GPUs: acme=3:16.",
            value="TENANT=WEIGHT",
        ),
    ] = None,
    flags: JobFlags = NO_FLAGS,
    options: RowOptions = ROWS,
) -> int:
    """Say whether, when and where a job would start; submits nothing.

    The leader answers with its own code, on a copy of its state. --drain, --add, --quota and --share, together and as
    often as you like, change the fleet and the tenants' rights in that copy. The command may be left out: it only tells
    how long such jobs took before. The exit code is 0 if all of the job would start now, 7 if all or some of it would
    start later, 8 if it would never start on this fleet, and 1 if it would be refused.
    """

    def act() -> int:
        unnamed = _ANYTHING if needs_argv(drivers_of(flags)[0]) else ()
        words = command or unnamed
        sweep = sweep_of(flags, words)
        request = request_of(with_any(flags), words, sweep) if command or flags != NO_FLAGS else None
        quotas, shares = quotas_of(quota or ()), shares_of(share or ())
        packed = packed_data(flags.data) if request is not None else {}

        async def work(client: AsyncClient) -> int | None:
            supposed = functools.partial(client.plan, drain=drain or (), add=add, quota=quotas, share=shares)
            asked = request
            if asked is not None:
                wanted, asked = await with_newest(client, flags, words, asked, sweep)
                asked = await offered(supposed, wanted, words, asked, sweep)
                asked = with_data(asked, packed | await kept_data(client, asked, flags.data))
            return await _plan(client, asked, drain or (), add, quotas, shares, options)

        return with_client(options, work)

    return guarded(options, act)


def quotas_of(words: Sequence[str]) -> Quota | None:
    """Return the quotas: from `16`, a number for the tenant that asks; from `acme=16`, numbers by tenant.

    `acme=none` gives 0, which means no limit. Return None without words. Raises `Rejected`.
    """
    if len(words) == 1 and words[0].isdecimal() and int(words[0]):  # 0 is no limit on the wire: refused below
        return int(words[0])
    found: dict[str, int] = {}
    for word in words:
        tenant, _, gpus = word.partition("=")
        is_twice = tenant in found
        if not tenant or is_twice or (gpus != NO_LIMIT and (not gpus.isdecimal() or not int(gpus))):
            raise rejected(
                "invalid-argument",
                f"--quota {word} is the second of {tenant}"
                if is_twice
                else f"--quota {word} is not a tenant with a number of GPUs",
                found=word,
                allowed="1..1000000 GPUs, or none for no limit",
                next="write --quota acme=16, once for each tenant; to let none of its jobs start: moorage admin hold",
            )
        found[tenant] = 0 if gpus == NO_LIMIT else int(gpus)
    return found or None


def shares_of(words: Sequence[str]) -> Share:
    """Return shares by tenant: `acme=3` is the weight 3, and `acme=3:16` also 16 guaranteed GPUs. Raises `Rejected`."""
    found: dict[str, int | tuple[int, int]] = {}
    for word in words:
        tenant, _, of = word.partition("=")
        weight, colon, gpus = of.partition(":")
        if not tenant or tenant in found or not weight.isdecimal() or (colon and not gpus.isdecimal()):
            raise rejected(
                "invalid-argument",
                f"--share {word} is not a tenant with a weight",
                found=word,
                next="write --share acme=3 once for each tenant, or acme=3:16 for GPUs of its own, too",
            )
        found[tenant] = (int(weight), int(gpus)) if colon else int(weight)
    return found


async def _plan(
    client: AsyncClient,
    request: Request | None,
    drain: Sequence[str],
    add: str | None,
    quota: Quota | None,
    share: Share,
    options: RowOptions,
) -> int:
    planned = await client.plan(request, drain=drain, add=add, quota=quota, share=share)
    imagined = bool(drain or add is not None or quota is not None or share)
    data = msgspec.to_builtins(planned)
    if not options.shown(Answer("plan", planned.ledger, data), [data]):
        _print_plan(planned, request, imagined)
    return EXIT_NOT_NOW if _in_part(planned) else _EXITS.get(planned.starts, 0)


def _in_part(planned: Plan) -> bool:
    """Return whether some of the job would start now and some would not."""
    return planned.starts == "now" and planned.replicas_now < planned.replicas


def _print_plan(planned: Plan, request: Request | None, imagined: bool) -> None:
    """Print the plan, of a request or of changes alone. `imagined` says that it is for another fleet or other rights
    than there are, so a submit would do something else."""
    rows: list[tuple[str, Any]] = [("starts", told_starts(planned) if request is not None else "")]
    rows += [("on", _place(place.worker, len(place.gpus), place.models)) for place in planned.places]
    for name, what in (("preempts", planned.preempts), ("would start", planned.starting)):
        if what is not None:
            rows.append((name, _jobs(what)))
    for worker, after_ms in (planned.empty or {}).items():
        rows.append(("empty", f"{worker} {_empty(after_ms)}"))
    why = None if planned.waiting is None else msgspec.structs.replace(planned.waiting, job="JOB")
    rows += [row for row in explained_rows(why) if row[0] != "starts"] if why is not None else []
    rows.append(("ledger", planned.ledger))
    print_out(facts(rows))
    if planned.problem is not None:
        print_error(planned.problem)
    apart = request is not None and request.gpu is not None and bool(request.gpu.distinct_hosts)
    for line in fix_lines(why, apart=apart) if why is not None else []:
        print_err(line)
    for warning in planned.warnings:
        if warning.startswith(WARNED):
            print_warning(warning)
    for advice in advice_of(planned.sized) if planned.sized is not None else []:
        print_err(f"note: {advice}")
    if planned.starts == "now" and not imagined:
        print_err(
            f"to submit the job only if nothing has changed since this plan: moorage submit --if-seq {planned.ledger} …"
        )


def _place(worker: str, gpus: int, models: Sequence[str]) -> str:
    """Return a worker with the number of GPUs that a replica would have there, and their models if they differ; --json
    has which."""
    unlike = f", which differ: {', '.join(models)}" if models else ""
    return f"{worker}  {many(gpus, 'GPU')}{unlike}" if gpus else worker


def _empty(after_ms: int | None) -> str:
    if after_ms is None:
        return "at an unknown time"
    return f"in about {age(after_ms)}" if after_ms else "now"


def told_starts(planned: Plan) -> str:
    """Return when a job would start, in words."""
    why = planned.waiting or Explained()
    if _in_part(planned):
        rest = msgspec.structs.replace(why, position=None)
        return f"{planned.replicas_now} of {planned.replicas} replicas start now; the rest wait: {waits(rest)}"
    if planned.in_ms is not None:
        return f"{foreseen(planned.in_ms)}, on {planned.on}"
    if planned.starts == "unknown" and why.starts_unknown:
        return f"not now; the time is unknown: {why.starts_unknown}"
    if planned.starts == "never" and not planned.waiting:
        return "never"  # whatever the fleet has: it was cancelled before
    words = {"unknown": "not now; the time is unknown", "never": "never on this fleet", "none": "it is a job already"}
    return words.get(planned.starts, planned.starts)


def _jobs(found: PlannedJobs) -> str:
    own = ", ".join(found.own) + ("…" if found.own_jobs > len(found.own) else "")
    others = f"{found.other_jobs} of other tenants" if found.other_jobs else ""
    return ", ".join(filter(None, (own, others))) or "none"
