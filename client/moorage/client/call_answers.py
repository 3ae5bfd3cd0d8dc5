"""What a job of `submit_many` leaves: a line for each of its items, with the value of the answer or the error."""

from __future__ import annotations

import contextlib
from base64 import b64decode
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from moorage.schemas.ranges import Ranges, numbers_in, parse_ranges
from moorage.schemas.unreadable import UNREADABLE

#: the file of the items in a job's folder, and the one with their answers, which it keeps
ITEMS: Final = "moorage-items.jsonl"
ANSWERS: Final = "answers.jsonl"
#: bytes of the answers that one replica keeps
ANSWERS_BYTES_MAX: Final = 64 << 20


def is_of_calls(run: Mapping[str, Any]) -> bool:
    """Return whether this is the `run` of a job of `submit_many`."""
    return bool(run.get("calls")) and ANSWERS in run.get("keep", ())


def shares_of(run: Mapping[str, Any], numbers: Ranges) -> Iterator[tuple[int, range]]:
    """Yield the number of each replica of such a job, and those of its items."""
    for number in numbers_in(numbers):
        first, last = parse_ranges(run["items"][number])[0]
        yield number, range(first, last + 1)


class CallError(msgspec.Struct, frozen=True):
    """Why an item has no answer: an error's code, or the name of what the function raised; and its words."""

    kind: str
    message: str


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a call of an item has led to, as a line of `ANSWERS`: its value, in base64 if it is bytes, or its error."""

    item: int
    value: Any = None
    base64: str | None = None
    error: CallError | None = None

    @property
    def answer(self) -> Any:
        """The value as the service has given it; an array as a list."""
        return self.value if self.base64 is None else b64decode(self.base64)


_decode_outcome: Final = msgspec.json.Decoder(Outcome).decode
encode_outcome: Final = msgspec.json.Encoder().encode


def read_outcomes(content: bytes) -> dict[int, Outcome]:
    """Return the outcomes in a file of answers, by item. A line that was cut off counts as none."""
    found: dict[int, Outcome] = {}
    for line in content.splitlines():
        with contextlib.suppress(*UNREADABLE):
            outcome = _decode_outcome(line)
            found[outcome.item] = outcome
    return found
