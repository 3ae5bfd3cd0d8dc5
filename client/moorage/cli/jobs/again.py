"""`moorage again`: runs jobs once more, or what of them did not succeed, as new jobs with the same request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar

from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import print_err, print_out
from moorage.cli.framework.interrupts import detachable
from moorage.cli.framework.options import ROWS, RowOptions, guarded
from moorage.cli.jobs.acceptance import accepted, print_failure_limit, print_interrupted, print_warnings
from moorage.cli.jobs.bringing import with_files
from moorage.cli.jobs.instead import changed, fields_in
from moorage.cli.jobs.job_flags import JobFlags, fields_of
from moorage.cli.jobs.selectors import (
    ANY_JOB,
    HELP,
    LISTED,
    Chosen,
    SomeReplicas,
    ids_of,
    means_several,
    replica_in,
    with_named,
    words_of,
)
from moorage.client.errors import Rejected, rejected
from moorage.schemas.units import many

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient
    from moorage.schemas.frames import AgainAnswer
    from moorage.schemas.job import Request


@dataclass(frozen=True)
class Changes:
    """What the new job has in place of the old one's."""

    __group__: ClassVar[str] = "What to change"

    gpu: Annotated[str | None, Parameter(help="Other GPUs: 1xH100:80G.", value="GPUS")] = None
    cpu: Annotated[float | None, Parameter(help="Cores per replica: 4 or 0.5.", value="CORES")] = None
    memory: Annotated[str | None, Parameter(help="Host memory per replica: 16Gi or 512Mi.", value="SIZE")] = None
    time_limit: Annotated[str | None, Parameter(help="Longest time that one attempt may run.", value="DURATION")] = None
    env: Annotated[
        list[str] | None, Parameter(help="A variable for the command; the job's others stay.", value="NAME=VALUE")
    ] = None
    image: Annotated[str | None, Parameter(help="Image of the container or the virtual machine.", value="IMAGE")] = None
    with_: Annotated[
        list[str] | None,
        Parameter(
            help="Files and folders to bring in place of those that the job brought.", names=("--with",), value="PATH"
        ),
    ] = None
    priority: Annotated[int | None, Parameter(help="0..100, higher first.")] = None
    retries: Annotated[int | None, Parameter(help="How many further attempts are made after a failure.")] = None
    max_running: Annotated[int | None, Parameter(help="At most so many replicas run at once.")] = None
    max_failed: Annotated[
        str | None,
        Parameter(help="Cancel the other replicas once so many have failed; `all` never does.", value="NUMBER"),
    ] = None
    but: Annotated[
        str | None,
        Parameter(help="Any other fields of the request, as a JSON object: '{\"labels\": {}}'.", value="JSON"),
    ] = None


NO_CHANGES = Changes()


def again(
    *jobs: Annotated[str, Parameter(help=HELP, lists=LISTED)],
    chosen: Chosen = ANY_JOB,
    failed: Annotated[
        bool, Parameter(help="Only the replicas that ended without success; they keep their numbers.")
    ] = False,
    replica: SomeReplicas = None,
    job: Annotated[str | None, Parameter(help="The new job's id; JOB-again-1, -2, … by default.", value="ID")] = None,
    changes: Changes = NO_CHANGES,
    options: RowOptions = ROWS,
) -> int:
    """Submit a job's request once more, as a new job; with --failed only what has not succeeded.

    The new job has the same files, labels and limits, but for what you change here. It waits for no other job, unless
    the one that it waited for (--after) is run again by this command, too: then it waits for that. Of the jobs that a
    pattern, --label or --state means, those that were run again before, or have not failed, are left out.
    Prints the new ids.
    """

    def act() -> int:
        from moorage.client.again import anew

        given = {name: value for name, value in vars(changes).items() if name != "but"}
        flags, fresh = JobFlags(job=job, **given), fields_in(changes.but)
        fields = fields_of(flags)

        async def work(client: AsyncClient) -> int | None:
            names = await ids_of(client, words, chosen, acts=True)
            several = chosen != ANY_JOB or any(map(means_several, words_of(words, chosen)))
            if job is not None and len(names) != 1:
                why = f"--job names one job, and {len(names)} are to be run again"
                raise rejected("invalid-argument", why, found=job, next="leave out --job")
            made, asked = 0, ""
            chain = await _chain(client, names) if len(names) > 1 else {name: [] for name in names}
            ids: dict[str, str] = {}  # of the new jobs, by the old ones

            async def run_again(name: str) -> bool:
                nonlocal asked
                asked = ""
                answer = await _answer(client, name, failed=failed, replica=numbers, several=several)
                if answer is None:
                    return False
                new = replace(flags, job=answer.job if job is None else job)
                after = [{**each, "job": ids[each["job"]]} for each in chain[name] if each["job"] in ids]
                request = changed(
                    answer.request, new, (), dict(fields), {}, {"after": after, **fresh} if after else fresh
                )
                request = await _with_its_files(client, new, request)
                asked = request.job or ""
                await _submit(client, answer, request, options)
                ids[name] = request.job or ""
                return True

            async def run_all() -> None:
                nonlocal made
                for name in chain:
                    made += await anew(partial(run_again, name), named=job is not None)

            def detach() -> None:
                if asked:
                    print_interrupted([asked])

            code = await detachable(run_all(), detach)
            if several and not (options.json or options.format):
                print_err(f"{made} of {many(len(names), 'job')} run again")
            return code

        words, numbers = replica_in(jobs, replica)
        return with_named(options, words, work, chosen, sends=True)

    return guarded(options, act)


async def _chain(client: AsyncClient, names: Sequence[str]) -> dict[str, list[dict[str, str]]]:
    """Return which jobs each job was to start after, in an order in which none comes before one that it waited for."""
    after: dict[str, list[dict[str, str]]] = {}
    for name in names:
        waits_for = (await client._wire.show(name)).asked.get("after") or ()
        after[name] = [{"job": each} if isinstance(each, str) else each for each in waits_for]
    ordered: dict[str, list[dict[str, str]]] = {}

    def take(name: str) -> None:
        waits = [name]
        while waits:  # not by recursion: a chain may be long
            before = [each["job"] for each in after[waits[-1]] if each["job"] in after and each["job"] not in ordered]
            if before and before[0] not in waits:
                waits.append(before[0])
            else:
                ordered.setdefault(last := waits.pop(), after[last])

    for name in names:
        take(name)
    return ordered


async def _answer(
    client: AsyncClient, name: str, *, failed: bool, replica: str | None, several: bool
) -> AgainAnswer | None:
    """Return the request to submit; None if the job is one of several and is left out, which is said."""
    from moorage.client.again import ask_again

    try:
        answer = await ask_again(client._wire, name, failed=failed, replica=replica)
    except Rejected as refused:
        if not several or refused.code != "failed-precondition":
            raise
        print_err(f"left out: {refused.why}")
        return None
    if several and answer.again:
        print_err(f"left out: job {name} was run again before, as {', '.join(answer.again)}")
        return None
    return answer


async def _with_its_files(client: AsyncClient, flags: JobFlags, request: Request) -> Request:
    from moorage.client.again import keep_files

    if flags.with_ or flags.data:
        return await with_files(client, flags.with_, request, data=flags.data)
    await keep_files(client._wire, request)
    return request


async def _submit(client: AsyncClient, answer: AgainAnswer, request: Request, options: RowOptions) -> None:
    submitted = await accepted(client, client.submit(request), [request.job])
    assert submitted.accepted is not None
    if options.shown(submitted.accepted, [submitted.accepted]):
        return
    print_out(submitted.job)
    which = "" if request.indices is None else f": {_cut(request.indices)}"
    what = "each worker" if request.each_worker else many(answer.of, "replica")
    print_err(f"accepted: {what} of {answer.again_of}{which}")
    print_warnings(submitted.accepted)
    print_failure_limit(request)


def _cut(indices: str) -> str:
    from moorage.schemas.ranges import RANGES_SAID, format_ranges, parse_ranges

    return format_ranges(parse_ranges(indices), RANGES_SAID)
