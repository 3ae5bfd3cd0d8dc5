"""The checks of `moorage doctor` that concern the fleet: what this user may do, the leader, the ledger's copies, the
workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from moorage.cli.doctor.check import ANSWER_S_MAX, clock, failed, role_of
from moorage.cli.framework.options import Options
from moorage.cli.framework.render import age
from moorage.client.errors import NoScheduler, NotPermitted
from moorage.client.view.checks import AWAY, NAMES_MAX, Check, no_worker_is_up, of_leader, places_away
from moorage.schemas.answers.fleet import JOBS_FAIL_HERE, FleetAnswer, StalledJob, WorkerInfo
from moorage.schemas.capabilities import DRIVER_DEFAULT, KERNEL, VARIABLE, Capabilities
from moorage.schemas.errors import MoorageError
from moorage.schemas.frames import AGENT_STOPPED, CLOCK, DISK_FULL, FleetRow
from moorage.schemas.reasons import STARTS_FAIL
from moorage.schemas.roles import RIGHTS_ANEW
from moorage.schemas.units import many

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient

#: what to do about a device, by the kind of its fault
DEVICE_FIXES: Final = {
    "fabric": "start nvidia-fabricmanager on the host; the GPU is open again once its fabric is ready",
    "check": "mend the GPU, then moorage admin release --worker WORKER --gpu N, which has it checked again",
    "cdi": "run the command that the line names as root on the host; the worker sees the new spec within seconds",
    "cut-off": "run the job again: moorage admin requeue JOB; to prevent it, have the engine use CDI, or the"
    " cgroup driver cgroupfs",
    "foreign": "end the process that is named, or lend the GPU to it: moorage admin audit",
    "quarantined": "moorage admin release --worker WORKER --gpu N, once the GPU is surely free",
}


#: running jobs among which a service is looked for
SERVICES_MAX: Final = 20


async def of_moorage(options: Options, is_cluster: bool) -> AsyncIterator[Check]:
    from moorage.cli.framework.options import client_of

    try:
        async with client_of(options) as client:
            heard = await _check_events(client)
            try:
                listed = await client._wire.answer("ls", {"limit": 1})
            except NoScheduler as error:
                yield heard
                yield failed("leader", error)
                return
            except NotPermitted as error:
                others = [check async for check in _of_other_roles(client)]
                if not others and role_of(client._wire.context) in ("", "submitter"):
                    yield heard
                    raise
                if heard.verdict == "ok":  # of a key that is for no tenant's jobs nothing is missing
                    yield heard
                yield Check(
                    "submitter", "ok", f"{error.problem.message}: only a user with a tenant's key can submit jobs"
                )
                for check in others:
                    yield check
                return
            yield heard
            if role_of(client._wire.context) == "operator":  # to try is an error in the server's log
                yield _submits_not(client)
            else:
                yield await _submitter(client)
                async for check in _calls(client):
                    yield check
                yield await _queue(client, is_cluster)
            async for check in _of_operators(client, listed.ledger):
                yield check
    except MoorageError as error:
        from moorage.client.tenant import find_tenant

        tenant = find_tenant(options.tenant, target=options.nats)
        role = f"give this user the submitter's role of tenant {tenant}, or name another tenant with --tenant"
        yield failed("submitter", error, fix=role if isinstance(error, NotPermitted) else "")


async def _of_other_roles(client: AsyncClient) -> AsyncIterator[Check]:
    """Check what a key may do that submits nothing: an operator's asks about the fleet, an observer's reads fleet
    frames."""
    try:
        checks = await _of_whole_fleet(client)
    except MoorageError as error:
        if error.problem.next == RIGHTS_ANEW:
            yield failed("operator", error)
    except TimeoutError:
        pass
    else:
        for check in checks:
            yield check
        return
    try:
        async with asyncio.timeout(ANSWER_S_MAX):
            frame = await anext(client.fleet.frames())
    except (MoorageError, TimeoutError):
        return
    yield Check("leader", "ok", f"a scheduler leads: epoch {frame.epoch}, last ledger record {frame.ledger}")
    yield Check("observer", "ok", "this user receives the fleet's frames: moorage fleet --watch")
    for check in of_leader(FleetAnswer(ledger_copies=frame.ledger_copies)):
        yield check
    yield _workers(frame.workers)


async def _of_whole_fleet(client: AsyncClient) -> list[Check]:
    """Return the checks of the leader's answer `fleet`; to an operator the server does not tell its time, so the
    leader's counts. Raises `MoorageError` and TimeoutError."""
    began_s = time.time()
    async with asyncio.timeout(ANSWER_S_MAX):
        fleet = await client.fleet.show()
    is_operator = role_of(client._wire.context) == "operator"
    return [*([clock_beside(fleet, began_s, time.time())] if is_operator else []), *of_fleet(fleet)]


def clock_beside(fleet: FleetAnswer, from_s: float, until_s: float) -> Check:
    """Check this host's clock by that of the leader, which answered between these two seconds of this clock."""
    if fleet.time_ms is None:
        return Check("clock", "ok", "this host's clock is not compared with the leader's, which does not tell its time")
    leaders_s = fleet.time_ms / 1000
    off_s = from_s - leaders_s if leaders_s < from_s else min(0.0, until_s - leaders_s)
    return clock(off_s, f"that of scheduler {fleet.leader}")


async def _check_events(client: AsyncClient) -> Check:
    try:
        await (await client._wire.subscribe(client._wire.subjects.events(client.tenant), lambda _: None)).unsubscribe()
    except MoorageError as error:
        return failed(
            "events",
            error,
            "warn",
            "let this user subscribe to its tenant's events: moorage run, wait and logs need them",
        )
    return Check("events", "ok", f"this user may receive the events of tenant {client.tenant}'s jobs")


async def _submitter(client: AsyncClient) -> Check:
    """Check whether this key may submit. The empty request is refused and not stored."""
    from moorage.bus.errors import PermissionRefused

    try:
        await client._wire.link.request(client._wire.subjects.api(client.tenant, "submit"), b"", ANSWER_S_MAX)
    except PermissionRefused:
        return _submits_not(client)
    return Check("submitter", "ok", f"this user may read and submit jobs of tenant {client.tenant}")


async def _calls(client: AsyncClient) -> AsyncIterator[Check]:
    """Check whether members of a running service can answer to this user's inbox; nothing where no service runs."""
    from moorage.schemas.roles import inbox

    for job in (await client.ls(states=["RUNNING"], limit=SERVICES_MAX)).jobs:
        request = (await client._wire.show(job.job)).request
        service = None if request is None else request.service
        if service is None:
            continue
        there = await client.service(service.name)._calls.inbox()
        is_heard = await there.is_heard(client._wire.subjects.call(client.tenant, service.name))
        if is_heard:
            yield Check("calls", "ok", f"members of services can answer to this user's inbox: {service.name} does")
        elif is_heard is not None:
            found = f"a member of {service.name} is there, and may not answer to this user's inbox {there.prefix}.>"
            right = inbox("submitter", client.tenant)
            fix = f"name the inbox of the user's key, as {right}: --inbox-prefix, MOORAGE_INBOX_PREFIX, inbox_prefix"
            yield Check("calls", "fail", found, fix)
        if is_heard is not None:
            return


def _submits_not(client: AsyncClient) -> Check:
    found = f"this user may read tenant {client.tenant}'s jobs; only a user with a tenant's key can submit jobs"
    return Check("submitter", "ok", found)


#: JetStream refuses before it stores: the question leaves nothing behind
_NOT_HERE: Final = {"Nats-Expected-Stream": "moorage-doctor-asks"}
_WEDGE: Final = "one message with a wrong header stops a replicated stream permanently (nats-server 2.14 and 2.15)"


async def _queue(client: AsyncClient, is_cluster: bool) -> Check:
    """Check whether this key may publish to the durable queue: in a cluster one such key can stop the queue for all."""
    from moorage.bus.errors import PermissionRefused

    try:
        await client._wire.link.request(
            client._wire.subjects.request(client.tenant, "submit"), b"", ANSWER_S_MAX, _NOT_HERE
        )
    except PermissionRefused:
        if is_cluster:
            return Check(
                "queue",
                "ok",
                "this user may submit to the scheduler only, not to the durable queue; that is right in a "
                f"cluster: {_WEDGE}",
            )
        return Check(
            "queue",
            "ok",
            "this user may submit to the scheduler only, not to the durable queue, which needs an account "
            "for each tenant",
        )
    except MoorageError as error:
        return Check(
            "queue",
            "warn",
            f"a test message to the durable queue got no answer: {error}",
            "a scheduler creates the durable queue: start a scheduler",
        )
    if is_cluster:
        fix = (
            "in a cluster allow submitters to use the submit endpoint only: moorage admin nats-config writes "
            "such permissions"
        )
        return Check("queue", "warn", f"this user may publish to the durable queue: {_WEDGE}", fix)
    return Check(
        "queue",
        "ok",
        "this user may also submit to the durable queue, which stores requests even while no scheduler runs",
    )


async def _of_operators(client: AsyncClient, ledger: int) -> AsyncIterator[Check]:
    try:
        checks = await _of_whole_fleet(client)
    except (
        NotPermitted,
        NoScheduler,
    ) as error:  # the leader has answered this user: here it is an account without the subject
        operator = Check(
            "operator",
            "ok",
            "this user is not shown the whole fleet: moorage fleet, drain and audit need an operator's key",
        )
        if error.problem.next == RIGHTS_ANEW:
            operator = failed("operator", error)
    except TimeoutError:
        why = f"the leader did not say within {ANSWER_S_MAX:g} s what the whole fleet has"
        operator = Check("operator", "warn", why, "ask again: moorage fleet")
    except MoorageError as error:
        operator = failed("operator", error, "warn")
    else:
        for check in checks:
            yield check
        return
    yield Check("leader", "ok", f"a scheduler leads and answers; last ledger record {ledger}")
    yield operator


def of_fleet(fleet: FleetAnswer) -> Iterator[Check]:
    yield Check(
        "leader",
        "ok",
        f"scheduler {fleet.leader} leads: epoch {fleet.epoch}, last ledger record {fleet.ledger}",
    )
    yield Check("operator", "ok", "this user may see the whole fleet")
    yield from of_leader(fleet)
    yield _workers(fleet.workers)
    if fleet.stalled_jobs:
        yield _stalled(fleet.stalled_jobs, fleet.stalled)
    yield from _what_lacks(fleet.workers)
    yield from _device_fences(fleet.workers)
    yield from _devices(fleet.workers)


def _workers(rows: Sequence[WorkerInfo | FleetRow]) -> Check:
    nobody = no_worker_is_up(rows)
    if not rows:
        return Check("workers", "warn", nobody, "start a worker: moorage worker")
    counts: dict[str, list[str]] = {}
    for row in rows:
        counts.setdefault(row.state, []).append(row.worker)
    simulated = sum(row.simulated for row in rows)
    found = ", ".join(f"{len(names)} {state}{_named(state, names)}" for state, names in sorted(counts.items()))
    found += f"; {simulated} of {many(len(rows), 'worker')} simulated" if simulated else ""
    if STARTS_FAIL.name in counts:
        fix = "moorage fleet says why; mend that, then moorage uncordon WORKER opens the worker at once"
        return Check("workers", "warn", found, fix)
    whole = [row for row in rows if isinstance(row, WorkerInfo)]  # a frame says less of a worker
    if away := places_away(whole):
        return Check("workers", "warn", f"{found}; {'; '.join(away)}", "look at that place's nats-server and its link")
    downs = [(row.worker, each) for row in whole for each in row.drivers_down]
    if full := sorted({worker for worker, each in downs if each.why.startswith(DISK_FULL)}):
        found += f"; the disk is full, and nothing is started{_named('', full)}"
        return Check("workers", "warn", found, "free room on the disks that moorage fleet names")
    if low := sorted({row.worker for row in whole if row.warning.startswith("disk: ")}):
        found += f"; the disk is nearly full{_named('', low)}"
        return Check("workers", "warn", found, "free room on the disks that moorage fleet names")
    if off := sorted({row.worker for row in whole if f"{CLOCK}: " in row.warning}):
        found += f"; the clock is off by more than 5 s{_named('', off)}"
        return Check("workers", "warn", found, "run chrony or ntpd on the hosts that moorage fleet names, by how much")
    if eating := sorted({row.worker for row in whole if JOBS_FAIL_HERE in row.warning}):
        found += f"; jobs that do well elsewhere fail within seconds{_named('', eating)}"
        return Check("workers", "warn", found, "look at these hosts; moorage uncordon WORKER opens one at once")
    if stopped := counts.get(AGENT_STOPPED):
        found += f"; their agents were stopped while jobs run on{_named('', stopped)}"
        return Check("workers", "warn", found, "start the worker again on these hosts")
    if down := sorted({worker for worker, _ in downs}):
        drivers = sorted({each.driver for _, each in downs})
        found += f"; the engine of the driver {' '.join(drivers)} does not answer{_named('', down)}"
        return Check("workers", "warn", found, "start the engine on these hosts: moorage fleet says what it answered")
    if "stale" in counts or "not-heard" in counts:
        fix = (
            "read the log of each stale worker (with moorage up: worker.log in its data folder), and check its "
            "connection to the NATS server"
        )
        return Check("workers", "warn", found, fix)
    if nobody:
        fix = "moorage fleet shows these workers; moorage worker starts another worker"
        return Check("workers", "warn", f"{nobody}: {found}", fix)
    return Check("workers", "ok", found)


def _stalled(jobs: int, rows: Sequence[StalledJob]) -> Check:
    """Count the running jobs that have stalled for as long as their requests say."""
    longest = max(rows, key=lambda row: row.seconds)
    found = (
        f"{many(jobs, 'running job')} stalled, without output and with GPUs that do no work; "
        f"{longest.tenant}/{longest.job} for {age(1000 * longest.seconds)}: {longest.why}"
    )
    return Check("stalled", "warn", found, "moorage top lists them; their tenants end or mend them")


def _what_lacks(rows: Sequence[WorkerInfo]) -> Iterator[Check]:
    """Tell which workers run plain processes as one user alone, or do not hold them to their memory."""
    told = (
        ("users", "run jobs as their own user alone: requests that name another user go to other workers"),
        ("memory_limit", "cannot hold jobs to their memory: requests with resources.enforce = hard go to others"),
    )
    for capability, means in told:
        names = [
            row.worker
            for row in rows
            if not getattr(row.capabilities.get(DRIVER_DEFAULT, Capabilities()), capability) and row.state not in AWAY
        ]
        if names:
            found = f"{many(len(names), 'worker')} {means}{_named('', names)}"
            yield Check(capability.replace("_", "-"), "ok", found)


def _device_fences(rows: Sequence[WorkerInfo]) -> Iterator[Check]:
    """Tell on which workers the kernel keeps plain processes to their GPUs, and on which a variable alone does."""
    means = {
        KERNEL: "the kernel keeps jobs to their GPUs",
        VARIABLE: "a variable alone names a job's GPUs (device_fence = require refuses to start so)",
    }
    for devices, words in means.items():
        names = [
            row.worker
            for row in rows
            if row.gpus
            and row.capabilities.get(DRIVER_DEFAULT, Capabilities()).devices == devices
            and row.state not in AWAY
        ]
        if names:
            yield Check("device-fence", "ok", f"on {many(len(names), 'worker')} {words}{_named('', names)}")


def _devices(rows: Sequence[WorkerInfo]) -> Iterator[Check]:
    """Tell which GPUs get no jobs because of a fault, and of which a worker warns, by kind of fault."""
    found: dict[str, list[tuple[str, str]]] = {}
    for row in rows:
        for trouble in row.troubles if row.state not in AWAY else ():
            found.setdefault(trouble.kind, []).append((row.worker, trouble.detail))
    for kind, told in sorted(found.items()):
        what = f"{kind} on {many(len(told), 'GPU')}{_named('', sorted({worker for worker, _ in told}))}"
        fix = DEVICE_FIXES.get(kind, "moorage fleet has a line for each; docs/how-to/look-after-a-failing-gpu.md")
        yield Check("devices", "warn", f"{what}: {told[0][1]}".rstrip(": "), fix)


def _named(state: str, names: list[str]) -> str:
    """Return at most `NAMES_MAX` names of workers in this state; "" if the state is up."""
    if state == "up":
        return ""
    more = f" and {len(names) - NAMES_MAX} more" if len(names) > NAMES_MAX else ""
    return f": {' '.join(sorted(names)[:NAMES_MAX])}{more}"
