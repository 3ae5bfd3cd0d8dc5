"""Functions of the core that raise: once at a random place, or each time that they get one job, worker or shape.

Which functions run as a record is built, and with what, is seen in records of the same world. So each of them has its
turn, and a function that is new is among them.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, Final, NamedTuple

import moorage.ranking
import moorage.scheduler.core
from moorage.scheduler.core import contained_engine, containment
from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.events import Cancel, FromWorker, Submit
from moorage.scheduler.core.fleet.host import Host
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.ledger.state import Attempt, Job, Replica, Worker
from moorage.scheduler.core.lifecycle import pending_events
from moorage.scheduler.core.outputs.output_writer import InFlight
from moorage.scheduler.core.outputs.outputs import Outputs
from moorage.scheduler.core.queue.queue import Group

#: where the state is half changed, and nothing can take that back (ledger-rules H4)
HALF: Final = frozenset({Draft.finish.__code__, Draft.take_back.__code__})
#: the frames between a leader and what is contained, besides all of `OUTER_MODULES`
OUTER: Final = frozenset(
    made.__code__
    for made in (
        Engine.build, Engine._write, Engine.prepare_outputs, Engine._make_outputs, Engine.commit, Outputs.__init__
    )
)  # fmt: skip
#: where a record begins, and where it becomes bytes: nothing says what is at fault there
WHOLE: Final = frozenset(
    made.__code__ for made in (Draft.__init__, Draft.begin, Draft.pass_time, Draft.record, InFlight.__init__)
)
#: what contains, and may not fail itself
OUTER_MODULES: Final = frozenset((contained_engine.__name__, containment.__name__, pending_events.__name__))


class Raised(Exception):
    """What a function raises that has a defect."""


class Place(NamedTuple):
    """Where a function is kept: a class or a module, and its name there."""

    owner: Any
    name: str


#: a job by number, a worker by id, a shape by its key
Entity = tuple[str, Any]


@cache
def functions() -> dict[CodeType, Place]:
    """Return all functions and methods of the core and of the rankers, by their code."""
    found: dict[CodeType, Place] = {}
    for package in (moorage.scheduler.core, moorage.ranking):
        for known in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            module = importlib.import_module(known.name)
            if known.name in OUTER_MODULES:
                continue
            for name, value in list(vars(module).items()):
                if isinstance(value, FunctionType) and value.__code__.co_filename == module.__file__:
                    found[value.__code__] = Place(module, name)
                elif inspect.isclass(value) and value.__module__ == module.__name__:
                    for name, each in vars(value).items():
                        if isinstance(each, FunctionType) and each.__code__.co_filename == module.__file__:
                            found[each.__code__] = Place(value, name)
    return found


def entities(given: Iterator[Any]) -> Iterator[Entity]:
    """Yield what of these arguments a defect may be about."""
    for each in given:
        if isinstance(each, Job):
            yield "job", each.num
        elif isinstance(each, Replica):
            yield "job", each.job.num
        elif isinstance(each, Attempt):
            yield "job", each.replica.job.num
            yield "worker", each.worker.id
        elif isinstance(each, Worker):
            yield "worker", each.id
        elif isinstance(each, Host):
            yield "worker", each.worker.id
        elif isinstance(each, FromWorker):
            yield "worker", each.worker
        elif isinstance(each, Shape):
            yield "shape", each.key
        elif isinstance(each, Group):
            yield "shape", each.shape.key
        elif isinstance(each, Submit):
            yield "request", (each.tenant, each.name)
            yield "shape", each.shape.key
        elif isinstance(each, Cancel):
            yield "request", (each.tenant, each.job)


class Seen:
    """Which functions ran in a record, and what each got."""

    def __init__(self) -> None:
        self.codes: dict[CodeType, None] = {}
        self.got: dict[tuple[CodeType, Entity], None] = {}
        self.half: set[CodeType] = set()  # those that ran where nothing can be taken back
        self.weighing: set[CodeType] = set()  # those that ran for the whole record, whatever has changed what they got
        self._depth = self._weighs = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if code in HALF:
            self._depth += {"call": 1, "return": -1}.get(event, 0)
        if code is Draft.record.__code__:
            self._weighs += {"call": 1, "return": -1}.get(event, 0)
        if event != "call" or code not in functions() or code in OUTER or code in HALF:
            return
        self.codes[code] = None
        if self._depth:
            self.half.add(code)
        if self._weighs:
            self.weighing.add(code)
        if code.co_name == "__init__":
            return  # the row is not there yet
        given = frame.f_locals
        for entity in entities(given[name] for name in code.co_varnames[: code.co_argcount] if name in given):
            self.got[code, entity] = None


class Once:
    """Raises in one call of a function: as it begins, or after all of its work."""

    def __init__(self, code: CodeType, nth: int, event: str) -> None:
        self.code, self.left, self.event = code, nth, event
        self.has_raised = False
        self.may_end = False  # the term: nothing can be taken back there, or nothing says what is at fault

    def __str__(self) -> str:
        return f"{self.code.co_qualname} raises at its {self.event}"

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if frame.f_code is not self.code or event != self.event or self.has_raised:
            return
        self.left -= 1
        if self.left <= 0:
            self.has_raised = True
            assert frame.f_back is not None
            self.may_end = frame.f_back.f_code in OUTER  # it is no part of a step, but the step
            above: FrameType | None = frame
            while above is not None:
                self.may_end |= above.f_code in HALF or above.f_code in WHOLE
                above = above.f_back
            raise Raised(str(self))


@contextmanager
def profiled(by: Callable[[FrameType, str, Any], None] | None) -> Iterator[None]:
    sys.setprofile(by)
    try:
        yield
    finally:
        sys.setprofile(None)


class Poison:
    """A function that raises whenever it gets one job, worker or shape, until it is cured."""

    def __init__(self, code: CodeType, entity: Entity, *, after: bool) -> None:
        self.code, self.entity, self.after = code, entity, after
        self.raised = 0
        self.is_active = False  # whether the leader's records are built
        self._places: list[Place] = []
        self._does: Any = None

    def __str__(self) -> str:
        when = "after its work" if self.after else "at once"
        return f"{self.code.co_qualname} raises {when} for {self.entity}"

    def spread(self) -> None:
        """Put it wherever the function is named."""
        owner, name = functions()[self.code]
        does = self._does = vars(owner)[name]

        def broken(*given: Any, **named: Any) -> Any:
            if not self.is_active or self.entity not in entities(iter((*given, *named.values()))):
                return does(*given, **named)
            if self.after:
                does(*given, **named)
            self.raised += 1
            raise Raised(str(self))

        self._places = [Place(owner, name)]
        if isinstance(owner, ModuleType):
            loaded = [module for known, module in list(sys.modules.items()) if known.startswith("moorage.")]
            for module in loaded:
                self._places += [Place(module, known) for known, value in vars(module).items() if value is does]
        for place in self._places:
            setattr(*place, broken)

    def cure(self) -> None:
        for place in self._places:
            setattr(*place, self._does)
        self._places = []


def chosen(dice: random.Random, seen: Seen, codes: Sequence[CodeType] | None = None) -> Once:
    """Return a function that was seen to run, or one of these, to raise in one of its next calls."""
    known = list(seen.codes) if codes is None else codes
    code = dice.choice([code for code in known if not code.co_flags & inspect.CO_GENERATOR])
    return Once(code, dice.choice((1, 1, 1, 2, 5)), dice.choice(("call", "return")))


def poisoned(dice: random.Random, seen: Seen) -> Poison | None:
    """Return a function that was seen to run, to raise for something that it got; None if none was."""
    got = [(code, entity) for code, entity in seen.got if code not in seen.half | seen.weighing]
    if not got:
        return None
    code = dice.choice(list(dict.fromkeys(code for code, _ in got)))
    return Poison(code, dice.choice([entity for other, entity in got if other is code]), after=dice.random() < 0.4)
