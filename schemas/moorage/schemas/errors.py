"""Every error that a user can meet: its code, whose fault it is, and the fields that say what was found and what is
allowed.

Codes are an API: they stay, and the answer frame, the log and the command's output have the same ones.
"""

from __future__ import annotations

import re
from typing import Any, Final, Literal, TypedDict, Unpack

import msgspec

from moorage.schemas.printable import in_one_line, shown

Fault = Literal["caller", "service", "fleet", "moorage"]

#: code -> (whose fault, what it means in one sentence). The reference page is generated from this table.
CODES: Final[dict[str, tuple[Fault, str]]] = {
    "invalid-argument": ("caller", "the request is malformed or breaks a rule that no fleet could satisfy"),
    "failed-precondition": ("caller", "the request is well formed, but a set limit or the fleet as it is refuses it"),
    "too-large": ("caller", "the frame is over its bound in bytes or nesting"),
    "unknown-version": ("caller", "the frame names a version of the protocol that this scheduler does not speak"),
    "unknown-verb": ("caller", "no such verb, or one that this release does not serve"),
    "not-found": ("caller", "no such job or worker, as of a ledger record acknowledged after the question came"),
    "unknown-job": ("caller", "a job that `after` names is not known: the tenant has never had it, or it is forgotten"),
    "conflict": ("caller", "this job id is already used for a request with other content"),
    "served-elsewhere": ("caller", "another service of the tenant serves a model of this name"),
    "service-taken": ("caller", "another live job of the tenant has this service; cancel it, or replace it"),
    "not-permitted": ("caller", "this user may not do that here"),
    "no-match": (
        "fleet",
        "this host has no such GPU to borrow; of a job it is a warning that no known worker fits",
    ),
    "moved-on": ("caller", "the ledger has moved on since the plan that if_seq names: what it said may not hold"),
    "queue-full": ("fleet", "the queue is at its bound; send again after retry_after_s"),
    "cancelled-before": ("caller", "this id was cancelled before its submit came (cancel with `before`)"),
    "tombstones-full": ("fleet", "too many cancels of unknown jobs are remembered for this tenant"),
    "history-gone": ("fleet", "the job's history is kept no longer, or was never written"),
    "request-gone": ("fleet", "the job's request, or the archive with its files, is kept no longer: submit it anew"),
    "behind": ("moorage", "what follows the ledger has not read as far as the question yet; ask again"),
    "not-leading": (
        "moorage",
        "this scheduler does not lead, or cannot prove that it does, as while its ledger takes no record; send again",
    ),
    "worker-id-in-use": ("fleet", "a worker of another machine or state folder has this id until it is lost or leaves"),
    "gpu-lent-twice": ("fleet", "another worker lends this very GPU until it is lost or says goodbye"),
    "session-over": ("fleet", "the lease session is over; join again"),
    "stale-join": ("fleet", "the join number is not above the last one recorded"),
    "release-apart": ("fleet", "the worker's release is more than one minor version away from the scheduler's"),
    "gap": ("fleet", "a numbered frame is missing; send again from the number given"),
    "not-kept": ("fleet", "the output was never stored or has expired; the message names the retention setting"),
    "worker-lost": ("fleet", "the worker that holds this does not answer; the message says since when it is lost"),
    "overloaded": (
        "moorage",
        "too many such questions are under way, or their data cannot be read now; ask again after retry_after_s",
    ),
    "bad-settings": ("caller", "a setting is unknown, of the wrong type or unit, or out of its bounds"),
    "internal": ("moorage", "a defect in moorage; nothing was recorded"),
}

#: how a worker reports the end of what it was asked to end
ENDED_AS_ASKED: Final = "end"
#: and of one that was frozen until its end: its devices did not come free within its grace
ENDED_FROZEN: Final = "ended while frozen"
#: how a worker reports the end of what ran under a supervisor that its own release cannot use
UPGRADED: Final = "upgraded"
#: stands behind the reason of an end, after a semicolon: see `ENDS`
MPS_NOT_ASKED: Final = "mps-not-asked"
#: stands there, too
CHECKPOINT_NOT_STORED: Final = "checkpoint-not-stored"
#: stands there, too, behind the failure of a job of its own
NEIGHBOUR_OVER: Final = "neighbour-over-memory"
#: stands in a start's report, behind where its ports are reached and a semicolon
CHECKPOINT_REFUSED: Final = "checkpoint-refused"
#: how an attempt ended that did not end by itself, as the first word of its `why`: what each means
ENDS: Final[dict[str, str]] = {
    "start-failed": "the command could not be started: the message says at which step, and why",
    "not-here": "the workers that refused it lack what it needs: a secret, user, folder, program or image; its `why`"
    " names that and the workers",
    "cannot-run": "its request is wrong for every worker of its driver: the message says what to change",
    "setup-failed": "its setup command failed on a worker, whose output moorage logs shows",
    "timeout": "it ran longer than its timeout_s, or its deadline passed while it ran",
    "over-memory": "it held more of a shared GPU's memory than its share, and was ended (a CUDA context counts)",
    "mps-fault": "one of its processes had a fatal GPU error, which ended the MPS server that other jobs share",
    MPS_NOT_ASKED: "behind another reason: its MPS daemon was not asked, or did not answer, before its processes ended."
    " If one of them computed, the jobs that share the daemon may fail",
    CHECKPOINT_NOT_STORED: "behind another reason: its checkpoint could not be stored, so the next attempt begins"
    " at an earlier one",
    NEIGHBOUR_OVER: "behind another reason: within the minute before it failed, another job on a GPU that it shares"
    " held more memory than its share. Its own allocations may have found none; the other job ends as over-memory",
    CHECKPOINT_REFUSED: "with RUNNING, and not an end: a stored checkpoint was damaged, or was not the one that its"
    " attempt had stored; the message says from which one the attempt began",
    "idle": "its GPUs showed no use for longer than its worker's idle_reclaim_s allows, so its worker ended it",
    "stalled": "it wrote no output and its GPUs did no work for its stall_s, and its on_stall is end: it counts as a"
    " failure",
    "not-ready": "its check said not within its within_s that it is ready, so its worker ended it: it counts as a"
    " failure",
    "end": "its worker ended it when asked to: for a cancel, a drain, a preemption or an act of an operator",
    UPGRADED: "its worker's new release cannot use the supervisor that ran it, and ended it; no retry is counted",
    "disk": "its folder took more than its worker's folder_bytes, so its worker ended it",
    "not-stored": "it ended well, and the files that it was to keep could not be stored",
    "lost": "its host or its supervisor went away under it; it counts as a loss, and is tried again elsewhere while the"
    " bound on losses allows",
    "fence": "its worker was cut off for too long, or left for good, and ended it; it counts as a loss",
}


#: the reason of the end of a gang, as the scheduler writes it
_OF_GANG: Final = re.compile(r"gang: replica (\d+): ")


def reason_of(detail: str) -> str:
    """Return why an attempt ended by its worker's word, without what the word says of its MPS daemon and checkpoint."""
    return detail.partition(f"; {MPS_NOT_ASKED}: ")[0].partition(f"; {CHECKPOINT_NOT_STORED}: ")[0]


def is_as_asked(detail: str) -> bool:
    """Return whether an attempt ended as it was asked to, of which the asker's reason says more."""
    return reason_of(detail) == ENDED_AS_ASKED


def rank_that_ended(why: str) -> int | None:
    """Return the replica of a gang with which the others ended, as `why` of its job names it; None for other ends."""
    found = _OF_GANG.match(why)
    return None if found is None else int(found[1])


class Problem(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="error"):
    """The answer to whatever went wrong.

    `field` is a JSON path such as `$.gpu.count`; `found` and `allowed` are short texts; `next` is what to do now.
    `retry_after_s` is in seconds, and only there if sending again can help.
    """

    code: str  # one of a closed list; programs decide by it, not by the message
    message: str
    fault: str = ""  # who caused it: caller, fleet and so on
    field: str = ""
    found: str = ""
    allowed: str = ""
    next: str = ""
    job: str = ""
    retry_after_s: float | None = None


class Details(TypedDict, total=False):
    """The fields of a `Problem` that may be given beside its code and message."""

    field: str
    found: object
    allowed: str
    next: str
    job: str
    retry_after_s: float | None


class MoorageError(Exception):
    """The base of all errors that moorage raises. It has the `Problem` that is sent as the answer."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(problem.message)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the error with its own state: classes with other arguments cannot be made again from the message."""
        return _as_it_stood, (type(self), self.args), self.__dict__

    @property
    def code(self) -> str:
        """The kind of error, as a word that never changes (see the page of errors)."""
        return self.problem.code


def _as_it_stood(kind: type[MoorageError], words: tuple[Any, ...]) -> MoorageError:
    error = kind.__new__(kind)
    error.args = words
    return error


class Refused(MoorageError):
    """A request or frame is refused, and nothing of it was recorded."""


def problem(
    code: str,
    message: str,
    *,
    field: str = "",
    found: object = None,
    allowed: str = "",
    next: str = "",
    job: str = "",
    retry_after_s: float | None = None,
) -> Problem:
    """Return a `Problem`; `fault` follows from the code. Long texts are cut. Raises KeyError for an unknown code."""
    text = "" if found is None else _short(found)
    # both may quote what came
    message, field = _cut(shown(message), _MESSAGE_CHARS_MAX), _cut(in_one_line(field), _FIELD_CHARS_MAX)
    return Problem(code, message, CODES[code][0], field, text, allowed, next, job, retry_after_s)


def in_a_line(told: Problem) -> str:
    """Return a problem on one line, for a log: message, field, what was found, what is allowed, what to do next."""
    seen = (("at", told.field), ("found", told.found), ("allowed", told.allowed))
    where = ", ".join(f"{name} {value}" for name, value in seen if value)
    return "; ".join(text for text in (told.message, where, told.next) if text)


def refuse(code: str, message: str, **details: Unpack[Details]) -> Refused:
    """Return the error to raise: `raise refuse("invalid-argument", "…", field="$.gpu.count", found=0,
    allowed="1..1024")`."""
    return Refused(problem(code, message, **details))


_FOUND_CHARS_MAX: Final = 120
_FIELD_CHARS_MAX: Final = 200
_MESSAGE_CHARS_MAX: Final = 2000


def _short(found: object) -> str:
    return _cut(in_one_line(found) if isinstance(found, str) else repr(found), _FOUND_CHARS_MAX)


def _cut(text: str, chars_max: int) -> str:
    return text if len(text) <= chars_max else text[: chars_max - 1] + "…"
