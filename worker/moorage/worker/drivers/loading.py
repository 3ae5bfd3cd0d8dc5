"""Find the drivers that a worker's settings name, read the settings of each, and make them.

An entry of the setting `drivers` is the name of a driver that comes with moorage, or of a driver that an installed
package offers as an entry point of the group `moorage.drivers`, or `module:Class`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from moorage.schemas.capabilities import FENCES, KNOWN
from moorage.schemas.errors import refuse
from moorage.schemas.own_class import NotOffered, is_own, own_class, place_of
from moorage.schemas.settings import DEFAULT, OF_DRIVERS, SettingsFile, made, settle, unknown_variables
from moorage.worker.driver import Driver, Executes, Freezes, KeepsOutput
from moorage.worker.drivers import BUILT_IN
from moorage.worker.drivers.kit import Kit

GROUP: Final = "moorage.drivers"

log = logging.getLogger("moorage.worker")


class Found(NamedTuple):
    """A driver's class and its settings. `foreign` is set if it does not come with moorage."""

    kind: type[Driver]
    own: Any
    foreign: bool

    def make(self, kit: Kit) -> Driver:
        """Return a driver for the worker of this kit."""
        driver = self.kind.from_kit(kit._replace(own=self.own))
        driver.is_foreign = self.foreign
        if not getattr(self.own, "gpu_enabled", True):
            driver.capabilities = msgspec.structs.replace(driver.capabilities, gpu_enabled=False)
        return driver


def find(
    words: Sequence[str], file: SettingsFile, env: Mapping[str, str] | None = None, *, simulated: bool
) -> list[Found]:
    """Return the drivers that these entries name, each once, with their settings from the environment and the file.

    Raises Refused. The code is failed-precondition for an entry that names no usable driver, for two drivers of one
    name, and for a driver of simulated workers if not `simulated`. It is bad-settings for a wrong value, and for a
    setting or section of the file that no driver has. A variable that no driver has is only logged.
    """
    found = [_found(word, file, env) for word in dict.fromkeys(words)]
    names = [each.kind.name for each in found]
    for name in names:
        if names.count(name) > 1:
            raise refuse("failed-precondition", f"two drivers have the name {name}", field="$.drivers", found=name)
    for name in file.table(OF_DRIVERS):
        if name not in names:
            raise refuse(
                "bad-settings",
                f"[{OF_DRIVERS}.{name}] in {file.path} belongs to no driver of this worker",
                found=name,
                allowed=", ".join(names),
                next=f"add {name} to drivers of [worker], or remove that section",
            )
    for each in found:
        if each.kind.capabilities.simulated_only and not simulated:
            raise refuse(
                "failed-precondition",
                f"the driver {each.kind.name} runs nothing: only simulated workers offer it",
                field="$.drivers",
                next=f"set simulate, or remove {each.kind.name} from drivers",
            )
    return found


def _found(word: str, file: SettingsFile, env: Mapping[str, str] | None) -> Found:
    foreign = word not in BUILT_IN
    try:
        kind = own_class(place_of(word, BUILT_IN, GROUP), Driver)
        if foreign:
            _check(word, kind)
    except NotOffered as error:
        raise refuse("failed-precondition", f"no driver {word}", field="$.drivers", allowed=error.allowed) from None
    except ValueError as error:
        raise refuse("failed-precondition", str(error), field="$.drivers", found=word) from None
    return Found(kind, _own_settings(kind, file, env), foreign)


def _check(word: str, kind: type[Driver]) -> None:
    """Raise ValueError if moorage cannot use this class as a driver."""
    name, fence = kind.name, kind.capabilities.fence
    if name in ("", *KNOWN, *BUILT_IN):
        raise ValueError(f"{word}: its name {name!r} is taken or empty; give the class another `name`")
    if not is_own(word) and name != word:
        raise ValueError(f"{word}: the class has the name {name!r}; give the entry point the same name")
    if fence not in FENCES:
        raise ValueError(f"{word}: its fence must be one of {', '.join(FENCES)}, found {fence!r}")
    can = kind.capabilities
    for says, ability in ((can.execs, Executes), (can.freezes, Freezes), (can.keeps_output, KeepsOutput)):
        if says and not issubclass(kind, ability):
            raise ValueError(f"{word}: its capabilities say {ability.__name__}, and it lacks a method of that protocol")


def _own_settings(kind: type[Driver], file: SettingsFile, env: Mapping[str, str] | None) -> msgspec.Struct | None:
    """Return the settings that a driver declares, each from its variable, its section or its default.

    Return None if the driver declares none. Raises Refused with bad-settings.
    """
    section = f"{OF_DRIVERS}.{kind.name}"
    declared = kind.settings or _NoSettings
    found = settle(section, declared, env=env, file=file)
    for name in unknown_variables(section, found, env):
        log.warning("%s is not a setting of the driver %s: it has no effect", name, kind.name)
    if kind.settings is None:
        return None
    # only the keys are logged: any value may be a secret
    given = "; ".join(f"{key} ({one.source})" for key, one in found.items() if one.source != DEFAULT)
    log.info("settings of the driver %s: %s", kind.name, given or "defaults")
    return made(kind.settings, found)


class _NoSettings(msgspec.Struct):
    pass
