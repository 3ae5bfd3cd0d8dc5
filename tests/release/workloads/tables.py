"""Soft tables: whatever the core remembers beside the ledger's state stays within bounds that are named here.

The rule: no container that an engine keeps outgrows the state, that is some multiple of what lives in it, or a bound
that is a constant of its module. `small_bounds` makes those constants small, so that some hundred jobs reach them.
"""

from __future__ import annotations

import contextlib
import importlib
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Final

from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.fleet.shape import SHAPES_MAX
from moorage.scheduler.core.ledger.state import State

#: whose objects are looked into
OURS: Final = ("moorage.scheduler.core.", "moorage.ranking.")
#: constants that bound a soft table, by module and name, with what they are in a world of small bounds
BOUNDS: Final = {
    ("ranking.mix", "COUNTED_MAX"): 32,
    ("ranking.table", "RANKS_MAX"): 32,
    ("ranking.prices", "RANKS_MAX"): 32,
    ("ranking.fragments", "KEPT_MAX"): 48,
    ("ranking.prices", "CELLS_MAX"): 64,
    ("queue.order", "RATES_MAX"): 32,
    ("fleet.host", "FITS_MAX"): 32,
    ("fleet.host", "RANKS_MAX"): 32,
    ("fleet.fleet", "ASKED_MAX"): 16,
    ("fleet.fleet", "OPENED_MAX"): 64,
    ("fleet.fleet", "TOUCHED_SPARE"): 16,
    ("lifecycle.admission", "MATCHED_MAX"): 32,
    ("lifecycle.unmatched", "KEPT_MAX"): 32,
    ("lifecycle.timers", "TIMERS_SPARE"): 16,
    ("schedule.runtime", "GROUPS_MAX"): 32,
    ("schedule.victims", "COMPARED_MAX"): 3,
    ("schedule.preempt", "FOLLOWED_MAX"): 16,
    ("queue.queue", "SPARE"): 16,
}
CONTAINERS: Final = (dict, list, set, deque)
#: of anything, and so many for each thing that lives in the state
ALWAYS: Final = 64
EACH: Final = 2
#: tables whose bound is a constant that is not made small: a shape that is forgotten is another one when it comes again
CONSTANT: Final = {"Shapes._by_key": SHAPES_MAX}
#: objects that are no soft table of the engine's
NOT_SOFT: Final = ("State", "Finished", "Job", "Replica", "Attempt", "Worker", "Tenant", "Shape", "Record", "Draft")


@contextlib.contextmanager
def small_bounds() -> Iterator[None]:
    """The bounds of soft tables are small meanwhile, also where they are the default of an argument."""
    with contextlib.ExitStack() as stack:
        for (name, constant), small in BOUNDS.items():
            module = importlib.import_module(f"moorage.{name}" if name.startswith("ranking.") else OURS[0] + name)
            large = getattr(module, constant)
            stack.callback(setattr, module, constant, large)
            setattr(module, constant, small)
            for kind in [each for each in vars(module).values() if isinstance(each, type)]:
                made: Any = vars(kind).get("__init__")
                defaults = getattr(made, "__defaults__", None) or ()
                if large in defaults:
                    stack.callback(setattr, made, "__defaults__", defaults)
                    made.__defaults__ = tuple(small if value == large else value for value in defaults)
        yield


class Tables:
    """The containers that an engine keeps beside the state, and all that it keeps keeps."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.known: list[tuple[Any, str]] = []  # what has each of them, and under which name
        self.look()

    def look(self) -> None:
        """Find them, in all objects of the core and of its ranker that the engine leads to."""
        self.known = []
        seen: set[int] = {id(self.engine.state)}
        todo: list[Any] = [self.engine]
        while todo:
            thing = todo.pop()
            for name in _names(thing):
                value = getattr(thing, name, None)
                if isinstance(value, CONTAINERS):
                    self.known.append((thing, name))
                    inner = value.values() if isinstance(value, Mapping) else value
                    todo += [each for each in inner if _is_ours(each, seen)]
                elif _is_ours(value, seen):
                    todo.append(value)

    def confirm(self, state: State) -> None:
        """Raises AssertionError where one of those that were found has outgrown its bound."""
        most = ALWAYS + EACH * live(state)
        for thing, name in self.known:
            size = len(getattr(thing, name) or ())
            if size > most:
                key = f"{type(thing).__name__}.{name}"
                assert size <= CONSTANT.get(key, most), f"{key} has {size} entries, {most} do for all that lives"


def _is_ours(value: Any, seen: set[int]) -> bool:
    kind = type(value)
    if not kind.__module__.startswith(OURS) or kind.__name__ in NOT_SOFT or id(value) in seen:
        return False
    seen.add(id(value))
    return True


def _names(thing: object) -> list[str]:
    """The fields of an object, with slots or without."""
    slots = [getattr(each, "__slots__", ()) for each in type(thing).__mro__]
    named = [name for each in slots for name in ([each] if isinstance(each, str) else each) if name != "__weakref__"]
    return [*named, *getattr(thing, "__dict__", ())]


def live(state: State) -> int:
    """How much there is of all that lives in the state."""
    replicas = sum(len(job.replicas) for job in state.jobs.values())
    devices = sum(len(worker.hello.get("gpu_pool", ())) + 1 for worker in state.workers.values())
    return len(state.jobs) + replicas + devices + len(state.tenants)
