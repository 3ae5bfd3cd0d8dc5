"""`moorage metrics`: what a monitor watches, in Prometheus's text format, printed once or served to be scraped.

It asks the leader as any operator does, so the scheduler itself needs no open port. Names follow
https://prometheus.io/docs/practices/naming/. No label holds a job or a user's label, and the number of tenants is
bounded, as is that of services, so the number of series does not grow with what is submitted.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import msgspec

from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import print_err
from moorage.cli.framework.listening import address, cannot_listen, host_and_port
from moorage.cli.framework.options import DEFAULTS, FormatOfLog, Options, guarded, with_client
from moorage.client.view.checks import running_builds
from moorage.schemas.answers.fleet import AppendFigures, FleetAnswer, WorkerInfo
from moorage.schemas.answers.letters import LettersAnswer
from moorage.schemas.answers.operators import (
    Demand,
    PromiseRow,
    ServiceCalls,
    TenantsAnswer,
    UsageAnswer,
    UsageRow,
    Waits,
)
from moorage.schemas.cells import STATES
from moorage.schemas.errors import MoorageError
from moorage.schemas.optional import optional
from moorage.schemas.release import RELEASE
from moorage.schemas.service import BATCH_SIZES, CALL_MS
from moorage.schemas.waited import WaitedAnswer, WaitedRow
from moorage.system.build import build
from moorage.system.logged import begin_log
from moorage.system.notify import managed

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from moorage.bus.contexts import Context
    from moorage.client.client import AsyncClient
    from moorage.schemas.operate import TenantRow

#: tenants that have series of their own, those with most GPUs
TENANTS_MAX: Final = 200
#: states of workers that are named one by one, at most so many of them
NOT_HEARD: Final = frozenset(("lost", "stale", "not-heard"))
LOST_MAX: Final = 100
#: answers that are younger serve the next scrape, too: several monitors cost the leader one question
FRESH_S: Final = 5.0
#: how long a leader may take to answer
ANSWER_S_MAX: Final = 8.0
#: the part of it that each answer may take which the leader itself has to wait for: a client asks again for long
BESIDE_S_MAX: Final = 2.5
#: how long a scrape waits for that answer; then it gets the result of the question before
SCRAPE_S: Final = 1.0
HOUR_S: Final = 3600
#: the backups of a folder, by how `moorage admin backup` calls them, and what says that one was restored
BACKUPS: Final = "moorage-*.backup"
RESTORED: Final = "restored"
#: in place of the names of further tenants
OTHERS: Final = "(others)"
#: how often the servers' certificates are read: they end on a day
CERTIFICATES_S: Final = 300.0
#: by the values of labels: the number in each class of a histogram, and the sum of all
_Counted = dict[tuple[str, ...], tuple[Sequence[int], float]]


def metrics(
    *,
    listen: Annotated[
        str | None,
        Parameter(
            help="Serve them at /metrics on this port until Ctrl-C; on 127.0.0.1 by default.", value="[ADDRESS:]PORT"
        ),
    ] = None,
    backups: Annotated[
        Path | None,
        Parameter(
            help="A folder of backups on this machine: tells when the newest was made, and when its file "
            "`restored` was touched, as after a drill."
        ),
    ] = None,
    log_format: FormatOfLog = "text",
    options: Options = DEFAULTS,
) -> int:
    """Print what a monitor watches, in Prometheus's text format; or with --listen, serve it at an address to be
    scraped.

    Tells GPUs by state and by model, workers, jobs, how long they waited and how they ended, tenants with their limits,
    the ledger's copies. The command fails if no leader answers; with --listen, it serves `moorage_up` 0 while none
    does. --json changes nothing. It needs an operator's key and the package prometheus-client.
    """

    def act() -> int:
        from moorage.bus.certificate_ends import certificate_ends
        from moorage.bus.target import find_context

        where = None if listen is None else host_and_port(listen)
        library = optional("prometheus_client", extra="metrics")

        async def work(client: AsyncClient) -> None:
            context = find_context(options.nats)
            if where is None:
                told = (await _ask(client))._replace(certificates=await certificate_ends(context), backups=backups)
                sys.stdout.write(library.generate_latest(_Fixed(list(families(told)))).decode())
            else:
                await _serve(client, context, backups, library, *where)

        if where is not None:
            begin_log("INFO", log_format)

        return with_client(options, work)

    return guarded(options, act)


# ------------------------------------------------------------------------------------------------ what is told


class Told(NamedTuple):
    """The leader's answers; `fleet` None: no leader answered."""

    fleet: FleetAnswer | None = None
    tenants: Sequence[TenantRow] = ()
    waits: Waits | None = None
    usage: Sequence[UsageRow] = ()
    waiting: Mapping[str, int] = {}
    ended: Mapping[str, Mapping[str, int]] = {}
    services: Sequence[ServiceCalls] = ()
    #: None: not known now
    letters: Mapping[str, int] | None = {}
    demand: Demand | None = None
    #: where waits went; None: not known now
    waited: Sequence[WaitedRow] | None = ()
    promises: Sequence[PromiseRow] = ()
    #: when certificates end, in seconds since the epoch
    certificates: Mapping[str, float] = {}
    #: a folder of backups
    backups: Path | None = None


async def _ask(client: AsyncClient) -> Told:
    fleet, answer = await client.fleet.show(), await client._wire.operate("tenants")
    told = msgspec.convert(answer.data, TenantsAnswer)
    usage, letters, waited = await _last_hour(client), await _letters(client), await _waited(client)
    return Told(
        fleet, told.tenants, told.waits, usage, told.waiting, told.ended, told.services, letters, told.demand, waited,
        promises=told.promises,
    )  # fmt: skip


async def _last_hour(client: AsyncClient) -> list[UsageRow]:
    """Return the GPU time of the last whole hour, by tenant and model; none while what counts it is behind."""
    data = await _beside(client, "usage", {"by": ["hour", "tenant", "model"], "since_s": HOUR_S})
    if data is None:
        return []
    told = msgspec.convert(data, UsageAnswer)
    return [row for row in told.rows if row.hour_ms == told.from_ms]


async def _waited(client: AsyncClient) -> list[WaitedRow] | None:
    """Return all that was ever counted of waits, by tenant, model and cause; None while what counts it is behind."""
    data = await _beside(client, "usage", {"waits": True, "ever": True})
    return None if data is None else msgspec.convert(data, WaitedAnswer).rows


async def _letters(client: AsyncClient) -> Mapping[str, int] | None:
    """Return how many dead letters each tenant has; None while their stream does not answer."""
    data = await _beside(client, "dlq", {"limit": 1})
    return None if data is None else msgspec.convert(data, LettersAnswer).counts


async def _beside(client: AsyncClient, verb: str, arguments: Mapping[str, Any]) -> Any:
    """Return the data of an answer that is not from the leader's memory; None while it has none.

    The rest is answered already, and is not to be lost with it. Raises `MoorageError` if this key may not ask.
    """
    try:
        async with asyncio.timeout(BESIDE_S_MAX):
            return (await client._wire.operate(verb, arguments)).data
    except MoorageError as error:
        if error.code == "permission-refused":
            raise
    except TimeoutError:
        pass
    return None


def families(told: Told) -> Iterator[Metric]:
    """Yield all series, made from the leader's answers. If `fleet` is None, no leader answered: then only
    `moorage_build_info`, `moorage_up` 0 and what needs no leader come: the ends of certificates, and backups."""
    fleet = told.fleet
    yield _many(
        "build_info", "The release of this command, and its build.", ("release", "build"), {(RELEASE, build()): 1}
    )
    yield _one("up", "Whether the leader answered.", fleet is not None)
    yield _many(
        "certificate_end_timestamp_seconds",
        "When a certificate ends: that of each nats-server, of the authority that this command trusts, of its own key.",
        ("certificate",),
        told.certificates,
    )
    if told.backups is not None:
        yield _one(
            "backup_timestamp_seconds",
            "When the newest backup was made; 0: none is there.",
            _made_s(told.backups, BACKUPS),
        )
        help_ = "When a backup was last restored to try it, by the file `restored` beside the backups; 0: never."
        yield _one("restore_drill_timestamp_seconds", help_, _made_s(told.backups, RESTORED))
    if fleet is None:
        return
    yield _one("epoch", "The leader's epoch: it grows with each takeover.", fleet.epoch)
    yield _one("ledger_record", "The sequence of the ledger's last record.", fleet.ledger)
    yield _one("queued_replicas", "Replicas that wait, for whatever reason.", fleet.queued)
    yield _many(
        "waiting_replicas",
        "Replicas that wait, by the reason of the first job of their group; (others): not looked at, or in a pause.",
        ("reason",),
        told.waiting,
    )
    if (lacks := told.demand) is not None:
        rows: dict[tuple[str, str, str, str, str], int] = {}
        for row in lacks.rows:
            key = (row.tenant, "|".join(row.models), row.shape, row.reason, "true" if row.more_hosts_help else "false")
            rows[key] = rows.get(key, 0) + row.gpus
        labels = ("tenant", "models", "shape", "reason", "more_hosts_help")
        yield _many("demand_gpus", "GPUs that waiting replicas ask for, and whether one more host helps.", labels, rows)
        pools: dict[str, int] = {}
        for host in lacks.idle:
            pools[host.pool] = pools.get(host.pool, 0) + 1
        yield _many("idle_hosts", "Hosts with nothing to do, by their label pool.", ("pool",), pools)
    yield _one("live_jobs", "Jobs that are not over.", fleet.live_jobs)
    yield _many(
        "ended_jobs",
        "Jobs that ended since this leader began, by tenant and final state.",
        ("tenant", "state"),
        {(tenant, state): jobs for tenant, states in told.ended.items() for state, jobs in states.items()},
        counts=True,
    )
    yield _appends(fleet.appends or AppendFigures())
    if (copies := fleet.ledger_copies) is not None:
        yield _one("ledger_copies", "Copies of the ledger that there should be.", copies.wanted)
        yield _one("ledger_copies_lacking", "Copies of the ledger that are not up to date.", len(copies.lacking))
    if (queue := fleet.request_queue) is not None:
        yield _one("request_queue_messages", "Messages that wait in the durable queue.", queue.messages)
        yield _one("request_queue_bytes", "Bytes of these messages.", queue.bytes)
        yield _one("request_queue_bytes_max", "Bytes at which the durable queue is full.", queue.bytes_max)
    rates = fleet.rates or []
    yield _many(
        "tenant_refused",
        "Messages refused since this leader began, as their tenant sent more than requests_per_s.",
        ("tenant",),
        {row.tenant: row.refused for row in rates},
        counts=True,
    )
    yield _many(
        "tenant_rationed",
        "Whether a tenant floods, so that the server delivers few of its messages to the leader.",
        ("tenant",),
        {row.tenant: int(row.rationed) for row in rates},
    )
    if (contained := fleet.contained) is not None:
        yield _many(
            "failures",
            "How often this leader itself has failed, by the kind of input on which it failed.",
            ("what",),
            contained.counts,
            counts=True,
        )
        yield _one(
            "plain_ranker",
            "Whether the leader ranks with the plain ranker, not with the one of its settings.",
            contained.plain_ranker,
        )
    if fleet.schedulers is not None:
        standbys = sum(not row.leads for row in fleet.schedulers)
        yield _one("standbys", "Schedulers that would take over from the leader.", standbys)
    yield _many(
        "running_builds",
        "Schedulers and workers that run, by their build: more than one build is a fleet amid an upgrade.",
        ("build",),
        {name: len(who) for name, who in running_builds(fleet).items()},
    )
    if (follower := fleet.follower) is not None:
        yield _one("follower_behind_records", "Records that usage and history do not have yet.", follower.behind)
        lacking = sum(records for _, _, records in follower.gaps)
        yield _one("follower_gap_records", "Records that they will never have: deleted unread.", lacking)
    if told.letters is not None:
        yield _many("dead_letters", "Queued requests that were refused, by tenant.", ("tenant",), told.letters)
    yield from _of_gpus(fleet)
    yield from _of_tenants(told.tenants)
    yield from _of_usage(told.usage)
    if (waits := told.waits) is not None:
        yield _histogram("wait_seconds", "From a job's acceptance to its first start, by GPUs asked.", "gpus", waits)
        yield _histogram("tenant_wait_seconds", "The same by tenant.", "tenant", waits)
    if told.waited is not None:
        yield from _of_waits(told.waited)
    yield from _of_promises(told.promises)
    yield from _of_services(told.services)


def _of_waits(rows: Sequence[WaitedRow]) -> Iterator[Metric]:
    """Yield where waits went: the rate of the first is the mean number of replicas that wait for a cause."""
    by_tenant = Counter[str]()
    for row in rows:
        by_tenant[row.tenant or ""] += int(row.wait_s)
    named = {name for name, _ in by_tenant.most_common(TENANTS_MAX)}
    waits, gpus = dict[tuple[str, ...], float](), dict[tuple[str, ...], float]()
    for row in rows:
        key = (row.tenant or "" if row.tenant in named else OTHERS, row.model or "", row.cause or "")
        waits[key] = waits.get(key, 0) + row.wait_s
        gpus[key] = gpus.get(key, 0) + row.gpu_s
    labels = ("tenant", "model", "cause")
    help_ = "For how long replicas waited for a cause, a gang as one; the rate is how many wait."
    yield _many("waited_seconds", help_, labels, waits, counts=True)
    yield _many("waited_gpu_seconds", "The same for each GPU that they asked for.", labels, gpus, counts=True)


def _of_promises(rows: Sequence[PromiseRow]) -> Iterator[Metric]:
    """Yield what became of promised starts, of which nine of ten are to be kept."""
    said = {(row.tenant, kept): count for row in rows for kept, count in (("yes", row.kept), ("no", row.missed))}
    help_ = "Promised starts of this leader's term, by whether they were kept; nine of ten are to be."
    yield _many("promises", help_, ("tenant", "kept"), said, counts=True)
    untold = {(row.tenant,): row.not_told for row in rows}
    help_ = "First starts after a minute or more without a promise, in this leader's term."
    yield _many("promises_not_told", help_, ("tenant",), untold, counts=True)


def _made_s(folder: Path, pattern: str) -> float:
    """Return when the newest of these files was written, in seconds since the epoch; 0 without one that can be seen."""
    found = 0.0
    for file in folder.glob(pattern):
        with contextlib.suppress(OSError):  # the oldest are removed
            found = max(found, file.stat().st_mtime)
    return found


def _of_gpus(fleet: FleetAnswer) -> Iterator[Metric]:
    kind, workers = ("state", "simulated"), fleet.workers
    yield _many("workers", "Workers by state.", kind, Counter((row.state, _sim(row)) for row in workers))
    lost = [row.worker for row in workers if row.state in NOT_HEARD][:LOST_MAX]
    yield _many(
        "worker_not_heard", "The workers that are lost, stale or not heard.", ("worker",), dict.fromkeys(lost, 1)
    )
    cells = Counter((STATES.get(cell, "shared"), _sim(row)) for row in workers for cell in row.cells)
    yield _many("gpus", "GPUs by state.", kind, cells)
    for name, help_, key in (
        ("model_gpus", "GPUs of a model.", "gpus"),
        ("model_free_gpus", "GPUs of a model that are free.", "free"),
        ("model_largest_fit_gpus", "The most GPUs of a model that one job on one host gets now.", "largest"),
    ):
        yield _many(name, help_, ("model",), {row.model: getattr(row, key) for row in fleet.fits_now})
    for name, help_, key in (
        ("model_at_work_gpus", "GPUs' worth of a model at work now, as workers read what running jobs use.", "at_work"),
        ("model_idle_gpus", "GPUs of a model that are leased and do nothing now.", "idle"),
    ):
        yield _many(name, help_, ("model",), {row.model: getattr(row, key) for row in fleet.used_now})
    help_ = "Running jobs without output whose GPUs have done no work for their stall_s."
    yield _one("stalled_jobs", help_, fleet.stalled_jobs)


def _of_tenants(tenants: Sequence[TenantRow]) -> Iterator[Metric]:
    yield _one("tenants", "Tenants with jobs, limits or shares; those with most GPUs have series.", len(tenants))
    rows = sorted(tenants, key=lambda row: (-row.gpus, -row.jobs, row.tenant))[:TENANTS_MAX]
    label = ("tenant",)
    yield _many("tenant_live_jobs", "A tenant's jobs that are not over.", label, {row.tenant: row.jobs for row in rows})
    yield _many("tenant_leased_gpus", "GPUs that a tenant leases.", label, {row.tenant: row.gpus for row in rows})
    held = {row.tenant: row.hold is not None for row in rows}
    yield _many("tenant_held", "Whether an operator holds a tenant's queue.", label, held)
    limits = {row.tenant: row.limit.gpus for row in rows if row.limit is not None and row.limit.gpus}
    yield _many("tenant_limit_gpus", "GPUs that a tenant may lease at most.", label, limits)


def _of_usage(rows: Sequence[UsageRow]) -> Iterator[Metric]:
    most = sorted(rows, key=lambda row: -row.gpu_s)[:TENANTS_MAX]
    for name, help_, key in (
        ("granted_gpu_seconds", "GPU seconds granted in the last whole hour of UTC.", "gpu_s"),
        (
            "used_gpu_seconds",
            "GPU seconds at work in that hour, as workers measured them of what ended.",
            "used_gpu_s",
        ),
    ):
        values = {(row.tenant, row.model): getattr(row, key) for row in most}
        yield _many(f"tenant_{name}", help_, ("tenant", "model"), values)


def _of_services(rows: Sequence[ServiceCalls]) -> Iterator[Metric]:
    label, by = ("tenant", "service"), {(row.tenant, row.service): row for row in rows}
    help_ = "Members of a service that take calls now."
    yield _many("service_members", help_, label, {key: row.members for key, row in by.items()})
    for name, help_, field in (
        ("calls", "Calls of a service that are over, in this leader's term, however they ended.", "calls"),
        ("refused", "Calls that were refused, because all members that were asked are full.", "refused"),
        ("woken", "How often a caller had the first member of a service started.", "woken"),
    ):
        values = {key: getattr(row, field) for key, row in by.items()}
        yield _many(f"service_{name}", help_, label, values, counts=True)
    errors = {(*key, code): number for key, row in by.items() for code, number in row.errors.items()}
    help_ = "Calls of a service that were answered with an error, by its code."
    yield _many("service_errors", help_, (*label, "code"), errors, counts=True)
    seconds = [f"{ms / 1000:g}" for ms in CALL_MS]
    for name, help_, bounds, classes, total, unit in (
        ("wait_seconds", "How long calls of a service waited for a place.", seconds, "waited", "waited_ms", 1000),
        ("run_seconds", "How long calls of a service ran.", seconds, "ran", "ran_ms", 1000),
        ("batch_calls", "Calls in a batch that a service got.", list(map(str, BATCH_SIZES)), "batches", "batched", 1),
    ):
        counted: _Counted = {
            key: (getattr(row, classes), getattr(row, total) / unit)
            for key, row in by.items()
            if any(getattr(row, classes))
        }
        yield _classes(f"service_{name}", help_, label, bounds, counted)


def _one(name: str, help_: str, value: float) -> Metric:
    return _many(name, help_, (), {(): value})


def _many(name: str, help_: str, labels: tuple[str, ...], rows: Mapping[Any, float], *, counts: bool = False) -> Metric:
    """Return the gauge `name`, or with `counts` the counter, with a value for each row. A row's key is its label's
    value, or a tuple of them for several labels."""
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

    family = (CounterMetricFamily if counts else GaugeMetricFamily)(f"moorage_{name}", help_, labels=labels)
    for values, value in sorted(rows.items()):
        family.add_metric(values if isinstance(values, tuple) else (values,), value)
    return family


def _appends(told: AppendFigures) -> Metric:
    from prometheus_client.metrics_core import SummaryMetricFamily

    help_ = "How long this leader's appends to the ledger took, until they were acknowledged as stored."
    return SummaryMetricFamily("moorage_ledger_append_seconds", help_, count_value=told.records, sum_value=told.seconds)


def _histogram(name: str, help_: str, label: str, waits: Waits) -> Metric:
    """Return the waits as a histogram by one label, `tenant` or `gpus`; the rows that differ only in the other one are
    added up."""
    counted: _Counted = {}
    for value in sorted({getattr(row, label) for row in waits.rows}):
        rows = [row for row in waits.rows if getattr(row, label) == value]
        jobs = [sum(counts) for counts in zip(*(row.jobs for row in rows), strict=True)]
        counted[value,] = jobs, sum(row.sum_s for row in rows)
    return _classes(name, help_, (label,), [f"{bound:g}" for bound in waits.buckets_s], counted)


def _classes(
    name: str,
    help_: str,
    labels: tuple[str, ...],
    bounds: Sequence[str],
    counted: _Counted,
) -> Metric:
    """Return a histogram with these upper bounds of its classes, and one more class above the last."""
    from prometheus_client.metrics_core import HistogramMetricFamily

    family = HistogramMetricFamily(f"moorage_{name}", help_, labels=labels)
    for values, (numbers, total) in counted.items():
        family.add_metric(values, list(zip([*bounds, "+Inf"], accumulate(numbers), strict=True)), total)
    return family


def _sim(worker: WorkerInfo) -> str:
    return "true" if worker.simulated else "false"


# ------------------------------------------------------------------------------------------------- who is told


class _Fixed:
    """A list of families in the form in which prometheus_client reads it."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


class _Scraped:
    """Asks the leader when it is scraped. prometheus_client calls `collect` from its own threads.

    A scrape that gets no answer within `SCRAPE_S` has the result of the question before it: a silent leader is seen by
    the next scrape, whatever the monitor's time-out.
    """

    def __init__(self, client: AsyncClient, context: Context, backups: Path | None = None) -> None:
        self._client = client
        self._context = context
        self._backups = backups
        self._certificates: Mapping[str, float] = {}
        self._certificates_read_s = -CERTIFICATES_S
        self._loop = asyncio.get_running_loop()
        self._families: list[Metric] = list(families(Told()))
        self._asked_s = -FRESH_S
        self._asking: asyncio.Task[None] | None = None
        self._answered = True

    def collect(self) -> list[Metric]:
        return asyncio.run_coroutine_threadsafe(self._read(), self._loop).result()

    async def _read(self) -> list[Metric]:
        if self._asking is None and time.monotonic() - self._asked_s >= FRESH_S:
            self._asking = asyncio.create_task(self._ask())
        if self._asking is not None:
            await asyncio.wait({self._asking}, timeout=SCRAPE_S)
        return self._families

    async def _ask(self) -> None:
        try:
            told = await self._try()
            told = told._replace(certificates=await self._ends(), backups=self._backups)
            self._families = list(families(told))
            self._asked_s = time.monotonic()
        finally:
            self._asking = None

    async def _ends(self) -> Mapping[str, float]:
        from moorage.bus.certificate_ends import certificate_ends

        if time.monotonic() - self._certificates_read_s >= CERTIFICATES_S:
            with contextlib.suppress(MoorageError):  # a file that is being replaced
                self._certificates = await certificate_ends(self._context)
            self._certificates_read_s = time.monotonic()
        return self._certificates

    async def _try(self) -> Told:
        try:
            async with asyncio.timeout(ANSWER_S_MAX):
                found = await _ask(self._client)
        except (MoorageError, TimeoutError) as error:
            if self._answered:
                print_err(
                    "no leader answers, so the metrics of the fleet are missing: "
                    f"{error or f'not within {ANSWER_S_MAX:g} s'}"
                )
            self._answered = False
            return Told()
        if not self._answered:
            print_err("the leader answers again")
        self._answered = True
        return found


async def _serve(
    client: AsyncClient, context: Context, backups: Path | None, library: Any, host: str, port: int
) -> None:
    """Serve the metrics until it is cancelled. Raises `MoorageError` if its key may not ask, or if it may not listen at
    that address."""
    try:
        await _ask(client)
    except MoorageError as error:
        if error.problem.fault == "caller":  # a key without this right has it no later either
            raise
        print_err(f"no leader answers yet: {error}")
    try:
        server, thread = library.start_http_server(port, host, _Scraped(client, context, backups))
    except OSError as error:
        raise cannot_listen(host, port, error) from None
    print_err(f"metrics at {address(host, server.server_address[1])}/metrics, until Ctrl-C")
    serving = asyncio.Event()
    serving.set()
    try:
        async with managed(serving):
            await asyncio.Event().wait()
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()
        await asyncio.to_thread(thread.join)
