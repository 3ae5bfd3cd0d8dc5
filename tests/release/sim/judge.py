"""What must hold whatever happens: the ledger's own invariants after every record, and what the machines really ran.

The judge shares no memory with those it judges: it folds the ledger's bytes by itself, and takes leases from the
machines' records of processes, not from the scheduler's word.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from moorage.bus.jetstream import StoredMessage
from moorage.scheduler.core.config import Config
from moorage.scheduler.core.ledger.ceilings import CEILINGS, Ceilings
from moorage.scheduler.core.ledger.finished import job_key
from moorage.scheduler.core.ledger.state import State, Worker
from moorage.scheduler.ledger.invariants import Broken, validate
from moorage.scheduler.ledger.ledger import Ledger
from moorage.schemas.codec import Decoder, decode_request
from moorage.schemas.frames import HistoryFrame
from moorage.schemas.job import STATES
from moorage.schemas.subjects import Subjects
from moorage.testing.bus.bus import SimulatedBus
from moorage.testing.demo.intervals import clash
from tests.release.sim.afters import Afters
from tests.release.sim.devices import LocalHold, Ran
from tests.release.sim.machine import Machine
from tests.release.sim.orders import Orders
from tests.release.sim.preemptions import Preemptions
from tests.release.sim.stays import Stays
from tests.release.sim.sweeps import Sweeps

SUBJECTS: Final = Subjects()
_read_history: Final = Decoder[HistoryFrame](HistoryFrame)
#: ledger time is counted in whole milliseconds
CLOCK_MS: Final = 2


class Violated(AssertionError):
    """A promise does not hold."""


class Judge:
    """`watch` the bus, tell it of answers and starts; the first violation is raised by `finish`, or at once."""

    def __init__(self, config: Config, ceilings: Ceilings = CEILINGS) -> None:
        self.state = State(ceilings)
        self.machines: list[Machine] = []
        self.requests: dict[tuple[str, str], dict[str, Any]] = {}
        self.accepted: set[tuple[str, str]] = set()
        self.refused: set[tuple[str, str]] = set()  # for good: whatever comes late, these are never jobs
        self.records = 0
        self.digest = 0  # of every record: two runs of one seed have the same
        self.started_attempts = 0
        self.beside_frozen = 0  # processes that began on a device that a frozen one waits for
        self.on_violated: Callable[[], object] = lambda: None
        self.on_accepted: Callable[[str, str], object] = lambda tenant, job: None
        self._first: Violated | None = None
        self._modes: dict[tuple[str, str], str] = {}  # of every job that was asked about while it was known
        self._ran: dict[str, Ran] = {}  # by tenant, job, replica and fence: of each name one process alone
        self._bus: SimulatedBus | None = None
        self._term = _TermTime(0, 0, 0.0)
        self._stored_ms = 0.0  # when the last record was
        self._said_well: dict[tuple[str, int], float] = {}  # worker and slot -> when an operator said that it is well
        self._known: dict[int, _Known] = {}  # of each worker, by its number in the ledger
        self.preemptions = Preemptions(self.violated, config)
        self.orders = Orders(self.violated)
        self.afters = Afters(self.violated)
        self.stays = Stays(self.violated)
        self.sweeps = Sweeps(self.violated)
        self.histories = 0  # jobs that left memory, and whose history was read

    def violated(self, what: str, cause: BaseException | None = None) -> None:
        if self._first is None:
            self._first = Violated(what)
            self._first.__cause__ = cause
            self.on_violated()
        raise self._first

    def finish(self) -> None:
        """Raises `Violated` for whatever was seen, or is missing at the end."""
        if self._first is not None:
            raise self._first
        if missing := self.missing():
            self.violated(f"accepted and in no ledger, so lost: {missing}")
        self._check_success()
        if wrong := [f"{tenant}/{job}" for tenant, job in sorted(self.refused) if self._is_known(tenant, job)]:
            self.violated(f"refused for good, and in the ledger all the same: {wrong}")
        self._check_history()

    def missing(self) -> list[str]:
        """Jobs that were accepted, by an answer or by the queue's acknowledgement, and are not in the ledger (yet)."""
        return [f"{tenant}/{job}" for tenant, job in sorted(self.accepted) if not self._is_known(tenant, job)]

    def known(self, tenant: str) -> list[str]:
        """The jobs of a tenant that were accepted and are in the ledger, in a fixed order; a queue may hold more."""
        return sorted(job for of, job in self.accepted if of == tenant and self._is_known(tenant, job))

    def _is_known(self, tenant: str, job: str) -> bool:
        if self.state.job(tenant, job) is not None:
            return True
        return self.state.finished.find(job_key(tenant, job)) is not None

    def _check_history(self) -> None:
        """Of no job is a revision told twice, and of one whose end is told, each is told."""
        stream = (self._bus.streams() if self._bus is not None else {}).get(SUBJECTS.history_stream)
        told: dict[tuple[str, str, int], list[int]] = {}
        ended: dict[tuple[str, str, int], int] = {}
        for message in stream.messages.values() if stream is not None else ():
            frame = _read_history(message.data)
            for history in frame.jobs:
                name = frame.tenant, history.job, history.ledger
                told.setdefault(name, []).extend(move.rev for move in history.moves)
                if history.over:
                    if name in ended:
                        self.violated(f"the end of {name} is told twice in the history")
                    ended[name] = history.rev
        for name, revs in told.items():
            if len(set(revs)) < len(revs):
                self.violated(f"revisions of {name} are told twice in the history: {sorted(revs)}")
            if name in ended and sorted(revs) != list(range(2, ended[name] + 1)):
                self.violated(f"the history of {name} has {len(revs)} of {ended[name]} revisions")
        self.histories = len(ended)

    def _check_success(self) -> None:
        """A success that the ledger records is one that some machine saw, of every replica."""
        seen = {_unit(ran) for machine in self.machines for ran in machine.ran if ran.code == 0}
        for job in self.state.jobs.values():
            for replica in job.replicas:
                if STATES[replica.state] == "SUCCEEDED" and (job.tenant, job.name, replica.index) not in seen:
                    self.violated(f"{job.tenant}/{job.name}/{replica.index} succeeded, and nothing of it did")

    # ------------------------------------------------------------------------------------------- callers

    def answered(self, tenant: str, job: str, body: dict[str, Any], answer: dict[str, Any]) -> None:
        if answer.get("kind") == "accepted":
            is_new = (tenant, job) not in self.accepted
            self.stored(tenant, job, body)
            if is_new:
                self.on_accepted(tenant, job)
        elif answer.get("code") in ("internal", "invalid-argument", "conflict"):
            self.violated(f"{tenant}/{job} was refused: {answer}")

    def stored(self, tenant: str, job: str, body: dict[str, Any]) -> None:
        """An answer, or the queue's acknowledgement: from now on the job must not be lost."""
        self.requests[(tenant, job)] = body
        self.accepted.add((tenant, job))

    # -------------------------------------------------------------------------------------------- ledger

    def restored(self, state: State, taken_seq: int) -> list[tuple[str, str]]:
        """The ledger begins anew with `state`, from a backup at `taken_seq`. Returns the jobs that it has forgotten."""
        self.state = state
        self._known = {
            num: _Known(worker.session, worker.session, worker.n, worker.machine)
            for num, worker in state.worker_by_num.items()
        }
        self._term = _TermTime(0, 0, 0.0)
        self.preemptions.restored()
        self.stays.restored()
        self.orders.restored(taken_seq, state.seq)
        return [unit for unit in sorted(self.accepted) if not self._is_known(*unit)]

    def watch(self, bus: SimulatedBus) -> None:
        """Fold every record as it is stored, and check what one look at the state can check."""
        self._bus = bus
        streams = bus.account("ledger").streams
        store = streams.store
        ledger = Ledger(None, SUBJECTS, 0)  # type: ignore[arg-type]  # it only folds

        def stored(stream: Any, subject: str, payload: bytes, headers: Any) -> Any:
            answer, is_stored = store(stream, subject, payload, headers)
            if is_stored and stream.config["name"] == SUBJECTS.ledger_stream and stream.last_seq > self.state.seq:
                self._fold(ledger, StoredMessage(SUBJECTS.ledger_stream, subject, stream.last_seq, "", payload))
            return answer, is_stored

        streams.store = stored  # type: ignore[method-assign, assignment]

    def _fold(self, ledger: Ledger, message: StoredMessage) -> None:
        self.records += 1
        self.digest = zlib.crc32(message.data, self.digest)
        junk = ledger.junk
        try:
            self.preemptions.before(self.state)
            self.orders.before(self.state)
            ledger.fold_message(self.state, message)
            validate(self.state)
            if ledger.junk == junk:
                self.preemptions.after(self.state)
                self.orders.after(self.state)
                self.afters.after(self.state)
                self.stays.after(self.state)
                self.sweeps.after(self.state)
                self._check_workers(self.state)
                self._check_time(self.state)
        except (Broken, AssertionError) as broken:
            self.violated(f"after record {message.seq}: {broken}", broken)
        except Exception as error:
            self.violated(f"record {message.seq} cannot be folded: {error!r}", error)

    def _check_workers(self, state: State) -> None:
        """What a record may change of a worker: its session, and what an operator says of its devices."""
        known = self._known
        for num, worker in state.worker_by_num.items():
            was = known.setdefault(num, _Known("", "", 0, ""))
            if worker.session != was.session:
                joined = worker.session not in ("", was.last)
                if joined and worker.n <= was.n and worker.machine == was.machine:
                    self.violated(f"record {state.seq}: {worker.id} has a new session by join {worker.n} after {was.n}")
                if not worker.session:
                    self._check_lost(state, worker.id)
                last = (worker.session, worker.n, worker.machine) if joined else was[1:]
                known[num] = _Known(worker.session, *last)
            if worker.well_n == state.seq:
                self._hear_operator(worker)

    def _check_lost(self, state: State, name: str) -> None:
        """Of a worker that is given up nothing runs any more, whatever its agent does: before the next attempt, not
        only where one happens to start at once. What is kept through partitions and handlers may."""
        for machine in self.machines:
            for ran in machine.living if machine.name == name else ():
                if self.requests.get(_unit(ran)[:2], {}).get("on_partition", "kill") == "kill":
                    self.violated(f"record {state.seq}: {name} is given up, and {ran.key} runs there")

    def _hear_operator(self, worker: Worker) -> None:
        """Since when its devices are well by an operator's word, which stands above what is seen of their memory."""
        now_s = asyncio.get_running_loop().time()
        for slot in range(worker.well.bit_length()):
            if worker.well >> slot & 1:
                self._said_well[(worker.id, slot)] = now_s

    def _check_time(self, state: State) -> None:
        """Ledger time goes on within a term as the seconds do, while appends are under way too (H31).

        A record is built after the one before is stored, and the epoch record before it is stored itself: since those
        two moments so much time has passed at least.
        """
        now_ms = asyncio.get_running_loop().time() * 1000
        if state.epoch != self._term.epoch:
            self._term = _TermTime(state.epoch, state.time_ms, now_ms)
        elif state.time_ms - self._term.time_ms < self._stored_ms - self._term.stored_ms - CLOCK_MS:
            behind_ms = self._stored_ms - self._term.stored_ms - (state.time_ms - self._term.time_ms)
            self.violated(f"record {state.seq}: ledger time stood still for {behind_ms:.0f} ms of epoch {state.epoch}")
        self._stored_ms = now_ms

    # ------------------------------------------------------------------------------------------- machines

    def started(self, ran: Ran) -> None:
        """A process began: no other live attempt of its replica, no other holder of its exclusive GPUs."""
        self.started_attempts += 1
        tenant, job, replica = _unit(ran)
        named = ran.key.partition("|")[2]
        if (before := self._ran.setdefault(named, ran)) is not ran:
            self.violated(f"{named} was started on {before.machine}, and then again on {ran.machine}")
        mode = self._mode(tenant, job)
        for machine in self.machines:
            for other in machine.living:
                if other is ran:
                    continue
                if _unit(other) == (tenant, job, replica):
                    self.violated(f"two live attempts: {other.key} and {ran.key}")
                if machine.is_frozen(other) and not set(other.uuids).isdisjoint(ran.uuids):
                    self.beside_frozen += 1
                    if not self._is_preemptible(tenant, job):
                        self.violated(f"{ran.key} began on a device that the frozen {other.key} waits for")
                    continue
                if clash(mode, self._mode(*_unit(other)[:2])) and set(other.uuids) & set(ran.uuids):
                    self.violated(f"{other.key} and {ran.key} both hold {sorted(set(other.uuids) & set(ran.uuids))}")
            for hold in machine.local if ran.machine == machine.name else ():
                if hold.uuid in ran.uuids and clash(mode, hold.mode):
                    self.violated(f"{ran.key} and the local claim {hold.ticket} both hold {hold.uuid}")
            if ran.machine == machine.name:
                for uuid in ran.uuids:
                    self._check_memory(machine, uuid, ran.key)
        self._may_start(tenant, job, replica, ran)

    def _is_preemptible(self, tenant: str, job: str) -> bool:
        known = self.state.job(tenant, job)
        return known is not None and decode_request(known.body).preemptible

    def resumed(self, machine: Machine, ran: Ran) -> None:
        """The driver is to move the memory of a frozen process back: none but frozen ones may have its devices."""
        for other in machine.living:
            if other is ran or machine.is_frozen(other) or set(other.uuids).isdisjoint(ran.uuids):
                continue
            if clash(self._mode(*_unit(ran)[:2]), self._mode(*_unit(other)[:2])):
                self.violated(f"{ran.key} was resumed beside {other.key}")
        for hold in machine.local:
            if hold.uuid in ran.uuids and clash("exclusive", hold.mode):
                self.violated(f"{ran.key} was resumed beside the local claim {hold.ticket}")
        for uuid in ran.uuids if self._mode(*_unit(ran)[:2]) == "exclusive" else ():
            self._check_memory(machine, uuid, f"{ran.key} which was resumed")

    def held_locally(self, machine: Machine, hold: LocalHold) -> None:
        """Code of the worker's own process was given a device."""
        for ran in machine.living:
            if machine.is_frozen(ran):
                continue
            if hold.uuid in ran.uuids and clash(hold.mode, self._mode(*_unit(ran)[:2])):
                self.violated(f"{ran.key} and the local claim {hold.ticket} both hold {hold.uuid}")
        for other in machine.local:
            if other.uuid == hold.uuid and clash(hold.mode, other.mode):
                self.violated(f"the local claims {other.ticket} and {hold.ticket} both hold {hold.uuid}")
        self._check_memory(machine, hold.uuid, f"the local claim {hold.ticket}")

    def _check_memory(self, machine: Machine, uuid: str, who: str) -> None:
        """Promise 10. Of sharers a device is free once their processes are gone; memory tells them not apart."""
        inventory = machine.inventory
        assert inventory is not None
        slot = next((at for at, device in enumerate(inventory.host.devices) if device.uuid == uuid), -1)
        said_s = self._said_well.get((machine.name, slot), -1.0)
        for left in machine.memory.left(uuid):
            ended_before = left.end_s is not None and left.end_s <= said_s
            if self._mode(*_unit(left)[:2]) == "exclusive" and not ended_before:
                self.violated(f"{uuid} was given to {who} before the memory of {left.key} was back")

    def _may_start(self, tenant: str, job: str, replica: int, ran: Ran) -> None:
        """The ledger knows this very attempt, and of a gang that all its attempts were claimed."""
        fence = int(ran.key.rpartition("/")[2])
        known = self.state.job(tenant, job)
        if known is None:
            return  # over and compacted while its worker was away: the fence ends it
        if fence > self.state.seq:
            self.violated(f"{ran.key} started before its placement is in the ledger")
        if known.gang and known.replicas[replica].fence == fence and not known.started:
            states = [STATES[each.state] for each in known.replicas]
            if any(state in ("QUEUED", "PLACED") for state in states) and known.gang == 1:
                self.violated(f"{ran.key} of a gang started while its ranks are {states}")

    def _mode(self, tenant: str, job: str) -> str:
        known = self.state.job(tenant, job)
        if known is not None:
            gpu = decode_request(known.body).effective_gpu
            self._modes[(tenant, job)] = "exclusive" if gpu is None else gpu.effective_sharing
        return self._modes.get((tenant, job), "exclusive")


class _Known(NamedTuple):
    """A worker after the last record: its session, "" for none. A session is another one by a join of a higher number
    alone, not by one that comes late, or twice: the last it had, and the number of the join to that. Another machine
    counts anew.
    """

    session: str
    last: str
    n: int
    machine: str


class _TermTime(NamedTuple):
    """When a term's epoch record was stored, by the ledger's time and by the clock of all."""

    epoch: int
    time_ms: int
    stored_ms: float


def _unit(ran: Ran) -> tuple[str, str, int]:
    tenant, job, replica, *_ = ran.key.partition("|")[2].split("/")
    return tenant, job, int(replica)
