"""The lease sessions of workers: join, renewal, goodbye and loss.

A worker ends its session itself at its fence. The scheduler considers it over only later, by grace and margin. So
attempts of an old session never overlap with new ones. Times here are the leader's own monotonic milliseconds: ledger
time never decides a loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple, TypeGuard

import msgspec

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.draft import Draft, steps_to_end
from moorage.scheduler.core.events import FromWorker
from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.host import Host
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.ledger import acts
from moorage.scheduler.core.ledger.records import GOODBYE, WORKERS_MAX, GangPhase
from moorage.scheduler.core.ledger.state import (
    AT_CLAIMED,
    AT_EXITED,
    FROZEN,
    LEAVING,
    LOST_KEPT,
    RUNNING,
    Attempt,
    State,
    Worker,
)
from moorage.scheduler.core.lifecycle.forgetting import FORGET_EVERY_S
from moorage.scheduler.core.lifecycle.health import DETAIL_CHARS_MAX, Health, drivers_down
from moorage.scheduler.core.lifecycle.lending import Lending, recorded_devices
from moorage.scheduler.core.lifecycle.stalls import Stalls
from moorage.scheduler.core.lifecycle.transitions import Lifecycle
from moorage.schemas.attempt import AttemptName, name_in
from moorage.schemas.capabilities import Capabilities
from moorage.schemas.errors import Problem, problem
from moorage.schemas.frames import Goodbye, Held, Hello, Join, Load, Renew, ReportAck, ReportFrame, Resized
from moorage.schemas.frames.reported import fits
from moorage.schemas.hello_check import check_hello, devices_of
from moorage.schemas.printable import stripped
from moorage.schemas.release import RELEASE, release_problem

#: after this many renewals in a row without an attempt, its worker is asked about it
MISSED_MAX: Final = 3
#: fields that the scheduler adds to a recorded hello
_OUR_OWN: Final = frozenset({"lost_ms", "json"})
#: a worker that joins so often in a row without a frame of its session counts as not heard from
JOINS_UNPROVEN_MAX: Final = 2
#: the tables of a term that are neither in the ledger nor reported again
KNOWN: Final = ("former", "renewals", "ahead", "hostless", "joins")
_OVER: Final = frozenset({"exited", "ran", "refused", "withdrawn", "not-held"})


class RenewalAudit(NamedTuple):
    """The attempts in a worker's last renewal that the ledger did not know; `twice`: also in the renewal before.

    Attempts that it shows as ended are left out.
    """

    unknown: frozenset[AttemptName]
    twice: frozenset[AttemptName]


class Sessions:
    """Handles the frames of workers, and finds the workers that are lost."""

    def __init__(self, state: State, fleet: Fleet, lifecycle: Lifecycle, config: Config) -> None:
        self.state = state
        self.fleet = fleet
        self.lifecycle = lifecycle
        self.health = Health(state, lifecycle)
        self.lending = Lending(state, has_kept_jobs)
        self.stalls = Stalls(state, fleet, lifecycle)
        self.config = config
        self.release = RELEASE  # of this scheduler
        #: by worker number: the capabilities of the previous session, until the join that ended it is answered
        self.former: dict[int, Mapping[str, Capabilities]] = {}
        #: by worker number, of workers that renewed in this term; for audits
        self.renewals: dict[int, RenewalAudit] = {}
        self.ahead: dict[int, str] = {}  # by worker number: what it knows that the ledger does not contain
        #: by worker number: since which monotonic ms it has a session and no host, as the core failed on it
        self.hostless: dict[int, int] = {}
        #: by worker number (below WORKERS_MAX): how often it has joined since a frame named its session. A goodbye
        #: names it, a loss does not, so the count survives a loss, and a worker that only joins gets no jobs in between
        self.joins: dict[int, int] = {}

    # -------------------------------------------------------------------------------------------- join

    def join(self, draft: Draft, event: FromWorker, frame: Join) -> Problem | str:
        """Write a join, and return the id of a session (for a repeated join, the current one), or a problem.

        One record first takes the reports of the old session, then adopts the attempts that the join lists, and then
        declares all others over.
        """
        apart = release_problem(frame.hello.release, self.release)
        if apart is not None:
            return apart
        elsewhere = frame.ledger not in ("", self.state.ledger_id) and not self.state.follows(frame.ledger)
        if elsewhere and (frame.holding or frame.reports):
            return problem(
                "failed-precondition",
                f"the worker has jobs of another ledger, {frame.ledger}, or reports about them; this scheduler's ledger"
                f" is {self.state.ledger_id}",
                field="$.ledger",
                found=frame.ledger,
                next="bring that ledger back from its backup (moorage admin restore); or give its jobs up: stop the"
                " worker, end what it still runs, and remove its state folder",
                retry_after_s=self.config.lost_ms / 1000,
            )
        worker = self.state.workers.get(event.worker)
        if worker is not None:
            answer = self._answer_known(worker, frame)
            if answer is not None:
                return answer
        trouble = check_hello(frame) or self.lending.check(draft, event.worker, frame.hello, self.config.lost_ms / 1000)
        if trouble is not None:
            return trouble
        num = self._number_new(draft, event, frame) if worker is None else self._end_last_session(draft, worker, frame)
        if isinstance(num, Problem):
            return num
        hello = _as_recorded(frame.hello) | {"lost_ms": self.config.lost_after_ms(frame.hello.lease_s)}
        if event.json:
            hello["json"] = True  # kept in the ledger, so that the next leader uses this form too
        draft.add(acts.Join(num, frame.boot, frame.n, event.fresh, 0, hello))
        return event.fresh

    def _answer_known(self, worker: Worker, frame: Join) -> Problem | str | None:
        """Return the answer to a known worker that gets no new session: a problem, or the session of this same join.

        None if it gets a new session.
        """
        if frame.ledger == self.state.ledger_id:
            knows = f"epoch {frame.epoch}" if frame.epoch > self.state.epoch else ""
            if self._is_ahead(worker, knows):
                return no_leader()
        if worker.machine != frame.machine and has_kept_jobs(worker):
            return problem(
                "worker-id-in-use",
                f"jobs with on_partition keep wait for the machine that held the worker id {worker.id}",
                next="give this worker another id, or cancel the kept jobs",
                retry_after_s=self.config.lost_ms / 1000,
            )
        if not worker.session:
            # a lost journal may begin again at 1, but not in the same boot: this join is late or repeated
            is_late = frame.n <= worker.n and (frame.boot, frame.machine) == (worker.boot, worker.machine)
            return self._stale(worker, frame) if is_late else None
        if worker.machine != frame.machine:
            return self._id_in_use(worker, frame)
        lost_ms = self.config.lost_after_ms(frame.hello.lease_s)
        if frame.n == worker.n and frame.boot == worker.boot and worker.lost_ms in (0, lost_ms):
            return worker.session  # the answer contains this leader's lease, so that must be the recorded one
        return self._stale(worker, frame) if frame.n <= worker.n else None

    def _id_in_use(self, worker: Worker, frame: Join) -> Problem:
        """Return the problem for a worker whose id a live session has; equal starts of `boot` mean the same kernel."""
        if frame.boot.partition(".")[0] == worker.boot.partition(".")[0]:
            holder, which = "a worker of the same machine, with another state folder,", "that state folder (--state)"
        else:
            holder, which = "a worker of another machine", "the machine it ran on before"
        lost_ms = max(worker.lost_ms, self.config.lost_ms)
        return problem(
            "worker-id-in-use",
            f"{holder} has the id {worker.id} until it leaves, or is silent for {lost_ms / 1000:g} s",
            next=f"give this worker another id with --id, or start it on {which}, or stop the other one",
            retry_after_s=lost_ms / 1000,
        )

    def _stale(self, worker: Worker, frame: Join) -> Problem:
        return problem(
            "stale-join",
            f"join number {frame.n} is not above {worker.n}, the last recorded",
            found=frame.n,
            allowed=f"> {worker.n}",
            next="keep the state folder between starts, or wait until the old session is lost",
            retry_after_s=self.config.lost_ms / 1000,
        )

    def _number_new(self, draft: Draft, event: FromWorker, frame: Join) -> Problem | int:
        """Write a new worker into the draft, and return its number; a problem if the ledger knows the most it can."""
        num, known = self.state.next_worker, len(self.state.workers)
        if known >= WORKERS_MAX:
            return problem(
                "failed-precondition",
                f"the ledger knows {known:,} worker ids, which is the most: one is forgotten once its worker was away"
                f" for {self.config.history_keep:g} s and no job in memory has run there",
                found=known,
                allowed=f"at most {WORKERS_MAX:,}",
                next="give agents that take each other's place one id (--id), or set a shorter history_keep",
                retry_after_s=FORGET_EVERY_S,
            )
        draft.add(acts.Known(num, event.worker, frame.machine))
        return num

    def _end_last_session(self, draft: Draft, worker: Worker, frame: Join) -> Problem | int:
        """End a known worker's last session: take its reports, adopt the listed attempts, declare the rest over.

        Return the worker's number; or a problem, and nothing is done, if listed attempts hold devices that have moved.
        """
        listed = frozenset(map(name_in, frame.holding))
        moved = moved_devices(worker, frame, listed)
        over = {name_in(report) for report in frame.reports if report.kind in _OVER}
        alive = sorted(key for key in moved - over if worker.attempts[key].phase != AT_EXITED)
        if alive:
            # they cannot be adopted, as their masks would mean other devices; nor placed again, as they still run
            return problem(
                "failed-precondition",
                f"the worker has {len(alive)} attempts on devices that this hello does not show in the same slots",
                field="$.holding",
                found=f"{alive[0][0]}/{alive[0][1]}/{alive[0][2]}",
                next="end what runs on devices that are gone, then join",
            )
        said = {key: value for key, value in worker.hello.items() if key not in _OUR_OWN}
        is_new = frame.boot != worker.boot or _as_recorded(frame.hello) != said
        if is_new:
            self.health.ask_anew(draft, worker)  # before its reports: what it refuses in these stands
        if _supervisor_died(worker, frame):
            self.lifecycle.on_reports_of_dead_supervisor(draft, worker, frame.reports)
        else:
            self.lifecycle.on_reports(draft, worker, frame.reports)
        self.fleet.leave(worker.num)
        self.lifecycle.lose_worker(draft, worker, "joined anew without it", listed - moved)
        self.former[worker.num] = worker.inventory.capabilities
        if is_new:
            self.lifecycle.starts.mended(draft, worker)
        if worker.machine != frame.machine:
            draft.add(acts.Known(worker.num, worker.id, frame.machine))
        if worker.is_unlisted:
            draft.add(acts.Flag(worker.num, "open", ""))
        return worker.num

    def forget(self, num: int) -> None:
        """Drop what is known of a worker that the ledger has forgotten."""
        for table in (self.former, self.ahead, self.renewals, self.joins):
            table.pop(num, None)

    def goodbye(self, draft: Draft, event: FromWorker, frame: Goodbye) -> Problem | None:
        worker = self.state.workers.get(event.worker)
        if not self._is_current(worker, frame.session):
            return session_over(event.worker)
        self.joins.pop(worker.num, None)
        self.fleet.leave(worker.num)
        self.lifecycle.lose_worker(draft, worker, GOODBYE, frozenset())
        return None

    def joined(self, worker: Worker, attempts: Iterable[tuple[Attempt, Shape]], mono_ms: int) -> None:
        """Add the host to the fleet after the fold, as heard from just now.

        A worker that joins repeatedly without naming its session does not receive the answers: nothing is placed on it
        until a renewal proves that it does.
        """
        host = self.fleet.join(worker, attempts)
        self.lending.joined(worker)
        joins = self.joins[worker.num] = self.joins.get(worker.num, 0) + 1
        host.heard = joins <= JOINS_UNPROVEN_MAX
        host.last_ms = mono_ms
        self.fleet.refresh(host)

    # ------------------------------------------------------------------------------------------- reports

    def reports(
        self, draft: Draft, event: FromWorker, frame: ReportFrame, folded: dict[int, int]
    ) -> Problem | ReportAck:
        """Handle a report frame and return its acknowledgement; a problem if its session is over or frames are missing.

        A frame that was handled before is only acknowledged again. `folded` is the number of the last frame handled in
        this draft, by worker number.
        """
        worker = self.state.workers.get(event.worker)
        if not self._is_current(worker, frame.session):
            return session_over(event.worker)
        self.joins.pop(worker.num, None)
        last = folded.get(worker.num, worker.no)
        if frame.no <= last:
            return ReportAck(last, self.state.epoch)
        if frame.no != last + 1:
            if not self.state.restored_epoch and self._is_ahead(
                worker, f"{frame.no - 1} answered frames of its reports, and the ledger has {last}"
            ):
                return no_leader()
            return problem(
                "gap",
                f"report frame {frame.no} came, {last + 1} is next",
                found=frame.no,
                allowed=str(last + 1),
                next=f"send frame {last + 1} again",
            )
        self.lifecycle.on_reports(draft, worker, frame.reports)
        draft.count(worker, frame.no)
        folded[worker.num] = frame.no
        return ReportAck(frame.no, self.state.epoch)

    @staticmethod
    def _is_current(worker: Worker | None, session: str) -> TypeGuard[Worker]:
        """Return whether this is the worker's current session, which this record has not ended."""
        return worker is not None and worker.session == session != ""

    # ---------------------------------------------------------------------------------------- renewals

    def renew(self, draft: Draft, event: FromWorker, frame: Renew) -> Problem | Host:
        """Return the host of a renewal, with its locally claimed devices updated, or the problem that refuses it.

        The caller renews the lease once the record is stored. The device report is handled too. After a takeover the
        worker's release may be too far from this scheduler's: then its lease runs out.
        """
        worker = self.state.workers.get(event.worker)
        if worker is None or not worker.session or worker.session != frame.session:
            return session_over(event.worker)
        apart = release_problem(worker.inventory.release, self.release)
        if apart is not None:
            return apart
        host = self.fleet.hosts.get(worker.num)
        if host is None:
            return session_over(event.worker)
        if not host.heard and self._is_ahead(worker, self._known_by(worker, frame)):
            return no_leader()
        every = (1 << len(host.cls.devices)) - 1
        self.joins.pop(worker.num, None)
        busy = sum(1 << slot for slot in set(frame.busy) if 0 <= slot < 64) & every
        if host.busy & ~busy or (host.waiting and not frame.waiting):
            self.fleet.opens(worker.num)  # `refresh` misses a shared device that reopens
        stayed, down = host.stays, drivers_down(frame, host.cls.drivers)
        if host.down.keys() != down.keys():
            if host.down.keys() - down.keys():
                self.fleet.opens(worker.num)  # `refresh` looks at devices alone
            self.fleet.redrawn.add(worker.num)
        host.down = down
        host.use = {name_in(each): each for each in frame.use if each.attempt}
        host.stopped = {name_in(each): each.processes for each in frame.stopped}
        if frame.reported or host.reported:
            told = host.reported | {name_in(each): each for each in frame.reported if fits(each.values)}
            host.reported = {name: each for name, each in told.items() if name in worker.attempts}
        host.leaves_ms = None if frame.leaving_s is None else draft.time_ms + 1000 * frame.leaving_s
        if stayed != host.stays:
            if host.stays:
                self.fleet.opens(worker.num)
            self.fleet.refresh(host)
        self.stalls.on_renewal(host)
        stale = host.stale and host.load_ms >= 0  # a host that sends no load frames is judged by its renewals
        host.refused = 0
        if (host.busy, host.waiting, host.heard, host.stale) != (busy, frame.waiting, True, stale):
            host.busy, host.waiting, host.heard, host.stale = busy, frame.waiting, True, stale
            self.fleet.refresh(host)
        self.health.on_renewal(draft, host, frame)
        return host

    def note_unknown(self, worker: Worker, unknown: list[Held]) -> None:
        """Note the attempts in a worker's renewal that the ledger does not know, for audits."""
        self.renewals[worker.num] = audited(self.renewals.get(worker.num), unknown)

    def _is_ahead(self, worker: Worker, knows: str) -> bool:
        """Return whether a worker first heard from in this term knows records that the ledger does not contain (H7).

        `knows` says what these are, "" for none; it is kept in `ahead`. If there are any, this term is over, or the
        ledger is an older backup. Only the first frame is evidence: a worker that has followed this term and then
        claims to know more is faulty, or lies.
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
        """Return what a renewal shows that the ledger lacks (newer term, acknowledged reports, later placement).

        Empty if nothing.
        """
        if frame.epoch > self.state.epoch:
            return f"epoch {frame.epoch}"
        # a restored ledger may lack reports acknowledged before: the operator who restored it accepted that
        if frame.no > worker.no and not self.state.restored_epoch:
            return f"{frame.no} answered frames of its reports, and the ledger has {worker.no}"
        fence = max((held.fence for held in frame.held), default=0)
        return f"a placement of record {fence}" if fence > self.state.seq else ""

    def behind(self, *, waited: bool) -> bool | None:
        """Return whether most workers know records that the ledger does not contain, although this scheduler leads it.

        None while too few were heard from, unless all have had time to renew (`waited`). A single worker in a big fleet
        is not believed, as it may lie.
        """
        if not self.ahead:
            return False
        with_us = sum(host.heard for num, host in self.fleet.hosts.items() if num not in self.ahead)
        if not waited and with_us + len(self.ahead) < len(self.fleet.hosts):
            return None
        return len(self.ahead) > with_us

    def load(self, worker_id: str, frame: Load, mono_ms: int) -> None:
        """Handle a load frame: devices that it shows as sick or in foreign use get no new jobs (H21).

        It reopens devices that only an earlier load frame closed. It is ignored if the worker has no session in that
        boot.
        """
        worker = self.state.workers.get(worker_id)
        host = self.fleet.hosts.get(worker.num) if worker is not None else None
        if host is None or frame.boot != host.worker.boot:
            return
        sick = used_percent = 0
        before, host.troubles, host.warnings = (host.troubles, host.warnings, host.warning), {}, {}
        host.warning = stripped(frame.warning, DETAIL_CHARS_MAX)
        for slot, reading in enumerate(frame.gpu_pool):
            if reading.util_percent > 0:
                used_percent += min(reading.util_percent, 100)
            if reading.warning and slot < len(host.cls.devices):
                kind, _, detail = reading.warning.partition(": ")
                host.warnings[slot] = (kind, detail)
            if (reading.health != "ok" or reading.foreign) and slot < len(host.cls.devices):
                sick |= 1 << slot
                ill = reading.health != "ok"
                host.troubles[slot] = (reading.health, reading.detail) if ill else ("foreign", reading.foreign)
        if (host.troubles, host.warnings, host.warning) != before:
            self.fleet.redrawn.add(host.worker.num)
        host.util_percent = used_percent // max(1, len(frame.gpu_pool))
        heat = [reading.temperature_c for reading in frame.gpu_pool if reading.temperature_c is not None]
        host.temperature_c = max(heat, default=None)
        host.load_ms = mono_ms
        if (frame.data or host.data) and host.data != (data := frozenset(frame.data)):
            host.data = data
            self.fleet.opens(host.worker.num)
        stale = host.stale and self._renews_no_more(host, mono_ms)
        if sick != host.sick or stale != host.stale:
            self.fleet.opens(host.worker.num)
            host.sick = sick
            host.stale = stale
            self.fleet.refresh(host)

    def silent(self, mono_ms: int) -> list[Worker]:
        """Return the workers lost by silence, and mark hosts that miss renewals or load frames as stale."""
        lost = []
        for host in self.fleet.hosts.values():
            silent_ms = mono_ms - host.last_ms
            # its lease is the one sent with its join, even if this leader's settings differ
            if silent_ms > self.config.lost_ms and silent_ms > host.worker.lost_ms:
                lost.append(host.worker)
            elif host.stale or not host.heard:
                continue
            elif mono_ms - self._last_report_ms(host) > host.loads_within_ms or self._renews_no_more(host, mono_ms):
                host.stale = True
                self.fleet.refresh(host)
        for num, since_ms in list(self.hostless.items()):
            worker = self.state.worker_by_num.get(num)
            if worker is None or not worker.session or num in self.fleet.hosts:
                del self.hostless[num]
            elif mono_ms - since_ms > max(self.config.lost_ms, worker.lost_ms):
                lost.append(worker)
        return lost

    def _renews_no_more(self, host: Host, mono_ms: int) -> bool:
        """Return whether a host's last renewal is over half a lease old: then the worker itself refuses placements."""
        # a worker with a longer lease of its own refuses none yet, and is as silent
        return mono_ms - host.last_ms > self.config.lease_s * 500

    @staticmethod
    def _last_report_ms(host: Host) -> int:
        """Return when the host last sent a load frame, or a renewal if it never sent a load frame."""
        return host.load_ms if host.load_ms >= 0 else host.last_ms

    def differences(
        self, worker: Worker, held: list[Held], no: int, resized: list[Resized]
    ) -> tuple[list[Attempt], list[Held]]:
        """Return the attempts to send to a worker again, and those in its list that the ledger does not know.

        `no` is the number of the last report frame that it knows to be answered. In each attempt that the list lacks,
        `missed` counts that renewal, if the worker had reported the attempt before it sent that: renewals from before
        the placement came may wait for a slow leader or server.
        """
        has = {name_in(each): each.n for each in resized}
        shown = {name_in(entry): entry for entry in held}
        unknown = [entry for key, entry in shown.items() if key not in worker.attempts]
        again = []
        for key, attempt in worker.attempts.items():
            entry = shown.get(key)
            if entry is not None:
                attempt.missed = 0
                if wants_more(attempt, entry.phase) or _is_behind(attempt, has.get(key, 0)):
                    again.append(attempt)
            elif attempt.phase == AT_EXITED:
                continue
            else:
                # a larger number: a restored ledger lacks reports since its backup
                if no >= worker.no and attempt.phase >= AT_CLAIMED:
                    attempt.missed += 1
                again.append(attempt)
        return again, unknown


def audited(last: RenewalAudit | None, unknown: list[Held]) -> RenewalAudit:
    """Return the audit of a renewal that lists these unknown attempts; `last` is that of the one before, or None."""
    keys = frozenset(name_in(entry) for entry in unknown if entry.phase != "exited")
    return RenewalAudit(keys, keys & last.unknown if last is not None else frozenset())


def _as_recorded(hello: Hello) -> dict[str, Any]:
    """Return a hello as recorded: with the empty fields, which the wire leaves out and placement reads."""
    recorded: dict[str, Any] = msgspec.to_builtins(hello)
    for name, empty in (("gpu_pool", []), ("drivers", []), ("labels", {}), ("sharers_max", {})):
        recorded.setdefault(name, empty)
    recorded.setdefault("modes", list(hello.modes))
    recorded.setdefault("cpu_milli", 0)
    recorded.setdefault("memory_mib", 0)
    return recorded


def _is_behind(attempt: Attempt, has: int) -> bool:
    """Return whether what the attempt has was changed since the order that the worker last applied."""
    job = attempt.replica.job
    return (bool(job.resizes) or job.relimit is not None) and has < job.changed_seq


def wants_more(attempt: Attempt, phase: str) -> bool:
    """Return whether a worker reports a phase in which it must get its attempt's order again."""
    if attempt.replica.state in LEAVING:
        return phase in ("claimed", "running", "frozen")
    if attempt.replica.state == RUNNING and phase in ("running", "frozen"):
        return attempt.freeze or phase == "frozen"
    if attempt.replica.state == FROZEN:
        return attempt.mask != 0
    return phase == "claimed" and attempt.replica.job.gang == GangPhase.STARTED


def _supervisor_died(worker: Worker, frame: Join) -> bool:
    """Return whether the worker's supervisor died while the machine went on: a boot is `machine's.start`."""
    of_machine, _, start = frame.boot.partition(".")
    return bool(start) and frame.boot != worker.boot and worker.boot.startswith(f"{of_machine}.")


def session_over(worker_id: str) -> Problem:
    return problem(
        "session-over",
        f"this lease session of worker {worker_id} is over",
        next="end what runs under it, clear, and join again",
    )


def no_leader() -> Problem:
    """Return the answer to a worker that knows more than this ledger: it asks again, and the real leader answers."""
    return problem("not-leading", "a worker knows a newer term: this scheduler does not lead, or must not")


def has_kept_jobs(worker: Worker) -> bool:
    """Return whether jobs wait for this machine to come back (on_partition keep)."""
    current = (attempt.replica for attempt in worker.attempts.values() if attempt.replica.attempt is attempt)
    return any(replica.state == LOST_KEPT for replica in current)


def has_room(state: State, draft: Draft, event: FromWorker) -> bool:
    """Return whether the record has room for the most that this frame may write; an empty record always has."""
    frame, steps, worker = event.frame, 0, state.workers.get(event.worker)
    if worker is None:
        return True
    if isinstance(frame, ReportFrame | Join):
        steps = 2 * len(frame.reports)
        gangs = [attempt for attempt in worker.attempts.values() if attempt.replica.job.gang]
        if gangs:
            told = {name_in(report) for report in frame.reports}
            steps += steps_to_end([attempt for attempt in gangs if attempt.name in told])
    if isinstance(frame, Join | Goodbye):
        steps += steps_to_end(worker.attempts.values())
    return steps == 0 or draft.has_room(steps)


def moved_devices(worker: Worker, frame: Join, listed: frozenset[AttemptName]) -> frozenset[AttemptName]:
    """Return the listed attempts on a slot that has another device (vendor, uuid), or none, in the new session."""
    both = zip(recorded_devices(worker), devices_of(frame.hello), strict=False)
    same = sum(1 << slot for slot, (old, new) in enumerate(both) if old == new)
    return frozenset(key for key in listed if key in worker.attempts and worker.attempts[key].home & ~same)
