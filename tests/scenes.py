"""Tests that are one coroutine, played by something else than the loop that `conftest.py` gives to each `async def`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from moorage.testing import SimulatedClock

Scene = TypeVar("Scene", bound=Callable[..., Any])


def in_virtual_time(scene: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Play a test, which may have fixtures, on a clock that goes on whenever nothing else is to do."""

    @functools.wraps(scene)
    def test(*fixtures: Any, **named: Any) -> None:
        SimulatedClock().run(scene(*fixtures, **named))

    return test


def played_by(play: Callable[[Scene], None]) -> Callable[[Scene], Callable[[], None]]:
    """Have a test played by `play`, which makes what its coroutine takes; such a test has no fixtures."""

    def decorate(scene: Scene) -> Callable[[], None]:
        @functools.wraps(scene)
        def test() -> None:
            play(scene)

        test.__signature__ = inspect.Signature()  # type: ignore[attr-defined]
        return test

    return decorate
