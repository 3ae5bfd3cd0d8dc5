"""Find plain messages in the data read from a connection, and give them to the handlers of their subscriptions."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Final

from moorage.bus.transport import Delivery, Handler

#: a plain message's line as a server writes it: subject, subscription, reply subject, bytes of the payload
plain_line: Final = re.compile(rb"MSG (\S+) (\d+) (?:(\S+) )?(\d+)\r\n").match
END_BYTES: Final = 2
#: so much of a message waits here for its end; a larger one does in nats-py's parser, which copies nothing twice
_PART_BYTES_MAX: Final = 64 * 1024


def hand_out(
    data: bytes, part: bytearray, handler_of: Callable[[int], Handler | None]
) -> tuple[bytes, Exception | None]:
    """Give messages to their handlers, up to the first data that is no plain message or has no handler.

    Return the data that is left, and None. If a handler raises, return the data behind its message, and the exception.
    `part` keeps, from call to call, the beginning of a message whose end has not been read yet.
    """
    if part:
        data = bytes(part) + data
        part.clear()
    now_s, at, size = time.monotonic(), 0, len(data)
    of, handler = b"", None
    while (line := plain_line(data, at)) is not None:
        subject, sid, reply, length = line.groups(b"")
        begin = line.end()
        end = begin + int(length)
        if end + END_BYTES > size:
            if end - at > _PART_BYTES_MAX:
                break
            part += data[at:]
            return b"", None
        if sid != of:  # most that come together are for one handler, and nothing ends a subscription meanwhile
            of, handler = sid, handler_of(int(sid))
        if handler is None:
            break
        at = end + END_BYTES
        try:
            handler(Delivery(subject.decode(), reply.decode(), data[begin:end], None, now_s))
        except Exception as error:  # as nats-py tells of a callback that fails
            return data[at:], error
    return data[at:], None
