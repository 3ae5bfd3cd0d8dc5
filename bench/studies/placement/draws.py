"""The order of tasks and hosts in the published runs, number by number, so that a policy's result can be compared run
by run and not in the mean alone.

Their simulator is written in Go and draws from its `math/rand` with the run's seed: the tasks, by name, are shuffled;
more are drawn from them until 130 % of the GPUs are asked for, or, of a list that asks for more, as many are taken out
of it; then the hosts are put in the order in which ties fall.
In between ten watches of the cluster's objects begin, and each draws how long it will take (client-go's reflector).

`math/rand` is the additive lagged Fibonacci generator x[n] = x[n - 607] + x[n - 273] mod 2^64 of D. P. Mitchell and
J. A. Reeds. It is seeded with a linear congruential one (multiplier 48271, modulus 2^31 - 1) and with its own state
after 7.8e12 steps from seed 1 (`gen_cooked.go` of the Go project says so), which is not copied but jumped to here: the
state so many steps on is a power of y modulo y^607 - y^334 - 1.
"""

from __future__ import annotations

import functools
from typing import Final, TypeVar

from moorage.testing.simulate.openb import TraceHost, TraceTask

#: percent of the GPUs that are asked for in the end
ARRIVE_PERCENT: Final = 130
#: numbers that the published simulator's watches draw between tasks and hosts
WATCHES: Final = 10

_LENGTH, _TAP = 607, 273
_COOKED_STEPS: Final = 7_800_000_000_000
_MODULUS: Final = (1 << 31) - 1
_WORD: Final = (1 << 64) - 1
#: bytes of one coefficient of a product: 607 products of 64 by 64 bits
_WIDE: Final = 18

T = TypeVar("T")


def drawn(hosts: list[TraceHost], tasks: list[TraceTask], seed: int) -> tuple[list[TraceHost], list[TraceTask]]:
    """Hosts in the order in which ties fall, and tasks in the order of their arrival."""
    source = Source(seed)
    source.int63()  # the published simulator logs one
    by_name = sorted(tasks, key=lambda task: task.name)
    arriving = list(by_name)
    source.shuffle(arriving)
    asked = sum(task.gpu_demand_milli for task in arriving)
    most = ARRIVE_PERCENT * 10 * sum(host.gpus for host in hosts)
    if asked > most:
        while asked > most:
            asked -= arriving.pop(source.below(len(arriving))).gpu_demand_milli
    else:
        while True:
            task = by_name[source.below(len(by_name))]
            if asked + (task.gpu_milli if task.gpus else 0) > most:
                break
            arriving.append(task)
            asked += task.gpu_demand_milli
    for _ in range(WATCHES):
        source.int63()
    named = sorted(hosts, key=lambda host: host.name)
    place = dict(zip(source.permutation(len(named)), named, strict=True))
    return [place[number] for number in range(len(named))], arriving


class Source:
    """Go's `rand.New(rand.NewSource(seed))`, as far as it is needed here."""

    __slots__ = ("_feed", "_state", "_tap")

    def __init__(self, seed: int) -> None:
        self._state = [word ^ cooked for word, cooked in zip(_seeded(seed, 20), _cooked(), strict=True)]
        self._tap, self._feed = 0, _LENGTH - _TAP

    def int63(self) -> int:
        """`Int63`: 0..2^63 - 1."""
        self._tap = (self._tap - 1) % _LENGTH
        self._feed = (self._feed - 1) % _LENGTH
        word = self._state[self._feed] = self._state[self._feed] + self._state[self._tap] & _WORD
        return word & _WORD >> 1

    def below(self, bound: int) -> int:
        """`Intn`: 0..bound - 1, for a bound of 1..2^31 - 1."""
        if bound & bound - 1 == 0:
            return self.int63() >> 32 & bound - 1
        most = _MODULUS - (1 << 31) % bound
        found = self.int63() >> 32
        while found > most:
            found = self.int63() >> 32
        return found % bound

    def shuffle(self, items: list[T]) -> None:
        """`Shuffle`, in place, which draws in another way than `Intn` (Lemire, "Fast Random Integer Generation")."""
        for last in range(len(items) - 1, 0, -1):
            bound = last + 1
            product = (self.int63() >> 31) * bound
            while product & 0xFFFFFFFF < (1 << 32) % bound:
                product = (self.int63() >> 31) * bound
            other = product >> 32
            items[last], items[other] = items[other], items[last]

    def permutation(self, length: int) -> list[int]:
        """`Perm`: 0..length - 1 in random order."""
        found = [0] * length
        for number in range(length):
            other = self.below(number + 1)
            found[number] = found[other]
            found[other] = number
        return found


def _seeded(seed: int, shift: int) -> list[int]:
    """The words that the congruential generator makes of a seed, three of its numbers each, `shift` bits apart."""
    number = seed % _MODULUS or 89_482_311
    for _ in range(20):
        number = 48_271 * number % _MODULUS
    words = []
    for _ in range(_LENGTH):
        word = 0
        for place in (2, 1, 0):
            number = 48_271 * number % _MODULUS
            word ^= number << place * shift
        words.append(word & _WORD)
    return words


@functools.cache
def _cooked() -> list[int]:
    """The state so many steps after seed 1, by its places in the generator's ring."""
    history = [0] * _LENGTH  # x[-606] … x[0]
    for place, word in enumerate(_seeded(1, 10)):
        history[_index_at(place, 0)] = word
    power = _power(_COOKED_STEPS)
    later = []
    for _ in range(_LENGTH):
        later.append(sum(a * b for a, b in zip(power, history, strict=True)) & _WORD)
        power = _times_y(power)
    return [later[_index_at(place, _COOKED_STEPS)] for place in range(_LENGTH)]


def _index_at(place: int, steps: int) -> int:
    """Which of the last 607 numbers, 0 for the oldest, stands at a place of the ring after so many steps."""
    return _LENGTH - 1 - (place - (_LENGTH - _TAP) + steps) % _LENGTH


def _power(exponent: int) -> list[int]:
    """y to that power modulo y^607 - y^334 - 1, the coefficients modulo 2^64."""
    found = [1] + [0] * (_LENGTH - 1)
    for bit in f"{exponent:b}":
        found = _product(found, found)
        if bit == "1":
            found = _times_y(found)
    return found


def _times_y(one: list[int]) -> list[int]:
    found = [one[-1], *one[:-1]]
    found[_LENGTH - _TAP] = found[_LENGTH - _TAP] + one[-1] & _WORD
    return found


def _product(one: list[int], other: list[int]) -> list[int]:
    """Their product, reduced: as two long numbers, whose digits do not run over."""
    both = _digits(one) * _digits(other)
    wide = both.to_bytes(2 * _LENGTH * _WIDE, "little")
    found = [int.from_bytes(wide[at : at + _WIDE], "little") & _WORD for at in range(0, len(wide), _WIDE)]
    for place in range(2 * _LENGTH - 2, _LENGTH - 1, -1):
        for lower in (place - _LENGTH, place - _TAP):
            found[lower] = found[lower] + found[place] & _WORD
    return found[:_LENGTH]


def _digits(coefficients: list[int]) -> int:
    return int.from_bytes(b"".join(word.to_bytes(_WIDE, "little") for word in coefficients), "little")
