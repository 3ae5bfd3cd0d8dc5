"""Which checkpoint an attempt has stored, as its worker reports it while it runs and with its end.

The next attempt begins with no other one, so no other host can put one in its place: see `schemas.frames` (Report,
Place). Below the feature level of the act, this leader alone knows it, and a later leader lets names find them.
"""

from __future__ import annotations

from typing import Final

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.ledger.acts import Stored
from moorage.scheduler.core.ledger.gang_sets import common_of
from moorage.scheduler.core.ledger.state import Attempt, Replica
from moorage.schemas.errors import CHECKPOINT_NOT_STORED, reason_of
from moorage.schemas.frames import START_FAILED, GangSets, Report

#: a SHA-256 as the object store writes it
DIGEST_CHARS_MAX: Final = 64
#: the reason of an attempt of which its worker knows nothing more, so that it stored nothing
_LOST: Final = "lost"


def note_running(draft: Draft, attempt: Attempt, report: Report) -> None:
    """Note what a worker tells of an attempt that runs: another checkpoint, or why it could not be stored."""
    digest, behind = report.checkpoint or "", f"{CHECKPOINT_NOT_STORED}: "
    attempt.unstored = report.detail.removeprefix(behind) if report.detail.startswith(behind) else ""
    if attempt.is_current and 0 < len(digest) <= DIGEST_CHARS_MAX and not _is_known(attempt, digest):
        _write(draft, attempt.replica, attempt.no, digest, report.code if report.code > 0 else -1)


def note_unread(draft: Draft, attempt: Attempt) -> None:
    """Note that the sets with which a gang was to begin cannot be read: it begins with no set of that step again."""
    begun = attempt.begun
    if begun is not None and begun == common_of(attempt.replica.job):
        no, step = begun
        _write(draft, attempt.replica, no, "", step)


def gang_sets(attempt: Attempt) -> GangSets:
    """Return what the worker of a rank of a gang is told of its sets."""
    sets = attempt.replica.sets
    own = [digest for no, _, digest in sets if no == attempt.no]
    return GangSets(*attempt.name, own, len(own) < len(sets))


def _is_known(attempt: Attempt, digest: str) -> bool:
    replica = attempt.replica
    return digest == replica.stored_by(attempt.no) or any(digest == kept for _, _, kept in replica.sets)


def note_checkpoint(draft: Draft, attempt: Attempt, report: Report) -> None:
    """Note what the report of an attempt's end tells; nothing if its worker, of an earlier release, tells nothing.

    What it has told before counts if it tells of none at its end.
    """
    digest = report.checkpoint
    if digest is None:
        detail = report.detail
        if not detail.startswith(START_FAILED) and not (detail.startswith(_LOST) and reason_of(detail) == _LOST):
            return
        digest = ""
    if len(digest) > DIGEST_CHARS_MAX:
        digest = ""
    before = attempt.replica.stored_by(attempt.no)
    if digest != before if digest else not before:
        _write(draft, attempt.replica, attempt.no, digest)


def _write(draft: Draft, replica: Replica, no: int, digest: str, step: int = -1) -> None:
    draft.tell(Stored(replica.job.num, replica.index, no, digest, step))
