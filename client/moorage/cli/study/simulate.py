"""`moorage simulate`: runs the real scheduler's core on a trace with a virtual clock, without a server."""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import msgspec
from msgspec.structs import replace

from moorage.cli.fleet.playing import ERASED, Format, Played, configs_of, events_of, progress_of
from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import emit, print_err, print_out
from moorage.cli.framework.exit_codes import EXIT_DRIFT, EXIT_INTERRUPTED
from moorage.cli.framework.files import cannot_read, cannot_write
from moorage.cli.framework.options import LOCAL, LocalOptions, guarded
from moorage.cli.framework.render import hours, table
from moorage.client.durations import seconds
from moorage.client.errors import rejected

if TYPE_CHECKING:
    from moorage.scheduler.core.events import Order
    from moorage.testing.simulate.run import Simulated
    from moorage.testing.simulate.trace import SimHost, TraceJob

#: combinations of rankers and settings in one call: as many as the picture has colours
RUNS_MAX: Final = 7
#: hosts of a trace that an error names
HOSTS_NAMED_MAX: Final = 8

#: the first columns that tell a format, in the order in which they are looked for
_HEADS: Final[tuple[tuple[str, Format], ...]] = (
    ("vc,job,arrival_s", "philly"),
    ("name,cpu_milli,memory_mib", "openb"),
    ("at_s", "csv"),
    ("{", "own"),
)


def simulate(
    trace: Annotated[Path, Parameter(help="The jobs: JSON lines, CSV, or a published trace.")],
    /,
    *,
    fleet: Annotated[
        str | None,
        Parameter(help="The hosts: 4x8xH100+2x4xL40S, a fleet's file, or an openb node list.", value="HOSTS"),
    ] = None,
    format: Annotated[
        Format | None, Parameter(help="Format of the trace; by default read from its first line.")
    ] = None,
    cluster: Annotated[str | None, Parameter(help="Which virtual cluster of a philly trace.", value="NAME")] = None,
    ranker: Annotated[
        list[str] | None,
        Parameter(help="The ranker, which orders the hosts for a job; repeated: one run for each.", value="NAME"),
    ] = None,
    set: Annotated[
        list[str] | None,
        Parameter(help="A setting of the scheduler: key=value, or key=a,b for one run each.", value="KEY=VALUE"),
    ] = None,
    quota: Annotated[
        list[str] | None,
        Parameter(help="A tenant's limit of GPUs: acme=16; of a ledger's trace also acme=16@3d.", value="TENANT=GPUS"),
    ] = None,
    share: Annotated[
        list[str] | None,
        Parameter(help="A tenant's weight and, after a colon, guaranteed GPUs: acme=3:16.", value="TENANT=WEIGHT"),
    ] = None,
    add: Annotated[
        str | None, Parameter(help="Of a ledger's trace: hosts besides, from the beginning: 2x8xH100.", value="HOSTS")
    ] = None,
    without: Annotated[
        list[str] | None, Parameter(help="Of a ledger's trace: as if this host had never come.", value="HOST")
    ] = None,
    prove: Annotated[
        bool,
        Parameter(help="Of a ledger's trace: compare each placement with the ledger's; exit code 10 if one differs."),
    ] = False,
    shake: Annotated[
        int | None,
        Parameter(
            help="Compare what is changed with what is, on so many copies in which each job comes up to a minute "
            "sooner or later.",
            value="COPIES",
        ),
    ] = None,
    until: Annotated[str | None, Parameter(help="Stop after this much virtual time.", value="DURATION")] = None,
    jobs_csv: Annotated[
        Path | None, Parameter(help="Write one line for each job; with several runs FILE-1 and so on.", value="FILE")
    ] = None,
    timeline_csv: Annotated[
        Path | None,
        Parameter(help="Write the fleet's state over time; with several runs FILE-1 and so on.", value="FILE"),
    ] = None,
    plot: Annotated[Path | None, Parameter(help="Draw all runs as SVG.", value="FILE")] = None,
    options: LocalOptions = LOCAL,
) -> int:
    """Show what the scheduler would have done with a trace: the production core under a virtual clock.

    Prints allocation, waits, completion times and fairness, by class of request and by tenant. Several rankers or
    settings are run one after the other on the same jobs. Ctrl-C ends the current run and reports what there is. It
    needs no server, and sends nothing.

    One run is an anecdote: --shake 5 tells what a change does to mean waits in five copies, as their median and range,
    or "no clear effect".
    """

    def act() -> int:
        jobs = _jobs(trace, format, cluster)
        own = events_of(trace, format) if fleet is None or add or without or prove else None
        events = [] if own is None else own.events
        limits: dict[str, tuple[int, int | None]] = {}
        unchanged = events
        if events:
            from moorage.testing.simulate.proof import edited

            names = {event.data.get("name") for event in events if event.kind == "join"}
            for host in without or []:
                if host not in names:
                    raise rejected(
                        "invalid-argument", f"no host {host} joins in {trace}", found=host,
                        allowed=", ".join(sorted(map(str, names))[:HOSTS_NAMED_MAX]), next="name one of them",
                    )  # fmt: skip
            limits, quota_now = _timed_quotas(quota or []), list[str]()
            tenants = {job.tenant for job in jobs}
            for tenant in limits:
                if tenant not in tenants:
                    raise rejected(
                        "invalid-argument", f"no job of tenant {tenant} in {trace}", found=tenant,
                        allowed=", ".join(sorted(tenants)[:HOSTS_NAMED_MAX]), next="name one of them",
                    )  # fmt: skip
            added = [] if add is None else [replace(host, name=f"added-{host.name}") for host in _hosts(add)]
            events, hosts = edited(events, add=added, without=without or [], quotas=limits), []
        elif add or without or prove:
            raise rejected(
                "invalid-argument",
                f"{trace} says nothing of hosts and orders, to which --add, --without and --prove could refer",
                next="moorage admin trace FILE writes a trace from the ledger",
            )
        else:
            hosts, quota_now = _hosts(fleet), quota or []
        until_ms = None if until is None else int(seconds(until) * 1000)
        if until_ms is None and own is not None and "until_s" in own.head:  # what runs on then has no known end
            until_ms = int(own.head["until_s"] * 1000)
        held = {} if own is None else {str(key): str(value) for key, value in own.head.get("settings", {}).items()}
        runs = [held | run for run in settings_of(ranker or [], set or [])]
        rights = _rights(quota_now, share or [])
        if limits:
            rights.said["quota"] = " ".join(quota or [])
        files = (jobs_csv, timeline_csv, plot)
        if shake is not None:
            from moorage.cli.study.shake import shaken

            if prove or any(files):
                why = "--shake compares mean waits: it proves nothing and writes no files"
                raise rejected("invalid-argument", why, next="leave out --prove, --jobs-csv, --timeline-csv, --plot")
            edits = [f"--{name} {value}" for name, values in (
                ("add", [add] if add else []), ("without", without), ("quota", quota), ("share", share),
            ) for value in values or []]  # fmt: skip
            was, now = Played(hosts, jobs, unchanged, False), Played(hosts, jobs, events, False)
            return shaken(shake, was, now, " ".join(edits), runs, rights.orders, until_ms, as_json=options.json)
        _check_writable([file for file in files if file is not None])
        title = trace.name if cluster is None else f"{trace.name}, cluster {cluster}"
        played = Played(hosts, jobs, events, prove)
        return _simulate(trace.name, title, played, runs, rights, until_ms, files, options)

    return guarded(options, act)


def _timed_quotas(quota: list[str]) -> dict[str, tuple[int, int | None]]:
    """Return the limits of tenants with the ms from which they hold, as in `acme=16@3d`."""
    from moorage.cli.jobs.plan import quotas_of

    found: dict[str, tuple[int, int | None]] = {}
    for text in quota:
        asked, _, since = text.partition("@")
        told = quotas_of([asked]) or {}
        if isinstance(told, int):
            raise rejected("invalid-argument", f"--quota {text} names no tenant", found=text, next="--quota acme=16@3d")
        for tenant, gpus in told.items():
            found[tenant] = (int(seconds(since) * 1000) if since else 0, gpus)
    return found


def _check_writable(files: list[Path]) -> None:
    """Check that the results can be written in the end, before the long run begins. Raises `Rejected`."""
    for file in files:
        reason = "Is a directory" if file.is_dir() else None if file.parent.is_dir() else "No such folder"
        if reason is None and not os.access(file if file.exists() else file.parent, os.W_OK):
            reason = "Permission denied"
        if reason is not None:
            raise cannot_write(file, reason, "name a file in a folder that is there", "invalid-argument")


def _hosts(fleet: str | None) -> list[SimHost]:
    from moorage.system.simulated_hosts import load_hosts, simulated_hosts
    from moorage.testing.simulate.openb_jobs import openb_hosts
    from moorage.testing.simulate.trace import SimHost

    if fleet is None:
        raise rejected("invalid-argument", "no hosts to simulate", next="name the hosts: --fleet 24x8xT4")
    if fleet.endswith((".csv", ".toml", ".json")) and not os.path.isfile(fleet):
        raise rejected(
            "invalid-argument",
            f"{fleet} cannot be read: there is no such file",
            found=fleet,
            next="name a fleet's file, or write the hosts as 4x8xH100+2x4xL40S",
        )
    try:
        if fleet.endswith(".csv"):
            return openb_hosts(Path(fleet))
        found = load_hosts(Path(fleet)) if os.path.isfile(fleet) else simulated_hosts(fleet, "n")
    except ValueError as error:
        form = 'write tables as [[host]] with gpus = "8xH100" and count = 4'
        fix = form if os.path.isfile(fleet) else "write it as 4x8xH100+2x4xL40S"
        raise rejected("invalid-argument", str(error), found=fleet, next=fix) from None
    return [SimHost(host.name, host.devices, host.cpu_milli, host.memory_mib) for host in found]


def _jobs(path: Path, format: Format | None, cluster: str | None) -> list[TraceJob]:
    from moorage.testing.simulate import openb_jobs, philly, trace

    try:
        with path.open("rb") as file:
            head = file.readline(256).decode("utf-8-sig", errors="replace").lstrip()
        found = format or next((name for start, name in _HEADS if head.startswith(start)), None)
        if found is None:
            allowed = "JSON lines, or a first line as at_s,runs_s,tenant,job,gpu or vc,job,arrival_s,duration_s,num_gpu"
            raise rejected(
                "invalid-argument",
                f"{path} is not a trace in a known format",
                found=head[:60],
                allowed=allowed,
                next="name the format with --format",
            )
        if found == "philly":
            return trace.in_order(path, philly.read_philly(path, cluster or ""))
        if cluster is not None:
            raise rejected(
                "invalid-argument",
                f"{path} is not a philly trace, so --cluster has nothing to choose from",
                found=cluster,
                next="leave out --cluster",
            )
        readers = {"own": trace.read_own, "csv": trace.read_csv, "openb": openb_jobs.openb_jobs}
        return trace.in_order(path, readers[found](path))
    except OSError as error:
        raise cannot_read(path, error.strerror, "name a trace") from None


class _Rights(NamedTuple):
    """The weights, guarantees and limits of tenants: as operator's orders, and in the form of the report."""

    orders: list[Order]
    said: dict[str, str]


def _rights(quota: list[str], share: list[str]) -> _Rights:
    """Return the tenants' rights at the beginning of the trace. Raises `Rejected`, or Refused for a bad number."""
    from moorage.cli.jobs.plan import quotas_of, shares_of
    from moorage.scheduler.whatif.plan import orders_of

    quotas = quotas_of(quota) or {}
    if isinstance(quotas, int):
        raise rejected(
            "invalid-argument",
            f"--quota {quotas} names no tenant",
            found=quotas,
            next="write --quota acme=16, once for each tenant of the trace",
        )
    rows = {
        name: {"weight": row} if isinstance(row, int) else dict(zip(("weight", "gpus"), row, strict=True))
        for name, row in shares_of(share).items()
    }
    said = {name: " ".join(words) for name, words in (("quota", quota), ("share", share)) if words}
    return _Rights(orders_of(quotas, rows, "simulate"), said)


def settings_of(rankers: list[str], said: list[str]) -> list[dict[str, str]]:
    """Return the settings of each run: every combination of what was given in several."""
    from moorage.scheduler.core.config import Config
    from moorage.schemas.settings import declared

    known = declared("scheduler", Config)
    axes: dict[str, list[str]] = {}
    for key, equals, value in (text.partition("=") for text in said):
        if not equals or not key:
            raise rejected("invalid-argument", "--set needs key=value", found=key, next="--set ranker=pack")
        key = key.replace("-", "_")
        if key not in known:
            raise rejected(
                "invalid-argument",
                f"the scheduler has no setting {key!r}",
                found=key,
                allowed=", ".join(known),
                next="moorage scheduler --help shows what each is",
            )
        axes.setdefault(key, []).extend(value.split(","))
    if rankers:
        axes["ranker"] = [*axes.get("ranker", []), *(name for text in rankers for name in text.split(","))]
    if (count := math.prod(map(len, axes.values()))) > RUNS_MAX:
        raise rejected(
            "invalid-argument",
            f"{count} runs in one call",
            allowed=f"at most {RUNS_MAX}",
            next="give --set and --ranker fewer values",
        )
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def _simulate(
    name: str,
    title: str,
    played: Played,
    runs: list[dict[str, str]],
    rights: _Rights,
    until_ms: int | None,
    files: tuple[Path | None, Path | None, Path | None],
    options: LocalOptions,
) -> int:
    from moorage.cli.framework.interrupts import raise_once
    from moorage.testing.simulate.chart import Series, chart
    from moorage.testing.simulate.measures import write_jobs, write_timeline
    from moorage.testing.simulate.run import simulate as run_one

    configs = configs_of(runs)  # all are checked before the first is run
    series: list[Series] = []
    is_proven = True
    raise_once()
    for number, (run, config) in enumerate(zip(runs, configs, strict=True)):
        label = " ".join(run.values()) or config.ranker
        progress = progress_of(label)
        done = run_one(
            name,
            played.hosts,
            played.jobs,
            config,
            {**run, **rights.said},
            orders=rights.orders,
            events=played.events,
            until_ms=until_ms,
            progress=progress,
        )
        if progress is not None:
            sys.stderr.write(ERASED)
        series.append(Series(label, done.report, done.points))
        is_proven = (not played.prove or _prove(played.jobs, done, as_json=options.json)) and is_proven
        suffix = f"-{number + 1}" if len(runs) > 1 else ""
        if options.json:
            emit(done.report)
        else:
            _print_simulated(label, done)
        if files[0] is not None:
            with whole(_numbered(files[0], suffix)) as file:
                write_jobs(file, done.runs)
        if files[1] is not None:
            with whole(_numbered(files[1], suffix)) as file:
                write_timeline(file, done.points)
        if done.report.cut_at_h is not None and until_ms is None:
            break
    if files[2] is not None:
        with whole(files[2]) as file:
            file.write_text(chart(title, series), encoding="utf-8")
    if not is_proven:
        return EXIT_DRIFT
    return EXIT_INTERRUPTED if until_ms is None and series[-1].report.cut_at_h is not None else 0


def _prove(jobs: list[TraceJob], done: Simulated, *, as_json: bool) -> bool:
    """Print how many placements came out as the ledger has them, and the first that did not; return whether all did."""
    from moorage.testing.simulate.proof import prove

    proof = prove(jobs, done.placed)
    if as_json:
        emit({"kind": "proof", **msgspec.to_builtins(proof)})
        return not proof.kinds
    print_err(
        f"{proof.same:,} of {proof.placements:,} placements are the ledger's: the same ms, host and GPUs; "
        f"{proof.within_2s:,} are within 2 s"
    )
    if (first := proof.first) is not None:
        print_err(f"others: {', '.join(f'{count:,} {kind}' for kind, count in proof.kinds.items())}")
        print_err(f"the first: {first.tenant}/{first.job} {first.attempt}, {first.kind}")
        for word, place in (("then", first.then), ("now", first.now)):
            print_err(f"  {word}: " + (f"{place[0] / 1000:.3f}s on {place[1]}, slots {place[2]}" if place else "-"))
    return not proof.kinds


@contextmanager
def whole(file: Path) -> Iterator[Path]:
    """Yield the path to write to, so that the file is there whole or not at all. A pipe or a device is written
    directly.

    Raises `Rejected` if it cannot be written, as on a full disk.
    """
    part = file if file.exists() and not file.is_file() else file.with_name(f".{file.name}.part")
    try:
        yield part
        if part != file:
            part.replace(file)
    except OSError as error:
        raise cannot_write(file, error.strerror, "make room there") from None
    finally:
        if part != file:
            part.unlink(missing_ok=True)


def _numbered(path: Path, suffix: str) -> Path:
    return path.with_stem(path.stem + suffix)


def _print_simulated(label: str, done: Simulated) -> None:
    report = done.report
    cut = "" if report.cut_at_h is None else f", stopped at {report.cut_at_h:.1f} h of virtual time"
    not_so_far = "never started" if report.cut_at_h is None else "not started"
    never = f", {report.never_started:,} {not_so_far}" if report.never_started else ""
    print_err(
        f"{label}: {report.ended:,} of {report.jobs:,} jobs ended in {report.makespan_h:.1f} h of virtual time on "
        f"{report.gpus:,} GPUs"
        f"{cut}{never}; {report.allocated_percent:.1f} % of the GPU time allocated while jobs arrived, "
        f"{report.whole_percent:.1f} % in "
        f"all; fairness {report.fairness:.2f}"
    )
    for job, why in report.never.items():
        print_err(f"  {job} never started: {why}")
    if len(report.never) < report.never_started and report.never:
        print_err(
            f"  {report.never_started - len(report.never):,} more jobs never started; --jobs-csv FILE lists all jobs"
        )
    header = ["JOBS OF", "JOBS", "STARTED", "WAIT MEAN H", "P50", "P90", "MAX", "JCT MEAN H", "SLOWDOWN", "GPU HOURS"]
    groups = [("all", report.all), *report.classes.items()]
    if len(report.tenants) > 1:
        groups += [(f"tenant {name}", waits) for name, waits in report.tenants.items()]
    rows = [
        [
            name,
            waits.jobs,
            waits.started,
            hours(waits.wait_mean_h),
            hours(waits.wait_p50_h),
            hours(waits.wait_p90_h),
            hours(waits.wait_max_h),
            hours(waits.jct_mean_h),
            f"{waits.slowdown_mean:.2f}",
            f"{waits.gpu_hours:.1f}",
        ]
        for name, waits in groups
    ]
    print_out(table(header, rows, numbers=header[1:]))
