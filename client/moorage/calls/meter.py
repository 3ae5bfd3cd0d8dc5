"""What one member counts from its start: calls, errors by code, times and sizes. Its load frames and `STATS` say it."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

from moorage.schemas.service import BATCH_SIZES, CALL_CODES_MAX, CALL_MS, OTHER_CODES, CallCounts


class Meter:
    """Counts what becomes of calls here: each has begun and ended, or was refused, has expired or was handed on.

    Answers with an error are counted beside that, by `failed`. Times are in milliseconds.
    """

    def __init__(self) -> None:
        self.refused = 0  # with `busy`
        self.expired = 0
        self.handed = 0
        self.ended = 0
        self.errors = 0
        self.last_error = ""
        self.waited_ms = 0
        self.ran_ms = 0
        self._codes: Counter[str] = Counter()
        self._waited = [0] * (len(CALL_MS) + 1)
        self._ran = [0] * (len(CALL_MS) + 1)
        self._batches = [0] * (len(BATCH_SIZES) + 1)
        self._batched = 0

    def began(self, waited_ms: int) -> None:
        """A call that waited so long, here and elsewhere, runs now."""
        self.waited_ms += waited_ms
        self._waited[bisect_left(CALL_MS, waited_ms)] += 1

    def finished(self, ran_ms: float) -> None:
        """A call that has begun runs no longer, however it ended."""
        self.ended += 1
        self.ran_ms += round(ran_ms)
        self._ran[bisect_left(CALL_MS, ran_ms)] += 1

    def failed(self, code: int, message: str) -> None:
        """A call is answered with an error, whether the service or the member made it."""
        self.errors += 1
        self.last_error = f"{code}:{message}"
        name = str(code)
        self._codes[name if name in self._codes or len(self._codes) < CALL_CODES_MAX else OTHER_CODES] += 1

    def batch(self, size: int) -> None:
        """So many calls were given to the service at once."""
        self._batched += size
        self._batches[bisect_left(BATCH_SIZES, size)] += 1

    def counts(self) -> CallCounts:
        """Return what the load frame says beside its totals."""
        return CallCounts(dict(self._codes), tuple(self._waited), tuple(self._ran), tuple(self._batches), self._batched)
