"""What must hold of preemption in every prefix of the ledger, told record by record by the judge.

Who is ended had less right; what that frees is placed to nobody else; whoever was ended waits again at no cost, and is
seen to run again. That no slot is leased before it is free, and no replica lives twice, the judge sees of everybody.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from moorage.scheduler.core.state import QUEUED, Job, Replica, State
from moorage.schemas.codec import decode_request
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
    """`before` and `after` each record, on the judge's own state; `violated` is the judge's."""

    def __init__(self, violated: Callable[[str], None]) -> None:
        self._violated = violated
        self._held: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self._victims: dict[tuple[str, str, int], _Victim] = {}
        self.begun = 0  # jobs that others were ended for
        self.ended = 0  # attempts that were ended for somebody
        self.ran_again = 0  # of these, those whose replica was placed again

    def before(self, state: State) -> None:
        self._held = {num: job.preempts for num, job in state.preempting.items() if job.preempts is not None}

    def after(self, state: State) -> None:
        for num, (workers, _) in self._held.items():
            holder = state.jobs.get(num)
            for worker in workers if holder is not None else ():
                for member in state.worker_by_num[worker].members.values():
                    if holder is not None and member.fence == state.seq:
                        self._check_placed(holder, member.replica.job)
        for num, job in state.preempting.items():
            if job.preempts is not None and self._held.get(num) != job.preempts:
                self._begin(state, job, job.preempts[1])
        for unit, victim in list(self._victims.items()):
            self._follow(state, unit, victim)

    def _check_placed(self, holder: Job, placed: Job) -> None:
        """Whoever is placed on a host that is held is the one it is held for, or stands in the same line.

        That is one for all tenants alike, unless they have shares or limits.
        """
        if (_priority(placed), _gpu(placed)) != (_priority(holder), _gpu(holder)):
            self._violated(f"{_name(placed)} was placed where others were ended for {_name(holder)}")

    def _begin(self, state: State, right: Job, victims: tuple[int, ...]) -> None:
        self.begun += 1
        if not victims:
            self._violated(f"{_name(right)} holds hosts, and nobody ends for it")
        guaranteed = state.tenants[right.tenant].guaranteed
        for num in victims:
            job = state.jobs[num]
            reclaims = guaranteed > 0 and job.tenant != right.tenant
            if not reclaims and _priority(job) >= _priority(right):
                self._violated(f"{_name(job)} was ended for {_name(right)}, which has no more right than it")
            for replica in job.replicas:
                if replica.state == _ENDING:
                    self.ended += 1
                    self._victims[(job.tenant, job.name, replica.index)] = _victim(replica)

    def _follow(self, state: State, unit: tuple[str, str, int], victim: _Victim) -> None:
        job = state.job(*unit[:2])
        if job is None:
            del self._victims[unit]
            return
        replica = job.replicas[unit[2]]
        if replica.fence != victim.fence:
            self.ran_again += 1
            del self._victims[unit]
        elif replica.state in _OVER:
            del self._victims[unit]
        elif replica.state == QUEUED and _victim(replica) != victim:
            self._violated(f"{_name(job)}/{unit[2]} was preempted, and that counted against it")
        elif replica.state == _FAILED:
            self._violated(f"{_name(job)}/{unit[2]} was preempted, and failed of it")


def _victim(replica: Replica) -> _Victim:
    return _Victim(replica.fence, replica.retries, replica.losses)


def _priority(job: Job) -> int:
    return job.priority if job.priority >= 0 else decode_request(job.body).priority


def _gpu(job: Job) -> object:
    return decode_request(job.body).effective_gpu


def _name(job: Job) -> str:
    return f"{job.tenant}/{job.name}"
