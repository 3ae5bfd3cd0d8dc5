"""The base of the classes of `sync`: each has a private thread, and an asynchronous object that works there."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from moorage.client.client import AsyncClient
from moorage.client.loop_thread import LoopThread, refuse_inside_loop

P = ParamSpec("P")
T = TypeVar("T")


def with_arguments_of(
    original: Callable[Concatenate[Any, P], None],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Return a decorator for a method that passes its arguments to `original`. It copies signature and docstring."""
    return wraps(original)


class Handle(Generic[T]):
    """An object of an `AsyncClient`, wrapped for use from other threads."""

    def __init__(self, thread: LoopThread, twin: T) -> None:
        self._thread = thread
        self._twin = twin

    if not TYPE_CHECKING:  # for a type checker it is an error

        def __getattr__(self, name: str) -> Any:
            from moorage.client.keywords import no_attribute

            raise no_attribute(self, name)

    def __repr__(self) -> str:
        return repr(self._twin).replace(f"<{type(self._twin).__name__}", f"<{type(self).__name__}", 1)

    def _repr_html_(self) -> str | None:
        shown: Callable[[], str] | None = getattr(self._twin, "_repr_html_", None)
        return None if shown is None else shown()


class ClientBase(Handle[AsyncClient]):
    """A client that is opened and closed together with its thread."""

    @with_arguments_of(AsyncClient.__init__)
    def __init__(self, *args: Any, **fields: Any) -> None:
        refuse_inside_loop()
        twin = AsyncClient(*args, **fields)
        super().__init__(LoopThread(twin._wire._name), twin)

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> Self:
        """Start the thread and connect, as `AsyncClient.open` does. Return this client."""
        if self._thread.runs:
            raise RuntimeError("the client is open already")
        try:
            self._thread.start()
            self._thread.call(self._twin.open())
        except BaseException:
            self._thread.stop()
            raise
        return self

    def close(self) -> None:
        """Close the connection, as `AsyncClient.close` does, and end the thread.

        Does nothing if the client is closed, or in the child of a fork.
        """
        if not self._thread.runs:
            return
        try:
            if not self._thread.is_of_parent:
                self._thread.call(self._twin.close())
        finally:
            self._thread.stop()
