"""The questions of `ls`, a tenant's and an operator's, and of `again`; and the frame in which the leader tells
operators more of the fleet than the public frame does."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from moorage.schemas.always import always
from moorage.schemas.frames.use import Used
from moorage.schemas.frames.version import VERSION
from moorage.schemas.job import STATES
from moorage.schemas.names import TENANT, WORKER, is_tenant, is_worker
from moorage.schemas.reasons import REASONS

#: jobs in one page, and ids that one question may name
LISTED_MAX: Final = 1000
#: labels that one question may ask for, and characters of an id's pattern
LABELS_ASKED_MAX: Final = 16
PATTERN_CHARS_MAX: Final = 128
#: patterns that one question may have
PATTERNS_MAX: Final = 100
#: any number of characters in an id's pattern
ANY: Final = "*"

_is_cursor: Final = re.compile(r"m:\d{1,18}|h:\d{1,18}:\d{1,9}").fullmatch
_is_pattern: Final = re.compile(rf"[A-Za-z0-9_.*-]{{1,{PATTERN_CHARS_MAX}}}").fullmatch


class LsAsked(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The question of `ls`: which jobs, newest first, a page of them. Each field that is given leaves out others.

    - `states`: jobs in one of these states; empty: in any.
    - `labels`: jobs with all of these labels. The value `*` is any.
    - `ids`: jobs whose id matches, where `*` stands for any characters, as in `train-*-r1`; or one of several, with
      commas between them.
    - `reason`: jobs that wait for this reason.
    - `worker`: jobs with an attempt on this worker, and ended ones whose last attempt was there.
    - `tenant`: an operator's question: jobs of this tenant; "" is of all. A tenant's own question has none.
    - `limit`: rows of a page, 1..1000. `after`: the `next` of the page before.
    - `history`: whether jobs that have left the scheduler's memory follow, from the history, on pages of their own.
    - `oldest`: the oldest job in memory first, in place of the newest, and none from the history.
    - `at_ms`: the jobs that had been accepted and had not ended at this ledger time, as they were then; with `leases`,
      the worker and slots of each attempt. The answer's `ended` has, by state, how many jobs ended in the hour before.
    - `jobs`: those of these ids that are in memory, in this order, and nothing else.
    """

    states: list[str] = []
    labels: dict[str, str] = {}
    ids: str = ""
    reason: str = ""
    worker: str = ""
    tenant: str = ""
    limit: int = 100
    after: str = ""
    history: bool = True
    oldest: bool = False
    at_ms: int = 0
    jobs: list[str] | None = None

    def __post_init__(self) -> None:
        for state in self.states:
            if state not in STATES:
                raise ValueError(f"states must be of {', '.join(STATES)}, found {state[:80]!r}")
        if len(self.labels) > LABELS_ASKED_MAX:
            raise ValueError(f"labels must be at most {LABELS_ASKED_MAX}, found {len(self.labels)}")
        patterns = self.ids.split(",") if self.ids else []
        if len(patterns) > PATTERNS_MAX or not all(map(_is_pattern, patterns)):
            allowed = f"1..{PATTERN_CHARS_MAX} letters, digits, '-', '_', '.', and '*' for any"
            allowed += f"; at most {PATTERNS_MAX} of these, with commas between them"
            raise ValueError(f"ids must be {allowed}, found {self.ids[:80]!r}")
        if self.reason and self.reason not in REASONS:
            raise ValueError(f"reason must be one of {', '.join(REASONS)}, found {self.reason[:80]!r}")
        if self.worker and not is_worker(self.worker):
            raise ValueError(f"worker must match {WORKER.pattern}, found {self.worker[:80]!r}")
        if self.tenant and not is_tenant(self.tenant):
            raise ValueError(f"tenant must match {TENANT.pattern}, found {self.tenant[:80]!r}")
        if not 1 <= self.limit <= LISTED_MAX:
            raise ValueError(f"limit must be 1..{LISTED_MAX}, found {self.limit}")
        if self.after and not _is_cursor(self.after):
            raise ValueError(f"after must be the `next` of the page before, found {self.after[:80]!r}")
        if self.at_ms < 0 or (self.at_ms and self.oldest):
            raise ValueError(f"at_ms must be a time in ms, and goes without oldest, found {self.at_ms}")
        if self.jobs is not None and len(self.jobs) > LISTED_MAX:
            raise ValueError(f"jobs must be at most {LISTED_MAX} ids, found {len(self.jobs)}")


class AgainAsked(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The question of `again`: the request with which a job is run again. Nothing is submitted.

    - `failed`: only the replicas that have ended without success; else all.
    - `replicas`: only those of these numbers, as in `0-99,205`.
    """

    job: str
    failed: bool = False
    replicas: str | None = None


class AgainAnswer(msgspec.Struct, frozen=True):
    """What is answered to `again`.

    - `job`: an id that no job has, `<job>-again-<n>`. Two callers may be given the same.
    - `again_of`: the job of the question. `of` is how many replicas are to be run again.
    - `request`: what to submit, changed or not. It has both ids and, in `indices`, the numbers of these replicas; it
      lacks what was meant for the job's first time: `after`, `start_after_s` and `if_seq`.
    - `again`: the jobs in memory that are runs again of this job.
    """

    job: str
    again_of: str
    of: int
    request: dict[str, Any]
    again: list[str] = []


class ServiceLately(msgspec.Struct, frozen=True):
    """The members of a service now, and its calls of about the last minute."""

    tenant: str
    service: str
    members: int  # members that take calls
    places: int  # calls that these run at the same time
    running: int  # calls that run
    waiting: int  # calls that wait in members' rooms
    calls: int  # calls that are over, however they ended
    errors: int  # calls answered with an error
    waited_ms: int | None  # nine of ten calls had waited no longer; 0 without calls, null for longer than 60,000
    ran_ms: int | None  # nine of ten calls ran no longer; 0 and None as above
    job: str = ""  # the job of the member that was heard last; "" of one that is none


class FailedLately(msgspec.Struct, frozen=True):
    """The jobs of a tenant that failed, timed out or expired within the last hour, as far as this leader saw it."""

    tenant: str
    jobs: int  # how many, at most 5,000 of all tenants
    job: str  # the last one
    state: str  # its final state
    age_ms: int  # how long ago it ended


class TenantDetail(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What a tenant has now."""

    tenant: str
    jobs: int = always(int)  # number of jobs that are not over
    gpus: int = always(int)  # number of leased GPUs
    waiting: int = always(int)  # number of replicas that wait
    held: bool = always(bool)  # whether an operator holds its queue


class UsedJob(Used, frozen=True, omit_defaults=True, kw_only=True):
    """A job that holds GPUs, and its use of them."""

    tenant: str
    job: str
    worker: str = always(str)  # the first worker that has it
    gpu: str = always(str)  # the token of what it asks for
    idle_ms: int | None = None  # for how long the leader has seen one of its GPUs do nothing; left out if all work


class FleetDetail(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="fleet-detail"):
    """What operators see beyond the public frame: one frame every 2 s, on a subject that they alone may read.

    It names jobs and tenants, so it is no part of the frame for observers.
    """

    epoch: int  # the leader's epoch
    ledger: int  # number of the ledger's last record
    v: int = VERSION
    tenants: list[TenantDetail] = []  # tenants with jobs that are not over, those with most GPUs first, at most 1,000
    tenants_of: int = 0  # how many there are
    jobs: list[UsedJob] = []  # jobs that hold GPUs and whose use is known, those used least first, at most 1,000
    jobs_of: int = 0
    #: jobs that ended in this leader's term, by tenant and state
    ended: dict[str, dict[str, int]] = {}
    #: tenants whose jobs failed within the last hour, the last one first, at most 1,000
    failed: list[FailedLately] = []
    #: services with members or with calls in the last minute, at most 201: those with errors first, then those with
    #: most calls
    services: list[ServiceLately] = []
    #: promised starts that were kept and missed in this term, and waits of a minute or more without a promise
    promised: tuple[int, int, int] = (0, 0, 0)
