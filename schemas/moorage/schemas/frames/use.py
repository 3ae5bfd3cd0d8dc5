"""Frames of what running attempts use of their GPUs: the newest reading, and those of the last minutes."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from moorage.schemas.always import always
from moorage.schemas.frames.version import VERSION
from moorage.schemas.ranges import NUMBERS_MAX

#: A device at work draws more power than this part of the way from its draw when idle up to its limit. A kernel that
#: only waits for another device, as a collective operation does, is at 100 % and draws less
LOW_POWER: Final = 0.25
#: the part of its limit that stands for a device's draw when idle, if its worker has not seen it idle
IDLE_POWER: Final = 0.1
#: seconds for which a worker keeps its readings of a running attempt, one a second
USE_KEPT_S: Final = 600

_Fence = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]
_Replica = Annotated[int, msgspec.Meta(ge=0, lt=NUMBERS_MAX)]
_Seconds = Annotated[int, msgspec.Meta(ge=1, le=USE_KEPT_S)]


class DeviceUse(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What an attempt uses of one device at a moment.

    `slot` is the device's position in hello's `gpu_pool`. `percent` is the greatest of compute, encoder and decoder:
    of the device for an exclusive lease, of the attempt's processes for a share. Null: the board does not report it.
    `shared_by` is set where the driver does not tell sharers apart, as under MPS: `percent` is then of the device,
    which so many attempts share. `power_w` is the whole device's, and `power_limit_w` is how much it may draw.
    """

    slot: int
    percent: int | None
    memory_mib: int | None
    power_w: int | None
    power_limit_w: int | None = None
    shared_by: int = 0


class AttemptUse(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What an attempt uses of each of its devices; an attempt that cannot be measured has none.

    `tenant`, `job`, `replica`, `attempt` and `fence` name it. One without an attempt counts for nothing: a fence alone
    names no attempt, as one record places many.

    `still_s` is for how many whole seconds the attempt has written no output, has reported no progress, and each of its
    devices was at 0 %, or at 100 % with low power (`LOW_POWER`). It is 0 for a request without `stall_s`.
    """

    fence: int
    devices: list[DeviceUse]
    still_s: int = 0
    tenant: str = ""
    job: str = ""
    replica: int = 0
    attempt: int = 0  # from 1 on; 0 of workers of a release that names none


class UseAsked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The question of `moorage.api.<tenant>.use`: what a running replica has used of its GPUs in the last seconds.

    The readings are summed up to at most `points` equal spans, each with the mean of its readings.
    """

    job: str
    replica: _Replica = 0
    last_s: _Seconds = USE_KEPT_S
    points: _Seconds = 60


class ReadUse(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="read-use"):
    """The leader asks a worker for the readings of a running attempt. `session` proves that the leader asks."""

    session: str
    tenant: str
    job: str
    replica: _Replica
    attempt: _Fence
    fence: _Fence
    last_s: _Seconds
    points: _Seconds
    v: int = VERSION


class UseLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One device of an attempt: a mean for each span of time, oldest first, null where nothing was read.

    `index` is the device's own index on its host, `memory_total_mib` its memory. Units as in `DeviceUse`.
    """

    index: int
    uuid: str
    name: str
    memory_total_mib: int
    percent: list[int | None]
    memory_mib: list[int | None]
    power_w: list[int | None]
    shared_by: int = 0


class UsePage(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="use-page"):
    """What a running attempt has used: a line for each of its devices. The last span ends now; each lasts `span_s`.

    `devices` is empty if the worker cannot measure the attempt, as that of a VM.
    """

    replica: int
    attempt: int
    span_s: float
    devices: list[UseLine] = []
    worker: str = ""
    simulated: bool = False
    v: int = VERSION


class Used(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What a running job uses of its GPUs now. `Job.use` of the SDK has the minutes before."""

    devices: int = always(int)  # number of its GPUs with a reading
    percent: int = always(int)  # mean use, percent of the time
    percent_min: int = always(int)  # use of the least used GPU
    percent_max: int = always(int)  # use of the most used GPU
    memory_mib: int = always(int)  # memory in use on all of them
    idle: int = 0  # number of its GPUs that do nothing; left out for none
    shared_by: int = 0  # number of jobs on such a GPU whose use cannot be told apart; left out if it can
