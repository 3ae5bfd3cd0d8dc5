"""The names that tenants, jobs and workers may have. A dot would change the subject, so no name has one."""

from __future__ import annotations

import re
from typing import Final

TENANT: Final = re.compile(r"[a-z0-9-]{1,32}")
JOB_CHARS_MAX: Final = 64
JOB: Final = re.compile(rf"[A-Za-z0-9_-]{{1,{JOB_CHARS_MAX}}}")
WORKER: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
#: a person of a tenant, who has a key
PERSON: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
#: a service that answers calls: the last word of their subject
SERVICE: Final = re.compile(r"[a-z0-9_-]{1,48}")
LABEL_KEY: Final = re.compile(r"[A-Za-z0-9_./-]{1,63}")
ENV_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}")
#: the file of a secret in a worker's folder of secrets
SECRET: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")
SECRET_WORDS: Final = "1..128 letters, digits, '_', '.', '-', and not '.' or '..'"
#: what job ids that moorage makes up consist of, behind their j: Crockford's base 32, whose order is that of ASCII
JOB_ID_DIGITS: Final = "0123456789abcdefghjkmnpqrstvwxyz"
#: words that name jobs on a command line, and the sign that makes any word behind it an id
LAST: Final = "last"
ALL: Final = "all"
EXACTLY: Final = "="
#: how the uuid of a GPU begins that somebody made up
SIMULATED_UUID: Final = "SIM-"
#: beginning of the ids of devices that only the host's CDI specs know, followed by the machine
CDI_UUID: Final = "CDI-"

#: the address of files that a job brings: the SHA-256 of their tar file
FILES: Final = re.compile(r"[0-9a-f]{64}")

is_files = FILES.fullmatch
is_tenant = TENANT.fullmatch
is_job = JOB.fullmatch
#: the reason of the end of a job that another one replaces: with the other one's id
REPLACED_BY: Final = "replaced by job {}"
is_worker = WORKER.fullmatch
is_person = PERSON.fullmatch
is_service = SERVICE.fullmatch


def exactly(job: str) -> str:
    """Return the word that names the job with exactly this id on a command line; in quotes, since zsh replaces an
    unquoted =ID with the path of a program."""
    return f"'{EXACTLY}{job}'"


def replaced_by(why: str) -> str | None:
    """Return the id of the job that replaced one which ended with this reason; None if it ended for another one."""
    job = why.rpartition(" ")[2]
    return job if is_job(job) and why == REPLACED_BY.format(job) else None


def word_of(job: str) -> str:
    """Return the word that names a job on a command line: its id, behind `=` if it would mean something else there.

    That are `last` and `all`, what begins as an option does, and for `moorage explain` a code.
    """
    from moorage.schemas.errors import CODES
    from moorage.schemas.reasons import REASONS

    is_other = job in (LAST, ALL) or job.startswith("-") or job in CODES or job in REASONS
    return exactly(job) if is_other else job


def is_secret(name: str) -> bool:
    """Return whether a secret may have this name: a file name without a folder."""
    return SECRET.fullmatch(name) is not None and name not in (".", "..")


def worker_slug(host_name: str) -> str:
    """Return a worker id from a host name: what is not allowed becomes `-`, which is dropped at both ends; cut at 64
    characters. "worker" if nothing is left."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", host_name)[:64].strip("-") or "worker"
