"""The acts of a record: all changes besides its steps. Each act is a class with everything known about it.

On the wire an act is the list `[tag, field, ...]`. Every ledger ever written contains tags and field orders: none may
change. A new act is a new class with the feature level that it needs, a name in the union of its file and one here. A
new field comes last and has a default. As in `fold`: no policy, clock, randomness, floats or set order.

Jobs and workers are named by their numbers, devices by slot masks. `by` is an actor as `records.actor` writes it.
"""

from __future__ import annotations

from typing import Final

import msgspec

from moorage.scheduler.core.ledger.acts.base import Act, Unknown
from moorage.scheduler.core.ledger.acts.job import (
    Avoid,
    Change,
    Compact,
    Exec,
    Expire,
    Freeze,
    JobAct,
    Lacks,
    LastReported,
    Lends,
    Met,
    Peaked,
    Preempt,
    Priority,
    Promised,
    Relimit,
    Relocate,
    RelocateAgain,
    Relocated,
    Replicas,
    Reserves,
    Resize,
    Scale,
    Stays,
    Stored,
    Used,
)
from moorage.scheduler.core.ledger.acts.ledger import (
    Behind,
    Epoch,
    LedgerAct,
    Level,
    Resign,
    Restored,
    Settings,
    Snapshot,
)
from moorage.scheduler.core.ledger.acts.schedule import (
    AddSchedule,
    PauseSchedule,
    Ran,
    RemoveSchedule,
    ScheduleAct,
)
from moorage.scheduler.core.ledger.acts.tenant import (
    Counter,
    Cursor,
    ForgetTenants,
    HalfLife,
    Hold,
    Limit,
    Limits,
    Share,
    TenantAct,
    Tombstone,
    Unhold,
    Untomb,
)
from moorage.scheduler.core.ledger.acts.worker import (
    Flag,
    Forget,
    Gone,
    Health,
    Join,
    Known,
    Shut,
    Unquarantine,
    Well,
    Window,
    WorkerAct,
)

AnyAct = WorkerAct | JobAct | TenantAct | ScheduleAct | LedgerAct

encode_act: Final = msgspec.msgpack.Encoder().encode
