"""Compute how many tokens the launches of a job get, so that it uses its part of a device.

There is one controller per job and device, without I/O. The tokens are in a bucket that the job's processes take from
(the segment of the limiter); only the agent adds tokens. Each measurement sets the rate to the tokens
drained per second, multiplied by target / utilization; while the job is idle, the former rate stays. A PID term then
changes that rate by at most a half.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

#: two measurements that are closer to each other do not give a rate
PASSED_S_MIN: Final = 0.05
#: tokens a second of a whole device at a constant rate
RATE: Final = 50_000
#: tokens a second of one job: at the beginning, at least, at most
RATE_FIRST: Final = 100.0
RATE_MIN: Final = 10.0
RATE_MAX: Final = 100_000.0
#: bounds of the tokens that a job may save; between them it may save those of so many seconds
CAPACITY_MIN: Final = 100.0
CAPACITY_MAX: Final = 200_000.0
BURST_S: Final = 2.0
#: weights of the PID term, and of a new measurement against the earlier ones; what a step keeps of the integral
PROPORTIONAL: Final = 0.5
INTEGRAL: Final = 0.1
DERIVATIVE: Final = 0.05
SMOOTHING: Final = 0.3
INTEGRAL_DECAY: Final = 0.95
#: below this utilisation a job is idle, and its use of tokens does not show its need
IDLE_MAX: Final = 0.01
_INTEGRAL_MAX: Final = 1.0
_CORRECTION_MAX: Final = 0.5


class Refill(NamedTuple):
    """Tokens to add to a bucket. Those that would bring it above `up_to` are dropped."""

    tokens: float
    up_to: float


class Bucket(Protocol):
    """Holds the tokens of one job for each of its devices, as `limiter.segment.Segment` does."""

    def refill(self, device: int, tokens: float, capacity: float) -> float:
        """Add tokens, but none beyond a level of `capacity`; return how many the bucket of the device then has."""
        ...


class Controller:
    """The controller of one job on one device.

    `target` is the part of the device to use. Raises ValueError if it is not 0..1.
    """

    def __init__(self, target: float) -> None:
        if not 0 <= target <= 1:
            raise ValueError(f"target must be 0..1, found {target}")
        self.target = target
        self.rate = RATE_FIRST
        self.capacity = self._capacity()
        self.smoothed: float | None = None
        self._level = self.capacity
        self._integral = 0.0
        self._error = 0.0

    def begin(self, bucket: Bucket, device: int) -> float:
        """Fill the bucket to the capacity, before the first `step`; return how many tokens the bucket then has."""
        return bucket.refill(device, self.capacity, self.capacity)

    def step(self, bucket: Bucket, device: int, utilisation: float, passed_s: float) -> float:
        """Add the tokens, if any, that `update` computes from a measurement; return how many the bucket then has."""
        level = bucket.refill(device, 0.0, self.capacity)
        given = self.update(utilisation, passed_s, level)
        return level if given is None else bucket.refill(device, given.tokens, given.up_to)

    def update(self, utilisation: float, passed_s: float, level: float) -> Refill | None:
        """Return what to add to the bucket. Return None, and change nothing, if `passed_s` is below `PASSED_S_MIN`.

        `utilisation` is the part of the device that the job has used since the last measurement, `passed_s` seconds
        ago, and `level` is what its bucket has now. The tokens are added up to the former capacity; the new capacity
        applies from the next call on.
        """
        if passed_s < PASSED_S_MIN:
            return None
        up_to = self.capacity
        measured = min(max(utilisation, 0.0), 1.0)
        before = measured if self.smoothed is None else self.smoothed
        self.smoothed = SMOOTHING * measured + (1 - SMOOTHING) * before
        drained = max(0.0, (self._level + self.rate * passed_s - level) / passed_s)
        self._level = level
        base = self.rate
        if self.smoothed > IDLE_MAX:
            base = self._rate(drained * (self.target / self.smoothed))
        self.rate = self._rate(base * (1 + self._correction(self.target - self.smoothed, passed_s)))
        self.capacity = self._capacity()
        return Refill(self.rate * passed_s, up_to)

    def _correction(self, error: float, passed_s: float) -> float:
        summed = self._integral * INTEGRAL_DECAY + error * passed_s
        self._integral = min(max(summed, -_INTEGRAL_MAX), _INTEGRAL_MAX)
        change, self._error = (error - self._error) / passed_s, error
        whole = PROPORTIONAL * error + INTEGRAL * self._integral + DERIVATIVE * change
        return min(max(whole, -_CORRECTION_MAX), _CORRECTION_MAX)

    def _rate(self, wanted: float) -> float:
        return min(max(wanted, RATE_MIN), RATE_MAX)

    def _capacity(self) -> float:
        return min(max(self.rate * BURST_S, CAPACITY_MIN), CAPACITY_MAX)
