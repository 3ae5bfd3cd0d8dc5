"""Encodes events as JSON by string formatting: the bytes of `encode(event_of(…))` in a third of the time.

Every transition of every job is sent once, so this is the busiest encoder. Names of tenants, jobs and workers need no
escaping (`schemas.names`); all other text goes through the encoder.
"""

from __future__ import annotations

from typing import Final

import msgspec

from moorage.scheduler.core.ledger.records import BY_WORKER, Mode, by_tenant
from moorage.scheduler.core.ledger.state import (
    AT_MS,
    BY,
    CLAIMED,
    PLACED,
    RUNNING,
    SLOTS,
    STATE,
    STORY_WORDS,
    WHY,
    WORKER,
    Job,
    State,
    Transition,
    code_of,
)
from moorage.scheduler.core.outputs.outputs import CHANGES_SURE, enforced_of, event_of, gpu_names
from moorage.schemas.codec import encode
from moorage.schemas.job import STATES
from moorage.schemas.memo import Memo

#: cached texts of slot masks; beyond it the cache is emptied
TEXTS_MAX: Final = 100_000
_BY_WORKER: Final = ',"by":"worker"},'
_SIMULATED: Final = ',"simulated":true}'
#: revision, ledger ms, replica, attempt, state, exit code, fence
_Ended = tuple[int, int, int, int, int, int, int]
_text: Final = msgspec.json.Encoder().encode


class EventEncoder:
    """Encodes what a record changed; call `forget` after a worker joined, as its slots may be other devices."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._gpus: Memo[tuple[int, int], str] = Memo(TEXTS_MAX)
        self._workers: dict[int, tuple[str, bool]] = {}
        self._seq = -1
        #: for the record `_seq`: the common parts of events for a first placement, and for a whole run
        self._first: dict[str, tuple[str, str]] = {}
        self._last: dict[_Ended, tuple[str, str, str, str]] = {}

    def forget(self) -> None:
        self._gpus.clear()
        self._workers.clear()

    def event(self, job: Job) -> bytes:
        """Return an event with the changes of this job since its last event, and mark them as sent."""
        told, rev, story, seq = job.told, job.rev, job.story, self._state.seq
        if seq != self._seq:
            self._seq = seq
            self._first.clear()
            self._last.clear()
        if not told:
            if rev == 2 and job.ledger == seq and len(job.replicas) == 1 and _is_placement(story[0]):
                member = job.replicas[0].member
                if member is not None and member.mode > Mode.EXCLUSIVE:
                    return encode(event_of(self._state, job))
                job.told = rev
                return self._placed(job, story[0])
        elif rev - told == 3 and len(job.replicas) == 1 and _is_one_run(story[-3:]):
            job.told = rev
            return self._ran(job, story[-1])
        if rev - told > CHANGES_SURE:  # its size has to be measured
            return encode(event_of(self._state, job))
        job.told = rev
        workers, devices = self._workers, self._gpus
        changes = last = ""
        simulated = is_placed = False
        if told < 1:
            changes = (
                f'{{"rev":1,"time_ms":{job.accepted_ms},"replica":-1,"attempt":0,"state":"ACCEPTED"'
                f',"by":"{by_tenant(job.tenant)}"}},'
            )
            told = 1
        rows = story[told - rev :] if rev > told else ()  # each row of the story has a revision of its own
        for number, ms, index, attempt, to, num, mask, code, why, fence, actor, *result in rows:
            changes += (
                f'{{"rev":{number},"time_ms":{ms},"replica":{index},"attempt":{attempt},"state":"{STORY_WORDS[to]}"'
            )
            if num >= 0:
                worker = workers.get(num) or self._worker(num)
                simulated = simulated or worker[1]
                if to == PLACED:
                    is_placed = True
                    changes += worker[0] + (devices.get((num, mask)) or self._devices(num, mask))
                elif code_of(to, code) is None:
                    changes += worker[0]
                else:
                    changes += f'{worker[0]},"code":{code}'
                if why:
                    last = f',"why":{_text(why).decode()}'
                    changes += last
                if fence:
                    changes += f',"fence":{fence}'
            else:
                if code:  # the code of a gang's rank, from its EXITED row
                    changes += f',"code":{code}'
                if why:
                    last = f',"why":{_text(why).decode()}'
                    changes += last
            changes += _BY_WORKER if actor == BY_WORKER else _by(actor) if actor else "},"
            if result:
                changes = f'{changes[:-2]},"result":{result[0]}}},'
        enforced = enforced_of(job) if is_placed else None
        end = f',"enforced":{_text(enforced).decode()}}}' if enforced is not None else "}"
        state = STATES[job.replicas[0].state] if len(job.replicas) == 1 else job.state
        return (
            f'{{"kind":"event","tenant":"{job.tenant}","job":"{job.name}","rev":{rev},"state":"{state}"'
            f',"ledger":{self._state.seq},"changes":[{changes[:-1]}]{last}{_SIMULATED[:-1] if simulated else ""}{end}'
        ).encode()

    def _placed(self, job: Job, row: Transition) -> bytes:
        """Return the most frequent first event: accepted and placed in this record, first attempt."""
        num, mask, tenant = row[WORKER], row[SLOTS], job.tenant
        worker, simulated = self._workers.get(num) or self._worker(num)
        head, placed = self._first.get(tenant) or self._begun(tenant)
        devices = self._gpus.get((num, mask)) or self._devices(num, mask)
        end = _SIMULATED if simulated else "}"
        return f'{head}{job.name}{placed}{worker}{devices},"fence":{self._seq}}}]{end}'.encode()

    def _begun(self, tenant: str) -> tuple[str, str]:
        """Return what all events of `_placed` for a tenant in this record have before and after the job's name."""
        ms = self._state.time_ms
        found = self._first[tenant] = (
            f'{{"kind":"event","tenant":"{tenant}","job":"',
            f'","rev":2,"state":"PLACED","ledger":{self._seq},"changes":['
            f'{{"rev":1,"time_ms":{ms},"replica":-1,"attempt":0,"state":"ACCEPTED","by":"{by_tenant(tenant)}"}},'
            f'{{"rev":2,"time_ms":{ms},"replica":0,"attempt":1,"state":"PLACED"',
        )
        return found

    def _ran(self, job: Job, row: Transition) -> bytes:
        """Return the most frequent last event: claimed, started and ended in one record."""
        rev, ms, index, attempt, to, num, _, code, _, fence, _, *result = row
        worker, simulated = self._workers.get(num) or self._worker(num)
        key = rev, ms, index, attempt, to, code, fence
        claimed, running, ended, end = self._last.get(key) or self._ended(key)
        if result:
            end = f'{end[:-2]},"result":{result[0]}}}]'
        return (
            f'{{"kind":"event","tenant":"{job.tenant}","job":"{job.name}{claimed}{worker}{running}{worker}{ended}'
            f"{worker}{end}{_SIMULATED if simulated else '}'}"
        ).encode()

    def _ended(self, key: _Ended) -> tuple[str, str, str, str]:
        """Return what all events of `_ran` with this end in this record have around the worker's name."""
        rev, ms, index, attempt, to, code, fence = key
        alike = f',"time_ms":{ms},"replica":{index},"attempt":{attempt},"state":"'
        by = f',"fence":{fence}{_BY_WORKER}'
        found = self._last[key] = (
            f'","rev":{rev},"state":"{STATES[to]}","ledger":{self._seq},"changes":[{{"rev":{rev - 2}{alike}CLAIMED"',
            f'{by}{{"rev":{rev - 1}{alike}RUNNING"',
            f'{by}{{"rev":{rev}{alike}{STORY_WORDS[to]}"',
            f',"code":{code}{by[:-1]}]',
        )
        return found

    def _worker(self, num: int) -> tuple[str, bool]:
        worker = self._state.worker_by_num[num]
        found = f',"worker":"{worker.id}"', bool(worker.hello.get("simulated", False))
        self._workers[num] = found
        return found

    def _devices(self, num: int, mask: int) -> str:
        """Return the devices of a placement; an event is sent with the record that places, so they are today's."""
        names = gpu_names(self._state.worker_by_num[num], mask, self._state.seq)
        return self._gpus.put((num, mask), f',"gpus":{_text(names).decode()}' if names else "")


def _is_one_run(rows: list[Transition]) -> bool:
    """Return whether these rows are one attempt's whole run, reported by its worker in one record."""
    if len(rows) != 3:
        return False
    claimed, running, ended = rows
    if claimed[STATE] != CLAIMED or running[STATE] != RUNNING or claimed[AT_MS] != ended[AT_MS]:
        return False
    return claimed[BY] == running[BY] == ended[BY] == BY_WORKER and not (claimed[WHY] or running[WHY] or ended[WHY])


def _is_placement(row: Transition) -> bool:
    """Return whether a transition is a placement by the scheduler without a reason."""
    return row[STATE] == PLACED and not row[WHY] and not row[BY]


def _by(actor: str) -> str:
    by, _, said = actor.partition(" ")
    return f',"by":{_text(by).decode()}' + (f',"said":{_text(said).decode()}}},' if said else "},")
