"""`moorage advise`: which workloads ask for more memory than they use; what smaller GPUs would have done to waits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec

from moorage.cli.fleet.playing import as_row, compared, configs_of, trace_of_ledger
from moorage.cli.fleet.tried_cures import COPIES
from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import emit, print_err, print_out
from moorage.cli.framework.options import ROWS, RowOptions, guarded, with_client
from moorage.cli.framework.render import table, utc
from moorage.cli.jobs.right_size import JOBS_SURE, advice_of
from moorage.schemas.gpu import format_token
from moorage.schemas.sizes import SizedRow, SizesAnswer
from moorage.schemas.units import many

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient
    from moorage.testing.simulate.trace import Trace, TraceJob

_GIB: Final = 1024


def advise(
    *,
    all: Annotated[bool, Parameter(help="All tenants; it needs an operator's key.")] = False,
    try_: Annotated[
        Path | None,
        Parameter(
            help="Also play copies of this trace from the ledger: how much sooner jobs would have started on those "
            "GPUs.",
            names=("--try",),
            value="TRACE",
        ),
    ] = None,
    options: RowOptions = ROWS,
) -> int:
    """Show what workloads use of the memory that they ask for, and which smaller GPUs of the fleet would do.

    It counts jobs that succeeded under this leader, by workload: the label `workload`, or else program and first word.
    Workers report what attempts had at most with their ends. Nothing is advised with fewer than five measured jobs, or
    where a fifth more than was used does not fit. Nothing is changed.
    """
    told: list[SizesAnswer] = []

    async def work(client: AsyncClient) -> None:
        wire = client._wire
        answer = await (wire.operate if all else wire.answer)("usage", {"sizes": True})
        found = msgspec.convert(answer.data, SizesAnswer)
        if try_ is None and options.shown(answer, found.rows):
            return
        told.append(found)

    def act() -> int | None:
        for answer in told:
            if not (try_ is not None and options.json):
                _print(answer, of_all=all)
            if try_ is not None:
                _try(answer.rows, try_, as_json=options.json)
        return None

    return with_client(options, work) or guarded(options, act)


def _print(answer: SizesAnswer, *, of_all: bool) -> None:
    if not answer.rows:
        print_err(f"no job has succeeded since {utc(answer.from_ms)} whose worker reported its memory")
        return
    header = [*(["TENANT"] if of_all else []), "WORKLOAD", "ASKS", "JOBS", "GPU-GIB", "HAD", "GIB", "ASKED", "INSTEAD"]
    cells = [
        [
            *([row.tenant] if of_all else []),
            row.workload,
            row.asks,
            row.jobs,
            _gib(row.gpu_used_mib),
            _gib(row.gpu_mib),
            _gib(row.memory_used_mib),
            _gib(row.memory_mib),
            ", ".join(row.instead) or "-",
        ]
        for row in answer.rows
    ]
    print_out(table(header, cells, numbers=("JOBS", "GPU-GIB", "HAD", "GIB", "ASKED")))
    advised = [advice for row in answer.rows for advice in advice_of(row)]
    for advice in advised:
        print_out(advice)
    if not advised:
        print_err(
            f"nothing to advise: no workload of {JOBS_SURE} measured jobs or more asks for much more than it uses"
        )
    more = f"; {many(answer.left_out, 'older workload')} left out" if answer.left_out else ""
    print_err(f"the most that a job used, since {utc(answer.from_ms)}{more}")


def _gib(mib: int | None) -> str:
    return "-" if mib is None else f"{mib / _GIB:.1f}"


def _try(rows: list[SizedRow], trace: Path, *, as_json: bool) -> None:
    """Print how much sooner the jobs of each workload would have started on the smallest GPU that would do."""
    from moorage.testing.simulate.shaken import Side

    whole = trace_of_ledger(trace)
    config = configs_of([{str(key): str(value) for key, value in whole.head.get("settings", {}).items()}])[0]
    before = Side([], whole.jobs, whole.events, config)
    sides, among = dict[str, Any](), dict[str, Any]()
    for row in rows:
        if row.instead and row.gpu_jobs >= JOBS_SURE and (names := _of(row, whole)):
            name = f"{row.workload}: {row.instead[0]} in place of {row.asks}"
            sides[name] = before._replace(jobs=[_smaller(job, row.instead[0], names) for job in whole.jobs])
            among[name] = names
    if not sides:
        print_err(f"nothing to try: {trace.name} has no job of a workload for which smaller GPUs would do")
        return
    until = whole.head.get("until_s")
    found = compared(COPIES, before, sides, None if until is None else int(until * 1000), among)
    for name, effects in found.items():
        if as_json and effects:
            emit({**as_row(name, effects[0]), "told": effects[0].sooner})
        elif effects:
            print_out(f"{name}: would have started {effects[0].sooner}")
        else:
            print_out(f"{name}: none of its jobs began")


def _of(row: SizedRow, whole: Trace) -> frozenset[tuple[str, str]]:
    return frozenset(
        (job.tenant, job.request.job or "")
        for job in whole.jobs
        if job.tenant == row.tenant
        and job.request.labels.get("workload") == row.workload
        and format_token(job.request.effective_gpu) == row.asks
    )


def _smaller(job: TraceJob, token: str, names: frozenset[tuple[str, str]]) -> TraceJob:
    """Return a job with other GPUs if it is one of these, as a submit with that token would have had them."""
    gpu = job.request.gpu
    if gpu is None or (job.tenant, job.request.job or "") not in names:
        return job
    model = token.partition("x")[2]
    smaller = msgspec.structs.replace(gpu, model=model, min_memory_mib=None)
    return msgspec.structs.replace(job, request=msgspec.structs.replace(job.request, gpu=smaller))
