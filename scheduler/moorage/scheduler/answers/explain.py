"""Why a job waits: one dominant reason, with the number of workers left after each filter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from moorage.scheduler.core.fleet.filters import FILTERS, nearest_to_a_fit
from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.host import EXCLUSIVE, Host, apart, size_of_largest, too_few_lent
from moorage.scheduler.core.fleet.places import most_in_one
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.ledger.state import Worker
from moorage.schemas import actors, reasons
from moorage.schemas.answers.jobs import HolderRow, Holders
from moorage.schemas.held_data import keys_of
from moorage.schemas.job import HOST_COUNTER
from moorage.schemas.reasons import REASONS, Reason
from moorage.schemas.units import many


class Explanation:
    """The dominant reason with its evidence.

    `counts` is how many workers were left after each filter, in order. `held_on` are hosts that would do if other jobs
    had not taken what the job asks for. `missing` is how many more free GPUs the best host would need, 0 if it does not
    wait for GPUs. `troubles` says in words what is wrong with devices or hosts that would do. `because` adds amounts
    that the counts do not show.
    """

    __slots__ = ("because", "counts", "held_on", "missing", "reason", "troubles")

    def __init__(
        self,
        reason: Reason,
        counts: dict[str, int],
        held_on: list[Host],
        missing: int = 0,
        *,
        troubles: Sequence[str] = (),
        because: str = "",
    ) -> None:
        self.reason = reason
        self.counts = counts
        self.held_on = held_on
        self.missing = missing
        self.troubles = list(troubles)
        self.because = because


HOLDERS_MAX: Final = 5
#: the most attempts that one answer reads
ATTEMPTS_LOOKED_MAX: Final = 4_096


def explain(
    fleet: Fleet,
    shape: Shape,
    excluded: frozenset[int] = frozenset(),
    leaving: frozenset[int] = frozenset(),
    refusing: frozenset[int] = frozenset(),
    closed: frozenset[int] = frozenset(),
    failing: frozenset[int] = frozenset(),
    without_data: frozenset[int] = frozenset(),
    others: frozenset[int] = frozenset(),
) -> Explanation:
    """Run the filters over the hosts; the first that leaves none is the dominant reason, `PLACING` if all leave some.

    `excluded` hosts are reserved for other jobs, `leaving` hosts will be drained too soon, `refusing` hosts refuse the
    job whatever it asks for, on `closed` ones it takes no turns with services that sleep, on `failing` ones jobs fail
    that do well elsewhere, and on those `without_data` it does not start yet; a job for each worker waits for none of
    the `others`. This walks the fleet: for questions, not for each record.
    """
    counts: dict[str, int] = {"known": len(fleet.hosts)}
    if not fleet.hosts:
        return Explanation(reasons.NO_WORKER, counts, [])
    for part in shape.parts:
        found = explain(fleet, part.shape, excluded, leaving, refusing, closed, failing)
        if found.reason is not reasons.PLACING:
            found.because = f"group {part.name}: {found.because}" if found.because else f"of group {part.name}"
            return found
    if shape.parts:
        places = fleet.places(shape)
        lacks = (any(fleet.lack(part.shape, part.shape.together) > 0 for part in place.parts) for place in places)
        if all(lacks):
            because = "empty, hosts would hold each group in some place, and in none all of them"
            return Explanation(reasons.PLACE_SIZE, counts, [], because=because)
        because = f"each group has room, and not all at once{' in one place' * (places != (shape,))}"
        return Explanation(reasons.GANG, counts, [], because=because)
    matching = _matching(fleet, shape, counts)
    if isinstance(matching, Explanation):
        return matching
    if others and (own := [host for host in matching if host.worker.num not in others]):
        matching = own
        counts["waiting-here"] = len(own)
    sized = _large_enough(fleet, matching, shape, counts)
    if isinstance(sized, Explanation):
        return sized
    if refusing:
        sized = [host for host in sized if host.worker.num not in refusing]
        counts["not-refused"] = len(sized)
        if not sized:
            return Explanation(reasons.REFUSED, counts, [])
    open_hosts = _open(sized, shape, counts)
    if isinstance(open_hosts, Explanation):
        return open_hosts
    roomy = _roomy(open_hosts, shape, counts)
    if isinstance(roomy, Explanation):
        return roomy
    awaited, roomy = roomy, [host for host in roomy if host.worker.num not in closed]
    if not roomy:
        because = f"{_frozen_on(awaited)}, and this one takes no turns with them"
        return Explanation(reasons.FROZEN_HERE, counts, awaited, because=because)
    failing_here, roomy = roomy, [host for host in roomy if host.worker.num not in failing]
    if failing:
        counts["not-failing"] = len(roomy)
    if not roomy:
        ids = [f"{host.worker.id}: jobs fail there within seconds" for host in failing_here[:HOLDERS_MAX]]
        return Explanation(reasons.JOBS_FAIL, counts, [], troubles=ids)
    if without_data:
        roomy = [host for host in roomy if host.worker.num not in without_data]
        counts["with-data"] = len(roomy)
    if not roomy:
        return Explanation(reasons.DATA, counts, [host for host in open_hosts if host.worker.num not in without_data])
    unreserved = [host for host in roomy if host.worker.num not in excluded]
    counts["not-reserved"] = len(unreserved)
    if not unreserved:
        return Explanation(reasons.RESERVED, counts, [])
    staying = [host for host in unreserved if host.worker.num not in leaving]
    counts["not-leaving"] = len(staying)
    if not staying:
        drained = [_planned(host.worker) for host in unreserved[:HOLDERS_MAX]]
        return Explanation(reasons.LEAVING, counts, [], troubles=drained)
    now, where = _now(fleet, staying, shape)
    if shape.together > 1 and now < shape.together:
        reason = reasons.GANG
        if _now(fleet, unreserved, shape)[0] >= shape.together:
            reason = reasons.LEAVING
        elif _now(fleet, roomy, shape)[0] >= shape.together:
            reason = reasons.RESERVED
        elif where and sum(host.replicas_of(shape, "now") for host in staying) >= shape.together:
            reason = reasons.PLACE
        of = "at least" if shape.most else "its"
        because = f"room for {now} of {of} {shape.together} replicas{where}{apart(shape)}"
        return Explanation(reason, counts, open_hosts, because=because)
    return Explanation(reasons.PLACING, counts, [])


def _matching(fleet: Fleet, shape: Shape, counts: dict[str, int]) -> list[Host] | Explanation:
    """Return the hosts that pass the filters of their classes."""
    failed: dict[str, int] = {}
    left: list[Host] = []
    for cls in fleet.classes.values():
        fit = cls.fit(shape)
        if fit.reason:
            failed[fit.reason] = failed.get(fit.reason, 0) + len(cls.hosts)
        else:
            left.extend(cls.hosts.values())
    passed = len(fleet.hosts)
    for name in FILTERS:  # filters that removed no host are not listed
        if gone := failed.get(name):
            passed -= gone
            counts[name] = passed
    counts["matching"] = len(left)
    # filters run in a fixed order, so the reason checked last is from the hosts nearest to a fit
    return left or Explanation(REASONS[nearest_to_a_fit(failed)], counts, [])


def _large_enough(fleet: Fleet, hosts: list[Host], shape: Shape, counts: dict[str, int]) -> list[Host] | Explanation:
    """Return the hosts that could hold a replica if empty, if together they could hold all replicas."""
    rooms = [host.replicas_of(shape, "ever") for host in hosts]
    sized = [host for host, room in zip(hosts, rooms, strict=True) if room]
    counts["large-enough"] = len(sized)
    if not sized:
        if because := too_few_lent(hosts, shape):
            reason = reasons.DEVICE if shape.device_ids else reasons.COUNT
            return Explanation(reason, counts, [], because=because)
        because = f"{_asked_of_host(shape)}; the most that one has is {size_of_largest(hosts, shape)}"
        return Explanation(reasons.HOST_SIZE, counts, [], because=because)
    if (ever := sum(rooms)) < shape.together:
        because = (
            f"empty, they would hold {ever} of {'at least' if shape.most else 'its'} {shape.together}{apart(shape)}"
        )
        return Explanation(reasons.GANG_SIZE, counts, [], because=because)
    most, where = most_in_one(fleet.places(shape), shape, zip(hosts, rooms, strict=True))
    if most < shape.together:
        because = f"empty, hosts would hold {most} of its {shape.together}{where}{apart(shape)}"
        return Explanation(reasons.PLACE_SIZE, counts, [], because=because)
    return sized


def _open(hosts: list[Host], shape: Shape, counts: dict[str, int]) -> list[Host] | Explanation:
    """Return the hosts that accept new work."""
    heard = [host for host in hosts if host.heard]
    counts["heard"] = len(heard)
    if not heard:
        return Explanation(reasons.NOT_HEARD, counts, [])
    open_hosts = [host for host in heard if host.usable and not (host.waiting and shape.count)]
    counts["open"] = len(open_hosts)
    answering = [host for host in open_hosts if shape.driver not in host.down]
    if answering:
        return answering
    if open_hosts:
        told = [f"{host.worker.id}: {shape.driver}: {host.down[shape.driver][0]}" for host in open_hosts]
        reason = reasons.DISK_FULL if all(host.disk_full for host in open_hosts) else reasons.DRIVER_DOWN
        return Explanation(reason, counts, [], troubles=told[:HOLDERS_MAX])
    shut = [host for host in heard if host.worker.until_ms]
    shown = [*shut, *(host for host in heard if not host.worker.until_ms)][:HOLDERS_MAX]
    return Explanation(
        reasons.STARTS_FAIL if shut else reasons.CLOSED, counts, [], troubles=[_closed(host) for host in shown]
    )


def _roomy(hosts: list[Host], shape: Shape, counts: dict[str, int]) -> list[Host] | Explanation:
    """Return the hosts with enough GPUs, CPU and memory free for one replica."""
    free = [host for host in hosts if host.cls.rooms(_free(host, shape), shape)]
    counts["with-free-gpus"] = len(free)
    if not free:
        return _no_free_gpus(hosts, shape, counts)
    roomy = [host for host in free if host.fits_host(shape)]
    counts["with-cpu-and-memory"] = len(roomy)
    return roomy or Explanation(reasons.HOST_BUSY, counts, free, because=_asked_of_host(shape))


def _no_free_gpus(hosts: list[Host], shape: Shape, counts: dict[str, int]) -> Explanation:
    """Return why no host has enough free GPUs.

    Jobs lease them, foreign processes use them, processes of the hosts borrow them, their workers have just refused
    them, or they are not healthy.
    """
    missing = max(0, shape.count - max(_free(host, shape).bit_count() for host in hosts))
    unleased = [host for host in hosts if host.cls.rooms(_but_for_health(host, shape), shape)]
    if not unleased:
        if because := _fragmented(hosts, shape):
            return Explanation(reasons.FRAGMENTED, counts, hosts, missing, because=because)
        because = "a GPU that would do is shared by jobs of another user" if _is_anothers(hosts, shape) else ""
        return Explanation(reasons.BUSY, counts, hosts, missing, because=because)
    awaited = [host for host in unleased if host.cls.rooms(host.free & ~host.shut & host.cls.fit(shape).mask, shape)]
    if awaited:
        return Explanation(reasons.FROZEN_HERE, counts, awaited, missing, because=_frozen_on(awaited))
    foreign = [host for host in unleased if host.cls.rooms(_but_for_foreign(host, shape), shape)]
    lending = [host for host in unleased if host.cls.rooms(_healthy(host) & host.cls.fit(shape).mask, shape)]
    refusing = [host for host in lending if host.cls.rooms(_but_for_refusals(host) & host.cls.fit(shape).mask, shape)]
    if foreign:
        reason, troubled = reasons.FOREIGN, foreign
    elif refusing:
        reason, troubled = reasons.JUST_REFUSED, refusing
    else:
        reason, troubled = (reasons.LENT, lending) if lending else (reasons.SICK, unleased)
    # the workers whose other devices are leased: those would do as well
    leased = [host for host in hosts if host.cls.fit(shape).mask & host.lent & ~host.free & ~host.worker.quarantined]
    return Explanation(reason, counts, leased, missing, troubles=_troubles(troubled, shape))


def _fragmented(hosts: list[Host], shape: Shape) -> str:
    """Return how many GPUs are free on how many hosts, if they would be enough on one; "" if they are too few."""
    free = [count for host in hosts if (count := _free(host, shape).bit_count())]
    if shape.mode > EXCLUSIVE or sum(free) < shape.count:
        return ""
    joined = " that NVLink joins" * shape.linked
    return (
        f"{many(sum(free), 'GPU')} are free on {many(len(free), 'host')}, and none of these has {shape.count}{joined}"
    )


def _frozen_on(hosts: list[Host]) -> str:
    """Return for how many GPUs of a few of these hosts frozen jobs wait."""
    told = [
        f"{many((host.free & host.awaited).bit_count(), 'GPU')} of {host.worker.id}" for host in hosts[:HOLDERS_MAX]
    ]
    return f"frozen jobs wait for {', '.join(told)}"


def _is_anothers(hosts: list[Host], shape: Shape) -> bool:
    """Return whether a device in the requested mode cannot be shared, because jobs of another user share it."""
    devices = ((host, device) for host in hosts for device in host.shared.values())
    return any(
        device.user and device.mode == shape.mode and device.user != host.cls.user_of(shape) for host, device in devices
    )


def _closed(host: Host) -> str:
    """Return why no new job is placed on a host that was heard from."""
    worker = host.worker
    if worker.until_ms:
        return f"{worker.id}: starts fail: {worker.why}"
    if worker.flag != "open":
        by = f" by {actors.words(*actors.split(worker.by))}" if worker.by else ""
        return f"{worker.id}: {worker.flag}{by}" + (f": {worker.why}" if worker.why else "")
    if not worker.session:
        return f"{worker.id}: lost"
    if host.leaves_ms is not None:
        return f"{worker.id}: leaving, as it was told to end"
    if host.agent_stopped:
        return f"{worker.id}: {next(iter(host.down.values()))[0]}"
    return f"{worker.id}: " + ("its renewals or load frames are missed" if host.stale else "kept for a local claim")


def _planned(worker: Worker) -> str:
    why = worker.window.why if worker.window is not None else ""
    return f"{worker.id}: will be drained" + (f": {why}" if why else "")


def _asked_of_host(shape: Shape) -> str:
    asked = [f"{shape.cpu_milli / 1000:g} cores"] if shape.cpu_milli else []
    asked += [f"{shape.memory_mib / 1024:.1f} GiB".replace(".0 ", " ")] if shape.memory_mib else []
    asked += [f"{count} {HOST_COUNTER}{name}" for name, count in shape.counts]
    return f"it asks for {' and '.join(asked)} on one host" if asked else ""


def _now(fleet: Fleet, hosts: list[Host], shape: Shape) -> tuple[int, str]:
    return most_in_one(fleet.places(shape), shape, ((host, host.replicas_of(shape, "now")) for host in hosts))


def _free(host: Host, shape: Shape) -> int:
    """Return the slots on which this shape could start now."""
    return host.slots_for(shape) | host.open_to(shape)


def holders(hosts: list[Host], shape: Shape, tenant: str, *, of_host: bool = False) -> Holders:
    """Return which jobs hold what a shape asks for on these hosts, as far as a tenant may know it.

    The tenant's own jobs are named, those with most GPUs first; of other tenants only the numbers of jobs and GPUs are
    given. `workers` lists a few of the `hosts` with how many GPUs are leased there, or with `of_host` how much CPU and
    memory is free. Once `ATTEMPTS_LOOKED_MAX` attempts were read, further hosts are left out, and `more` is true.
    """
    own: dict[str, int] = {}
    others: set[int] = set()
    gpus = looked = 0
    workers: list[str] = []
    for host in hosts:
        mask = host.cls.fit(shape).mask
        if len(workers) < HOLDERS_MAX:
            leased = (host.lent & ~host.free).bit_count()
            of_gpus = f"{leased} of {len(host.cls.devices)} GPUs leased"
            of_data = f", has data {', '.join(there)}" if (there := _data_on(host, shape, tenant)) else ""
            workers.append(f"{host.worker.id}: {_left_of_host(host, shape) if of_host else of_gpus}{of_data}")
        for attempt in host.worker.attempts.values():
            looked += 1
            held = (attempt.mask & mask).bit_count()
            if shape.count and not held and not of_host:
                continue
            job = attempt.replica.job
            if job.tenant == tenant:
                own[job.name] = own.get(job.name, 0) + held
            else:
                others.add(job.num)
                gpus += held
        if looked >= ATTEMPTS_LOOKED_MAX:
            break
    most = sorted(own.items(), key=lambda row: (-row[1], row[0]))
    return Holders(
        own=[HolderRow(job=name, gpus=held) for name, held in most[:HOLDERS_MAX]],
        own_jobs=len(own),
        other_jobs=len(others),
        other_gpus=gpus,
        workers=workers,
        hosts=len(hosts),
        more=looked >= ATTEMPTS_LOOKED_MAX,
    )


def _data_on(host: Host, shape: Shape, tenant: str) -> list[str]:
    """Return the names of what a job reads that its host has."""
    if not host.data:
        return []
    return [name for name, source in shape.data if keys_of(tenant, shape.driver, source) & host.data]


def _left_of_host(host: Host, shape: Shape) -> str:
    cores = f"{host.cpu_left(shape) / 1000:g} of {host.cpu_of(shape) / 1000:g} cores"
    cores += " for jobs without a GPU" * (host.cpu_of(shape) < host.cpu_milli)
    counts = [
        f"{host.counts_free.get(name, 0)} of {host.counts.get(name, 0)} {HOST_COUNTER}{name}, "
        for name, _ in shape.counts
    ]
    return f"{''.join(counts)}{cores}, {host.memory_free // 1024} of {host.memory_mib // 1024} GiB free"


def _but_for_health(host: Host, shape: Shape) -> int:
    """Return the matching slots that no job leases, with quarantined ones: their jobs have ended."""
    return (host.free | host.worker.quarantined & host.lent) & host.cls.fit(shape).mask


def _healthy(host: Host) -> int:
    """Return the slots that no job leases and that nothing is wrong with; processes of the host may borrow them."""
    return host.free & ~(host.sick | host.worker.quarantined | host.worker.unwell_mask)


def _but_for_refusals(host: Host) -> int:
    """Return the slots on which a job could start now if the worker had not just refused some of them."""
    return _healthy(host) & ~(host.busy & ~host.refused)


def _but_for_foreign(host: Host, shape: Shape) -> int:
    """Return the slots on which this shape could start now without foreign processes."""
    foreign = sum(1 << slot for slot, (kind, _) in host.troubles.items() if kind == "foreign")
    left = host.free & host.cls.fit(shape).mask & ~(host.worker.quarantined | host.worker.unwell_mask)
    return left & (foreign | ~(host.busy | host.sick))


def _troubles(hosts: list[Host], shape: Shape) -> list[str]:
    """Return why a few devices that would do are not free, as `w3 GPU 1: used by pid 1234 python (user bob)`."""
    shown = []
    for host in hosts:
        for slot in range(len(host.cls.devices)):
            kind, detail = host.troubles.get(slot, ("", ""))
            if slot in host.worker.unwell:
                kind, detail = host.worker.unwell[slot][:2]
            elif host.worker.quarantined >> slot & 1:
                kind, detail = "quarantined", ""
            if kind and host.cls.fit(shape).mask >> slot & 1:
                text = f"used by {detail}" if kind == "foreign" else f"{kind}: {detail}" if detail else kind
                shown.append(f"{host.worker.id} GPU {slot}: {text}")
        fits = _healthy(host) & host.busy & host.cls.fit(shape).mask
        if lends := (fits & ~host.refused).bit_count():
            shown.append(f"{host.worker.id}: lends {many(lends, 'GPU')} to processes of its host")
        if refused := (fits & host.refused).bit_count():
            shown.append(f"{host.worker.id}: has just refused a start on {many(refused, 'GPU')}")
        if len(shown) >= HOLDERS_MAX:
            break
    return shown[:HOLDERS_MAX]
