"""Turns the outputs of a record into messages: answers in one frame for each inbox, events in one for each tenant."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from moorage.bus.inbox import mux_frames, split_mux_reply
from moorage.scheduler.core.outputs.outputs import Message, Outputs
from moorage.schemas.codec import encode, is_json
from moorage.schemas.errors import problem
from moorage.schemas.frames import VERSION
from moorage.schemas.subjects import FLEET, Subjects

EVENTS_FRAME_BYTES_MAX: Final = 400 * 1024


def messages_of(
    outputs: Outputs, subjects: Subjects, seq: int, decided: Callable[[str, bytes], bool], bytes_max: int
) -> list[Message]:
    """Return all messages of a record, to send in one write: frames for workers first, then answers and events.

    `outputs` stay as they are: a copy of this process may look ahead while the record is stored. `decided` takes the
    answers that the durable queue's reader waits for. `bytes_max` is the most that the server accepts.
    """
    messages = [*outputs.messages, *outputs.turns]
    # the reader's own marks contain a blank; subjects never do
    answers = [answer for answer in outputs.answers if " " not in answer[0] or not decided(*answer)]
    messages += coalesced(answers, bytes_max)
    by_tenant: dict[str, list[bytes]] = {}
    for tenant, job, payload, own in outputs.events:
        if own:
            messages.append((subjects.event(tenant, job), payload, ""))
        mine = by_tenant.get(tenant)
        if mine is None:
            mine = by_tenant[tenant] = []
        mine.append(payload)
    messages += [(subjects.events(FLEET), encode(event), "") for event in outputs.fleet]
    for tenant, events in by_tenant.items():
        for frame in _event_frames(tenant, seq, events):
            messages.append((subjects.events(tenant), frame, ""))
    return messages


def coalesced(answers: list[tuple[str, bytes]], bytes_max: int) -> list[Message]:
    """Return the answers as messages; answers to one inbox of an SDK share a frame, other callers get their own.

    An answer with more bytes than the server accepts would never arrive: a refusal that says so is sent in its place.
    """
    messages: list[Message] = []
    frames: dict[str, list[tuple[int, bytes]]] = {}
    for reply, whole in answers:
        payload = whole if len(whole) <= bytes_max else _too_large(whole, bytes_max)
        mux = split_mux_reply(reply)
        if mux is None:
            messages.append((reply, payload, ""))
        elif mux[0] in frames:
            frames[mux[0]].append((mux[1], payload))
        else:
            frames[mux[0]] = [(mux[1], payload)]
    messages.extend(mux_frames(frames))
    return messages


def _too_large(answer: bytes, bytes_max: int) -> bytes:
    refusal = problem(
        "too-large",
        f"the answer has {len(answer)} bytes, and the nats-server takes {bytes_max} at a time",
        next="ask for less (a lower limit), or raise max_payload of the nats-server, to 8 MB at most",
    )
    return encode(refusal, json=is_json(answer))


class _Encoded(msgspec.Struct, frozen=True, tag_field="kind", tag="events"):
    """An `Events` frame whose events are encoded already."""

    tenant: str
    ledger: int
    jobs: list[msgspec.Raw]
    v: int = VERSION


def _event_frames(tenant: str, seq: int, events: list[bytes]) -> Iterator[bytes]:
    """Yield the tenant's events of this record as `Events` frames; the events are encoded already."""
    if sum(map(len, events)) + len(events) <= EVENTS_FRAME_BYTES_MAX:
        yield encode(_Encoded(tenant, seq, list(map(msgspec.Raw, events))))
        return
    group: list[msgspec.Raw] = []
    size = 0
    for event in events:
        if size + len(event) > EVENTS_FRAME_BYTES_MAX and group:
            yield encode(_Encoded(tenant, seq, group))
            group, size = [], 0
        group.append(msgspec.Raw(event))
        size += len(event) + 1
    if group:
        yield encode(_Encoded(tenant, seq, group))
