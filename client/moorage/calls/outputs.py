"""Answers that are larger than a message of the server: they go in parts, as fast as their callers ask for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from moorage.calls.member import Call
from moorage.schemas.service import END, OUTPUT, PART, PARTS_AHEAD, SEND_TO

#: a caller that asks for no more parts for so long, in seconds, is given up
SILENCE_S: Final = 60.0
#: of the largest message, how much a part has: the headers need some
OUTPUT_PART: Final = 0.5

#: puts a message for a caller: its subject, body and headers
Put = Callable[[str, bytes, dict[str, str]], None]


@dataclass(eq=False)
class _Output:
    """What is left of one answer: `sent` counts its parts."""

    call: Call
    body: memoryview
    headers: Mapping[str, str]
    part_bytes: int
    ask_at: str
    sent: int = 0
    timer: asyncio.TimerHandle | None = None

    @property
    def parts(self) -> int:
        return -(-len(self.body) // self.part_bytes)

    @property
    def left_bytes(self) -> int:
        return max(0, len(self.body) - self.sent * self.part_bytes)


class Outputs:
    """The answers of one member that go out in parts. `on_silence` gets a call whose caller asks for no more."""

    def __init__(self, put: Put, on_silence: Callable[[Call], None]) -> None:
        self._put = put
        self._on_silence = on_silence
        self._going: dict[int, _Output] = {}

    def __len__(self) -> int:
        return len(self._going)

    @property
    def replies(self) -> set[str]:
        """The reply subjects of the calls whose answers these are."""
        return {each.call.reply for each in self._going.values()}

    @property
    def waiting_bytes(self) -> int:
        """How many bytes wait to be asked for."""
        return sum(each.left_bytes for each in self._going.values())

    def begin(
        self, number: int, call: Call, body: bytes, headers: Mapping[str, str], message_bytes: int, ask_at: str
    ) -> None:
        """Send the first parts of an answer; its caller asks for more at `ask_at`, with the number of the last one that
        it takes. `message_bytes` is what a message may have."""
        part_bytes = max(1, int(message_bytes * OUTPUT_PART))
        self._going[number] = _Output(call, memoryview(body), headers, part_bytes, ask_at)
        self.send(number, PARTS_AHEAD)

    def send(self, number: int, upto: int) -> None:
        """Send the parts of an answer up to this one, and behind the last its end."""
        going = self._going.get(number)
        if going is None:
            return
        size, reply = str(len(going.body)), going.call.reply
        while going.sent < min(upto, going.parts):
            at = going.sent * going.part_bytes
            going.sent += 1
            asks = going.sent % (PARTS_AHEAD // 2) == 0
            headers = {PART: str(going.sent), OUTPUT: size, **({SEND_TO: going.ask_at} if asks else {})}
            first = {} if going.sent > 1 else going.headers
            self._put(reply, bytes(going.body[at : at + going.part_bytes]), {**first, **headers})
        if going.timer is not None:
            going.timer.cancel()
        if going.sent < going.parts:
            going.timer = asyncio.get_running_loop().call_later(SILENCE_S, self._on_timer, number)
            return
        del self._going[number]
        self._put(reply, b"", {**going.headers, END: str(going.parts), OUTPUT: size})

    def drop(self, reply: str | None = None) -> list[Call]:
        """Send no more of the answers to the caller with this reply subject, of all without one; return their calls."""
        numbers = [number for number, going in self._going.items() if reply in (None, going.call.reply)]
        dropped = [self._going.pop(number) for number in numbers]
        for going in dropped:
            if going.timer is not None:
                going.timer.cancel()
        return [going.call for going in dropped]

    def _on_timer(self, number: int) -> None:
        self._on_silence(self._going.pop(number).call)
