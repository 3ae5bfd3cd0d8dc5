"""`moorage explain`: why a job is where it is, or what a code means."""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final

from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.codes import FIXES, LOOK_KILLED, code_of, fix_of, fix_of_end, frame, states
from moorage.cli.framework.console import here, print_err, print_out
from moorage.cli.framework.exit_codes import shell_code
from moorage.cli.framework.options import ROWS, RowOptions, guarded
from moorage.cli.framework.render import age, facts, ordinal, pipe_line, place_of, utc
from moorage.cli.framework.screen import APART_S, Screen
from moorage.cli.jobs.instead import as_words, as_words_of_new
from moorage.cli.jobs.job_rows import after_rows, members_words, stalled_words
from moorage.cli.jobs.replica_words import shown_words
from moorage.cli.jobs.selectors import LISTED, ask_each, one_id, with_named
from moorage.cli.jobs.services import newest_of
from moorage.client.answers import Explanation
from moorage.client.errors import NotFound, stopped_early
from moorage.client.reading import as_struct
from moorage.client.tenant import is_operators
from moorage.schemas.codec import Decoder
from moorage.schemas.errors import Refused
from moorage.schemas.exit_words import was_killed
from moorage.schemas.frames import FleetFrame
from moorage.schemas.job import TERMINAL
from moorage.schemas.names import word_of
from moorage.schemas.reasons import CLOSED, HELD, REASONS, SCALED
from moorage.schemas.units import many

if TYPE_CHECKING:
    from moorage.bus.transport import Delivery
    from moorage.client.client import AsyncClient
    from moorage.schemas.answers.jobs import Explained, Fix, Leave, Start
    from moorage.schemas.frames import Answer

#: where to look for why it ended so, by its state; a reason of its own that has a fix goes before
_LOOK: Final = {
    "FAILED": "moorage logs {job}",
    "TIMED_OUT": FIXES["timeout"],
    "EXPIRED": "moorage again {job} lets it wait once more; moorage plan says when it would start",
    "REJECTED": "ask for GPUs that the fleet has (moorage plan tries others), or submit it with --on-no-match wait",
}
_decode_frame: Final[Decoder[FleetFrame]] = Decoder(FleetFrame)


def explain(
    *what: Annotated[
        str,
        Parameter(
            help="Jobs (moorage help jobs), or one code: of an error, of a reason for waiting, or a state.",
            lists=LISTED,
        ),
    ],
    watch: Annotated[bool, Parameter(help="Print again whenever the answer changes, until the job has ended.")] = False,
    options: RowOptions = ROWS,
) -> int:
    """Say why a job waits, or what a code means.

    One word alone that is a code is taken for the code, except with --watch. For a job called gang write =gang.
    """
    if len(what) == 1 and not watch and (code := code_of(what[0])) is not None:
        fault = f" (fault: {code.fault})" if code.fault else ""
        text = f"{code.code}: {code.means}{fault}"
        state = states().get(code.code.upper().replace("-", "_"))
        if state is not None and state != code:
            text += f"\n{state.code}, the state of a job: {state.means}"
        return guarded(options, lambda: None if options.shown(frame(code), [frame(code)]) else print_out(text))

    async def work(client: AsyncClient) -> int | None:
        async def ask(name: str) -> Answer:
            try:
                return await client._wire.answer("explain", {"job": name})
            except NotFound:
                if not (job := await newest_of(client, name)):
                    raise
            return await client._wire.answer("explain", {"job": job})

        if watch:
            await _watch(client, await one_id(client, ",".join(what), "explain --watch"), options)
            return None
        operates = is_operators(client._wire.context)
        options.show_each(await ask_each(client, what, ask), partial(_explain, operates=operates))
        return None

    return with_named(options, what, work)


async def _watch(client: AsyncClient, job: str, options: RowOptions) -> None:
    """Print the job's explanation, and print it again when it has changed, until the job is over.

    It asks the leader at each event of the tenant, and at each fleet frame that shows another fleet than the one
    before.
    """
    news = asyncio.Event()
    news.set()
    frame_before: tuple[Any, ...] = ()

    def on_frame(delivery: Delivery) -> None:
        nonlocal frame_before
        try:
            frame = _decode_frame(delivery.data)
        except Refused:
            return
        now = (frame.queued, frame.running, [(row.state, row.cells) for row in frame.workers])
        if now != frame_before:
            frame_before = now
            news.set()

    subscriptions = [
        await client._wire.subscribe(client._wire.subjects.events(client.tenant), lambda _: news.set()),
        await client._wire.subscribe(client._wire.subjects.fleet_frame, on_frame),
    ]
    screen = Screen(sys.stdout)
    before: Explanation | None = None
    try:
        while before is None or before.state not in TERMINAL:
            await news.wait()
            news.clear()
            answer = await client._wire.answer("explain", {"job": job})
            if before is not None and answer.data == before.data:
                continue
            before = as_struct(Explanation, answer.data)
            if options.json or options.format:
                options.shown(answer, [answer.data])
            elif screen.live:
                fixes = fix_lines(before, operates=is_operators(client._wire.context))
                screen.draw([*explained(before).splitlines(), *fixes])
            else:
                print_out(pipe_line((job, before.state, before.reason, _why(before))))
            await asyncio.sleep(APART_S)
    finally:
        for subscription in subscriptions:
            await subscription.unsubscribe()


def _explain(data: dict[str, Any], *, operates: bool) -> None:
    why = as_struct(Explanation, data)
    print_out(explained(why))
    for line in fix_lines(why, operates=operates):
        print_err(line)


def _why(why: Explained) -> str:
    return f"{why.reason}: {why.means}" if why.reason else why.why


def explained(why: Explained) -> str:
    """Return the answer of `explain` as text for people."""
    if why.state in TERMINAL:
        rows = [
            ("replicas", shown_words(why.replicas)),
            ("code", None if why.code is None else shell_code(why.code)),
            ("why", why.why),
            ("ended", utc(why.ended_ms) if why.ended_ms else ""),
        ]
    else:
        rows = explained_rows(why)
    return facts([("job", why.job), ("state", why.state), *rows])


def explained_rows(why: Explained) -> list[tuple[str, Any]]:
    """Return why a job waits, as names and values."""
    return [
        ("serves", _serves(why)),
        ("asks", why.asks),
        ("place", _place(why) if why.position is not None else ""),
        ("waiting", many(why.waiting_replicas, "replica") if why.waiting_replicas else ""),
        ("reason", _why(why)),
        ("because", why.because),
        *after_rows(why),
        ("members", members_words(why.scaled) if why.reason != SCALED.name else ""),  # `because` says it
        ("needs", why.needs),
        ("starts", starts(why)),
        ("ends", foreseen(why.ends) if why.ends is not None else ""),
        ("workers", _steps(why.workers_left)),
        *[("held by", holder) for holder in why.held_by],
        *[("avoids", f"{device}, which failed while this job ran on it") for device in why.avoids],
        ("refused by", ", ".join(why.refused_by)),
        *[("leaves", _leaving(row)) for row in why.leaves],
        ("stalled", stalled_words(why.stalled)),
    ]


def _serves(why: Explained) -> str:
    """Return the service and its models, and how many members are ready; of none the other rows say why."""
    if not why.service or why.members_ready is None:
        return ""
    models = f" ({', '.join(why.models)})" if why.models else ""
    ready = "no member is" if not why.members_ready else f"{why.members_ready} member{_are(why.members_ready)}"
    return f"{why.service}{models}: {ready} ready for calls"


def _are(number: int) -> str:
    return " is" if number == 1 else "s are"


def _place(why: Explained) -> str:
    """Return a job's place in the queue, and its tenant's turn where several tenants wait."""
    place = f"{place_of(why)}{_age(why)}"
    if why.turn is None:
        return place
    return f"{place}, by arrival; its tenant is served as the {ordinal(why.turn)} of {why.tenants} tenants"


def _age(why: Explained) -> str:
    if why.counts_as is None:
        return ""
    waited = age(why.waited_ms or 0)
    return f"; after a wait of {waited} its priority {why.priority} has the effective value {why.counts_as}"


def starts(why: Explained) -> str:
    """Return when a job is expected to start, as `foreseen`; "" if unknown."""
    if why.starts_in_ms is not None:
        return f"not before {age(why.starts_in_ms)} from now"
    if why.starts is None:
        return f"unknown: {why.starts_unknown}" if why.starts_unknown else ""
    return foreseen(why.starts)


def foreseen(start: Start) -> str:
    """Return when something is expected: `in about 4m (in 8 of 10 cases 2m to 11m; from 40 earlier runs of the same
    command)`.

    The scheduler gives the interval only after enough runs. Where time limits bound it, it may be earlier: `at the
    latest in 25s`.
    """
    runs, p10_ms, p90_ms = start.runs, start.p10_ms, start.p90_ms
    seen = f"from {many(runs, 'earlier run')} of the same command"
    if p90_ms is not None and p90_ms < 1000:
        return "in under a second"
    if p90_ms is not None and not runs:
        # nothing was learned: what bounds it are time limits, and the graces of jobs that were asked to end
        return f"at the latest in {age(p90_ms)} (from time limits and grace periods)"
    if p90_ms is not None and p10_ms is None:
        return f"probably within {age(p90_ms)} (from time limits and {seen.removeprefix('from ')})"
    about = f"in about {age(start.p50_ms)}" if start.p50_ms >= 1000 else "in under a second"
    if p10_ms is not None and p90_ms is not None:
        return f"{about} (in 8 of 10 cases {age(p10_ms)} to {age(p90_ms)}; {seen})"
    return f"{about} (the median, {seen})" if runs else about


def _leaving(row: Leave) -> str:
    return f"{row.worker} in {age(row.in_ms)}: this worker is drained" + (f" ({row.why})" if row.why else "")


def _steps(left: dict[str, int]) -> str:
    """Return how many workers were left after each filter that removed some: `known 4 > with-free-gpus 0`."""
    steps: list[tuple[str, int]] = []
    for name, number in left.items():
        if not steps or number != steps[-1][1]:
            steps.append((name, number))
    return " > ".join(f"{REASONS[name].step if name in REASONS else name} {number}" for name, number in steps)


def fix_lines(why: Explained, *, apart: bool = False, operates: bool = False) -> list[str]:
    """Return what would help, a line for each; without a tenant, of a job that is not submitted yet, whose replicas
    may be asked for `apart`: each on a host of its own. With `operates`, the commands have the tenant's key in place
    of the operator's, which may submit nothing."""
    of = f" --nats submitter.{why.tenant}" if operates and why.tenant else here()
    word = f"{word_of(why.job)}{of}"
    if why.stalled:
        return [f"fix: {FIXES['stalled'].format(job=word)}"]
    if why.state in _LOOK:
        look = _LOOK[why.state] if not why.compacted else "moorage show {job}"
        if stopped_early(why.why):
            look = "moorage show {job} --failed; to run all that is left: moorage again {job} --failed --max-failed all"
        elif why.state == "FAILED" and why.replicas is not None:
            look = "moorage show {job} --failed"
        elif why.state == "FAILED" and was_killed(why.code) and not why.why:
            look = LOOK_KILLED
        return [f"fix: {(fix_of_end(why.why) or look).format(job=word)}"]
    tried = [_fix_line(fix, why, of, apart=apart) for fix in why.fixes]
    fix = fix_of(why.reason)
    if tried and why.reason == CLOSED.name and why.tenant:
        by_name = f"moorage admin place {word_of(why.job)} --on WORKER --tenant {why.tenant}"
        return [*tried, f"fix: or ask an operator to start it on a cordoned worker: {by_name}"]
    if tried or not fix:
        return tried
    if why.reason == HELD.name and why.tenant:
        return [f"fix: ask an operator to end the hold: {_release(why)}"]
    return [f"fix: {fix.format(job=word, asks=why.asks)}"]


def _release(why: Explained) -> str:
    what = "--queue" if why.position is not None else word_of(why.job)  # who is held itself has no place
    return f"moorage admin release {what} --tenant {why.tenant}"


def _fix_line(fix: Fix, why: Explained, of: str, *, apart: bool) -> str:
    """Return the command that would start the job now; for a job not yet submitted, the flags to change."""
    if fix.command:
        return f"fix: {fix.say}: {fix.command}"
    head = f"fix: the job would start now with this change ({fix.say})"
    if not why.tenant:
        return f"{head}: {as_words_of_new(fix, apart=apart)}"
    from moorage.client.tenant import find_tenant

    if " --tenant " not in of and " --nats submitter." not in of and why.tenant != find_tenant():
        of += f" --tenant {why.tenant}"
    return f"{head}: moorage submit --instead-of {word_of(why.job)}{of} {as_words(fix)}"
