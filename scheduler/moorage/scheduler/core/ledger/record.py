"""A record of the ledger, and its bytes. It holds outcomes, not causes, so that folding needs no policy.

All transitions of one tick are steps. There may be thousands, so each is `STEP_WIDTH` integers in one flat list (see
`records.Op`); rarer changes are acts (see `acts`).
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from moorage.scheduler.core.ledger import records
from moorage.scheduler.core.ledger.acts import AnyAct, Unknown


class Record(msgspec.Struct, array_like=True, gc=False):
    """The outcomes of one tick. `digest` is that of the state before this record; `time` is ledger milliseconds.

    - `format` is the ledger's feature level; in a record that raises it, the new one. Its place and those of the other
      fields without a default are the same in every format: so each release can tell that a record is of a later one.
    - (`leader`, `rid`) is the record's name, by which its leader recognises it after an unclear answer.
    - `accepts` has for each tenant a flat list: job, body, replicas, traceparent, …; jobs are numbered in this order.
      The job's id is empty if the body begins with it, as nearly all bodies do.
    - `acts` and `accepts` are folded where an ACT or ACCEPT step says that they were decided; those that no step names
      were decided before all steps, the acts first.
    - `reports` is flat: worker number, and number of its last report frame that is folded with this record, after it.
    - `evidence` is flat, four numbers for each decision: the first job, the number of replicas placed, the hosts known,
      and the free devices left on the last host. From feature level 2 on the second has `GUARANTEED` or `BORROWED` in
      it: whether the first job stayed within its tenant's guarantee.
    - `actors` is flat: the first index and the end index of a range of `steps`, and the note that names their actor
      (see `records.actor`). Steps without an actor are the worker's if their op is in `REPORTED`, else the scheduler's.
    - `ways` says how requests and orders came (see `ways`). Releases that do not know it leave it out.
    """

    format: int
    epoch: int
    leader: int
    rid: int
    time: int
    digest: int
    accepts: list[tuple[str, list[Any]]] = []
    steps: list[int] = []
    reports: list[int] = []
    notes: list[str] = []
    acts: list[AnyAct] = []
    evidence: list[int] = []
    actors: list[int] = []
    ways: list[int] = []


_ACTS_AT: Final = Record.__struct_fields__.index("acts")
_HEAD: Final = len(Record.__struct_fields__) - len(Record.__struct_defaults__)
_encode: Final = msgspec.msgpack.Encoder().encode
#: an array of all fields begins with this byte, one without `ways` with the byte before it; empty, that is one byte
_ALL: Final = 0x90 + len(Record.__struct_fields__)
_decode: Final = msgspec.msgpack.Decoder(Record).decode
_decode_list: Final = msgspec.msgpack.Decoder(list[Any]).decode


def encode_record(record: Record) -> bytes:
    """Return the bytes of a record: without ways, those that releases write which do not know ways."""
    payload = _encode(record)
    return payload if record.ways else bytes((_ALL - 1,)) + payload[1:-1]


def decode_record(payload: bytes) -> Record:
    """Return the record in these bytes. Raises `msgspec.DecodeError` if they are not a record.

    An act that this release cannot read does not make the record invalid: it becomes `Unknown`, which `fold` refuses.
    Nor does another form of a record of a later format: its head is returned, and `fold` refuses that format.
    """
    try:
        return _decode(payload)
    except msgspec.ValidationError:
        fields = _decode_list(payload)
        head = fields[:_HEAD]
        if len(head) == _HEAD and all(type(each) is int for each in head) and head[0] > records.FORMAT:
            return Record(*head)
        acts = msgspec.convert(fields[_ACTS_AT : _ACTS_AT + 1], list[list[list[Any]]])
        if not acts:
            raise
        record = msgspec.convert([*fields[:_ACTS_AT], [], *fields[_ACTS_AT + 1 :]], Record)
        record.acts = [_read(act) for act in acts[0]]  # type: ignore[misc]
        return record


def _read(act: list[Any]) -> AnyAct | Unknown:
    try:
        known: AnyAct = msgspec.convert(act, AnyAct)
        return known
    except msgspec.ValidationError as error:
        return Unknown(str(act[0]) if act else "", str(error))
