"""Define what a handler gets: its input, its devices, and the request to stop."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

from moorage.schemas.attempt import AttemptName
from moorage.schemas.frames import Device
from moorage.schemas.frames.reported import row_of
from moorage.schemas.handler import DRIVER, INPUT_KEY
from moorage.schemas.items import Item
from moorage.schemas.job import Request
from moorage.schemas.printable import carried
from moorage.system.device_environment import child_environment
from moorage.system.proctree import boottime_s

PROGRESS_TEXT_CHARS_MAX: Final = 200


class HandlerCancelled(Exception):
    """Raised by `HandlerContext.raise_if_cancelled` in a function that is asked to stop; do not catch it."""

    def __init__(self, reason: str) -> None:
        self.reason: Final = reason
        super().__init__(f"asked to stop: {reason}")


class HandlerContext:
    """One run of a handler: its job, its input, and whether it should go on.

    `input` is the request's `driver_config.handler.input`, any JSON value, or None if it has none; `item` is the value
    of this replica's item, or None if the request has no items; `arguments` are the words of `argv` after the handler's
    name. `devices` are those of the lease, in its order; no other job gets them until the function has returned (in a
    shared `mode`, none but the other sharers). `environment` is what a process of this job would have as its
    environment: the request's variables with secrets resolved, and moorage's own. The service's `os.environ` is never
    changed: start processes with `child_environment()`, or pass `uuids` to the library that you use.

    `progress`, `report`, `cancelled` and the methods that depend on `cancelled` may be used from any thread.
    """

    def __init__(
        self,
        name: AttemptName,
        request: Request,
        devices: tuple[Device, ...],
        mode: str,
        environment: Mapping[str, str],
        *,
        say_progress: Callable[[float, str], None],
        say_report: Callable[[bytes], None],
        fence_s: Callable[[], float],
        item: Item | None = None,
    ) -> None:
        self.name: Final = name
        self.tenant, self.job, self.replica, self.attempt, self.fence = name
        self.request: Final = request
        self.arguments: Final = tuple(request.workload.argv[1:])
        self.input: Final[Any] = request.blocks.get(DRIVER, {}).get(INPUT_KEY)
        self.item: Final[Any] = None if item is None else item.value
        self.devices: Final = devices
        self.mode: Final = mode
        self.environment: Final = environment
        self._say_progress = say_progress
        self._say_report = say_report
        self._fence_s = fence_s
        self._cancelled = threading.Event()
        self._checkpoint = threading.Event()
        self._checkpoint_in_loop = asyncio.Event()
        self._reason = ""

    def child_environment(self) -> dict[str, str]:
        """Return the whole environment for a process that the function starts, to be passed to it as `env`.

        It is the service's own with `environment` over it: the process sees only the devices of the lease. PATH,
        LD_PRELOAD and LD_LIBRARY_PATH are extended as in jobs of the driver process (`TF_PATH` and the like).
        """
        return child_environment(os.environ, self.environment)

    @property
    def uuids(self) -> tuple[str, ...]:
        """The uuids of the lease's devices, as `CUDA_VISIBLE_DEVICES` takes them."""
        return tuple(device.uuid for device in self.devices)

    def progress(self, fraction: float, text: str = "") -> None:
        """Report the progress of the function, 0..1, with one line of at most 200 characters (longer text is cut).

        It is published on the job's log subject as a line of JSON, some five times a second at most: of several
        reports, the newest. Any kind of number is accepted, because libraries have their own. Raises ValueError for a
        fraction outside 0..1.
        """
        number = float(fraction)
        if not 0 <= number <= 1:
            raise ValueError(f"fraction must be 0..1, found {fraction}")
        self._say_progress(number, carried(str(text)[:PROGRESS_TEXT_CHARS_MAX]))

    def report(self, values: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        """Report numbers of the function itself, as `report(step=120, loss=0.31)` or `report({"val/loss": 0.4})`.

        As `moorage.job.report` of a process: `moorage ls --metrics`, `show` and the page have the newest value of each
        name; rows are not kept. Raises ValueError for more than 16 names, and for what is no finite number, true,
        false or text of at most 64 characters. What has an `item()`, as numbers of numpy, is taken as that.
        """
        row = {name: _plain(value) for name, value in {**(values or {}), **more}.items()}
        try:
            line = json.dumps(row).encode()
        except TypeError as error:
            raise ValueError(f"report takes numbers, true, false and texts: {error}") from None
        row_of(line)
        self._say_report(line)

    @property
    def cancelled(self) -> bool:
        """Whether to stop: the job was cancelled or timed out, the worker stops, or its lease session is over.

        The end of the session is read from the clock (CLOCK_BOOTTIME), so it is noticed even while the event loop is
        blocked.
        """
        return self._cancelled.is_set() or (self.request.on_partition != "keep" and boottime_s() >= self._fence_s())

    @property
    def cancel_reason(self) -> str:
        """Why to stop, in a word or a line; "" while the function may go on."""
        return self._reason or ("fence" if self.cancelled else "")

    def wait_cancelled(self, timeout_s: float) -> bool:
        """Block this thread until the function is asked to stop, at most `timeout_s`. Return whether it was asked.

        Not for async functions.
        """
        return self._cancelled.wait(timeout_s) or self.cancelled

    def raise_if_cancelled(self) -> None:
        """Raise HandlerCancelled if the function was asked to stop. Call it between the steps of a plain function."""
        if self.cancelled:
            raise HandlerCancelled(self.cancel_reason)

    @property
    def checkpoint_asked(self) -> bool:
        """Whether to save the work: set once, `run.checkpoint_before_s` before the timeout or the job's deadline.

        Only if the request names a `checkpoint_signal`; to a function all signals are the same.
        """
        return self._checkpoint.is_set()

    def wait_checkpoint(self, timeout_s: float) -> bool:
        """Block this thread until a checkpoint is asked for, at most `timeout_s`. Return whether one was asked for.

        Not for async functions.
        """
        return self._checkpoint.wait(timeout_s)

    async def until_checkpoint(self) -> None:
        """Return once `checkpoint_asked`; for async functions, in the loop in which they run."""
        await self._checkpoint_in_loop.wait()

    def ask_checkpoint(self) -> None:
        """Set `checkpoint_asked`; called by the driver, in the event loop."""
        self._checkpoint.set()
        self._checkpoint_in_loop.set()

    def cancel(self, reason: str) -> None:
        """Ask the function to stop; called by the driver."""
        self._reason = self._reason or reason
        self._cancelled.set()

    def __repr__(self) -> str:
        return f"<HandlerContext {self.tenant}/{self.job}/{self.replica} attempt {self.attempt}>"


def _plain(value: Any) -> Any:
    is_plain = isinstance(value, bool | int | float | str)
    return value if is_plain or not callable(item := getattr(value, "item", None)) else item()
