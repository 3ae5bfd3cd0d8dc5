"""Which checkpoint an attempt has stored, as its worker reports it while it runs and with its end.

The next attempt begins with no other one, so no other host can put one in its place: see `schemas.frames` (Report,
Place). Below the feature level of the act, this leader alone knows it, and a later leader lets names find them.
"""

from __future__ import annotations

from typing import Final

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.ledger.acts import Stored
from moorage.scheduler.core.ledger.state import Attempt
from moorage.schemas.errors import CHECKPOINT_NOT_STORED, reason_of
from moorage.schemas.frames import START_FAILED, Report

#: a SHA-256 as the object store writes it
DIGEST_CHARS_MAX: Final = 64
#: the reason of an attempt of which its worker knows nothing more, so that it stored nothing
_LOST: Final = "lost"


def note_running(draft: Draft, attempt: Attempt, report: Report) -> None:
    """Note what a worker tells of an attempt that runs: another checkpoint, or why it could not be stored."""
    digest, behind = report.checkpoint or "", f"{CHECKPOINT_NOT_STORED}: "
    attempt.unstored = report.detail.removeprefix(behind) if report.detail.startswith(behind) else ""
    if attempt.is_current and 0 < len(digest) <= DIGEST_CHARS_MAX and digest != attempt.replica.stored_by(attempt.no):
        _note(draft, attempt, digest, report.code if report.code > 0 else -1)


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
        _note(draft, attempt, digest, -1)


def _note(draft: Draft, attempt: Attempt, digest: str, step: int) -> None:
    replica = attempt.replica
    if draft.may(Stored):
        draft.add(Stored(replica.job.num, replica.index, attempt.no, digest, step))
    else:
        draft.about_to_change(replica.job, replica)
        replica.note_checkpoint(attempt.no, digest, draft.time_ms, step)
