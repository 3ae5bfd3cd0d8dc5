"""The sums of waits by week, tenant, model, cause and holder. Bounded: the oldest weeks go first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

WEEK_MS: Final = 7 * 86_400_000
#: the epoch was a Thursday, weeks begin on Mondays
_MONDAY_MS: Final = 3 * 86_400_000
OTHERS: Final = "(others)"
#: rows that are kept, and rows of one week; further tenants of a week count together
ROWS_MAX: Final = 50_000
ROWS_MAX_WEEK: Final = 20_000

#: week since the epoch, tenant, model, cause, holder
Key = tuple[int, str, str, str, str]
#: ms, GPU ms, jobs
Sums = tuple[int, int, int]


def week_of(ms: int) -> int:
    return (ms + _MONDAY_MS) // WEEK_MS


def begin_of(week: int) -> int:
    """Return the ms since 1970 at which a week begins."""
    return week * WEEK_MS - _MONDAY_MS


class WaitedTable:
    def __init__(self, rows_max: int = ROWS_MAX, week_max: int = ROWS_MAX_WEEK) -> None:
        self._weeks: dict[int, dict[tuple[str, str, str, str], list[int]]] = {}
        #: by tenant, model and cause: the sums of weeks that are gone
        self.before: dict[tuple[str, str, str], list[int]] = {}
        self._count = 0
        self._rows_max, self._week_max = rows_max, week_max

    def add(self, key: Key, ms: int, gpu_ms: int, jobs: int = 0) -> None:
        week, tenant, model, cause, holder = key
        rows = self._weeks.setdefault(week, {})
        row = rows.get(key[1:])
        if row is None:
            name = (tenant, model, cause, holder)
            if len(rows) >= self._week_max:
                name = (OTHERS, OTHERS, cause, "")
            row = rows.get(name)
            if row is None:
                row = rows[name] = [0, 0, 0]
                self._count += 1
        row[0] += ms
        row[1] += gpu_ms
        row[2] += jobs
        while self._count > self._rows_max and len(self._weeks) > 1:
            gone = self._weeks.pop(min(self._weeks))
            self._count -= len(gone)
            for (tenant, model, cause, _), sums in gone.items():
                into = self.before.setdefault((tenant, model, cause), [0, 0, 0])
                for column, value in enumerate(sums):
                    into[column] += value

    def spread(self, key: tuple[str, str, str, str], from_ms: int, until_ms: int, units: int, gpus: int) -> None:
        """Add `units` that waited over a time, to each week that it is in; each asked for so many GPUs."""
        while from_ms < until_ms:
            week = week_of(from_ms)
            end = min(until_ms, begin_of(week + 1))
            ms = (end - from_ms) * units
            self.add((week, *key), ms, ms * gpus)
            from_ms = end

    def rows(self, from_week: int) -> Iterator[tuple[Key, Sums]]:
        for week, rows in self._weeks.items():
            if week >= from_week:
                for key, (ms, gpu_ms, jobs) in rows.items():
                    yield (week, *key), (ms, gpu_ms, jobs)

    def dump(self) -> list[tuple[Key, Sums]]:
        return list(self.rows(0))

    @classmethod
    def load(cls, rows: Iterable[tuple[Key, Sums]]) -> WaitedTable:
        table = cls()
        for key, sums in rows:
            table.add(key, *sums)
        return table
