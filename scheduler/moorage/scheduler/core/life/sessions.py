"""Workers' lease sessions: join, renewals, goodbye, loss, and what a renewal does not yet show.

A session ends at the worker's own fence and, later by grace and margin, at the scheduler: the two never overlap.
Times here are the leader's own monotonic milliseconds; ledger time never decides a loss.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, TypeGuard

import msgspec

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.draft import STEP_BYTES, Draft
from moorage.scheduler.core.events import FromWorker
from moorage.scheduler.core.fleet import Fleet
from moorage.scheduler.core.host import Host
from moorage.scheduler.core.life.health import Health
from moorage.scheduler.core.life.lending import Lending, check_hello, devices_of, recorded_devices
from moorage.scheduler.core.life.lifecycle import Lifecycle
from moorage.scheduler.core.records import GOODBYE, WORKERS_MAX, Act, GangPhase
from moorage.scheduler.core.shape import Shape
from moorage.scheduler.core.state import AT_EXITED, CANCELLING, ENDING, LOST_KEPT, Member, MemberKey, State, Worker
from moorage.schemas.errors import Problem, problem
from moorage.schemas.frames import FactAck, FactFrame, Goodbye, Held, Hello, Join, Load, Renew
from moorage.schemas.release import RELEASE, release_problem

#: a renewal's list must lack a member this often in a row before the worker is asked to account for it
MISSED_MAX: Final = 3
_OVER: Final = frozenset({"exited", "refused", "withdrawn", "not-held"})


class Sessions:
    """Which worker may hold what, and since when it was heard."""

    def __init__(self, state: State, fleet: Fleet, lifecycle: Lifecycle, config: Config) -> None:
        self.state = state
        self.fleet = fleet
        self.lifecycle = lifecycle
        self.health = Health(state, lifecycle)
        self.lending = Lending(state, kept)
        self.config = config
        self.release = RELEASE  # of this scheduler
        self.ahead: dict[int, str] = {}  # by worker number: what it knows of this ledger that the ledger lacks

    # -------------------------------------------------------------------------------------------- join

    def join(self, draft: Draft, event: FromWorker, frame: Join) -> Problem | str:
        """A session id (fresh, or the standing one for a repeated join), or why not.

        One record folds the facts under their old names, adopts what is listed, and only then declares the rest over.
        """
        apart = release_problem(frame.hello.release, self.release)
        if apart is not None:
            return apart
        worker = self.state.workers.get(event.worker)
        if worker is not None:
            standing = self._beside(draft, worker, frame)
            if standing is not None:
                return standing
        trouble = check_hello(frame) or self.lending.check(draft, event.worker, frame.hello, self.config.lost_ms / 1000)
        if trouble is not None:
            return trouble
        num = self._numbered(draft, event, frame) if worker is None else self._take_over(draft, worker, frame)
        if isinstance(num, Problem):
            return num
        hello = _as_recorded(frame.hello) | {"lost_ms": self.config.lost_ms}
        draft.acts.append([Act.JOIN, num, frame.boot, frame.n, event.fresh, 0, hello])
        draft.bytes += 512 + len(msgspec.msgpack.encode(hello))
        return event.fresh

    def _beside(self, draft: Draft, worker: Worker, frame: Join) -> Problem | str | None:
        """What stands against a new session of a known worker, or its standing one where this join has made it."""
        if frame.ledger == self.state.ledger_id:
            knows = f"reign {frame.reign}" if frame.reign > self.state.epoch else ""
            if self._is_ahead(worker, knows):
                return no_leader()
        if worker.machine != frame.machine and kept(worker):
            return problem(
                "worker-id-in-use",
                f"jobs with on_partition keep wait for the machine that held the worker id {worker.id}",
                next="give this worker another id, or cancel the kept jobs",
                retry_after_s=self.config.lost_ms / 1000,
            )
        if not worker.session or worker.num in draft.left:
            return None
        if worker.machine != frame.machine:
            return problem(
                "worker-id-in-use",
                f"worker {worker.id} is held by another machine until it is lost or says goodbye",
                next="give this worker another id, or wait until the other one is lost",
                retry_after_s=self.config.lost_ms / 1000,
            )
        if frame.n == worker.n and frame.boot == worker.boot and worker.lost_ms in (0, self.config.lost_ms):
            return worker.session  # whose answer tells this leader's numbers
        if frame.n <= worker.n:
            return problem(
                "stale-join",
                f"join number {frame.n} is not above {worker.n}, the last recorded",
                found=frame.n,
                allowed=f"> {worker.n}",
                next="keep the state folder between starts, or wait until the old session is lost",
                retry_after_s=self.config.lost_ms / 1000,
            )
        return None

    def _numbered(self, draft: Draft, event: FromWorker, frame: Join) -> Problem | int:
        """The number that a worker gets which was never seen before."""
        num = len(self.state.worker_by_num) + draft.numbered
        if num >= WORKERS_MAX:
            return problem("failed-precondition", f"{WORKERS_MAX:,} workers are known: the ledger's bound")
        draft.acts.append([Act.WORKER, num, event.worker, frame.machine])
        draft.numbered += 1
        return num

    def _take_over(self, draft: Draft, worker: Worker, frame: Join) -> Problem | int:
        """From a known worker's last session: fold its facts, adopt what is listed, and have the rest over."""
        listed = frozenset((h.tenant, h.job, h.replica, h.fence) for h in frame.holding)
        moved = moved_devices(worker, frame, listed)
        over = {(fact.tenant, fact.job, fact.replica, fact.fence) for fact in frame.facts if fact.kind in _OVER}
        alive = sorted(key for key in moved - over if worker.members[key].phase != AT_EXITED)
        if alive:
            # their masks would name other devices, and over they are not: no next attempt beside them
            return problem(
                "failed-precondition",
                f"it holds {len(alive)} members on devices that this hello does not show in the same slots",
                field="$.holding",
                found=f"{alive[0][0]}/{alive[0][1]}/{alive[0][2]}",
                next="end what runs on devices that are gone, then join",
            )
        self.lifecycle.on_facts(draft, worker, frame.facts)
        self.fleet.leave(worker.num)
        self.lifecycle.lose_worker(draft, worker, "joined anew without it", listed - moved)
        if worker.machine != frame.machine:
            draft.acts.append([Act.WORKER, worker.num, worker.id, frame.machine])
        return worker.num

    def goodbye(self, draft: Draft, event: FromWorker, frame: Goodbye) -> Problem | None:
        worker = self.state.workers.get(event.worker)
        if not self._stands(worker, draft, frame.session):
            return session_over(event.worker)
        self.fleet.leave(worker.num)
        self.lifecycle.lose_worker(draft, worker, GOODBYE, frozenset())
        return None

    def joined(self, worker: Worker, members: Iterable[tuple[Member, Shape]], mono_ms: int) -> None:
        """After the fold: the host stands in the fleet again, heard now."""
        host = self.fleet.join(worker, members)
        self.lending.joined(worker)
        host.heard = True
        host.last_ms = mono_ms
        self.fleet.refresh(host)

    # ------------------------------------------------------------------------------------------- facts

    def facts(self, draft: Draft, event: FromWorker, frame: FactFrame, folded: dict[int, int]) -> Problem | FactAck:
        """Fold a frame once. `folded` is what this draft folded through, by worker number."""
        worker = self.state.workers.get(event.worker)
        if not self._stands(worker, draft, frame.session):
            return session_over(event.worker)
        last = folded.get(worker.num, worker.no)
        if frame.no <= last:
            return FactAck(last, self.state.epoch)
        if frame.no != last + 1:
            if not self.state.restored_epoch and self._is_ahead(
                worker, f"facts answered up to frame {frame.no - 1}, of which {last} are here"
            ):
                return no_leader()
            return problem(
                "gap",
                f"fact frame {frame.no} came, {last + 1} is next",
                found=frame.no,
                allowed=str(last + 1),
                next=f"send frame {last + 1} again",
            )
        self.lifecycle.on_facts(draft, worker, frame.facts)
        draft.facts += (worker.num, frame.no)
        draft.bytes += 10
        folded[worker.num] = frame.no
        return FactAck(frame.no, self.state.epoch)

    @staticmethod
    def _stands(worker: Worker | None, draft: Draft, session: str) -> TypeGuard[Worker]:
        """Whether this is the worker's lease session, and no frame before it in this very record has ended it."""
        return worker is not None and worker.session == session != "" and worker.num not in draft.left

    # ---------------------------------------------------------------------------------------- renewals

    def renew(self, draft: Draft, event: FromWorker, frame: Renew) -> Problem | Host:
        """The host whose session lives on; the soft view takes what the frame says of local claims.

        A session that began under another scheduler may be of a release too far from ours: then its lease runs out.
        """
        worker = self.state.workers.get(event.worker)
        if worker is None or not worker.session or worker.session != frame.session:
            return session_over(event.worker)
        apart = release_problem(worker.hello.get("release", ""), self.release)
        if apart is not None:
            return apart
        host = self.fleet.hosts.get(worker.num)
        if host is None:
            return session_over(event.worker)
        if not host.heard and self._is_ahead(worker, self._known_by(worker, frame)):
            return no_leader()
        every = (1 << len(host.cls.devices)) - 1
        busy = sum(1 << slot for slot in set(frame.busy) if 0 <= slot < 64) & every
        if host.busy & ~busy or (host.waiting and not frame.waiting):
            self.fleet.opens(worker.num)  # a shared device that opens again moves no bucket
        stale = host.stale and host.load_ms >= 0  # it says no load frames: then its renewals tell how it is
        if (host.busy, host.waiting, host.heard, host.stale) != (busy, frame.waiting, True, stale):
            host.busy, host.waiting, host.heard, host.stale = busy, frame.waiting, True, stale
            self.fleet.refresh(host)
        self.health.heard(draft, host, frame)
        return host

    def _is_ahead(self, worker: Worker, knows: str) -> bool:
        """Whether it knows more of this ledger than the ledger itself, when it is first heard in this reign (H7).

        Then our reign is over, or the ledger is an older backup. Who has followed this reign before has only its own
        trouble, or lies: no evidence of ours.
        """
        host = self.fleet.hosts.get(worker.num)
        if host is not None and host.heard:
            return False
        if knows:
            self.ahead[worker.num] = knows
        else:
            self.ahead.pop(worker.num, None)
        return bool(knows)

    def _known_by(self, worker: Worker, frame: Renew) -> str:
        """What a renewal shows that this ledger lacks: a newer reign, answered facts, a later placement. Else empty."""
        if frame.reign > self.state.epoch:
            return f"reign {frame.reign}"
        # facts that a restored ledger lacks were answered by the one that was: an operator has given it up
        if frame.no > worker.no and not self.state.restored_epoch:
            return f"facts answered up to frame {frame.no}, of which {worker.no} are here"
        fence = max((held.fence for held in frame.held), default=0)
        return f"a placement of record {fence}" if fence > self.state.seq else ""

    def behind(self, *, waited: bool) -> bool | None:
        """Whether the workers, more of them than not, know more of the ledger than it has, though it says we lead.

        None while too few were heard to tell. One worker alone in a big fleet is not believed: it may lie.
        """
        if not self.ahead:
            return False
        with_us = sum(host.heard for num, host in self.fleet.hosts.items() if num not in self.ahead)
        if not waited and with_us + len(self.ahead) < len(self.fleet.hosts):
            return None
        return len(self.ahead) > with_us

    def load(self, worker_id: str, frame: Load, mono_ms: int) -> None:
        """A load frame can only add busy: sick devices and foreign holders take no new work (H21)."""
        worker = self.state.workers.get(worker_id)
        host = self.fleet.hosts.get(worker.num) if worker is not None else None
        if host is None or frame.boot != host.worker.boot:
            return
        sick = used_percent = 0
        before, host.troubles = host.troubles, {}
        for slot, reading in enumerate(frame.gpu_pool):
            if reading.util_percent > 0:
                used_percent += min(reading.util_percent, 100)
            if (reading.health != "ok" or reading.foreign) and slot < len(host.cls.devices):
                sick |= 1 << slot
                ill = reading.health != "ok"
                host.troubles[slot] = (reading.health, reading.detail) if ill else ("foreign", reading.foreign)
        if host.troubles != before:
            self.fleet.redrawn.add(host.worker.num)
        host.util_percent = used_percent // max(1, len(frame.gpu_pool))
        host.load_ms = mono_ms
        if sick != host.sick or host.stale:
            self.fleet.opens(host.worker.num)
            host.sick = sick
            host.stale = False
            self.fleet.refresh(host)

    def silent(self, mono_ms: int) -> list[Worker]:
        """The workers whose sessions are over by silence; those without load frames take no new work."""
        stale_ms = int(self.config.load_s * self.config.loads_missed_max * 1000)
        lost = []
        for host in self.fleet.hosts.values():
            silent_ms = mono_ms - host.last_ms
            # it holds the lease that it was told with its join, also where this leader's settings are others
            if silent_ms > self.config.lost_ms and silent_ms > host.worker.lost_ms:
                lost.append(host.worker)
            elif not host.stale and host.heard and mono_ms - self._told_ms(host) > stale_ms:
                host.stale = True
                self.fleet.refresh(host)
        return lost

    @staticmethod
    def _told_ms(host: Host) -> int:
        """When the host last said how it is: its load frames, or its renewals where it never said load."""
        return host.load_ms if host.load_ms >= 0 else host.last_ms

    def differences(self, worker: Worker, held: list[Held], no: int) -> tuple[list[Member], list[Held]]:
        """What a renewal does not yet show: members to send again, and held ones that the ledger does not know."""
        shown = {(h.tenant, h.job, h.replica, h.fence): h for h in held}
        unknown = [entry for key, entry in shown.items() if key not in worker.members]
        again = []
        for key, member in worker.members.items():
            entry = shown.get(key)
            if entry is not None:
                member.missed = 0
                if wants_more(member, entry.phase):
                    again.append(member)
            elif member.phase == AT_EXITED:
                continue
            else:
                if no == worker.no:
                    member.missed += 1
                again.append(member)
        return again, unknown


def _as_recorded(hello: Hello) -> dict[str, Any]:
    """A hello as a map with all that placement reads, what is left out on the wire as it is empty too."""
    recorded: dict[str, Any] = msgspec.to_builtins(hello)
    for name, empty in (("gpu_pool", []), ("drivers", []), ("labels", {}), ("sharers_max", {})):
        recorded.setdefault(name, empty)
    recorded.setdefault("modes", list(hello.modes))
    recorded.setdefault("cpu_milli", 0)
    recorded.setdefault("memory_mib", 0)
    return recorded


def wants_more(member: Member, phase: str) -> bool:
    """Whether the ledger wants something of a held member that its phase does not show."""
    if member.replica.state in (CANCELLING, ENDING):
        return phase in ("claimed", "running")
    return phase == "claimed" and member.replica.job.gang == GangPhase.STARTED


def session_over(worker_id: str) -> Problem:
    return problem(
        "session-over",
        f"this lease session of worker {worker_id} is over",
        next="end what runs under it, clear, and join again",
    )


def no_leader() -> Problem:
    """To a worker that has heard of a newer reign: it asks on, and whoever leads answers."""
    return problem("not-leading", "a newer reign was heard of: this scheduler does not lead, or may not")


def kept(worker: Worker) -> bool:
    """Whether jobs wait for this very machine (on_partition keep)."""
    return any(member.replica.state == LOST_KEPT for member in worker.members.values())


def lose_bytes(worker: Worker) -> int:
    """What the end of a session writes at most: two steps a member, and more for the ranks of its gangs."""
    return sum(
        2 * STEP_BYTES * (len(member.replica.job.replicas) if member.replica.job.gang else 1)
        for member in worker.members.values()
    )


def moved_devices(worker: Worker, frame: Join, listed: frozenset[MemberKey]) -> frozenset[MemberKey]:
    """Listed members with a slot that shows another device (vendor, uuid) in the new session than in the old one."""
    both = zip(recorded_devices(worker), devices_of(frame.hello), strict=False)
    same = sum(1 << slot for slot, (old, new) in enumerate(both) if old == new)
    return frozenset(key for key in listed if key in worker.members and worker.members[key].mask & ~same)
