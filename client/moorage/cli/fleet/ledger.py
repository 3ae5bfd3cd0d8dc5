"""The operator's acts on the ledger as a whole: backup, restore, and the feature level of its records."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import emit, print_err, print_out
from moorage.cli.framework.files import cannot_read
from moorage.cli.framework.interrupts import run
from moorage.cli.framework.options import OF_LEDGER, ROWS, LedgerOptions, RowOptions, guarded, with_client
from moorage.cli.framework.render import age, table
from moorage.cli.framework.settings import FILE_HELP, the_file
from moorage.client.answers import FleetInfo
from moorage.client.errors import rejected
from moorage.client.reading import as_struct
from moorage.schemas.units import many

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient
    from moorage.scheduler.settings import SchedulerSettings

SETTINGS: Final = f"The schedulers' {FILE_HELP[0].lower()}{FILE_HELP[1:]}"
#: a trace with less than this part of the time asked for says so
_SPAN_MIN: Final = 0.9
#: bounds of the stream of traces
KEPT_MIN: Final = 16 * 1024**2
KEPT_MAX: Final = 1024**4
REPLICAS: Final = (
    "Copies of the ledger. Default: the schedulers' setting; without it, as many as the ledger of the backup had."
)


def backup(
    to: Annotated[Path, Parameter(help="A new file, or a folder: then the file is named by ledger and record.")],
    /,
    *,
    settings: Annotated[Path | None, Parameter(help=SETTINGS)] = None,
    options: LedgerOptions = OF_LEDGER,
) -> int:
    """Write the ledger as it is now to a file: jobs, sessions, finished ids, cursors of the request queue.

    A backup only reads the ledger, and may be made while a leader runs. The file appears whole or not at all, never
    replaces another one, and is read back before the command returns. Like a scheduler, this needs the ledger's own
    account.
    """

    def act() -> int:
        from moorage.scheduler.ledger.backup import backup as take
        from moorage.scheduler.settings import ledger_url

        held, target = scheduler_of(settings, options)
        file, header = run(take(ledger_url(held.ledger_url_file) or target or held.nats, held.prefix, to))
        if options.json:
            import msgspec

            emit({"kind": "backup", "file": str(file), **msgspec.to_builtins(header)})
        else:
            jobs, workers = many(header.jobs, "job"), many(header.workers, "worker")
            print_out(f"{file}\trecord {header.seq} of ledger {header.ledger_id}, {jobs}, {workers}")
        return 0

    return ledger_guarded(options, act)


def trace(
    to: Annotated[Path | None, Parameter(help="A new file, or - for the standard output.")] = None,
    /,
    *,
    keep: Annotated[
        str | None,
        Parameter(help="From now on keep what traces need, in a stream of so many bytes; off: no more.", value="SIZE"),
    ] = None,
    since: Annotated[
        str | None, Parameter(help="Only what came since; by default all that the ledger has.", value="DURATION")
    ] = None,
    anonymous: Annotated[
        bool, Parameter(help="Other names for tenants, jobs, hosts and workloads, and no labels.")
    ] = False,
    settings: Annotated[Path | None, Parameter(help=SETTINGS)] = None,
    options: LedgerOptions = OF_LEDGER,
) -> int:
    """Write a trace from the ledger: arrivals, hosts, operators' orders, how long each attempt ran, and where.

    It has what decides, of a command the workload's name alone, and no environment or user's label. `moorage
    simulate FILE --prove` plays it. The ledger goes back to the older of its two snapshots; what stood there comes
    first. With `--keep 1GiB` the schedulers keep what traces need in a stream of its own, some 500 bytes a job, from
    which the oldest goes; a trace then begins there. Like a scheduler, this needs the ledger's own account.
    """
    if (to is None) == (keep is None):
        raise rejected(
            "invalid-argument", "moorage admin trace writes a FILE, or takes --keep",
            allowed="one of both", next="moorage admin trace FILE, or moorage admin trace --keep 1GiB",
        )  # fmt: skip

    def turn() -> int:
        from moorage.scheduler.ledger.traced import keep as keep_traces
        from moorage.scheduler.settings import ledger_url

        assert keep is not None
        size = _kept_bytes(keep)
        held, target = scheduler_of(settings, options)
        url = ledger_url(held.ledger_url_file) or target or held.nats
        kept = run(keep_traces(url, held.prefix, size))
        if options.json:
            emit({"kind": "kept", "stream": kept, "bytes": size})
            return 0
        print_out(f"{kept}\tkeeps what traces need, up to {keep}" if size else f"{kept}\tis not kept any more")
        return 0

    def act() -> int:
        from moorage.client.durations import seconds
        from moorage.scheduler.ledger.traced import read_trace
        from moorage.scheduler.settings import ledger_url
        from moorage.testing.simulate.from_ledger import TraceWriter

        held, target = scheduler_of(settings, options)
        since_ms = None if since is None else int(seconds(since) * 1000)
        make = partial(TraceWriter, anonymous=anonymous)
        url = ledger_url(held.ledger_url_file) or target or held.nats
        written, read = run(read_trace(url, held.prefix, make, since_ms))
        assert to is not None
        if str(to) == "-":
            sys.stdout.buffer.writelines(written.lines())
        else:
            with to.open("xb") as file:
                file.writelines(written.lines())
        told = ", ".join(f"{count} {what}" for what, count in written.untold.items())
        said = f"{many(written.jobs, 'job')} of {many(written.records, 'record')} from {written.since}"
        said += f", {age(written.span_ms)}"
        print_err(said + (f"; not told: {told}" if told else ""))
        if read.is_cut and (since_ms is None or written.span_ms < since_ms):
            print_err("the stream of traces has a gap: what came before it is left out")
        if since_ms is not None and written.is_cut and written.span_ms < since_ms * _SPAN_MIN:
            longer = "the stream of traces grows" if read.from_stream else "moorage admin trace --keep 1GiB keeps more"
            print_err(f"neither ledger nor stream goes back further than that, and not {since}: {longer}")
        return 0

    return ledger_guarded(options, act if keep is None else turn)


def _kept_bytes(text: str) -> int:
    """Return the bytes that a stream of traces is to have; 0 for off. Raises `Rejected`."""
    from moorage.schemas.units import size_bytes

    if text == "off":
        return 0
    try:
        size = size_bytes(text)
    except ValueError:
        size = 0
    if not KEPT_MIN <= size <= KEPT_MAX:
        raise rejected(
            "invalid-argument", "--keep is a size or off", found=text, allowed="off, or 16MiB to 1TiB",
            next="moorage admin trace --keep 1GiB",
        )  # fmt: skip
    return size


def restore(
    file: Annotated[Path, Parameter(help="What `moorage admin backup` wrote.")],
    /,
    *,
    replace: Annotated[
        bool, Parameter(help="Delete the ledger that is there; without this it is left, and restore refuses.")
    ] = False,
    replicas: Annotated[Literal[1, 3, 5] | None, Parameter(help=REPLICAS)] = None,
    settings: Annotated[Path | None, Parameter(help=SETTINGS)] = None,
    options: LedgerOptions = OF_LEDGER,
) -> int:
    """Make a new ledger that begins with what a backup holds. Stop every scheduler first.

    The new ledger has another id, and workers accept it because it was restored: jobs that they run go on if the backup
    knows them, and are ended if it does not. What was accepted since the backup is lost: its senders must send it
    again. For lease_s + grace_s + margin_s after the first start no job is placed, because jobs that were placed after
    the backup may still run.

    With another number of copies, a backup and its restore take a ledger from one server to three, or back.
    """

    def act() -> int:
        from moorage.scheduler.follower.follower import count_the_rest
        from moorage.scheduler.ledger.backup import restore as make
        from moorage.scheduler.settings import ledger_url

        if not os.access(file, os.R_OK):  # what is written here is refused in other words
            reason = "Permission denied" if file.exists() else "No such file"
            raise cannot_read(file, reason, "name a file of moorage admin backup")
        held, target = scheduler_of(settings, options)
        users, copies = target or held.nats, replicas or configured_replicas(settings)
        ledger = ledger_url(held.ledger_url_file) or users
        made = make(
            ledger, users, held.prefix, copies, file, replace=replace, say=print_err, count_the_rest=count_the_rest
        )
        state = run(made)
        if options.json:
            emit(
                {
                    "kind": "restored",
                    "ledger_id": state.ledger_id,
                    "former": state.former_of(""),
                    "seq": state.seq,
                    "epoch": state.epoch,
                    "jobs": len(state.jobs),
                }
            )
        else:
            print_out(f"{state.ledger_id}\trestored with {many(len(state.jobs), 'job')}; start the schedulers")
        return 0

    return ledger_guarded(options, act)


def level_lines(level: int, known: Sequence[int]) -> list[str]:
    """Return the ledger's level in words, and the command that raises it if all schedulers know a newer one."""
    newest = min(known, default=level)
    how = f"to raise it: moorage admin feature-level --to {newest} --schedulers {len(known)}"
    return [f"feature level {level}", *([how] if newest > level else [])]


def feature_level(
    *,
    to: Annotated[
        int | None, Parameter(help="The level to raise it to; without it, show the level.", value="NUMBER")
    ] = None,
    schedulers: Annotated[
        int, Parameter(help="With --to: how many schedulers that know the new level must answer.", value="NUMBER")
    ] = 1,
    why: Annotated[str, Parameter(help="For the ledger.")] = "",
    options: RowOptions = ROWS,
) -> int:
    """Show the leader, the standbys and the ledger's feature level; or raise that level.

    The level says which records the ledger may have. Raise it as the last step after an upgrade of every scheduler:
    from then on the schedulers use the new features of the release. A scheduler that does not know the level stops. The
    level is never lowered, so make a backup before.
    """

    async def work(client: AsyncClient) -> int | None:
        if to is None:
            answer = await client._wire.operate("fleet")
            found = as_struct(FleetInfo, answer.data)
            rows = found.schedulers or []
            if not options.shown(answer, rows):
                cells = [
                    [
                        row.scheduler,
                        row.release,
                        row.level,
                        row.ledger,
                        "leads" if row.leads else "stands by",
                    ]
                    for row in rows
                ]
                print_out(
                    table(["SCHEDULER", "RELEASE", "KNOWS", "RECORD", "ROLE"], cells, numbers=("KNOWS", "RECORD"))
                )
                print_err("\n".join(level_lines(found.feature_level or 1, [row.level for row in rows])))
            return None
        done = await client.admin.feature_level(to, schedulers=schedulers, why=why)
        if not options.shown(done, [done]):
            print_out(f"feature level\t{done.level}{'' if done.changed else ' already'}")
        return None

    return with_client(options, work)


def scheduler_of(settings: Path | None, options: LedgerOptions) -> tuple[SchedulerSettings, str | None]:
    """Return the schedulers' settings, and the URL of the users' server if a `moorage up` is here (see
    `find_ledger`)."""
    from moorage.cli.local.processes import find_ledger
    from moorage.scheduler.settings import scheduler_settings

    held, _ = scheduler_settings({"nats": options.nats}, file=the_file(settings))
    return find_ledger(held)


def configured_replicas(settings: Path | None) -> int:
    """Return how many copies of the ledger the schedulers' settings ask for; 0 if they do not say."""
    from moorage.scheduler.settings import scheduler_settings
    from moorage.schemas.settings import DEFAULT

    said = scheduler_settings({}, file=the_file(settings))[1]["replicas"]
    return 0 if said.source == DEFAULT else int(said.value)


def ledger_guarded(options: LedgerOptions, act: Any) -> int:
    """Do the same as `guarded`, and also print errors of the ledger or of a disk as errors of the command."""

    def told() -> int | None:
        from moorage.scheduler.ledger.ledger import Deposed, LedgerBroken
        from moorage.scheduler.ledger.state_bytes import BadSnapshot

        try:
            result: int | None = act()
        except BrokenPipeError:
            raise  # who read our output has gone: that is no error of the ledger's
        except (BadSnapshot, Deposed, LedgerBroken, OSError) as error:
            at = isinstance(error, OSError) and error.filename
            text = f"{error.strerror}: {error.filename}" if at else str(error)  # type: ignore[union-attr]
            fix = "name a file that you may read or write, in an existing folder" if at else "moorage doctor"
            raise rejected("failed-precondition", text, next=fix) from None
        return result

    return guarded(options, told)
