"""A driver as somebody else would write it: this one file says all that moorage knows of it.

`"run": {"driver": "parrot", "argv": ["hello"]}` says its words, as often as `driver_config.parrot.times` says, and ends
with `driver_config.parrot.code`. What it said can be asked for later.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from moorage.schemas.attempt import AttemptName
from moorage.schemas.capabilities import Capabilities
from moorage.schemas.codec import encode
from moorage.schemas.errors import refuse
from moorage.schemas.frames import LogPage, Output, ReadLog
from moorage.schemas.job import Request
from moorage.schemas.settings import setting
from moorage.worker.attempt.output_pages import page_of
from moorage.worker.driver import Assignment, Driver
from moorage.worker.session.attempt_messages import Ended, Started


class ParrotSettings(msgspec.Struct, frozen=True):
    between: Annotated[str, setting("What stands between two times.")] = " "
    times_max: Annotated[int, setting("How often it repeats itself at most.", ge=1, le=100)] = 5

    def __post_init__(self) -> None:
        if "\n" in self.between:
            raise ValueError("between must be in one line")


class ParrotConfig(msgspec.Struct):
    times: int = 1
    code: int = 0


class Parrot(Driver):
    name = "parrot"
    capabilities = Capabilities(needs_argv=True, keeps_output=True, ends_streams=True, uses_devices=False)
    settings = ParrotSettings
    config = ParrotConfig

    def __init__(self, settings: ParrotSettings) -> None:
        super().__init__()
        self._settings = settings
        self._said: dict[AttemptName, bytes] = {}

    def check(self, request: Request) -> None:
        times = self.read_config(request).times
        if times > self._settings.times_max:
            allowed = f"1..{self._settings.times_max}"
            raise refuse("invalid-argument", f"times must be {allowed}", field="$.driver_config.parrot.times")

    def start(self, assignments: list[Assignment]) -> None:
        for each in assignments:
            config: ParrotConfig = each.config
            text = self._settings.between.join([" ".join(each.run.argv)] * config.times) + "\n"
            size = len(text.encode())
            self._said[each.name] = text.encode()
            self.report(Started([each.name]))
            self.publish(each.name, encode(Output(each.name[3], "out", 0, text, end=True, next=size)))
            self.publish(each.name, encode(Output(each.name[3], "err", 0, "", end=True)))
            self.report(Ended([(each.name, config.code, "exit")]))

    def end(self, name: AttemptName, grace_s: float, why: str) -> None:
        """What has started has ended."""

    async def read_log(self, ask: ReadLog) -> LogPage:
        said = self._said.get((ask.tenant, ask.job, ask.replica, ask.attempt, ask.fence), b"")
        return page_of(said if ask.stream == "out" else b"", ask, is_over=True)
