"""`moorage show`: a job's request, state and all state changes, as words and as rows."""

from __future__ import annotations

import contextlib
import shutil
import sys
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec

from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import print_err, print_out, word_here
from moorage.cli.framework.options import ROWS, RowOptions
from moorage.cli.framework.render import age, facts, pipe_line, ports_words, table, utc, utc_ms
from moorage.cli.framework.screen import Screen
from moorage.cli.jobs.asked_rows import asked_rows, service_words
from moorage.cli.jobs.asked_rows import words as command_words
from moorage.cli.jobs.grid_lines import grid_lines
from moorage.cli.jobs.job_rows import (
    after_rows,
    code_cell,
    end_of,
    ended_by_itself,
    members_words,
    stall_event_words,
    stalled_words,
    stopped_words,
    worker_cell,
)
from moorage.cli.jobs.replica_words import shown_words
from moorage.cli.jobs.selectors import (
    HELP,
    LISTED,
    ask_each,
    one_id,
    with_named,
)
from moorage.cli.jobs.spent import promised_words, spent_rows, waited_words
from moorage.cli.jobs.unkept import unkept
from moorage.cli.jobs.use import WATCH_S, use_rows, use_table, use_words
from moorage.client.answers import JobInfo
from moorage.client.errors import ClientError, FailedReplica, stopped_early
from moorage.client.reading import as_struct
from moorage.client.reported_words import reported_words
from moorage.schemas.actors import words
from moorage.schemas.capabilities import Enforced
from moorage.schemas.job import ACCEPTED, CLAIMED, RUNNING, TERMINAL
from moorage.schemas.names import SIMULATED_UUID
from moorage.schemas.ranges import count_of, parse_ranges
from moorage.schemas.units import many
from moorage.schemas.waited import WaitedPart

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient
    from moorage.schemas.answers.jobs import ShownJob
    from moorage.schemas.frames import Answer, Change

#: replicas whose workers are asked for their ports
PORTS_ROWS_MAX: Final = 64
#: most replicas whose workers are asked whether they kept all of the output, and how long `show` waits for that
CUT_ROWS_MAX: Final = 4
CUT_S_MAX: Final = 1.0


def show(
    *jobs: Annotated[str, Parameter(help=HELP, lists=LISTED)],
    watch: Annotated[
        bool,
        Parameter(
            help="Of one job, until it has ended: drawn again with its use of GPUs; in a pipe, a line for each change."
        ),
    ] = False,
    failed: Annotated[
        bool,
        Parameter(help="Which replicas failed: the item of each, its code, and the last line that it wrote to stderr."),
    ] = False,
    options: RowOptions = ROWS,
) -> int:
    """Show jobs: request, state and all state changes."""

    async def work(client: AsyncClient) -> int | None:
        if watch:
            name = await one_id(client, ",".join(jobs), "show --watch")
            if (screen := Screen(sys.stdout)).live and not options.json and options.format is None:
                await _draw(client, name, screen)
                return None
            async for event in client.job(name).events():
                if not options.shown(event, [event]):
                    if event.enforced is not None and not event.changes:
                        print_out(f"from now on {enforced_words(event.enforced)}")
                    if event.idle is not None:
                        print_out(idle_words(event.idle.seconds, event.idle.ends_s))
                    if event.stalled is not None:
                        print_out(stall_event_words(event.stalled))
                    for change in event.changes:
                        print_out(pipe_line(_change_row(change, None)))
            return None

        from moorage.client.brought import brought
        from moorage.client.waited import waited_of

        async def ask(name: str) -> Answer:
            answer = await client._wire.answer("show", {"job": name})
            shown = as_struct(JobInfo, answer.data)
            found = Found(
                ports=await _ports_of(client, shown),
                output_cuts=await _cuts_of(client, shown),
                brought=await brought(client._wire, shown.run),
                keep_unmatched=await unkept(client, shown),
                waited=await waited_of(client, shown),
            )
            answer.data.update(msgspec.to_builtins(found))
            return answer

        async def ask_failed(name: str) -> Answer:
            from moorage.client.failures import failed_replicas

            answer = await client._wire.answer("show", {"job": name})
            answer.data["failed"] = msgspec.to_builtins(
                await failed_replicas(client._wire, as_struct(JobInfo, answer.data))
            )
            return answer

        options.show_each(
            await ask_each(client, jobs, ask_failed if failed else ask), _show_failed if failed else _show
        )
        return None

    return with_named(options, jobs, work)


class Found(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What `show` finds besides the scheduler's answer: from workers, and from what is stored of the job."""

    ports: dict[str, dict[str, str]] = {}  # by replica: where each of its ports is reached
    output_cuts: dict[str, int | None] = {}  # by stream: bytes that its worker did not keep; None: their number is lost
    brought: str = ""  # the files that it brought, in words
    waited: list[WaitedPart] = []  # where its waits went
    keep_unmatched: list[str] = []  # a line for each pattern of `keep` that matched nothing


NOTHING_FOUND: Final = Found()


async def _draw(client: AsyncClient, job: str, screen: Screen) -> None:
    """Draw the job and its use of GPUs every `WATCH_S` seconds until it has ended."""
    import asyncio

    from moorage.client.brought import brought

    found: Found | None = None
    while True:
        shown = await client._wire.show(job)
        if found is None:
            found = Found(brought=await brought(client._wire, shown.run))
        lines = job_words(shown, found).splitlines()
        if any(row.use for row in shown.replica_states):
            with contextlib.suppress(ClientError):  # it has ended since, or its worker is away
                lines += ["", *use_table(await use_rows(client, job, None), sys.stdout).splitlines()]
        screen.draw(lines)
        if shown.state in TERMINAL:
            return
        await asyncio.sleep(WATCH_S)


async def _ports_of(client: AsyncClient, shown: JobInfo) -> dict[str, dict[str, str]]:
    """Ask the workers for the addresses of a running job's ports; by replica. A job that wants no ports has none."""
    request = shown.asked
    found: dict[str, dict[str, str]] = {}
    blocks = request.get("driver_config") or (request.get("template") or {}).get("driver_config") or {}
    block = blocks.get(shown.driver)
    if not isinstance(block, dict) or not block.get("ports"):
        return {}
    for row in shown.replica_states[:PORTS_ROWS_MAX]:
        with contextlib.suppress(ClientError):  # its worker is away, and the rest of the answer is there
            if row.state == RUNNING and (ports := await client.job(shown.job).ports(row.replica)):
                found[str(row.replica)] = {str(own): where for own, where in ports.items()}
    return found


async def _cuts_of(client: AsyncClient, shown: JobInfo) -> dict[str, int | None]:
    """Ask the workers of which streams they did not keep all: the number of bytes that are missing, None if it is not
    known. Nothing is said of workers that do not answer soon. It reads no byte: that would be told to auditors."""
    import asyncio

    from moorage.client.kept_output import newest_attempts
    from moorage.client.output import STREAMS, read_page
    from moorage.client.tenant import is_operators
    from moorage.schemas.frames import LOG_OFFSET_MAX, StreamName

    found: dict[str, int | None] = {}

    async def ask(replica: int, attempt: int | None, stream: StreamName) -> None:
        with contextlib.suppress(ClientError):
            page = await read_page(client._wire.read, shown.job, replica, attempt, stream, LOG_OFFSET_MAX, 1)
            if page.truncated:
                found[f"std{stream} of replica {replica}"] = page.cut_to - page.cut_from or None

    if shown.worker and not is_operators(client._wire.context):
        newest = [each for each in list(newest_attempts(shown).items())[:CUT_ROWS_MAX] if each[1] != 0]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CUT_S_MAX):
                await asyncio.gather(
                    *(
                        ask(replica, attempt, stream)
                        for replica, attempt in newest
                        if attempt != 0
                        for stream in STREAMS
                    )
                )
    return dict(sorted(found.items()))


def _cuts(cuts: dict[str, int | None]) -> str:
    words = (f"{name}{'' if count is None else f' lacks {count} bytes in its middle'}" for name, count in cuts.items())
    return f"cut by output_cap_bytes, or by a full disk: {', '.join(words)}" if cuts else ""


def _ports(ports: dict[str, dict[str, str]]) -> str:
    many_of = len(ports) > 1
    return "; ".join(
        f"{f'replica {replica}: ' if many_of else ''}{ports_words(of_one)}" for replica, of_one in ports.items()
    )


def _kept_rows(shown: ShownJob) -> list[tuple[str, str]]:
    """Return until when an ended job's id, its history and its output are kept."""
    kept = shown.kept
    if kept is None:
        return []
    history_ms = shown.kept_until_ms if shown.compacted else kept.history_ms
    return [
        ("id until", utc(kept.job_ms)),
        *([("history until", utc(history_ms))] if history_ms is not None else []),
        *(("output until", f"{utc(until)} on {worker}") for worker, until in kept.output_ms.items()),
    ]


def _show(data: dict[str, Any]) -> None:
    print_out(job_words(as_struct(JobInfo, data), msgspec.convert(data, Found)))


def _show_failed(data: dict[str, Any]) -> None:
    """Print which replicas failed, and how the others are."""
    shown, rows = as_struct(JobInfo, data), msgspec.convert(data["failed"], list[FailedReplica])
    print_err(f"job {shown.job} {shown.state}: {shown_words(shown.replicas) or many(len(rows), 'replica') + ' failed'}")
    if not rows:
        return
    cells = [(row.replica, item_cell(row.item), row.state, code_cell(row.code), row.stderr or row.why) for row in rows]
    print_out(table(["REPLICA", "ITEM", "STATE", "CODE", "LAST LINE"], cells, numbers=("REPLICA", "CODE"), wraps=True))
    early = " --max-failed all" if stopped_early(shown.why) else ""
    word = word_here(shown.job)
    print_err(f"their output: moorage logs {word} --failed   run them again: moorage again {word} --failed{early}")


def refused_words(shown: ShownJob) -> str:
    """Return why a line that a running job reported was refused last; "" if none was."""
    found = [each for each in shown.replica_states if each.report_refused]
    if not found:
        return ""
    of = f"replica {found[0].replica}: " if len(shown.replica_states) > 1 else ""
    return f"{of}{found[0].report_refused}"


def item_cell(item: Any) -> str:
    """Return an item as a cell: `lr=0.1 seed=2` of columns."""
    if item is None:
        return "-"
    return " ".join(f"{name}={each}" for name, each in item.items()) if isinstance(item, dict) else str(item)


def job_words(shown: JobInfo, found: Found = NOTHING_FOUND) -> str:
    """Return a job in full: facts, and a table of its state changes."""
    changes = shown.changes
    began = changes[0].time_ms if changes and changes[0].rev == 1 else None
    request = shown.asked
    about = facts(
        [
            ("job", shown.job),
            ("tenant", shown.tenant),
            ("state", shown.state),
            ("simulated", "yes" if shown.simulated or _simulated(changes) else ""),
            ("gpu", shown.gpu),
            ("command", command_words(shown.run.get("argv", ()))),
            ("items", items_words(request)),
            ("again of", request.get("again_of")),
            ("run again as", ", ".join(shown.again)),
            ("service", service_words(request.get("service"))),
            ("priority", shown.priority),
            *asked_rows(request, found.brought),
            ("age", age(shown.age_ms) if shown.rev else ""),
            *spent_rows(shown),
            ("promised", promised_words(shown.promised)),
            ("waited", waited_words(shown.waited or found.waited, shown)),
            ("worker", worker_cell(shown)),
            ("replicas", _replicas(shown)),
            ("began on", _workers(shown)),
            ("members", members_words(shown.scaled)),
            ("setup", setup_words(shown)),
            ("ready", ready_words(shown)),
            ("address", address_words(shown)),
            ("restarts", restarts_words(shown)),
            ("tried again", tries_words(shown)),
            ("from", began_words(shown)),
            ("stored", stored_words(shown)),
            ("use", use_words(shown.use)),
            ("reported", reported_words(shown.reported, of_several=shown.replicas is not None)),
            ("not reported", refused_words(shown)),
            *after_rows(shown),
            ("stalled", stalled_words(shown.stalled)),
            ("stopped", stopped_words(shown)),
            ("enforced", "; ".join(dict.fromkeys(map(enforced_words, _levels(shown))))),
            ("waits for", frozen_words(shown)),
            ("ports", _ports(found.ports)),
            ("output", _cuts(found.output_cuts)),
            ("code", code_cell(shown.code)),
            ("why", end_of(shown)),
            ("keep", "; ".join(found.keep_unmatched)),
            ("kept", _kept(shown)),
            *_kept_rows(shown),
        ]
    )
    if sys.stdout.isatty() and (lines := grid_lines(shown, shutil.get_terminal_size().columns)):
        about += "\n\n" + "\n".join(lines)
    if not changes:
        return about
    rows, left_out = _exceptions(changes)
    history = table(
        ["REV", "AFTER", "REPLICA", "TRY", "STATE", "WORKER", "CODE", "GPUS", "WHY"],
        [_change_row(change, began) for change in rows],
        numbers=("REV", "AFTER", "REPLICA", "TRY", "CODE"),
        optional=("REV", "GPUS", "CODE"),
        wraps=True,
    )
    if _lacks_older(shown):
        history += f"\nolder changes are left out; moorage events {word_here(shown.job)} has what is kept of them"
    elif left_out:
        history += (
            f"\n{many(left_out, 'replica')} without a failure or a second attempt left out: --json has all changes"
        )
    return f"{about}\n\n{history}"


def _lacks_older(shown: ShownJob) -> bool:
    """Return whether an answer has the newest changes alone; of very many replicas it has those ends that are odd."""
    states = {} if shown.replicas is None else shown.replicas.states
    unwell = sum(count for name, count in states.items() if name in TERMINAL and name != "SUCCEEDED")
    odd = [change for change in shown.changes if change.state in TERMINAL and change.state != "SUCCEEDED"]
    ends = sum((change.replica if change.through is None else change.through) - change.replica + 1 for change in odd)
    return shown.changes[0].rev > 1 or ends < unwell


#: the state changes of more replicas are shown of those alone that did not go well
HISTORIES_MAX: Final = 16


def _exceptions(changes: list[Change]) -> tuple[list[Change], int]:
    """Return the changes to show, and the number of replicas that are left out because nothing went wrong with them."""
    replicas = {change.replica for change in changes if change.replica >= 0}
    if len(replicas) <= HISTORIES_MAX:
        return changes, 0
    odd = {
        change.replica
        for change in changes
        if (change.state in TERMINAL and change.state != "SUCCEEDED") or change.attempt > 1
    }
    return [change for change in changes if change.replica < 0 or change.replica in odd], len(replicas - odd)


#: replicas in one state that `show` names
REPLICAS_NAMED_MAX: Final = 8


def _replicas(shown: ShownJob) -> str:
    """Return how many of several replicas are in which state; of those that failed a few numbers, too."""
    if counted := shown_words(shown.replicas):
        return counted
    rows = shown.replica_states
    if len(rows) < 2:
        return ""
    counts: dict[str, list[int]] = {}
    for row in rows:
        counts.setdefault(row.state, []).append(row.replica)
    words = []
    for name, numbers in sorted(counts.items(), key=lambda found: -len(found[1])):
        few = ", ".join(map(str, numbers[:REPLICAS_NAMED_MAX])) + (", …" if len(numbers) > REPLICAS_NAMED_MAX else "")
        words.append(f"{len(numbers)} {name}" + (f" ({few})" if name in TERMINAL and name != "SUCCEEDED" else ""))
    return ", ".join(words)


def _workers(shown: ShownJob) -> str | None:
    """Return on which workers a job for each worker began, and how far it came: first those where it failed."""
    if shown.request is None or not shown.request.each_worker:
        return None
    rows = [row for row in shown.replica_states if row.worker or row.ran_on]
    rows.sort(key=lambda row: (row.state == "SUCCEEDED", row.state not in TERMINAL, row.replica))
    words = [f"{row.worker or row.ran_on} {row.state} ({row.replica})" for row in rows[:REPLICAS_NAMED_MAX]]
    return ", ".join(words) + ", …" * (len(rows) > REPLICAS_NAMED_MAX)


def _levels(shown: ShownJob) -> list[Enforced]:
    """Return how strictly each replica is kept to its part of a shared GPU. Replicas with whole GPUs are left out."""
    return [row.enforced for row in shown.replica_states if row.enforced is not None and row.mode != "exclusive"]


def frozen_words(shown: ShownJob) -> str:
    """Return for which GPUs the job waits while it is frozen; "" if it waits for none."""
    gpus = [gpu for row in shown.replica_states for gpu in row.waits_for]
    return f"{', '.join(gpus)}, which preemptible jobs may use while this job is frozen" if gpus else ""


def items_words(request: dict[str, Any]) -> str:
    """Return how many items a job's replicas have and where they are: `10 of 100, in its request`; "" if none."""
    items = request.get("run", {}).get("items")
    if isinstance(items, dict):
        return f"{items['file']}, one of its files"
    if items is None:
        return ""
    indices = request.get("indices")
    some = "" if indices is None else f"{count_of(parse_ranges(indices))} of "
    return f"{some}{len(items)}, in its request"


def setup_words(shown: JobInfo) -> str:
    """Return what prepares a worker before a replica starts there; "" for nothing. Says so while one waits for it."""
    setup = shown.run.get("setup")
    if setup is None:
        return ""
    first = setup if setup.isprintable() else command_words((setup,))
    if CLAIMED not in (shown.state, *(row.state for row in shown.replica_states)):
        return first
    return f"comes first on its worker: {first} (its output: moorage logs {word_here(shown.job)})"


def ready_words(shown: ShownJob) -> str:
    """Return how many replicas of a job are ready for work; "" for a job without `ready`, or that has ended."""
    if shown.ready is None or shown.state in TERMINAL:
        return ""
    of = len(shown.replica_states)
    return ("yes" if shown.ready else "no") if of == 1 else f"{shown.ready} of {many(of, 'replica')}"


def began_words(shown: ShownJob) -> str:
    """Return from which checkpoints the running attempts of a job began: `the checkpoint of 2026-11-20T14:03:02Z`."""
    of = {row.replica: row.checkpoint for row in shown.replica_states if row.checkpoint is not None}
    found = {
        replica: f"the checkpoint of {utc(each.from_ms)}{_step_words(shown, each.from_step)}"
        if each.from_ms is not None
        else f"the checkpoint of attempt {each.from_attempt}{_step_words(shown, each.from_step)}"
        for replica, each in of.items()
        if each.from_attempt is not None
    }
    return _by_replica(found, shown)


def stored_words(shown: ShownJob) -> str:
    """Return when the attempts of a job have stored their newest checkpoint while they run, and why none is newer."""
    found = dict[int, str]()
    for row in shown.replica_states:
        if (each := row.checkpoint) is not None:
            stored = (
                ""
                if each.stored_ms is None
                else f"the checkpoint of {utc(each.stored_ms)}{_step_words(shown, each.step)}"
            )
            failed = f"none{' since' if stored else ''}: {each.not_stored}" if each.not_stored else ""
            if words := "; ".join(filter(None, (stored, failed))):
                found[row.replica] = words
    return _by_replica(found, shown)


def _step_words(shown: ShownJob, step: int | None) -> str:
    """Return the step that the job's own names say: without them that of a gang is a moment."""
    is_moment = shown.request is not None and shown.request.workload.checkpoint_step is None
    return "" if step is None or is_moment else f", step {step}"


def _by_replica(found: dict[int, str], shown: ShownJob) -> str:
    """Return the words of each replica in a line, of a few of many."""
    if len(shown.replica_states) < 2:
        return "".join(found.values())
    few = [f"{replica}: {words}" for replica, words in sorted(found.items())[:REPLICAS_NAMED_MAX]]
    return "; ".join(few) + (", …" if len(found) > REPLICAS_NAMED_MAX else "")


def address_words(shown: ShownJob) -> str:
    """Return where the ports of a job are reached that its workers gave it; "" for none."""
    rows = [row for row in shown.replica_states if row.address]
    several = len(shown.replica_states) > 1
    return "; ".join(f"replica {row.replica}: {row.address}" if several else row.address for row in rows)


def restarts_words(shown: JobInfo) -> str:
    """Return how often a job that stays has started again, and how often it may; "" if it never has."""
    count = sum(row.restarts for row in shown.replica_states)
    most = shown.run.get("max_restarts")
    return "" if not count else f"{count}" if most is None else f"{count}, at most {most} of each replica"


def tries_words(shown: JobInfo) -> str:
    """Return how often a job was tried again by its rows of `retry`, of several replicas the most of one; "" for
    none."""
    most: dict[str, list[int]] = {}
    for row in shown.replica_states:
        for causes, (count, times) in row.tries.items():
            most[causes] = max(most.get(causes, [0, times]), [count, times])
    return "; ".join(f"{causes}: {count} of {times}" for causes, (count, times) in most.items() if count)


def idle_words(seconds: int, ends_s: int) -> str:
    """Return for how long a job's GPUs have not been used, and when its worker ends the job for that."""
    ends = f"; its worker ends the job after {age(ends_s * 1000)} without use" if ends_s else ""
    return f"the job's GPUs have not been used for {age(seconds * 1000)}{ends}"


def enforced_words(enforced: Enforced) -> str:
    """Return how a job is kept to its part of a shared GPU, in words: memory and compute."""
    return f"memory {enforced.memory}, compute {enforced.compute}"


def _kept(shown: ShownJob) -> str:
    """Return what is still known of a job that is no longer in the scheduler's memory; "" for other jobs."""
    if not shown.compacted:
        return ""
    return (
        "in the history"
        if shown.kept_until_ms is not None
        else "only as a row of id, state and end; the job's history has been deleted"
    )


def _change_row(change: Change, began_ms: int | None) -> list[Any]:
    return [
        change.rev,
        utc_ms(change.time_ms) if began_ms is None else age(change.time_ms - began_ms),
        change.replica if change.replica >= 0 else "-",
        change.attempt,
        change.state,
        change.worker or "-",
        code_cell(change.code),
        len(change.gpus) or "-",
        why_of(
            change.state,
            ended_by_itself(change.state, change.code, change.why) or at(change.address),
            change.by,
            change.said,
        ),
    ]


def at(address: str) -> str:
    """Return where a replica is reached, as the reason column tells it; "" without an address."""
    return f"at {address}" if address else ""


def why_of(state: str, why: str, by: str, said: str) -> str:
    """Return the reason of a state; it names the user if a tenant or an operator caused it."""
    if by in ("", "worker") or state == ACCEPTED:
        return why or "-"
    actor = words(by, said)
    return f"{why} ({actor})" if why else f"({actor})"


def _simulated(changes: list[Change]) -> bool:
    return any(gpu.startswith(SIMULATED_UUID) for change in changes for gpu in change.gpus)
