"""Opens and closes a worker for new jobs, in a record and in the fleet's view alike."""

from __future__ import annotations

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.ledger import acts
from moorage.scheduler.core.ledger.state import Worker
from moorage.schemas.reasons import STARTS_FAIL


def set_flag(draft: Draft, fleet: Fleet, worker: Worker, act: acts.Flag | acts.Shut) -> None:
    """Give a worker the flag of this act from the draft's record on."""
    flag = act.flag if isinstance(act, acts.Flag) else STARTS_FAIL.name
    draft.add(act)
    host = fleet.hosts.get(worker.num)
    if host is not None:
        host.closed = flag != "open"
        fleet.refresh(host)
