"""What `admin.dlq` answers about dead letters, the queued requests that were refused."""

from __future__ import annotations

from typing import Any

import msgspec

from moorage.schemas.always import always
from moorage.schemas.errors import Problem


class LetterRow(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A dead letter in a list: what it was, and why it is here."""

    sequence: int  # its number, by which acts name it
    tenant: str = always(str)
    verb: str = always(str)  # submit or cancel; "" for a message that another program wrote
    subject: str = always(str)  # the subject that it was published to
    queued: int = always(int)  # its sequence in the durable queue
    time_ms: int = always(int)  # when it was refused, ms since 1970
    job: str = always(str)  # the job that its body names; "" if it names none
    code: str = always(str)  # code of the problem
    message: str = always(str)  # message of the problem
    bytes: int = always(int)  # size of its body


class Letter(LetterRow, frozen=True, omit_defaults=True, kw_only=True):
    """A dead letter with its problem and its body: the answer to the act `show`."""

    problem: Problem | None = None  # why it was refused
    evidence: str = ""  # the traceback, if the scheduler itself failed on it
    body: str = always(str)  # the message as text
    #: the message in base64, if it is no text in UTF-8
    data: bytes | None = None


class LettersAnswer(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A page of dead letters, oldest first: the answer to the act `list`."""

    letters: list[LetterRow] = always(list[LetterRow])
    counts: dict[str, int] = always(dict[str, int])  # number of letters by tenant
    next: int = always(int)  # ask again with it as `after`; 0 on the last page


class LetterDone(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The answer to the acts `drop` and `resend`."""

    sequence: int  # number of the letter, which is gone now
    dropped: bool = False
    resent: bool = False
    tenant: str = ""  # the tenant for which it was sent again
    verb: str = ""  # submit or cancel
    answer: Any = None  # what the request was answered, such as [Accepted](#accepted)
