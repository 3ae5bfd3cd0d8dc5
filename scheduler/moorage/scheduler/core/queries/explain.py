"""Why a job waits: one dominant reason, with the counts that the filters themselves produced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from moorage.scheduler.core.filters import FILTERS, nearest_to_a_fit
from moorage.scheduler.core.fleet import Fleet
from moorage.scheduler.core.host import EXCLUSIVE, NO_GPU, Host, size_of_largest
from moorage.scheduler.core.shape import Shape
from moorage.schemas import reasons
from moorage.schemas.reasons import REASONS, Reason


class Explanation:
    """`counts` is how many workers were left after each filter, in the filters' order; `held_on` the hosts that would
    do if others of ours had not taken what it asks for; `missing` how many GPUs more the best host would have to have
    free, 0 where that is not what it waits for; `troubles` what is wrong with devices or hosts that would do, in words;
    `because` how much it asks for or would get, where the counts do not say that."""

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

    def as_data(self) -> dict[str, Any]:
        because = {"because": self.because} if self.because else {}
        return {**named(self.reason), **because, "workers_left": self.counts}


def named(reason: Reason) -> dict[str, Any]:
    """A reason as an answer has it."""
    return {"reason": reason.name, "means": reason.means}


HOLDERS_MAX: Final = 5
#: members that one answer looks at
MEMBERS_LOOKED_MAX: Final = 4_096


def explain(
    fleet: Fleet,
    shape: Shape,
    excluded: frozenset[int] = frozenset(),
    leaving: frozenset[int] = frozenset(),
    refusing: frozenset[int] = frozenset(),
) -> Explanation:
    """Run every filter over every host and name the one after which nothing was left.

    The first filter that leaves no worker is the dominant reason. `excluded` are held back for somebody else, `leaving`
    are to be drained too soon, `refusing` would not run it whatever it asked for. Costs a walk over the fleet: for
    questions, not for the tick.
    """
    counts: dict[str, int] = {"known": len(fleet.hosts)}
    if not fleet.hosts:
        return Explanation(reasons.NO_WORKER, counts, [])
    matching = _matching(fleet, shape, counts)
    if isinstance(matching, Explanation):
        return matching
    sized = _large_enough(matching, shape, counts)
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
    unreserved = [host for host in roomy if host.worker.num not in excluded]
    counts["not-reserved"] = len(unreserved)
    if not unreserved:
        return Explanation(reasons.RESERVED, counts, [])
    staying = [host for host in unreserved if host.worker.num not in leaving]
    counts["not-leaving"] = len(staying)
    if not staying:
        drained = [f"{host.worker.id}: is to be drained" for host in unreserved[:HOLDERS_MAX]]
        return Explanation(reasons.LEAVING, counts, [], troubles=drained)
    now = _now(staying, shape)
    if shape.together > 1 and now < shape.together:
        reason = reasons.GANG
        if _now(unreserved, shape) >= shape.together:
            reason = reasons.LEAVING
        elif _now(roomy, shape) >= shape.together:
            reason = reasons.RESERVED
        return Explanation(reason, counts, open_hosts, because=f"room for {now} of its {shape.together} replicas")
    return Explanation(reasons.PLACING, counts, [])


def _matching(fleet: Fleet, shape: Shape, counts: dict[str, int]) -> list[Host] | Explanation:
    """The hosts that have what it asks for, by the filters of their classes."""
    failed: dict[str, int] = {}
    left: list[Host] = []
    for cls in fleet.classes.values():
        fit = cls.fit(shape)
        if fit.reason:
            failed[fit.reason] = failed.get(fit.reason, 0) + len(cls.hosts)
        else:
            left.extend(cls.hosts.values())
    passed = len(fleet.hosts)
    for name in FILTERS:  # a filter that took nobody is not named
        if gone := failed.get(name):
            passed -= gone
            counts[name] = passed
    counts["matching"] = len(left)
    # the filters run in one order, so the reason that came farthest names what is nearest to a fit
    return left or Explanation(REASONS[nearest_to_a_fit(failed)], counts, [])


def _large_enough(hosts: list[Host], shape: Shape, counts: dict[str, int]) -> list[Host] | Explanation:
    """Those that could hold some of it if they were empty, where together they could hold all of it."""
    rooms = [host.replicas_of(shape, "ever") for host in hosts]
    sized = [host for host, room in zip(hosts, rooms, strict=True) if room]
    counts["large-enough"] = len(sized)
    if not sized:
        lent = max((host.lent & host.cls.fit(shape).mask).bit_count() for host in hosts)
        if lent < shape.count:
            reason = reasons.DEVICE if shape.device_ids else reasons.COUNT
            return Explanation(reason, counts, [], because=f"the most such GPUs that one worker lends is {lent}")
        because = f"{_asked_of_host(shape)}; the most that one has is {size_of_largest(hosts)}"
        return Explanation(reasons.HOST_SIZE, counts, [], because=because)
    if (ever := sum(rooms)) < shape.together:
        return Explanation(
            reasons.GANG_SIZE, counts, [], because=f"empty, they would hold {ever} of its {shape.together}"
        )
    return sized


def _open(hosts: list[Host], shape: Shape, counts: dict[str, int]) -> list[Host] | Explanation:
    """Those that take in new work."""
    heard = [host for host in hosts if host.heard]
    counts["heard"] = len(heard)
    if not heard:
        return Explanation(reasons.NOT_HEARD, counts, [])
    open_hosts = [host for host in heard if host.usable and not (host.waiting and shape.count)]
    counts["open"] = len(open_hosts)
    return open_hosts or Explanation(
        reasons.CLOSED, counts, [], troubles=[_closed(host) for host in heard[:HOLDERS_MAX]]
    )


def _roomy(hosts: list[Host], shape: Shape, counts: dict[str, int]) -> list[Host] | Explanation:
    """Those with the GPUs, CPU and memory of one replica to spare."""
    free = [host for host in hosts if _free(host, shape) >= shape.count]
    counts["with-free-gpus"] = len(free)
    if not free:
        return _no_free_gpus(hosts, shape, counts)
    roomy = [host for host in free if host.fits_host(shape)]
    counts["with-cpu-and-memory"] = len(roomy)
    return roomy or Explanation(reasons.HOST_BUSY, counts, free, because=_asked_of_host(shape))


def _no_free_gpus(hosts: list[Host], shape: Shape, counts: dict[str, int]) -> Explanation:
    """Whether ours hold the GPUs, somebody from outside, or nobody as they are not well."""
    missing = shape.count - max(_free(host, shape) for host in hosts)
    unleased = [host for host in hosts if _but_for_health(host, shape) >= shape.count]
    if not unleased:
        because = "a GPU that would do is shared by jobs of another user" if _is_anothers(hosts, shape) else ""
        return Explanation(reasons.BUSY, counts, hosts, missing, because=because)
    foreign = [host for host in unleased if _but_for_foreign(host, shape) >= shape.count]
    reason, troubled = (reasons.FOREIGN, foreign) if foreign else (reasons.SICK, unleased)
    # beside what is wrong, ours that hold the others: each of them would do as well
    leased = [host for host in hosts if host.cls.fit(shape).mask & host.lent & ~host.free & ~host.worker.quarantined]
    return Explanation(reason, counts, leased, missing, troubles=_troubles(troubled, shape))


def _is_anothers(hosts: list[Host], shape: Shape) -> bool:
    """Whether jobs of another user share a device of these hosts in its mode, so that it takes none of its own."""
    devices = ((host, device) for host in hosts for device in host.shared.values())
    return any(
        device.user and device.mode == shape.mode and device.user != host.cls.user_of(shape) for host, device in devices
    )


def _closed(host: Host) -> str:
    """Why nothing new is placed on a host that was heard."""
    worker = host.worker
    if worker.flag != "open":
        return f"{worker.id}: {worker.flag}" + (f" by {worker.by}" if worker.by else "")
    if not worker.session:
        return f"{worker.id}: lost"
    return f"{worker.id}: " + ("its renewals or load frames are missed" if host.stale else "kept for a local claim")


def _asked_of_host(shape: Shape) -> str:
    asked = [f"{shape.cpu_milli / 1000:g} cores"] if shape.cpu_milli else []
    asked += [f"{shape.memory_mib / 1024:.1f} GiB".replace(".0 ", " ")] if shape.memory_mib else []
    return f"it asks for {' and '.join(asked)} on one host" if asked else ""


def _now(hosts: list[Host], shape: Shape) -> int:
    return sum(host.replicas_of(shape, "now") for host in hosts)


def _free(host: Host, shape: Shape) -> int:
    """Devices on which this shape could start now."""
    if shape.mode == NO_GPU:
        return 0
    mask = host.open & host.cls.fit(shape).mask
    if shape.mode > EXCLUSIVE:
        for slot, device in host.shared.items():
            if host.room_beside(slot, device, shape):
                mask |= 1 << slot & host.cls.fit(shape).mask
    return max(mask.bit_count(), host.lendable_to(shape).bit_count())


def holders(hosts: list[Host], shape: Shape, tenant: str, *, of_host: bool = False) -> dict[str, Any]:
    """Who holds what a shape asks for on these hosts, as a tenant may know it.

    Its own jobs by name, those with most GPUs first; of everybody else how many jobs and GPUs, and no name. `workers`
    are a few of the hosts with how much is leased there, or `of_host` how much of the host itself is free. At most
    `MEMBERS_LOOKED_MAX` members are looked at; `more` says that there were others.
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
            workers.append(f"{host.worker.id}: {_left_of_host(host) if of_host else of_gpus}")
        for member in host.worker.members.values():
            looked += 1
            held = (member.mask & mask).bit_count()
            if shape.count and not held and not of_host:
                continue
            job = member.replica.job
            if job.tenant == tenant:
                own[job.name] = own.get(job.name, 0) + held
            else:
                others.add(job.num)
                gpus += held
        if looked >= MEMBERS_LOOKED_MAX:
            break
    most = sorted(own.items(), key=lambda row: (-row[1], row[0]))
    return {
        "own": [{"job": name, "gpus": held} for name, held in most[:HOLDERS_MAX]],
        "own_jobs": len(own),
        "other_jobs": len(others),
        "other_gpus": gpus,
        "workers": workers,
        **({"more": True} if looked >= MEMBERS_LOOKED_MAX else {}),
    }


def _left_of_host(host: Host) -> str:
    cores = f"{host.cpu_free / 1000:g} of {host.cpu_milli / 1000:g} cores"
    return f"{cores}, {host.memory_free // 1024} of {host.memory_mib // 1024} GiB free"


def _but_for_health(host: Host, shape: Shape) -> int:
    """Devices that nobody leases; who lingers on one in quarantine is over."""
    return ((host.free | host.worker.quarantined & host.lent) & host.cls.fit(shape).mask).bit_count()


def _but_for_foreign(host: Host, shape: Shape) -> int:
    """Devices on which it could start now if nobody from outside were there."""
    foreign = sum(1 << slot for slot, (kind, _) in host.troubles.items() if kind == "foreign")
    left = host.free & host.cls.fit(shape).mask & ~(host.worker.quarantined | host.worker.unwell_mask)
    return (left & (foreign | ~(host.busy | host.sick))).bit_count()


def _troubles(hosts: list[Host], shape: Shape) -> list[str]:
    """What is wrong with devices that would do, as `w3 GPU 1: used by pid 1234 python (user bob)`; a few of them."""
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
            if len(shown) >= HOLDERS_MAX:
                return shown
    return shown
