"""What must hold of preemption in every prefix of the ledger, told record by record by the judge.

Who is ended had less right, by priority or because its tenant had borrowed what is guaranteed to another's; what that
frees is placed to nobody else; whoever was ended waits again at no cost, and is seen to run again. That no slot is
leased before it is free, and no replica lives twice, the judge sees of everybody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final, NamedTuple

from moorage.scheduler.answers.views import listed
from moorage.scheduler.core.config import Config
from moorage.scheduler.core.ledger.state import LOST_KEPT, QUEUED, REPLICA, STATE, WHY, Job, Replica, State
from moorage.schemas.codec import decode_request
from moorage.schemas.errors import ENDED_AS_ASKED
from moorage.schemas.job import STATE_NUMBER

_ENDING: Final = STATE_NUMBER["ENDING"]
_FAILED: Final = STATE_NUMBER["FAILED"]
#: how an attempt that was asked to end is over without another one
_OVER: Final = frozenset(STATE_NUMBER[name] for name in ("SUCCEEDED", "CANCELLED", "TIMED_OUT", "EXPIRED"))


class _Victim(NamedTuple):
    """An attempt that was ended for somebody: its fence, and what of its bounds its replica had used."""

    fence: int
    retries: int
    losses: int


class Preemptions:
    """`before` and `after` each record, on the judge's own state; `violated` is the judge's.

    `config` is that of the schedulers which are judged.
    """

    def __init__(self, violated: Callable[[str], None], config: Config) -> None:
        self._violated = violated
        self._config = config
        self._held: dict[int, tuple[tuple[int, ...], ...]] = {}
        self._victims: dict[tuple[str, str, int], _Victim] = {}
        self.begun = 0  # jobs that others were ended for
        self.ended = 0  # attempts that were ended for somebody
        self.ran_again = 0  # of these, those whose replica was placed again

    def restored(self) -> None:
        """The ledger begins anew: who was preempted in the one before is nobody's victim in this one."""
        self._held, self._victims = {}, {}

    def before(self, state: State) -> None:
        self._held = {num: job.preempts for num, job in state.preempting.items() if job.preempts is not None}

    def after(self, state: State) -> None:
        for num, (workers, *_) in self._held.items():
            holder = state.jobs.get(num)
            for worker in workers if holder is not None else ():
                for attempt in state.worker_by_num[worker].attempts.values():
                    if holder is not None and attempt.fence == state.seq:
                        self._check_placed(holder, attempt.replica.job)
        for num, job in state.preempting.items():
            if job.preempts is not None and self._held.get(num) != job.preempts:
                self._begin(state, job, job.preempts[1])
        for unit, victim in list(self._victims.items()):
            self._follow(state, unit, victim)

    def _check_placed(self, holder: Job, placed: Job) -> None:
        """Whoever is placed on a host that is held is the one it is held for, or stands in the same line."""
        if placed.tenant != holder.tenant or (_priority(placed), _gpu(placed)) != (_priority(holder), _gpu(holder)):
            self._violated(f"{_name(placed)} was placed where others were ended for {_name(holder)}")

    def _begin(self, state: State, right: Job, victims: tuple[int, ...]) -> None:
        self.begun += 1
        if not victims:
            self._violated(f"{_name(right)} holds hosts, and nobody ends for it")
        jobs = [state.jobs[num] for num in victims]
        others = [job for job in jobs if not _is_preemptible(job)]
        if _is_preemptible(right):
            self._violated(f"jobs ended for {_name(right)}, which is preemptible")
        by_priority = _priority(right) >= self._config.preempt_priority and all(
            _priority(job) < _priority(right) for job in others
        )
        if others and not by_priority and not self._may_reclaim(state, right, jobs):
            names = ", ".join(map(_name, jobs))
            self._violated(f"{names} ended for {_name(right)}, which has no more right than they")
        for job in jobs:
            for replica in job.replicas:
                if replica.state == _ENDING:
                    self.ended += 1
                    self._victims[(job.tenant, job.name, replica.index)] = _victim(replica)

    def _may_reclaim(self, state: State, right: Job, jobs: list[Job]) -> bool:
        """It asks for no more than is left of what its tenant is guaranteed; who loses has borrowed all that ends.

        Left by what is leased, and by what others of its tenant await already.
        """
        own, before = state.tenants[right.tenant], [state.jobs[num] for num in self._held if num in state.preempting]
        awaited = sum(_gpus(job) for job in before if job.tenant == own.name)
        if not self._config.reclaim or not 0 < _gpus(right) <= own.guaranteed - own.gpus - awaited:
            return False
        ending: Counter[str] = Counter()
        for num in {num for job in state.preempting.values() if job.preempts for num in job.preempts[1]}:
            for replica in state.jobs[num].replicas if num in state.jobs else ():
                if replica.state == _ENDING and replica.attempt is not None:
                    ending[state.jobs[num].tenant] += replica.attempt.home.bit_count()
        losers, frozen = {job.tenant: state.tenants[job.tenant] for job in jobs}, Counter[str]()
        for attempt in state.attempts():
            frozen[attempt.replica.job.tenant] += (attempt.home & ~attempt.mask).bit_count()
        return own.name not in losers and all(
            ending[row.name] <= row.gpus + frozen[row.name] - row.guaranteed for row in losers.values()
        )

    def _follow(self, state: State, unit: tuple[str, str, int], victim: _Victim) -> None:
        job = state.job(*unit[:2])
        if job is None:
            del self._victims[unit]
            return
        replica = next(each for each in listed(job) if each.index == unit[2])
        if replica.fence != victim.fence:
            self.ran_again += 1
            del self._victims[unit]
        elif replica.state in _OVER or _failed_by_itself(job, unit[2]):
            del self._victims[unit]
        elif replica.state == QUEUED and _victim(replica) != victim:
            self._violated(f"{_name(job)}/{unit[2]} was preempted, and that counted against it")
        elif replica.state == _FAILED:
            self._violated(f"{_name(job)}/{unit[2]} was preempted, and failed of it")


def _failed_by_itself(job: Job, replica: int) -> bool:
    """Whether its worker was lost before it asked it to end, and kept: what the worker says later is the job's own."""
    rows = [row for row in job.history if row[REPLICA] == replica][-2:]
    return len(rows) == 2 and rows[0][STATE] == LOST_KEPT and rows[1][WHY] != ENDED_AS_ASKED


def _victim(replica: Replica) -> _Victim:
    return _Victim(replica.fence, replica.retries, replica.losses)


def _is_preemptible(job: Job) -> bool:
    return decode_request(job.body).preemptible


def _priority(job: Job) -> int:
    return job.priority if job.priority >= 0 else decode_request(job.body).priority


def _gpu(job: Job) -> object:
    return decode_request(job.body).effective_gpu


def _gpus(job: Job) -> int:
    """What it needs at once: of a gang that of all its replicas."""
    request = decode_request(job.body)
    gpu = request.effective_gpu
    return 0 if gpu is None else gpu.count * (request.copies if gpu.effective_scheduling == "gang" else 1)


def _name(job: Job) -> str:
    return f"{job.tenant}/{job.name}"
