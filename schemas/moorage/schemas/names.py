"""What a tenant, a job and a worker may be called. A dot in a name would be a subject injection, so there is none."""

from __future__ import annotations

import re
from typing import Final

TENANT: Final = re.compile(r"[a-z0-9-]{1,32}")
JOB: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
WORKER: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
LABEL_KEY: Final = re.compile(r"[A-Za-z0-9_./-]{1,63}")
ENV_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}")
#: what job ids that moorage makes up consist of, behind their j: Crockford's base 32, whose order is that of ASCII
JOB_ID_DIGITS: Final = "0123456789abcdefghjkmnpqrstvwxyz"
#: how the uuid of a GPU begins that somebody made up
SIMULATED_UUID: Final = "SIM-"

is_tenant = TENANT.fullmatch
is_job = JOB.fullmatch
is_worker = WORKER.fullmatch


def worker_slug(host_name: str) -> str:
    """A worker id from a host name: what is not allowed becomes `-`, cut at 64 characters."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", host_name)[:64].strip("-") or "worker"
