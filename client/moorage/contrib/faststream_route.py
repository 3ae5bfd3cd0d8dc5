"""A route for FastStream: each message of a NATS subject becomes a job, and is acknowledged once that job is recorded.

So a handler of hours holds no message: nothing is redelivered because a task takes longer than `ack_wait`. A message
that comes again all the same, as after a crash between the record and the acknowledgement, is the same job. Needs the
package `faststream[nats]`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from faststream import AckPolicy
from faststream.exceptions import NackMessage, RejectMessage
from faststream.nats import NatsRoute
from faststream.nats.annotations import NatsMessage
from nats.aio.msg import Msg
from nats.errors import NotJSMessageError

from moorage.client import AsyncClient, QueueFull, Rejected

log = logging.getLogger("moorage.contrib")

#: how a message becomes a job: its argv, or its request as on the wire, from the decoded body
Task = Callable[[Any], Sequence[str] | Mapping[str, Any]]
#: after this time a message comes again for which the tenant's queue had no room
FULL_S: Final = 5.0
#: of a job's id that is made from the name of a stream
_STREAM_CHARS_MAX: Final = 32


def job_route(
    client: AsyncClient,
    subject: str,
    task: Task,
    gpu: str | int | None = None,
    *,
    fields: Mapping[str, Any] | None = None,
    **options: Any,
) -> NatsRoute:
    """Return a route for `NatsRouter(handlers=[...])` that submits a job for each message of a subject.

    `client` is open while the broker runs. `gpu` and `fields` are those of `AsyncClient.submit`, for every job;
    `options` are those of `broker.subscriber`: `stream`, `durable`, `pull_sub`, ... The job's id is the header
    `Moorage-Job` if the message has it, else made of stream, sequence and time, else FastStream's id of the message.
    The route answers `{"job": id}` to a request, and sends it to the route's `publishers`.

    A message is not acknowledged, and comes again, while no scheduler answers or the tenant has reached its limit of
    jobs (`QueueFull`, after `FULL_S`). One that can be no job (`Rejected`), or that `task` cannot read (ValueError,
    TypeError, LookupError), is logged and terminated: it would fail for ever.
    """

    async def submit(body: Any, message: NatsMessage) -> Any:
        try:
            job = await client.submit(task(body), gpu, job_id(message), **(fields or {}))
        except QueueFull as error:
            raise NackMessage(delay=FULL_S) from error
        except (Rejected, ValueError, TypeError, LookupError) as error:
            log.error("message %s of %s can be no job: %s", job_id(message), subject, error)
            raise RejectMessage from error
        return {"job": job.job}

    if options.get("stream") is not None:
        options = {"ack_policy": AckPolicy.NACK_ON_ERROR, "no_reply": True, **options}
    return NatsRoute(submit, subject, **{"title": f"{subject} to a job", **options})


def job_id(message: NatsMessage) -> str:
    """Return the id of a message's job: the same each time that the message is delivered."""
    if named := message.headers.get("Moorage-Job"):
        return str(named)
    raw = message.raw_message
    assert isinstance(raw, Msg)
    try:
        found = raw.metadata
    except NotJSMessageError:
        return re.sub(r"[^A-Za-z0-9_-]", "-", message.message_id)
    stream = re.sub(r"[^A-Za-z0-9_-]", "-", found.stream)[:_STREAM_CHARS_MAX]
    return f"{stream}-{found.sequence.stream}-{int(found.timestamp.timestamp() * 1000)}"
