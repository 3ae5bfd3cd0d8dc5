"""The acts of a record: what happens in it beside its steps. Each act is one class, with all that is known of it.

On the wire an act is the list `[tag, field, ...]`. Tags and the order of fields are in every ledger ever written: none
may change. A new act is a new class with the feature level that it needs, and a name in the union of its file. A new
field comes last and has a default. As in `fold`: no policy, clock, randomness, floats or set order in here.

Jobs and workers are named by their numbers, devices by masks of slots. `by` is an actor as `records.actor` writes it.
"""

from __future__ import annotations

from typing import Final

import msgspec

from moorage.scheduler.core.ledger.acts.base import *  # noqa: F403
from moorage.scheduler.core.ledger.acts.job import *  # noqa: F403
from moorage.scheduler.core.ledger.acts.job import JobAct
from moorage.scheduler.core.ledger.acts.ledger import *  # noqa: F403
from moorage.scheduler.core.ledger.acts.ledger import LedgerAct
from moorage.scheduler.core.ledger.acts.tenant import *  # noqa: F403
from moorage.scheduler.core.ledger.acts.tenant import TenantAct
from moorage.scheduler.core.ledger.acts.worker import *  # noqa: F403
from moorage.scheduler.core.ledger.acts.worker import WorkerAct

AnyAct = WorkerAct | JobAct | TenantAct | LedgerAct

encode_act: Final = msgspec.msgpack.Encoder().encode
