"""Which scheduler leads and which stand by: each announces its role, and the feature level that it can read and write.

Announcements may be lost and prove nothing. So an operator who raises the feature level also says how many schedulers
must have announced it. Announcements include the settings: each scheduler leads with its own, so a takeover changes
settings that differ. They also include the wall clock, from which a next leader would continue ledger time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any, Final

from moorage.bus.errors import BusError
from moorage.bus.transport import Delivery, Subscribed, Transport
from moorage.scheduler.core.config import Config
from moorage.scheduler.core.ledger import records
from moorage.schemas.answers.fleet import SchedulerRow
from moorage.schemas.codec import Decoder, encode
from moorage.schemas.errors import Refused
from moorage.schemas.frames import Standing
from moorage.schemas.subjects import Subjects
from moorage.system.build import build

SAY_S: Final = 2.0
#: a scheduler silent for this long no longer counts
HEARD_S: Final = 5 * SAY_S
#: a standby's wall clock that differs this much from the leader's is logged; an announcement may come late by less
CLOCK_OFF_S_MAX: Final = 5.0
#: the most schedulers remembered; further ones are ignored
KNOWN_MAX: Final = 64

log = logging.getLogger("moorage.scheduler")

_decode: Final[Decoder[Standing]] = Decoder(Standing)


def _spoken(config: Config) -> dict[str, Any]:
    """Return each setting that affects the leader's decisions, as a frame can carry it; not those of the process."""
    return {
        key: value if value is None or isinstance(value, str | int | float) else str(value)
        for key in Config.__struct_fields__
        for value in (getattr(config, key),)
    }


_DEFAULTS: Final = _spoken(Config())


class Standings:
    """Announces this scheduler while `announce` runs, and keeps what others announce after `listen`."""

    def __init__(self, world: Transport, subjects: Subjects, name: str, config: Config | None = None) -> None:
        self._settings = {key: value for key, value in _spoken(config or Config()).items() if value != _DEFAULTS[key]}
        self._told: dict[str, str] = {}  # how other schedulers' settings differ, as last logged
        self._wrong = set[str]()  # schedulers whose clocks are wrong, as last logged
        self._world = world
        self._subject = subjects.standing
        self._name = name
        self._heard: dict[str, tuple[Standing, float]] = {}
        self._off_s: dict[str, tuple[float, float]] = {}  # by name: how far ahead its last two announcements were

    async def announce(self, now: Callable[[], tuple[int, bool]]) -> None:
        """Announce forever; `now` returns the last folded ledger record, and whether this scheduler leads."""
        while True:
            ledger, leads = now()
            time_ms = int(time.time() * 1000)
            frame = Standing(self._name, build(), records.FORMAT, ledger, leads, self._settings, time_ms=time_ms)
            with contextlib.suppress(BusError):
                await self._world.send([(self._subject, encode(frame), "")])
            if leads:
                self._log_others()
            await asyncio.sleep(SAY_S)

    async def listen(self) -> Subscribed:
        return await self._world.subscribe(self._subject, self._on_delivery)

    def _on_delivery(self, delivery: Delivery) -> None:
        try:
            said = _decode(delivery.data)
        except Refused:
            return
        if len(self._heard) >= KNOWN_MAX and said.scheduler not in self._heard:
            self.lately()  # schedulers may have a new name at each start: forget those that have gone
        if said.scheduler in self._heard or len(self._heard) < KNOWN_MAX:
            self._heard[said.scheduler] = (said, time.monotonic())
            off_s = said.time_ms / 1000 - time.time() if said.time_ms else 0.0
            self._off_s[said.scheduler] = (off_s, self._off_s.get(said.scheduler, (0.0,))[0])

    def slept(self, seconds: float) -> None:
        """Note that a simulation skipped time; it does not count as silence."""
        self._heard = {name: (said, at_s + seconds) for name, (said, at_s) in self._heard.items()}

    def lately(self) -> list[Standing]:
        """Return the last announcement of each scheduler heard from within `HEARD_S`, sorted by name; forget others."""
        since = time.monotonic() - HEARD_S
        self._heard = {name: heard for name, heard in self._heard.items() if heard[1] >= since}
        self._off_s = {name: off_s for name, off_s in self._off_s.items() if name in self._heard}
        return [self._heard[name][0] for name in sorted(self._heard)]

    def _log_others(self) -> None:
        """Log, once each, which standby schedulers have other settings, or another time, than this leader."""
        found = {said.scheduler: other for said in self.lately() if (other := differing(said.settings, self._settings))}
        for name, other in found.items():
            if self._told.get(name) != other:
                log.warning("standby %s has other settings, which would hold after a takeover: %s", name, other)
        self._told = found
        wrong = {name for name in self._off_s if abs(self._clock_off_s(name)) > CLOCK_OFF_S_MAX}
        for name in sorted(wrong - self._wrong):
            off_s = self._clock_off_s(name)
            log.warning(
                "the clock of standby %s is %.0f s %s this leader's: run chrony or ntpd on both hosts",
                name, abs(off_s), "ahead of" if off_s > 0 else "behind",
            )  # fmt: skip
        self._wrong = wrong

    def _clock_off_s(self, name: str) -> float:
        """Return how far a scheduler's wall clock is ahead of this one, in seconds: by the better of its last two
        announcements, as one of them may have come late."""
        return min(self._off_s[name], key=abs)

    def rows(self) -> list[SchedulerRow]:
        """Return the schedulers in the form of the verb `fleet`."""
        return [
            SchedulerRow(
                scheduler=said.scheduler,
                release=said.release,
                level=said.level,
                ledger=said.ledger,
                leads=said.leads,
                settings=said.settings,
                clock_off_s=round(self._clock_off_s(said.scheduler), 3),
            )
            for said in self.lately()
        ]


def differing(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    """Return the settings that differ between two schedulers as text; empty if none. Omitted ones are defaults."""
    return ", ".join(
        f"{key} = {theirs.get(key, _DEFAULTS.get(key))} (the leader: {ours.get(key, _DEFAULTS.get(key))})"
        for key in sorted({*theirs, *ours})
        if theirs.get(key, _DEFAULTS.get(key)) != ours.get(key, _DEFAULTS.get(key))
    )
