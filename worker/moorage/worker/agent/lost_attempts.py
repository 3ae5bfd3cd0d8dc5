"""Find the attempts of which nothing is left on this host although the worker has them, and end them as lost.

A driver that loses the report of an end would hold the attempt's devices for ever. So the worker asks each driver, now
and then and for each audit, what the supervisor and the engine really have. An attempt that two answers leave out, at
least a renewal apart, is ended as lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Final

from moorage.schemas.attempt import AttemptName
from moorage.schemas.frames import Finding
from moorage.worker.driver import Driver
from moorage.worker.session.attempt_messages import Attempt, Log
from moorage.worker.session.lease_session import LeaseSession
from moorage.worker.session.shell import Shell

#: renewals between two looks while the worker has attempts
LOOK_RENEWALS: Final = 5
#: seconds that a driver's answer may take; after that it counts as no answer
ANSWER_S: Final = 10.0
#: the kind of an audit's finding
NOTHING_RUNS: Final = "nothing-runs"


class LostAttempts:
    """Compares a worker's attempts with what its drivers say is there; see the module's docstring."""

    def __init__(
        self,
        shell: Shell,
        drivers: Mapping[str, Driver],
        held: Mapping[AttemptName, Attempt],
        session: LeaseSession,
        unstarted: Collection[AttemptName] = (),
    ) -> None:
        self._shell = shell
        self._drivers = drivers
        self._held = held
        self._session = session
        self._unstarted = unstarted  # those that no driver has yet
        self._since_s: dict[AttemptName, float] = {}  # when an answer first left the attempt out
        self._looking = asyncio.Lock()

    async def run(self) -> None:
        """Look every `LOOK_RENEWALS` renewals, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_RENEWALS * (self._session.renew_s or 1.0))  # it is 0 before the first join
            if self._held and self._session.phase == "live":
                await self.look()

    async def look(self) -> list[AttemptName]:
        """Return the attempts of which nothing is left; end those that a look a renewal ago left out as well."""
        async with self._looking:
            missing: list[AttemptName] = []
            for driver in self._drivers.values():
                before = self._of(driver)
                if before and (living := await self._living(driver, before)) is not None:
                    missing += sorted(before & self._of(driver) - set(living))
            now = self._shell.now()
            missing = [name for name in missing if name in self._held]  # it may have ended as another driver was asked
            self._since_s = {name: self._since_s.get(name, now) for name in missing}
            for name, since_s in list(self._since_s.items()):
                if self._session.phase == "live" and now - since_s >= self._session.renew_s:
                    self._end(name)
            return missing

    async def findings(self) -> list[Finding]:
        """Return the attempts of which nothing is left as findings of an audit."""
        return [
            Finding(NOTHING_RUNS, -1, "", name=f"{tenant}/{job}/{replica} fence {fence}")
            for tenant, job, replica, _, fence in await self.look()
        ]

    def _of(self, driver: Driver) -> set[AttemptName]:
        """Return the driver's attempts that should be there. Frozen and stuck ones have rules of their own."""
        return {
            name
            for name, attempt in self._held.items()
            if attempt.driver == driver.name
            and name not in self._unstarted
            and attempt.phase in ("starting", "running", "ending")
            and not (attempt.frozen or attempt.freezing or attempt.stuck)
        }

    async def _living(self, driver: Driver, names: Collection[AttemptName]) -> Collection[AttemptName] | None:
        try:
            async with asyncio.timeout(ANSWER_S):
                return await driver.living(names)
        except TimeoutError:
            return None
        except Exception:
            if not driver.is_foreign:
                raise
            return None

    def _end(self, name: AttemptName) -> None:
        del self._since_s[name]
        driver = self._drivers[self._held[name].driver]
        why = f"{name} counts as running, but the driver {driver.name} has nothing of it: it is ended as lost"
        self._shell.say(Log("error", NOTHING_RUNS, why))
        self._shell.call_driver(driver, lambda: driver.give_up(name))
