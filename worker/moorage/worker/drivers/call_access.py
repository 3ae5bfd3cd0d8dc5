"""What an attempt that answers or makes calls gets, as a process and as a container: its variables, the file of its
key, and somebody who answers its calls once it has ended."""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec

from moorage.schemas.attempt import AttemptName
from moorage.schemas.held_calls import most_held_of
from moorage.schemas.job import Request
from moorage.schemas.service import CALL_SECRETS, CALLER_SECRETS, VERSION_LABEL, VERSION_VARIABLE
from moorage.system.device_environment import JobEnvironment
from moorage.worker.attempt.attempt_folders import AttemptFolders
from moorage.worker.attempt.call_keys import CallKeys
from moorage.worker.attempt.environment import LacksHere
from moorage.worker.attempt.orphaned_calls import OrphanedCalls
from moorage.worker.driver import Assignment

#: of a request's digest, which tells versions of one service apart
_DIGEST_CHARS: Final = 16


def call_access(
    calls: CallKeys | None, folders: AttemptFolders, assignment: Assignment, user: str | None, at: str = ""
) -> tuple[JobEnvironment, str]:
    """Return the variables of an attempt that answers or makes calls, and the file of its key on this host; none for
    another one.

    `user` gets the key, as in `AttemptFolders.give_key`. `at` is where the attempt finds it, if that is another path.
    Raises LacksHere, HostAtFault.
    """
    service, name = assignment.request.service, assignment.name
    if service is None and not assignment.run.calls:
        return JobEnvironment(), ""
    if calls is None:
        raise LacksHere("this worker gives its jobs no key to answer calls, or to make them")
    key = calls.key(name[0], CALLER_SECRETS if service is None else CALL_SECRETS)
    file = "" if key is None else folders.give_key(name, key, user)
    found = (at or file) if file else None
    if service is None:
        return calls.variables_of_caller(name[0], found), file
    variables = calls.variables(name[0], service, assignment.run.grace_s, found)
    variables[VERSION_VARIABLE] = _version_of(assignment.request)
    return variables, file


def _version_of(request: Request) -> str:
    """Return what tells this version of a service from others, as `VERSION_VARIABLE` has it: not the names of jobs, of
    which a request may have its own or not."""
    nameless = msgspec.structs.replace(request, job=None, instead_of=None)
    digest = hashlib.sha256(msgspec.json.encode(nameless, order="sorted")).hexdigest()[:_DIGEST_CHARS]
    return f"{digest},{request.labels.get(VERSION_LABEL, '')}"


def calls_of(request: Request) -> int:
    """Return how many calls an attempt of this job holds at most; 0 for one that answers none."""
    return 0 if request.service is None else most_held_of(request.service)


def answer_orphans(orphans: OrphanedCalls | None, folders: AttemptFolders, name: AttemptName) -> None:
    """Tell the callers of an attempt of which nothing runs any more."""
    if orphans is not None and (most := folders.calls(name)):
        orphans.answer(name[0], folders.path(name), most)
