"""Which jobs are runs again of another one, and the id that the next one gets: `JOB-again-1`, `-2`, …"""

from __future__ import annotations

import re
from itertools import count
from typing import Final

from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.ledger.finished import job_key
from moorage.schemas.job import Request
from moorage.schemas.names import JOB_CHARS_MAX

#: an id that was made here, and its first part
_IS_AGAIN: Final = re.compile(r"(.+)-again-[0-9]+").fullmatch


def reruns(engine: Engine, tenant: str, name: str, request: Request) -> tuple[str, list[str]]:
    """Return an id that no job has, and the jobs in memory that are runs again of this one under ids made here.

    `request` is the request of the job `name`. This looks at as many jobs as there are runs again.
    """
    made = _IS_AGAIN(name) if request.again_of is not None else None
    stem = made[1] if made else name
    earlier: list[str] = []
    for number in count(1):
        end = f"-again-{number}"
        free = stem[: JOB_CHARS_MAX - len(end)] + end
        if (job := engine.state.job(tenant, free)) is not None:
            if engine.reader.request_of(job).again_of == name:
                earlier.append(free)
        elif engine.state.finished.find(job_key(tenant, free)) is None:
            break
    return free, earlier
