"""Frames of a rescue: what an ended attempt left in its folder is stored, though its request kept nothing."""

from __future__ import annotations

from typing import Annotated

import msgspec

from moorage.schemas.frames.version import VERSION
from moorage.schemas.job import WORD_CHARS_MAX
from moorage.schemas.ranges import NUMBERS_MAX

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]
_Replica = Annotated[int, msgspec.Meta(ge=0, lt=NUMBERS_MAX)]
_Path = Annotated[str, msgspec.Meta(max_length=WORD_CHARS_MAX)]


class RescueAsked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The question of `moorage.api.<tenant>.rescue`: store what an ended attempt left in its folder.

    `path` is a file or folder below the attempt's folder, "" for all of it. If `attempt` is null, it is the replica's
    newest one. The question is asked again until its answer says `stored`.
    """

    job: str
    replica: _Replica = 0
    attempt: Annotated[int, msgspec.Meta(ge=1, le=1 << 31)] | None = None
    path: _Path = ""


class Rescue(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="rescue"):
    """The leader asks a worker to store what an attempt left. `session` proves that the leader asks.

    `driver` is "" if the leader does not know it any more.
    """

    session: str
    tenant: str
    job: str
    replica: _Replica
    attempt: _Count
    fence: _Count
    driver: str
    path: _Path = ""
    v: int = VERSION


class Rescued(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="rescued"):
    """Whether what an attempt left is `stored` by now, as the object of this name in the tenant's bucket of files."""

    attempt: _Count
    object: str
    stored: bool = False
    replica: int = 0
    worker: str = ""
    v: int = VERSION
