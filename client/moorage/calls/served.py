"""What answers the calls of `moorage serve package.module:name`: a function, or the methods of an object.

The name is a function, a coroutine function, a generator (its values are the parts of the answer), or a class: that is
made once, its `load` is called, if it has one, and its `call` answers the calls; its methods that are an `endpoint`
answer those for them.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final

from moorage.calls.wire import ToProgram
from moorage.schemas.names import SERVICE, is_service
from moorage.schemas.served import ENDPOINT_MARK, CallError
from moorage.schemas.service import NOT_ENDPOINTS
from moorage.system.loops import loop_factory
from moorage.system.spans import served_span

#: attributes of spans, for a member that is an attempt of a job
_ATTRIBUTES: Final = {
    f"moorage.{name.lower()}": value
    for name in ("TENANT", "JOB", "REPLICA")
    if (value := os.environ.get(f"MOORAGE_{name}"))
}


class Context:
    """What a function may know of its call, as its second argument if it takes one.

    `headers` are the caller's; `endpoint` is the method that it calls, "" for the service itself. `wait_ms` is how long
    its caller waits, in milliseconds from the start. `cancelled` is set once the caller waits no longer; a coroutine is
    also cancelled then.
    """

    def __init__(self, call: ToProgram) -> None:
        self.headers = call.headers
        self.endpoint = call.endpoint
        self.wait_ms = call.wait_ms
        self.cancelled = False

    def cancel(self) -> None:
        """Say that its caller waits no longer."""
        self.cancelled = True


class CannotServe(Exception):
    """The target is none: the message says why, and what to write."""


class Served:
    """What answers the calls: a function, or the methods of an object. `endpoints` are the names of the marked ones.

    `in_batches`, it gets lists of data and of contexts; else those of one call.
    """

    def __init__(self, found: Any, target: str, *, in_batches: bool = False) -> None:
        """Make it, if it is a class. Raises CannotServe, and what the target's own code raises."""
        self.in_batches = in_batches
        if inspect.isclass(found):
            made = found()
            load = getattr(made, "load", None)
            if load is not None:
                loading = load()
                if inspect.isawaitable(loading):
                    raise CannotServe(f"{target}.load must be a plain method")
            functions = {name: getattr(made, name) for name in _endpoints_of(found, target)}
            if hasattr(made, "call"):
                functions[""] = made.call
            if not functions:
                raise CannotServe(f"the class {target} has no method call, and none that is an @endpoint")
        else:
            functions = {"": found}
        for each in functions.values():
            if not callable(each):
                kind = type(each).__name__
                raise CannotServe(f"{target} is a {kind}: name a function, or a class with a method call")
        self._target = target
        self._functions: dict[str, Callable[..., Any]] = functions
        self.endpoints = [name for name in functions if name]
        if self.endpoints and in_batches:
            raise CannotServe("its methods are called one by one, and take no batches: leave out --batch")
        code = {name: _code_of(each) for name, each in functions.items()}
        kinds = {inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each) for each in code.values()}
        if len(kinds) > 1:
            raise CannotServe(f"{target}: either all methods that answer calls are async, or none is")
        [self.is_async] = kinds
        self._takes_context = {name: _positional(each) > 1 for name, each in functions.items()}
        #: whether it can hear that its caller waits no longer, while it runs
        self.hears_cancel = any(
            self._takes_context[name] or inspect.isgeneratorfunction(each) for name, each in code.items()
        )

    def span(self, contexts: Sequence[Context]) -> AbstractContextManager[None]:
        """Return a span around the function's work for these calls, where their spans are exported."""
        return served_span(self._target, [context.headers for context in contexts], _ATTRIBUTES)

    def __call__(self, data: Sequence[Any], contexts: Sequence[Context]) -> Any:
        """Return what it returns for the data of calls that run together: of one, unless they do so `in_batches`."""
        if self.in_batches:
            return self._functions[""](data, contexts) if self._takes_context[""] else self._functions[""](data)
        [context] = contexts
        function = self._functions.get(context.endpoint)
        if function is None:
            raise CallError(404, f"call one of its methods: {', '.join(self.endpoints)}")
        return function(data[0], context) if self._takes_context[context.endpoint] else function(data[0])


def _code_of(called: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that runs where this is called: behind `functools.partial`, and an object's `__call__`."""
    while isinstance(called, partial):
        called = called.func
    return called if inspect.isroutine(called) else type(called).__call__


def settled(value: Any) -> Any:
    """Return what a plain callable has returned, once that is there: it may be awaitable, as a decorator's may be."""
    if isinstance(value, AsyncIterator):
        return _each(value)
    if not inspect.isawaitable(value):
        return value
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_awaited(value))


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def _each(values: AsyncIterator[Any]) -> Iterator[Any]:
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        while True:
            try:
                value = runner.run(_awaited(anext(values)))
            except StopAsyncIteration:
                return
            yield value


def _endpoints_of(found: type, target: str) -> list[str]:
    """Return the names of the methods of a class that are marked as endpoints. Raises CannotServe."""
    names = [name for name in dir(found) if getattr(getattr(found, name, None), ENDPOINT_MARK, False)]
    for name in names:
        if not is_service(name) or name in NOT_ENDPOINTS:
            raise CannotServe(
                f"the method {name} of {target} cannot be an @endpoint: its name must be {SERVICE.pattern} and none of "
                + ", ".join(NOT_ENDPOINTS)
            )
    return names


def found(target: str) -> Any:
    """Return what `package.module:name` names. Raises CannotServe, and what the import raises."""
    module, colon, name = target.partition(":")
    if not colon or not module or not name:
        raise CannotServe(f"{target!r} names no function: write package.module:function")
    if module.endswith(".py"):
        dotted = module.removesuffix(".py").removeprefix("./").replace("/", ".")
        raise CannotServe(f"{module} is a file, and not the name of a module: write {dotted}:{name}")
    try:
        there: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # it is there, and imports another one that is not
        raise CannotServe(
            f"there is no module {error.name} in {os.getcwd()} or installed for {sys.executable}"
        ) from None
    for part in name.split("."):
        if not hasattr(there, part):
            has = ", ".join(_functions_of(there))
            raise CannotServe(f"{module} has no {name}; " + (f"it has {has}" if has else "it has no function"))
        there = getattr(there, part)
    return there


def _functions_of(found: Any) -> list[str]:
    """Return the names of the functions and classes that are written in a module, or of the methods of a class."""
    home = getattr(found, "__module__", None) or getattr(found, "__name__", None)
    return [
        name
        for name, value in getattr(found, "__dict__", {}).items()
        if not name.startswith("_") and callable(value) and getattr(value, "__module__", None) == home
    ]


def _positional(function: Callable[..., Any]) -> int:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a function of C may have no signature
        return 1
    return sum(each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) and each.default is each.empty
               for each in parameters)  # fmt: skip
