"""The verbs that show and end jobs: show, cancel, uncancel."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec

from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import fail, say, tell
from moorage.cli.framework.interrupts import detachable
from moorage.cli.framework.options import ROWS, RowOptions, guarded, with_client
from moorage.cli.framework.render import age, facts, pipe_line, ports_words, table, utc, utc_ms
from moorage.cli.framework.screen import Screen
from moorage.cli.jobs.acceptance import say_cancel_interrupted
from moorage.cli.jobs.job_rows import (
    after_rows,
    asked_rows,
    code_cell,
    ended_by_itself,
    members_words,
    stall_event_words,
    stalled_words,
    stopped_words,
    worker_cell,
)
from moorage.cli.jobs.replica_words import shown_words
from moorage.cli.jobs.selectors import (
    ANY_JOB,
    HELP,
    LISTED,
    Chosen,
    SomeReplicas,
    ask_each,
    ids_to_cancel,
    one_id,
    replica_in,
    with_named,
)
from moorage.cli.jobs.unkept import unkept
from moorage.cli.jobs.use import WATCH_S, use_rows, use_table, use_words
from moorage.client.errors import ClientError, NotFound, stopped_early
from moorage.client.login import who
from moorage.schemas.actors import words
from moorage.schemas.capabilities import Enforced
from moorage.schemas.job import ACCEPTED, CLAIMED, RUNNING, TERMINAL
from moorage.schemas.names import EXACTLY, SIMULATED_UUID, word_of
from moorage.schemas.ranges import RANGES_SAID, count_of, format_ranges, parse_ranges
from moorage.schemas.units import many

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient
    from moorage.schemas.frames import Answer

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
                        tell(f"from now on {enforced_words(event.enforced)}")
                    if event.idle is not None:
                        tell(idle_words(event.idle.seconds, event.idle.ends_s))
                    if event.stalled is not None:
                        tell(stall_event_words(event.stalled))
                    for change in event.changes:
                        tell(pipe_line(_change_row(_as_dict(change), None)))
            return None

        from moorage.client.brought import brought

        async def ask(name: str) -> Answer:
            answer = await client._wire.answer("show", {"job": name})
            if ports := await _ports_of(client, name, answer.data):
                answer.data["ports"] = ports
            if cuts := await _cuts_of(client, name, answer.data):
                answer.data["output_cuts"] = cuts
            if words := await brought(client._wire, answer.data.get("request", {}).get("run") or {}):
                answer.data["brought"] = words
            if lines := await unkept(client, answer.data):
                answer.data["keep_unmatched"] = lines
            return answer

        async def ask_failed(name: str) -> Answer:
            from moorage.client.failures import failed_replicas

            answer = await client._wire.answer("show", {"job": name})
            answer.data["failed"] = msgspec.to_builtins(await failed_replicas(client._wire, answer.data))
            return answer

        options.show_each(
            await ask_each(client, jobs, ask_failed if failed else ask), _show_failed if failed else _show
        )
        return None

    return with_named(options, jobs, work)


async def _draw(client: AsyncClient, job: str, screen: Screen) -> None:
    """Draw the job and its use of GPUs every `WATCH_S` seconds until it has ended."""
    import asyncio

    from moorage.client.brought import brought

    files: str | None = None
    while True:
        data = (await client._wire.answer("show", {"job": job})).data
        if files is None:
            files = await brought(client._wire, data.get("request", {}).get("run") or {})
        data["brought"] = files
        lines = job_words(data).splitlines()
        if any("use" in row for row in data.get("replica_states", ())):
            with contextlib.suppress(ClientError):  # it has ended since, or its worker is away
                lines += ["", *use_table(await use_rows(client, job, None), sys.stdout).splitlines()]
        screen.draw(lines)
        if data["state"] in TERMINAL:
            return
        await asyncio.sleep(WATCH_S)


async def _ports_of(client: AsyncClient, job: str, data: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Ask the workers for the addresses of a running job's ports; by replica. A job that wants no ports has none."""
    from moorage.schemas.capabilities import driver_of

    request = data.get("request", {})
    found: dict[str, dict[str, str]] = {}
    blocks = request.get("driver_config") or (request.get("template") or {}).get("driver_config") or {}
    block = blocks.get(driver_of(data))
    if not isinstance(block, dict) or not block.get("ports"):
        return {}
    for row in data.get("replica_states", [])[:PORTS_ROWS_MAX]:
        with contextlib.suppress(ClientError):  # its worker is away, and the rest of the answer is there
            if row["state"] == RUNNING and (ports := await client.job(job).ports(row["replica"])):
                found[str(row["replica"])] = {str(own): where for own, where in ports.items()}
    return found


async def _cuts_of(client: AsyncClient, job: str, data: dict[str, Any]) -> dict[str, int | None]:
    """Ask the workers of which streams they did not keep all: the number of bytes that are missing, None if it is not
    known. Nothing is said of workers that do not answer soon."""
    import asyncio

    from moorage.client.kept_output import newest_attempts
    from moorage.client.output import STREAMS, read_page
    from moorage.client.tenant import is_operators
    from moorage.schemas.frames import StreamName

    found: dict[str, int | None] = {}

    async def ask(replica: int, attempt: int | None, stream: StreamName) -> None:
        with contextlib.suppress(ClientError):
            page = await read_page(client._wire.read, job, replica, attempt, stream, -1, 1)
            if page.truncated:
                found[f"std{stream} of replica {replica}"] = page.cut_to - page.cut_from or None

    if data.get("worker") and not is_operators(client._wire.context):
        newest = [each for each in list(newest_attempts(data).items())[:CUT_ROWS_MAX] if each[1] != 0]
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


def _cuts(data: dict[str, Any]) -> str:
    cuts = data.get("output_cuts", {})
    words = (f"{name}{'' if count is None else f' lacks {count} bytes in its middle'}" for name, count in cuts.items())
    return f"cut by output_cap_bytes, or by a full disk: {', '.join(words)}" if cuts else ""


def _ports(data: dict[str, Any]) -> str:
    ports = data.get("ports", {})
    many_of = len(ports) > 1
    return "; ".join(
        f"{f'replica {replica}: ' if many_of else ''}{ports_words(of_one)}" for replica, of_one in ports.items()
    )


def _kept_rows(data: dict[str, Any]) -> list[tuple[str, str]]:
    """Return until when an ended job's id, its history and its output are kept."""
    kept = data.get("kept")
    if not kept:
        return []
    story_ms = data.get("kept_until_ms") if data.get("compacted") else kept["history_ms"]
    return [
        ("id until", utc(kept["job_ms"])),
        *([("history until", utc(story_ms))] if story_ms is not None else []),
        *(("output until", f"{utc(until)} on {worker}") for worker, until in kept["output_ms"].items()),
    ]


def _show(data: dict[str, Any]) -> None:
    tell(job_words(data))


def _show_failed(data: dict[str, Any]) -> None:
    """Print which replicas failed, and how the others are."""
    job, rows = data["job"], data["failed"]
    say(f"job {job} {data['state']}: {shown_words(data) or many(len(rows), 'replica') + ' failed'}")
    if not rows:
        return
    cells = [
        (row["replica"], _item_cell(row["item"]), row["state"], code_cell(row["code"]), row["stderr"] or row["why"])
        for row in rows
    ]
    tell(table(["REPLICA", "ITEM", "STATE", "CODE", "LAST LINE"], cells, numbers=("REPLICA", "CODE"), wraps=True))
    early = " --max-failed all" if stopped_early(data.get("why", "")) else ""
    word = word_of(job)
    say(f"their output: moorage logs {word} --failed   run them again: moorage again {word} --failed{early}")


def _item_cell(item: Any) -> str:
    """Return an item as a cell: `lr=0.1 seed=2` of columns."""
    if item is None:
        return "-"
    return " ".join(f"{name}={each}" for name, each in item.items()) if isinstance(item, dict) else str(item)


def job_words(data: dict[str, Any]) -> str:
    """Return a job in full: facts, and a table of its state changes."""
    changes = data.get("changes", [])
    began = changes[0]["time_ms"] if changes and changes[0]["rev"] == 1 else None
    simulated = data.get("simulated") or _simulated(changes)
    request = data.get("request", {})
    about = facts(
        [
            ("job", data["job"]),
            ("tenant", data["tenant"]),
            ("state", data["state"]),
            ("simulated", "yes" if simulated else ""),
            ("gpu", data.get("gpu")),
            ("command", " ".join(request.get("run", {}).get("argv", []))),
            ("items", items_words(request)),
            ("again of", request.get("again_of")),
            ("run again as", ", ".join(data.get("again", ()))),
            ("service", service_words(request.get("service"))),
            ("priority", data.get("priority")),
            *asked_rows(request, data.get("brought", "")),
            ("age", age(data["age_ms"]) if "age_ms" in data else ""),
            ("worker", worker_cell(data)),
            ("replicas", _replicas(data)),
            ("members", members_words(data)),
            ("setup", setup_words(data)),
            ("ready", ready_words(data)),
            ("address", address_words(data)),
            ("restarts", restarts_words(data)),
            ("use", use_words(data)),
            *after_rows(data),
            ("stalled", stalled_words(data)),
            ("stopped", stopped_words(data)),
            ("enforced", "; ".join(dict.fromkeys(map(enforced_words, _levels(data))))),
            ("waits for", frozen_words(data)),
            ("ports", _ports(data)),
            ("output", _cuts(data)),
            ("code", code_cell(data.get("code"))),
            ("why", ended_by_itself(data["state"], data.get("code"), data.get("why") or "")),
            ("keep", "; ".join(data.get("keep_unmatched", ()))),
            ("kept", _kept(data)),
            *_kept_rows(data),
        ]
    )
    if not changes:
        return about
    told, left_out = _exceptions(changes)
    story = table(
        ["REV", "AFTER", "REPLICA", "TRY", "STATE", "WORKER", "CODE", "GPUS", "WHY"],
        [_change_row(change, began) for change in told],
        numbers=("REV", "AFTER", "REPLICA", "TRY", "CODE"),
        optional=("REV", "GPUS", "CODE"),
        wraps=True,
    )
    if _lacks_older(data, changes):
        story += f"\nolder changes are left out; moorage events {word_of(data['job'])} has what is kept of them"
    elif left_out:
        story += f"\n{many(left_out, 'replica')} without a failure or a second attempt left out: --json has all changes"
    return f"{about}\n\n{story}"


def _lacks_older(data: dict[str, Any], changes: list[dict[str, Any]]) -> bool:
    """Return whether an answer has the newest changes alone; of very many replicas it has those ends that are odd."""
    states = data.get("replicas", {}).get("states", {})
    unwell = sum(count for name, count in states.items() if name in TERMINAL and name != "SUCCEEDED")
    told = [change for change in changes if change["state"] in TERMINAL and change["state"] != "SUCCEEDED"]
    ends = sum(change.get("through", change["replica"]) - change["replica"] + 1 for change in told)
    return bool(changes[0]["rev"] > 1 or ends < unwell)


#: the state changes of more replicas are shown of those alone that did not go well
STORIES_MAX: Final = 16


def _exceptions(changes: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """Return the changes to show, and the number of replicas that are left out because nothing went wrong with them."""
    replicas = {change["replica"] for change in changes if change["replica"] >= 0}
    if len(replicas) <= STORIES_MAX:
        return changes, 0
    odd = {
        change["replica"]
        for change in changes
        if (change["state"] in TERMINAL and change["state"] != "SUCCEEDED") or change["attempt"] > 1
    }
    told = [change for change in changes if change["replica"] < 0 or change["replica"] in odd]
    return told, len(replicas - odd)


#: replicas in one state that `show` names
REPLICAS_NAMED_MAX: Final = 8


def _replicas(data: dict[str, Any]) -> str:
    """Return how many of several replicas are in which state; of those that failed a few numbers, too."""
    if counted := shown_words(data):
        return counted
    rows = data.get("replica_states", [])
    if len(rows) < 2:
        return ""
    counts: dict[str, list[int]] = {}
    for at, row in enumerate(rows):
        counts.setdefault(row["state"], []).append(row.get("replica", at))
    words = []
    for name, numbers in sorted(counts.items(), key=lambda found: -len(found[1])):
        few = ", ".join(map(str, numbers[:REPLICAS_NAMED_MAX])) + (", …" if len(numbers) > REPLICAS_NAMED_MAX else "")
        words.append(f"{len(numbers)} {name}" + (f" ({few})" if name in TERMINAL and name != "SUCCEEDED" else ""))
    return ", ".join(words)


def _levels(data: dict[str, Any]) -> list[Enforced]:
    """Return how strictly each replica is kept to its part of a shared GPU. Replicas with whole GPUs are left out."""
    rows = data.get("replica_states", [])
    levels = [row["enforced"] for row in rows if "enforced" in row and row.get("mode") != "exclusive"]
    return msgspec.convert(levels, list[Enforced])


def frozen_words(data: dict[str, Any]) -> str:
    """Return for which GPUs the job waits while it is frozen; "" if it waits for none."""
    gpus = [gpu for row in data.get("replica_states", []) for gpu in row.get("waits_for", ())]
    return f"{', '.join(gpus)}, which preemptible jobs may use while this job is frozen" if gpus else ""


def service_words(service: dict[str, Any] | None) -> str:
    """Return which service's calls the job answers, and how many at a time; "" if it answers none."""
    if not service:
        return ""
    calls = many(service.get("concurrency", 1), "call")
    if batch := service.get("batch"):
        calls = f"{service.get('concurrency', 1)} × {many(batch['most'], 'call')}"
    most = (service.get("queue") or {}).get("most")
    waits = "" if most is None else f", {most} may wait for each member"
    sleeps = f", sleeps after {age(idle_s)} without a call" if (idle_s := service.get("sleep_after_s")) else ""
    return f"{service['name']}, {calls} at a time{waits}{sleeps}"


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


def setup_words(data: dict[str, Any]) -> str:
    """Return what prepares a worker before a replica starts there; "" for nothing. Says so while one waits for it."""
    setup = data.get("request", {}).get("run", {}).get("setup")
    if setup is None:
        return ""
    first = str(setup.strip().splitlines()[0])
    if all(row["state"] != CLAIMED for row in [data, *data.get("replica_states", ())]):
        return first
    return f"comes first on its worker: {first} (its output: moorage logs {word_of(data['job'])})"


def ready_words(data: dict[str, Any]) -> str:
    """Return how many replicas of a job are ready for work; "" for a job without `ready`, or that has ended."""
    if "ready" not in data or data["state"] in TERMINAL:
        return ""
    of = len(data.get("replica_states", []))
    return ("yes" if data["ready"] else "no") if of == 1 else f"{data['ready']} of {many(of, 'replica')}"


def address_words(data: dict[str, Any]) -> str:
    """Return where the ports of a job are reached that its workers gave it; "" for none."""
    rows = [row for row in data.get("replica_states", []) if "address" in row]
    several = len(data.get("replica_states", [])) > 1
    return "; ".join(f"replica {row['replica']}: {row['address']}" if several else row["address"] for row in rows)


def restarts_words(data: dict[str, Any]) -> str:
    """Return how often a job that stays has started again, and how often it may; "" if it never has."""
    count = sum(row.get("restarts", 0) for row in data.get("replica_states", []))
    most = data.get("request", {}).get("run", {}).get("max_restarts")
    return "" if not count else f"{count}" if most is None else f"{count}, at most {most} of each replica"


def idle_words(seconds: int, ends_s: int) -> str:
    """Return for how long a job's GPUs have not been used, and when its worker ends the job for that."""
    ends = f"; its worker ends the job after {age(ends_s * 1000)} without use" if ends_s else ""
    return f"the job's GPUs have not been used for {age(seconds * 1000)}{ends}"


def enforced_words(enforced: Enforced) -> str:
    """Return how a job is kept to its part of a shared GPU, in words: memory and compute."""
    return f"memory {enforced.memory}, compute {enforced.compute}"


def _kept(data: dict[str, Any]) -> str:
    """Return what is still known of a job that is no longer in the scheduler's memory; "" for other jobs."""
    if not data.get("compacted"):
        return ""
    return (
        "in the history"
        if "kept_until_ms" in data
        else "only as a row of id, state and end; the job's history has been deleted"
    )


def _change_row(change: dict[str, Any], began_ms: int | None) -> list[Any]:
    return [
        change["rev"],
        utc_ms(change["time_ms"]) if began_ms is None else age(change["time_ms"] - began_ms),
        change["replica"] if change["replica"] >= 0 else "-",
        change["attempt"],
        change["state"],
        change.get("worker") or "-",
        code_cell(change.get("code")),
        len(change.get("gpus", [])) or "-",
        why_of(
            change["state"],
            ended_by_itself(change["state"], change.get("code"), change.get("why", ""))
            or at(change.get("address", "")),
            change.get("by", ""),
            change.get("said", ""),
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


def _as_dict(change: Any) -> dict[str, Any]:
    import msgspec

    data: dict[str, Any] = msgspec.to_builtins(change)
    return data


def _simulated(changes: list[dict[str, Any]]) -> bool:
    return any(gpu.startswith(SIMULATED_UUID) for change in changes for gpu in change.get("gpus", []))


def cancel(
    *jobs: Annotated[str, Parameter(help=HELP, lists=LISTED)],
    chosen: Chosen = ANY_JOB,
    reason: Annotated[str, Parameter(help="Why, as text that the job's state changes show.")] = "",
    replica: SomeReplicas = None,
    before: Annotated[
        bool,
        Parameter(
            help="Remember the cancel of an id that is not known, as its submit may be on its way: it is then refused, "
            "for a day by default. moorage uncancel lifts that."
        ),
    ] = False,
    options: RowOptions = ROWS,
) -> int:
    """Cancel jobs, whether they wait or run; returns once the cancel is in the ledger.

    An id that is not known changes nothing, and the exit code is 3. Give an id that you chose in full; of an id that
    moorage made up, the beginning is enough.
    """

    asked_last: list[str] = []
    given: Sequence[str] = jobs
    numbers = replica

    async def work(client: AsyncClient) -> int | None:
        from moorage.client.replicas import field_of, replicas_of

        only, some = replicas_of(numbers), field_of(numbers)
        names, code, known = await ids_to_cancel(client, given, chosen), None, 0
        asked = {"reason": reason, "by": who(), **some, **({"before": True} if before else {})}
        for name in names:
            asked_last[:] = [name]
            try:
                answer = await client._wire.answer("cancel", {"job": name, **asked})
            except NotFound as error:  # the others are cancelled all the same
                code = fail(error, json=options.json)
                continue
            known += 1
            if options.shown(answer, [answer.data]):
                continue
            was = answer.data["was"]
            if was == "UNKNOWN":
                remembered = age(answer.data["remembered_s"] * 1000)
                tell(f"{name}\tno such job yet; its submit is refused for {remembered}")
                say(f"lift it: moorage uncancel {word_of(name)}")
            elif was in TERMINAL:
                tell(f"{name}\tunchanged, the job had ended before: {was}")
            else:
                some_of = "" if only is None else f"replica {format_ranges(only, RANGES_SAID)}"
                if answer.data["cancelled"]:
                    did = f"cancelling what goes on of {some_of}" if some_of else "cancelling"
                else:
                    did = f"unchanged, nothing goes on of {some_of}" if some_of else "unchanged"
                tell(f"{name}\t{did}, the job was {was}")
        if len(names) != 1 and not (options.json or options.format):
            say(many(known, "job"))
        return code

    def detach() -> None:
        for name in asked_last:
            say_cancel_interrupted(name, before=before)

    def act() -> int:
        nonlocal given, numbers
        given, numbers = replica_in(jobs, replica)
        return with_named(options, given, lambda client: detachable(work(client), detach), chosen, sends=True)

    return guarded(options, act)


def uncancel(
    *jobs: Annotated[str, Parameter(help="Ids of jobs, in full.", value="JOB")], options: RowOptions = ROWS
) -> int:
    """Undo cancel --before: jobs with these ids are accepted again."""

    async def work(client: AsyncClient) -> int | None:
        for name in jobs:
            answer = await client._wire.answer("uncancel", {"job": name.removeprefix(EXACTLY)})
            if not options.shown(answer, [answer.data]):
                lifted = "its submit is accepted again" if answer.data["lifted"] else "unchanged, nothing is in its way"
                tell(f"{answer.data['job']}\t{lifted}")
        return None

    return with_client(options, work, sends=True)
