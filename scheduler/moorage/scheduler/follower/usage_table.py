"""The sums of GPU time and memory of jobs that are over, by tenant, person, model and hour.

Persons are a part of the tenant's name, as `vision/lena`: so a save is the same as before there were any.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import Any, Final

from moorage.scheduler.follower.granted import SUMS, Sums

NOTHING: Final[Sums] = (0, 0, 0, 0)
#: whose (a tenant, or TENANT/PERSON), model, hour since the epoch
Key = tuple[str, str, int]

#: a row is an hour of one tenant and model; beyond this the oldest hours are dropped
ROWS_MAX: Final = 80_000
#: pairs of whose and model; further ones of persons count for their tenants, and those of tenants for `OTHERS`
SERIES_MAX: Final = 2_000
PERSONS_MAX: Final = 10_000
OTHERS: Final = "(others)"

_MOST: Final = 0xFFFFFFFFFFFFFFFF


class Series:
    """The rows of one tenant or person, and model, by hour, ascending."""

    __slots__ = ("hours", "sums")

    def __init__(self) -> None:
        self.hours: array[int] = array("I")
        self.sums: array[int] = array("Q")


class UsageTable:
    """The sums, in thousandths of a GPU's ms and in MiB ms: many short runs lose nothing to rounding."""

    def __init__(self, rows_max: int = ROWS_MAX, series_max: int = SERIES_MAX, persons_max: int = PERSONS_MAX) -> None:
        self.series: dict[tuple[str, str], Series] = {}
        self.count = 0  # rows
        self._of_persons = 0  # series
        self._rows_max, self._series_max, self._persons_max = rows_max, series_max, persons_max

    def add(self, tenant: str, model: str, hour: int, sums: Iterable[int]) -> None:
        """Add to the row of an hour; `tenant` may be a person of it, as `vision/lena`.

        Beyond the most series, a person's tenant and then `OTHERS` take the place of a new one. Beyond the most rows,
        the oldest hour of all series is dropped.
        """
        if "/" in tenant and (tenant, model) not in self.series and self._of_persons >= self._persons_max:
            tenant = tenant.partition("/")[0]
        series = self.series.get((tenant, model))
        if series is None:
            if "/" in tenant:
                self._of_persons += 1
            elif len(self.series) - self._of_persons >= self._series_max:
                tenant = OTHERS
                if (tenant, model) not in self.series:
                    model = OTHERS
            series = self.series.setdefault((tenant, model), Series())
        hours, at = series.hours, len(series.hours) - 1
        if at < 0 or hours[at] != hour:
            at = bisect_left(hours, hour)
            if at == len(hours) or hours[at] != hour:
                hours.insert(at, hour)
                series.sums[at * SUMS : at * SUMS] = array("Q", NOTHING)
                self.count += 1
        for column, value in enumerate(sums, at * SUMS):
            series.sums[column] = min(series.sums[column] + value, _MOST)
        while self.count > self._rows_max:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Remove the oldest hour of all tenants and models."""
        oldest = min(series.hours[0] for series in self.series.values())
        for key, series in list(self.series.items()):
            if series.hours[0] != oldest:
                continue
            del series.hours[0], series.sums[:SUMS]
            self.count -= 1
            if not series.hours:
                del self.series[key]
                self._of_persons -= "/" in key[0]

    def rows(self, from_hour: int, tenant: str | None = None) -> Iterator[tuple[Key, Sums]]:
        """Yield the rows from an hour on, of one tenant with its persons, or of all."""
        for (name, model), series in self.series.items():
            if tenant is None or name.partition("/")[0] == tenant:
                first = bisect_left(series.hours, from_hour)
                flat = iter(series.sums[first * SUMS :])
                for hour, sums in zip(series.hours[first:], zip(flat, flat, flat, flat, strict=True), strict=True):
                    yield (name, model, hour), sums

    def dump(self) -> list[tuple[str, str, bytes, bytes]]:
        """Return all rows in the form of a save."""
        return [
            (*key, struct.pack(f"<{len(each.hours)}I", *each.hours), struct.pack(f"<{len(each.sums)}Q", *each.sums))
            for key, each in self.series.items()
        ]

    @classmethod
    def load(cls, rows: Iterable[Any]) -> UsageTable:
        """Return the table of a save. Raises ValueError if hours and sums do not match in size."""
        table = cls()
        for tenant, model, hours, sums in rows:
            if not hours or len(hours) % 4 or len(sums) != len(hours) * 2 * SUMS:
                raise ValueError(f"{len(hours)} and {len(sums)} bytes do not match hours and sums of usage")
            series = table.series[tenant, model] = Series()
            series.hours.extend(struct.unpack(f"<{len(hours) // 4}I", hours))
            series.sums.extend(struct.unpack(f"<{len(sums) // 8}Q", sums))
            table.count += len(series.hours)
            table._of_persons += "/" in tenant
        return table
