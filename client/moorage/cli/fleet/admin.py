"""The operator's acts on jobs and tenants: `moorage admin hold` and its sisters."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

from moorage.cli.fleet.usage import weights_of
from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import here, print_err, print_out
from moorage.cli.framework.options import ROWS, RowOptions, guarded, with_client
from moorage.cli.framework.render import age, table, utc
from moorage.cli.jobs.flag_values import mebibytes, warn_of_decimal
from moorage.cli.jobs.selectors import HELP, LISTED, LIVE, SomeReplicas, ids_of, replica_in
from moorage.client.durations import exact, seconds
from moorage.client.errors import Rejected, rejected
from moorage.schemas.actors import words
from moorage.schemas.errors import MoorageError
from moorage.schemas.names import word_of
from moorage.schemas.units import many
from moorage.schemas.ways import words as came_words

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient
    from moorage.schemas.answers.fleet import WorkerInfo
    from moorage.schemas.answers.operators import ActRow
    from moorage.schemas.operate import Done, Hold, Limit, Share


@dataclass(frozen=True)
class TenantOptions(RowOptions):
    """The common options, for verbs that an operator uses: the tenant has to be named."""

    tenant: Annotated[
        str | None, Parameter(help="The tenant; needed, unless $MOORAGE_TENANT names it.", value="NAME")
    ] = None


OF_TENANT: Final = TenantOptions()
WHY: Final = "The reason; show, explain and the ledger have it."
#: tenants that a note names
OTHERS_MAX: Final = 8
QUEUE: Final = "The tenant's whole queue, future jobs included, instead of single jobs."


def hold(
    *jobs: Annotated[str, Parameter(help=HELP, lists=LISTED)],
    queue: Annotated[bool, Parameter(help=QUEUE)] = False,
    why: Annotated[str, Parameter(help=WHY)] = "",
    options: RowOptions = ROWS,
) -> int:
    """Keep waiting jobs from being placed; running attempts go on.

    The time limits of a job on hold keep counting, so it may expire. If a job on hold is running, a failed attempt is
    not tried again during the hold. To take the job off its GPUs, hold it and then requeue it.
    """

    async def work(client: AsyncClient) -> int | None:
        if not _one_of(jobs, queue, "hold"):
            done = await client.admin.hold(why=why)
            if not options.shown(done, [done]):
                gpus = f", its running jobs ({many(done.gpus, 'GPU')}) go on" if done.gpus else ""
                print_out(f"tenant {done.tenant}\tqueue {_now('on hold', done)}{_by(done.hold)}{gpus}")
                print_err(f"undo: moorage admin release --queue --tenant {done.tenant}{here(tenant=False)}")
            return None
        await _each(client, jobs, lambda name: client.admin.hold(name, why=why), options, _held, undo="release")
        return None

    return with_client(options, work)


def _held(done: Done) -> str:
    goes_on = f", {many(done.members, 'running replica')} {_goes(done.members)} on" if done.members else ""
    return f"{_now('on hold', done)}{_by(done.hold)}, the job is {done.state}{goes_on}"


def release(
    *jobs: Annotated[str, Parameter(help=HELP, lists=LISTED)],
    queue: Annotated[bool, Parameter(help=QUEUE)] = False,
    worker: Annotated[
        str | None, Parameter(help="Instead of jobs: put this worker's unhealthy GPUs back to use.")
    ] = None,
    gpu: Annotated[
        list[int] | None, Parameter(help="Only this GPU of the worker, by its place in CELLS, from 0.")
    ] = None,
    why: Annotated[str, Parameter(help=WHY)] = "",
    options: RowOptions = ROWS,
) -> int:
    """Undo hold; or return a worker's GPUs to use, after they failed or kept memory of an ended job.

    After the queue is released, jobs that were held one by one stay on hold. A GPU whose own readings still show a
    fault is taken out of use again at once.
    """

    async def work(client: AsyncClient) -> int | None:
        if gpu and worker is None:
            raise _ambiguous("--gpu needs --worker: it names a GPU of that worker", "release")
        if worker is not None and (jobs or queue):
            raise _ambiguous("release takes jobs, or --queue, or --worker", "release")
        if worker is not None:
            done = await client.admin.release_worker(worker, slots=gpu or None, why=why)
            if not options.shown(done, [done]):
                gpus = ", ".join(map(str, done.slots))
                print_out(f"{worker}\t{f'GPU {gpus} released' if done.changed else 'has no unhealthy GPU to release'}")
            return None
        if not _one_of(jobs, queue, "release"):
            done = await client.admin.release(why=why)
            if not options.shown(done, [done]):
                print_out(f"tenant {done.tenant}\t{'queue released' if done.changed else 'queue was not on hold'}")
            return None
        await _each(client, jobs, lambda name: client.admin.release(name, why=why), options, _released)
        return None

    return with_client(options, work)


def _released(done: Done) -> str:
    return f"{'released' if done.changed else 'was not on hold'}, the job is {done.state}"


def requeue(
    *jobs: Annotated[str, Parameter(help=HELP, lists=LISTED)],
    why: Annotated[str, Parameter(help=WHY)] = "",
    replica: SomeReplicas = None,
    options: RowOptions = ROWS,
) -> int:
    """End running jobs, within their grace, and queue them for a new attempt.

    This costs no retry. A replica of a lost worker (LOST_KEPT) is queued again at once: with this command you state
    that it no longer runs there.
    """

    async def work(client: AsyncClient) -> int | None:
        words, numbers = replica_in(jobs, replica)
        await _each(
            client, words, lambda name: client.admin.requeue(name, why=why, replica=numbers), options, _requeued
        )
        return None

    return with_client(options, work)


def _requeued(done: Done) -> str:
    did = f"requeued {many(done.members or 0, 'replica')}" if done.changed else "unchanged"
    return f"{did}, the job was {done.state}"


def place(
    *jobs: Annotated[str, Parameter(help=HELP, lists=LISTED)],
    on: Annotated[str, Parameter(help="The worker, also a cordoned one.", value="WORKER")],
    options: RowOptions = ROWS,
) -> int:
    """Start waiting jobs on this worker now, although it is cordoned, before jobs that come earlier.

    As many replicas as have room there start, or a whole gang; the others wait as before. What the job asks for and its
    tenant's limits hold. So a host that is cordoned can be tried before it is opened, and no other job gets there.
    """

    async def work(client: AsyncClient) -> int | None:
        await _each(client, jobs, lambda name: client.admin.place(name, on), options, _placed)
        return None

    return with_client(options, work)


def _placed(done: Done) -> str:
    return f"{many(done.members or 0, 'replica')} placed on {done.worker}, the job was {done.state}"


def freeze(
    *jobs: Annotated[str, Parameter(help=HELP, lists=LISTED)],
    why: Annotated[str, Parameter(help=WHY)] = "",
    options: RowOptions = ROWS,
) -> int:
    """Suspend running jobs, and move their GPU memory to their hosts' RAM.

    A job is FROZEN once its worker has reported it. It holds no GPU then: preemptible jobs may use those that it had,
    until it is resumed. Its host's memory stays its own, and its time limits keep counting. A job that cannot be frozen
    runs on, and show has the reason. A freeze needs NVIDIA's driver 570 or newer, and RAM for all of the job's GPU
    memory. Gangs, jobs that share their GPUs and jobs in containers cannot be frozen.
    """

    async def work(client: AsyncClient) -> int | None:
        await _each(client, jobs, lambda name: client.admin.freeze(name, why=why), options, _freezes, undo="resume")
        return None

    return with_client(options, work)


def _freezes(done: Done) -> str:
    did = f"{many(done.members or 0, 'replica')} asked to freeze" if done.changed else "was asked before"
    return f"{did}, the job was {done.state}"


def resume(
    *jobs: Annotated[str, Parameter(help=HELP, lists=LISTED)],
    why: Annotated[str, Parameter(help=WHY)] = "",
    options: RowOptions = ROWS,
) -> int:
    """Undo freeze: frozen jobs continue where they were suspended.

    If a job's memory cannot be put back, its attempt is lost. The job is tried again, as after a lost worker.
    """

    async def work(client: AsyncClient) -> int | None:
        await _each(client, jobs, lambda name: client.admin.resume(name, why=why), options, _resumes)
        return None

    return with_client(options, work)


def _resumes(done: Done) -> str:
    did = f"{many(done.members or 0, 'replica')} asked to resume" if done.changed else "unchanged"
    return f"{did}, the job was {done.state}"


def priority(
    *jobs: Annotated[str, Parameter(help=HELP, lists=LISTED)],
    to: Annotated[int, Parameter(help="0..100, higher first; a request's own is 50 unless it says.", value="NUMBER")],
    why: Annotated[str, Parameter(help=WHY)] = "",
    options: RowOptions = ROWS,
) -> int:
    """Change the priority of jobs. It replaces the priority of their requests."""

    async def work(client: AsyncClient) -> int | None:
        await _each(client, jobs, lambda name: client.admin.priority(name, to, why=why), options, _prioritized)
        return None

    return with_client(options, work)


def _prioritized(done: Done) -> str:
    return f"priority {done.priority}{'' if done.changed else ' already'}, the job is {done.state}"


def time_limit(
    *jobs: Annotated[str, Parameter(help=HELP, lists=LISTED)],
    to: Annotated[
        str,
        Parameter(help="Such as 3h, from each attempt's start on; +2h or -30m: than they have.", value="DURATION"),
    ],
    why: Annotated[str, Parameter(help=WHY)] = "",
    options: RowOptions = ROWS,
) -> int:
    """Change the time limit of what runs of jobs, and of their later attempts.

    It may go beyond the tenant's own limit, and past a reservation, which is made anew.
    """

    async def work(client: AsyncClient) -> int | None:
        await _each(client, jobs, lambda name: client.admin.time_limit(name, to, why=why), options, _relimited)
        return None

    return with_client(options, work)


def _relimited(done: Done) -> str:
    limit = "" if done.timeout_s is None else f" {exact(done.timeout_s)}"
    return f"time limit{limit}{'' if done.changed else ' already'}, the job is {done.state}"


def resize(
    *jobs: Annotated[str, Parameter(help=HELP, lists=LISTED)],
    compute: Annotated[str | None, Parameter(help="Compute of each GPU, such as 40%.", value="PERCENT")] = None,
    memory: Annotated[str | None, Parameter(help="Memory of each GPU, such as 8Gi or 8192M.", value="SIZE")] = None,
    why: Annotated[str, Parameter(help=WHY)] = "",
    options: RowOptions = ROWS,
) -> int:
    """Change the part of shared GPUs that jobs have.

    The change is refused if the other sharers leave no room for it. A running attempt takes it at once if the worker
    has its limiter on; but if jobs share by mps, new compute comes with the next attempt. Under an MPS daemon of the
    worker, new memory is refused while an attempt runs (requeue the job first). Otherwise the scheduler only counts the
    new part. The worker's memory guard ends an attempt that uses more memory than its new part. Later attempts of the
    job have the new part.
    """

    async def work(client: AsyncClient) -> int | None:
        percent, mib = _part_of(compute, memory)

        async def act(name: str) -> Done:
            return await client.admin.resize(name, compute_percent=percent, memory_mib=mib, why=why)

        await _each(client, jobs, act, options, _resized)
        return None

    return guarded(options, lambda: with_client(options, work))


#: how attempts take a new part, as the command says it
_TAKES: Final = {
    "live": "takes effect at once: the limiter enforces the new share",
    "next-attempt": "takes effect with the next attempt: MPS cannot change the share of a running process",
    "live next-attempt": "takes effect at once for memory, which the limiter enforces; and with the next attempt for"
    " compute: MPS cannot change the share of a running process",
    "counted": "takes effect in the scheduler's count only: no limiter enforces the share on the running processes",
}


def _resized(done: Done) -> str:
    if done.resized is None:
        return "resized"
    part = f"{done.resized.compute_percent} % of compute"
    part += f", {done.resized.memory_mib} MiB of memory" if done.resized.memory_mib else ""
    takes = [
        f"for {many(count, 'running attempt')} it {_TAKES.get(how, how)}"
        for how, count in sorted(done.resized.attempts.items())
    ]
    return "; ".join([f"{part} of each GPU{'' if done.changed else ' already'}, the job is {done.state}", *takes])


def limit(
    *,
    gpus: Annotated[
        str | None,
        Parameter(help="The most GPUs that the tenant may lease at once; none removes the limit.", value="NUMBER"),
    ] = None,
    jobs: Annotated[
        str | None,
        Parameter(help="The most jobs of the tenant that have not ended; none removes the limit.", value="NUMBER"),
    ] = None,
    cores: Annotated[
        str | None, Parameter(help="The most cores of hosts that its jobs ask for at once.", value="NUMBER")
    ] = None,
    memory: Annotated[
        str | None, Parameter(help="The most memory of hosts that its jobs ask for at once: 2Ti.", value="SIZE")
    ] = None,
    running: Annotated[
        str | None, Parameter(help="The most replicas on workers at once; a gang counts as one.", value="NUMBER")
    ] = None,
    running_per_key: Annotated[
        str | None, Parameter(help="The most replicas on workers of each --fair-key.", value="NUMBER")
    ] = None,
    job_gpus: Annotated[
        str | None, Parameter(help="The most GPUs that one job may ask for at once.", value="NUMBER")
    ] = None,
    gpus_of: Annotated[
        list[str] | None,
        Parameter(help="The most GPUs of a model at once; H100=none removes that limit.", value="MODEL=NUMBER"),
    ] = None,
    time_limit: Annotated[
        str | None, Parameter(help="The longest --time-limit of a job, which has to give one.", value="DURATION")
    ] = None,
    gpu_hours: Annotated[
        str | None,
        Parameter(
            help="A budget of GPU-hours, as 5000/month. Once it is spent, jobs with GPUs wait for the next one; with "
            ",refuse they are refused, with ,preemptible they start as preemptible ones.",
            value="HOURS/day|week|month[,refuse|,preemptible]",
        ),
    ] = None,
    gpu_weights: Annotated[
        list[str] | None,
        Parameter(help="What a GPU of a model counts in --gpu-hours; L4=none is 1 again.", value="MODEL=NUMBER"),
    ] = None,
    why: Annotated[str, Parameter(help=WHY)] = "",
    options: TenantOptions = OF_TENANT,
) -> int:
    """Limit a tenant: what it may have at once, how large and long its jobs may be, what it may spend.

    Beyond a limit of GPUs, cores, memory or running replicas, jobs wait with the reason `limit`, and beyond a budget
    with `budget`. What could never start is refused. Beyond the limit of jobs, a submit is refused and requests in the
    durable queue wait. Each limit but a budget is a number, or none, which removes it. Jobs that already exceed a new
    limit are not ended. To let none of a tenant's jobs start, hold its queue: moorage admin hold.
    """

    async def work(client: AsyncClient) -> int | None:
        given = {"gpus": gpus, "jobs": jobs, "running": running, "running_per_key": running_per_key}
        given["job_gpus"] = job_gpus
        bounds: dict[str, Any] = {
            name: _bound_of(f"--{name.replace('_', '-')}", word, client.tenant) for name, word in given.items()
        }
        bounds["gpus_of"] = _models("--gpus-of", gpus_of, lambda name, word: _bound_of(name, word, client.tenant) or 0)
        bounds["gpu_weights"] = _models("--gpu-weights", gpu_weights, _weight)
        bounds |= {"cores": _cores(cores), "memory_mib": _memory(memory), "time_limit": _longest(time_limit)}
        done = await client.admin.limit(**bounds, **_budget(gpu_hours), why=why)
        if not options.shown(done, [done]):
            print_out(f"tenant {done.tenant}\t{_bounds(done.limit)}{'' if done.changed else ' already'}")
            if done.limit is not None and 0 < done.limit.gpus < done.gpus:
                print_err(
                    f"the tenant leases {many(done.gpus, 'GPU')} now, and the jobs on them go on; no waiting job with "
                    f"GPUs starts until it leases fewer than {done.limit.gpus}"
                )
            await _warn_of_unknown(client)
        return None

    return guarded(options, lambda: with_client(_of_a_tenant(options, "limit"), work))


def counter(
    name: Annotated[str, Parameter(help="Its name, as matlab; without one, all are listed.")] = "",
    number: Annotated[str, Parameter(help="How many there are; none removes it.")] = "",
    /,
    *,
    per_tenant: Annotated[bool, Parameter(help="So many for each tenant, not in all.")] = False,
    why: Annotated[str, Parameter(help=WHY)] = "",
    options: RowOptions = ROWS,
) -> int:
    """Set how many there are of what jobs take with --uses NAME=1: licences, calls of a rate-limited interface.

    A job takes them from its placement until its GPUs are free, and waits with the reason `counter` until enough are
    left. What uses them goes on if there are fewer. Without a name, list them with how many are in use.
    """

    async def work(client: AsyncClient) -> int | None:
        if not number:
            rows = [each for each in await client.admin.counters() if not name or each.name == name]
            if not options.shown({"counters": rows}, rows):
                cells = [[each.name, each.used, each.most, each.per, words(each.by, each.said)] for each in rows]
                if cells:
                    print_out(table(["NAME", "USED", "OF", "PER", "BY"], cells, numbers=("USED", "OF")))
                else:
                    print_err("there is no counter" + f" {name}" * bool(name))
            return None
        if number != "none" and not (number.isascii() and number.isdecimal() and int(number[:8])):
            raise rejected(
                "invalid-argument", f"{number} is not how many there are", found=number,
                allowed="a number above 0, or none", next=f"moorage admin counter {name} 20",
            )  # fmt: skip
        most = 0 if number == "none" else int(number[:8])
        done = await client.admin.counter(name, most, per="tenant" if per_tenant else "fleet", why=why)
        if not options.shown(done, [done]):
            found = done.counter
            said = "no counter" if found is None else f"{found.used} of {found.most} in use"
            print_out(f"{name}\t{said}{'' if done.changed else ' already'}")
        return None

    def act() -> int:
        if not number and name and "=" in name:
            raise rejected(
                "invalid-argument", "how many there are stands behind a blank", found=name,
                next=f"moorage admin counter {' '.join(name.split('=', 1))}",
            )  # fmt: skip
        return with_client(options, work)

    return guarded(options, act)


def share(
    *,
    weight: Annotated[int | None, Parameter(help="Weight in the fair share; 1 by default.", value="NUMBER")] = None,
    gpus: Annotated[
        int | None, Parameter(help="Guaranteed GPUs, lent to other tenants while idle; 0 removes them.", value="NUMBER")
    ] = None,
    why: Annotated[str, Parameter(help=WHY)] = "",
    options: TenantOptions = OF_TENANT,
) -> int:
    """Set a tenant's share: its weight, and the GPUs that it is guaranteed.

    Within a priority, tenants that want more than there is get GPUs in proportion to their weights, and past usage
    counts. Others may borrow guaranteed GPUs while they are idle. The most that a tenant may have is its limit.
    """

    async def work(client: AsyncClient) -> int | None:
        done = await client.admin.share(weight=weight, gpus=gpus, why=why)
        if not options.shown(done, [done]):
            print_out(f"tenant {done.tenant}\t{_share(done.share)}{'' if done.changed else ' already'}")
            with contextlib.suppress(MoorageError):  # the share is set: a warning that cannot be made is no error
                if gpus and (warning := beyond_fleet(gpus, (await client.fleet.show()).workers)):
                    print_err(warning)
            await _warn_of_unknown(client)
        return None

    return guarded(options, lambda: with_client(_of_a_tenant(options, "share"), work))


def tenants(*, options: RowOptions = ROWS) -> int:
    """List the tenants with jobs, leases, holds, limits or shares; those with most GPUs first.

    USED is a tenant's recent use, as a number of GPUs in constant use. It stays 0 until the first tenant gets a share.
    """

    async def work(client: AsyncClient) -> int | None:
        import msgspec

        from moorage.schemas.answers.operators import TenantsAnswer

        answer = await client._wire.operate("tenants")
        rows = msgspec.convert(answer.data, TenantsAnswer).tenants
        if options.shown(answer, rows):
            return None
        if not rows:
            print_err("no tenant has jobs, leases, a hold, a limit or a share")
            return None
        cells = [
            [
                row.tenant,
                row.jobs,
                row.gpus,
                _bounds(row.limit),
                _share(row.share) if row.share is not None else "",
                f"{row.usage_milli / 1000:.1f}",
                _by(row.hold, "") if row.hold is not None else "",
            ]
            for row in rows
        ]
        header = ["TENANT", "JOBS", "GPUS", "LIMIT", "SHARE", "USED", "HELD"]
        print_out(table(header, cells, numbers=("JOBS", "GPUS", "USED")))
        return None

    return with_client(options, work)


def demand(*, options: RowOptions = ROWS) -> int:
    """Show what the fleet lacks, by tenant, shape and reason, and which hosts have nothing to do.

    HELPS says whether one more host may end the wait: a host like those that are there, or of a shape of the
    scheduler's setting growing. What waits for a limit, a hold or another job waits with more hosts, too.
    """

    async def work(client: AsyncClient) -> int | None:
        import msgspec

        found = await client.admin.demand()
        told = {"kind": "demand", **msgspec.to_builtins(found)}
        if options.shown(told, found.rows):
            return None
        if found.rows:
            cells = [
                [
                    row.tenant,
                    row.shape,
                    row.replicas,
                    row.gpus,
                    age(row.for_ms),
                    "yes" if row.more_hosts_help else "no",
                    row.reason,
                ]
                for row in found.rows
            ]
            header = ["TENANT", "SHAPE", "WAIT", "GPUS", "FOR", "HELPS", "REASON"]
            print_out(table(header, cells, numbers=("WAIT", "GPUS", "FOR")))
        else:
            print_err("nothing waits")
        idle = [f"{row.worker}{f' ({row.pool})' if row.pool else ''} {age(row.idle_ms)}" for row in found.idle]
        print_err(
            f"{many(found.gpus, 'GPU')} would be used if there were more hosts; idle: {', '.join(idle) or 'none'}"
        )
        return None

    return with_client(options, work)


def acts(
    *,
    since: Annotated[str | None, Parameter(help="How far back to begin: 2h, 7d.", value="DURATION")] = None,
    by: Annotated[str, Parameter(help="Only those of this operator, or of this name without keys.", value="NAME")] = "",
    verb: Annotated[str, Parameter(help="Only this order, as drain, limit or hold.", value="VERB")] = "",
    after: Annotated[
        str | None,
        Parameter(help="All behind this place, the oldest first: `next` of an earlier answer, or 0.", value="PLACE"),
    ] = None,
    options: RowOptions = ROWS,
) -> int:
    """List the newest orders of operators that changed something, at most 500: when, who, what and why.

    Also what tenants did that concerns others: commands in running jobs (exec), and who read the output of a job
    (logs), or what it left (rescue), that another person submitted. Such a read is listed once in ten minutes, and is
    lost if the scheduler ends before it is saved. Kept are the newest 10,000 orders, and as many of these. To export
    them, ask with --json and --after. Acts on dead letters are in the scheduler's log. CAME says how an order reached
    the leader: import, from the account and the key that nats-server stamped; subject, where only that operator may
    publish. Any other is unproven: on an open server, without a program that waits for an answer, or not recorded.
    """

    async def work(client: AsyncClient) -> None:
        import msgspec

        from moorage.client.durations import seconds
        from moorage.schemas.answers.operators import ActsAnswer

        asked = {"since_s": None if since is None else seconds(since), "by": by or None, "verb": verb or None}
        asked |= {} if after is None else {"after": after}
        answer = await client._wire.operate("acts", asked)
        while after is not None and answer.data["left_out"]:
            page = await client._wire.operate("acts", {**asked, "after": answer.data["next"]})
            answer = msgspec.structs.replace(page, data={**page.data, "acts": answer.data["acts"] + page.data["acts"]})
        told = msgspec.convert(answer.data, ActsAnswer)
        if options.shown(answer, told.acts):
            return
        if told.acts:
            header = ["UTC", "BY", "CAME", "VERB", "WHAT", "WHY"]
            cells = [
                [utc(row.at_ms), words(row.by, row.said), came_words(row.came), row.verb, about(row), row.why]
                for row in told.acts
            ]
            print_out(table(header, cells, optional=("WHY",), shortened=("WHAT", "CAME")))
        else:
            print_err("no operator has changed anything" + (f" since {utc(told.from_ms)}" if told.from_ms else ""))
        if told.left_out:
            print_err(f"{told.left_out} older ones are not shown: narrow it by --since, --by or --verb")
        for from_ms, until_ms in told.gaps:
            print_err(f"not known: from {utc(from_ms)} to {utc(until_ms)}: a restore, or what moorage doctor says")

    return with_client(options, work)


def about(row: ActRow) -> str:
    """Return what an order is about, in words: `acme/train 60`, `n07 left by 2026-11-20T12:00:00Z`."""
    where = f"{row.tenant}/{row.job}" if row.job else row.worker or row.tenant
    times = {"from": row.from_ms, "left by": row.leave_ms, "until": row.until_ms}
    moments = [f"{name} {utc(ms)}" for name, ms in times.items() if ms and (name != "from" or ms != row.at_ms)]
    return " ".join(filter(None, (where, row.what, ", ".join(moments))))


# --------------------------------------------------------------------------------------------------------------- inside


async def _warn_of_unknown(client: AsyncClient) -> None:
    """Say so if the tenant has no jobs: its name may be mistyped, since the scheduler knows tenants by their jobs."""
    with contextlib.suppress(MoorageError):  # what was ordered is done
        rows = await client.admin.tenants()
        if not any(row.jobs for row in rows if row.tenant == client.tenant):
            others = ", ".join([row.tenant for row in rows if row.jobs][:OTHERS_MAX])
            print_err(
                f"note: tenant {client.tenant} has no jobs now" + (f"; those that have: {others}" if others else "")
            )


async def _each(
    client: AsyncClient,
    jobs: Sequence[str],
    act: Callable[[str], Awaitable[Done]],
    options: RowOptions,
    told: Callable[[Done], str],
    undo: str = "",
) -> None:
    """Act on each job, and print what was done. The verb `undo` is named as the way to take it back."""
    names, changed = await ids_of(client, jobs, acts=True, states=LIVE), list[str]()
    for name in names:
        done = await act(name)
        if done.changed:
            changed.append(name)
        if not options.shown(done, [done]):
            print_out(f"{name}\t{told(done)}")
    if options.json or options.format:
        return
    if len(names) != 1:
        print_err(many(len(names), "job"))
    if undo and changed:
        print_err(
            f"undo: moorage admin {undo} {','.join(map(word_of, changed))} --tenant {client.tenant}{here(tenant=False)}"
        )


def _one_of(jobs: Sequence[str], queue: bool, verb: str) -> bool:
    """Return whether single jobs are named. Raises `Rejected` for both or neither: a whole queue must be named."""
    if bool(jobs) == queue:
        raise _ambiguous(f"{verb} takes jobs, or --queue for all that a tenant has", verb)
    return bool(jobs)


def _of_a_tenant(options: RowOptions, verb: str) -> RowOptions:
    """Return the options if they or the environment name a tenant, `default` included. Raises `Rejected`."""
    from moorage.client.tenant import TENANT_VARIABLE, named_tenant

    if not named_tenant(options.settled().tenant):
        raise rejected(
            "invalid-argument",
            f"{verb} needs --tenant",
            field="$.tenant",
            next=f"moorage admin {verb} --tenant NAME …, or set {TENANT_VARIABLE}; moorage admin tenants lists them",
        )
    return options


def _part_of(compute: str | None, memory: str | None) -> tuple[int | None, int | None]:
    """Return a part of a GPU as a GPU token spells it, in percent and MiB. Raises `Rejected`."""
    from moorage.schemas.gpu import parse_share

    words = [word for word in (compute, memory) if word is not None]
    try:
        share = parse_share(",".join(words), " ".join(words)) if words else None
    except ValueError as error:
        raise rejected("invalid-argument", str(error), next="moorage admin resize --help") from None
    if share is None or (compute or "%")[-1:] != "%" or (memory or "M")[-1:] == "%":
        said = "resize takes --compute in percent, --memory in G or M, or both"
        raise rejected("invalid-argument", said, found=" ".join(words), next="moorage admin resize --help")
    if memory is not None:
        warn_of_decimal(memory, share.memory_mib)
    return share.compute_percent if compute else None, share.memory_mib if memory else None


def _bound_of(option: str, word: str | None, tenant: str) -> int | None:
    """Return a limit as on the wire: 0 (no limit) for `none`, None if `word` is None. Raises `Rejected` for any other
    word than a number above 0.
    """
    if word is None:
        return None
    if word == "none":
        return 0
    is_number = word.isascii() and word.isdecimal()
    if is_number and int(word):
        return int(word)
    is_zero = is_number
    raise rejected(
        "invalid-argument",
        f"{option} {word} is not a limit"
        + (": to let no job of the tenant start, put its queue on hold" if is_zero else ""),
        found=word,
        allowed="a number above 0, or none",
        next=(
            f"moorage admin hold --queue --tenant {tenant} to let none of its jobs start; {option} none to remove "
            "its limit"
        )
        if is_zero
        else f"{option} 16, or {option} none to remove the limit",
    )


def _ambiguous(message: str, verb: str) -> Rejected:
    return rejected("invalid-argument", message, next=f"moorage admin {verb} --help")


def _now(word: str, done: Done) -> str:
    return word if done.changed else f"{word} already"


def _by(hold: Hold | None, head: str = " by ") -> str:
    """Return who put a job or queue on hold and why, as ` by operator:ana: month end`; "" without a hold."""
    if hold is None:
        return ""
    return f"{head}{words(hold.by, hold.said)}" + (f": {hold.why}" if hold.why else "")


def beyond_fleet(gpus: int, workers: Iterable[WorkerInfo]) -> str:
    """Return a warning if a guarantee is above the GPUs that the fleet has, else an empty text."""
    there = sum(worker.gpus for worker in workers)
    return f"warning[share]: {many(gpus, 'GPU')} guaranteed, but the fleet has only {there}" if gpus > there else ""


def _bounds(limit: Limit | None) -> str:
    if limit is None:
        return "no limit"
    spent = f"{limit.spent_hours:,.6g} of {limit.gpu_hours:,.6g} GPU-hours of this {limit.period}"
    parts = [
        many(limit.gpus, "GPU") if limit.gpus else "",
        many(limit.jobs, "job") if limit.jobs else "",
        f"{limit.cores:g} cores" if limit.cores else "",
        f"{limit.memory_mib:,} MiB of memory" if limit.memory_mib else "",
        f"{many(limit.running, 'replica')} at once" if limit.running else "",
        f"{many(limit.running_per_key, 'replica')} at once of each fair key" if limit.running_per_key else "",
        f"{many(limit.job_gpus, 'GPU')} a job" if limit.job_gpus else "",
        *(many(most, f"{model} GPU") for model, most in sorted(limit.gpus_of.items())),
        f"{exact(limit.time_limit_s)} of time limit" if limit.time_limit_s else "",
        f"{spent} spent" if limit.gpu_hours else "",
        *weights_of(limit),
    ]
    found = [part for part in parts if part]
    return "at most " + ", ".join(found) if found else "no limit"


def _weight(name: str, word: str) -> float:
    if word == "none":
        return 0
    try:
        found = float(word)
    except ValueError:
        found = 0
    if not 0.001 <= found <= 1000:
        raise rejected(
            "invalid-argument", f"{name} {word} is not a weight", found=word, allowed="0.001..1000, or none",
            next="--gpu-weights L4=0.2",
        )  # fmt: skip
    return found


def _models(option: str, words: list[str] | None, read: Callable[[str, str], float]) -> dict[str, float] | None:
    """Return what an option says of models, several behind commas or options; 0 removes one. Raises `Rejected`."""
    found = dict[str, float]()
    for word in ",".join(words).split(",") if words else ():
        model, equals, number = word.partition("=")
        if not equals or not model:
            raise rejected(
                "invalid-argument", f"{option} {word} says no number of a model", found=word,
                allowed="a model as in --gpu, = and a number above 0, or none", next=f"for example {option} H100=2",
            )  # fmt: skip
        found[model] = read(f"{option} {model} to", number)
    return found or None


def _cores(word: str | None) -> float | None:
    if word in (None, "none"):
        return None if word is None else 0
    try:
        found = float(word)
    except ValueError:
        found = 0
    if not 0 < found <= 1e6:
        raise rejected("invalid-argument", f"--cores {word} is not a limit", found=word, next="--cores 512, or none")
    return found


def _memory(word: str | None) -> int | None:
    if word in (None, "none"):
        return None if word is None else 0
    return mebibytes(word)


def _longest(word: str | None) -> float | None:
    if word in (None, "none"):
        return None if word is None else 0
    return seconds(word)


ON_SPENT: Final = ("wait", "refuse", "preemptible")


def _budget(word: str | None) -> dict[str, Any]:
    """Return the fields of --gpu-hours. Raises `Rejected`."""
    if word in (None, "none"):
        return {} if word is None else {"gpu_hours": 0}
    said, comma, how = word.partition(",")
    hours, _, period = said.partition("/")
    try:
        number = float(hours)
    except ValueError:
        number = 0
    if not 0 < number <= 1e9 or period not in ("day", "week", "month") or (comma and how not in ON_SPENT):
        raise rejected(
            "invalid-argument", f"--gpu-hours {word} is not a budget", found=word,
            allowed="HOURS/day, HOURS/week or HOURS/month, and behind it ,refuse or ,preemptible; or none",
            next="for example --gpu-hours 5000/month",
        )  # fmt: skip
    return {"gpu_hours": number, "period": period, "on_spent": how or "wait"}


def _share(share: Share | None) -> str:
    if share is None:
        return "no share"
    weight = f"weight {share.weight or 1}"
    return f"{weight}, {many(share.gpus, 'GPU')} guaranteed" if share.gpus else weight


def _goes(count: int) -> str:
    return "goes" if count == 1 else "go"
