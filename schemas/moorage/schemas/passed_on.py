"""What workers have the schedulers ask of nats-server for them: their buckets' messages, and new ones.

The server itself answers such a question, on whatever subject the asker names, without looking at the asker's rights.
So no worker asks it: it asks on a subject of its own, and a scheduler passes the question on, with the reply subject,
if that is the worker's inbox. The server then answers the worker directly.

    moorage.worker.n01.fetch.DIRECT.GET.OBJ_MOORAGE_FILES_vision  ->  $JS.API.DIRECT.GET.OBJ_MOORAGE_FILES_vision
    moorage.worker.n01.store.MOORAGE_FILES_vision.C.<object>      ->  $O.MOORAGE_FILES_vision.C.<object>
    moorage.worker.n01.result.MOORAGE_RESULT_vision.C.<object>    ->  $O.MOORAGE_RESULT_vision.C.<object>

An object is what its description (`….M.<name>`) says, by name and digest. Before a scheduler passes a description on,
it asks the leader whether the object may be that worker's (`StoreAsked`): its name tells an attempt, which the worker
must have. So no worker replaces or plants what an attempt elsewhere keeps, and none stores for an attempt that the
ledger has ended.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec

from moorage.schemas.names import TENANT, WORKER
from moorage.schemas.subjects import Subjects

API: Final = "$JS.API"
OBJECTS: Final = "$O"
#: how the name of an attempt's checkpoint begins (`handler.checkpoint_object`)
CHECKPOINT: Final = "checkpoint."
#: last token of the subject of messages with small results; for a piece of an object it is the object's id
TOGETHER: Final = "together"
#: what a worker hears in place of the server's answer while no leader says whose an object is: it sends again
NO_LEADER: Final = 504
#: by which a message takes the place of its subject's earlier ones; other values would empty more
_ROLLUP: Final = ("Nats-Rollup", "sub")
#: by which a message that is sent twice is stored once
_ID: Final = "Nats-Msg-Id"


class StoreAsked(msgspec.Struct, frozen=True):
    """A scheduler's question to the leader: may this worker describe an object of that name in a bucket of the
    tenant?"""

    worker: str
    tenant: str
    object: str


class MayStore(msgspec.Struct, frozen=True):
    """The answer to `StoreAsked`."""

    may: bool


class Passed(NamedTuple):
    """A question to pass on: the worker that asks it, and the server's subject; and for the description of an object,
    what the leader is asked first."""

    worker: str
    subject: str
    first: StoreAsked | None = None


class PassedOn:
    """The subjects of workers that schedulers pass on, and what the server calls them."""

    def __init__(self, subjects: Subjects) -> None:
        self._subjects = subjects
        tenant = TENANT.pattern
        read = "|".join(
            re.escape(bucket_of(""))
            for bucket_of in (subjects.files_bucket, subjects.checkpoints_bucket, subjects.schedules_bucket)
        )
        written = "|".join(
            re.escape(bucket_of("")) for bucket_of in (subjects.files_bucket, subjects.checkpoints_bucket)
        )
        asked = (
            rf"fetch\.(?P<fetch>(?:STREAM\.MSG\.GET|DIRECT\.GET)\.OBJ_(?:{read}){tenant}"
            rf"|STREAM\.INFO\.OBJ_{re.escape(subjects.checkpoints_bucket(''))}{tenant})"
            rf"|store\.(?P<store>(?:{written})(?P<of>{tenant})\.[CM]\.[^.\s*>]+)"
            rf"|result\.(?P<result>{re.escape(subjects.result_bucket(''))}(?P<results_of>{tenant})\.[CM]\.[^.\s*>]+)"
        )
        self._matched = re.compile(rf"{re.escape(subjects.prefix)}\.worker\.(?P<worker>{WORKER.pattern})\.(?:{asked})")

    def of(self, subject: str) -> Passed | None:
        """Return what a worker's subject stands for; None if it is none that schedulers pass on."""
        found = self._matched.fullmatch(subject)
        if found is None:
            return None
        if (fetched := found["fetch"]) is not None:
            return Passed(found["worker"], f"{API}.{fetched}")
        stored, tenant = found["store"] or found["result"], found["of"] or found["results_of"]
        _, part, name = stored.split(".")
        if part == "C":
            return Passed(found["worker"], f"{OBJECTS}.{stored}")
        try:
            described = base64.b64decode(name, altchars=b"-_", validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            return None
        # other names there say nothing of an attempt
        is_any = stored.startswith(self._subjects.checkpoints_bucket("")) and not described.startswith(CHECKPOINT)
        asked = None if is_any else StoreAsked(found["worker"], tenant, described)
        return Passed(found["worker"], f"{OBJECTS}.{stored}", asked)

    def asked(self, worker: str, subject: str) -> str | None:
        """Return the subject on which this worker asks what the server answers on `subject`; None if it cannot."""
        head, _, rest = subject.partition(".")
        if subject.startswith(f"{API}."):
            verb, rest = "fetch", subject.removeprefix(f"{API}.")
        elif head == OBJECTS:
            verb = "result" if self.is_small(subject) else "store"
        else:
            return None
        asked = self._subjects.worker(worker, f"{verb}.{rest}")
        return asked if self.of(asked) is not None else None

    def is_small(self, subject: str) -> bool:
        """Return whether a subject of objects is of a function's result."""
        return subject.startswith(f"{OBJECTS}.{self._subjects.result_bucket('')}")

    def rights(self, worker: str, tenant: str) -> set[str]:
        """Return the subjects to which a worker that serves this tenant may publish."""
        subjects = self._subjects
        files, checkpoints = subjects.files_bucket(tenant), subjects.checkpoints_bucket(tenant)
        found = {
            subjects.worker(worker, f"fetch.{verb}.OBJ_{bucket}")
            for bucket in (files, checkpoints, subjects.schedules_bucket(tenant))
            for verb in ("STREAM.MSG.GET", "DIRECT.GET")
        }
        # what is larger than the bucket must not drive out what is there
        found.add(subjects.worker(worker, f"fetch.STREAM.INFO.OBJ_{checkpoints}"))
        found |= {subjects.worker(worker, f"store.{bucket}.>") for bucket in (files, checkpoints)}
        found.add(subjects.worker(worker, f"result.{subjects.result_bucket(tenant)}.>"))
        return found


def may_pass(subject: str, headers: Mapping[str, str] | None) -> bool:
    """Return whether a worker's message with these headers is passed on to the server's subject.

    All small results have one subject: none takes the place of the others.
    """
    given = set((headers or {}).items())
    if not subject.endswith(f".C.{TOGETHER}"):
        given.discard(_ROLLUP)
    return all(name == _ID for name, _ in given)
