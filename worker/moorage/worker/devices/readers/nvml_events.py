"""Receive NVML events, above all Xid events, in a thread of its own.

`nvmlEventSetWait` blocks, so one daemon thread waits, a second at a time, and passes events to the event loop. A driver
without the event API (an old one, or a board that supports no event) is no error: then only the readings show faults.
Source: the NVML reference, "Event Handling Methods".
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from typing import Any, Final

from moorage.worker.devices.readers.base import ReportFault
from moorage.worker.devices.readers.faults import Fault, of_xid

WAIT_MS: Final = 1000
#: between two tries after an error other than a time-out (a lost GPU makes every wait fail)
AGAIN_S: Final = 5.0
#: nvml.h: nvmlEventTypeXidCriticalError and nvmlEventTypeDoubleBitEccError
_XID: Final = 0x8
_DOUBLE_BIT: Final = 0x2

log = logging.getLogger("moorage.worker.devices.readers")


class NvmlEvents:
    """Listens to the GPUs of these handles and uuids, one per slot, until `stop`.

    A MIG slice is given with the uuid of its GPU: an event of the GPU is reported for each of its slices.
    """

    def __init__(self, api: Any, handles: Sequence[Any], uuids: Sequence[str]) -> None:
        self._api = api
        self._handles = dict(zip(uuids, handles, strict=True))
        self._slots: dict[str, list[int]] = {}
        for slot, uuid in enumerate(uuids):
            self._slots.setdefault(uuid, []).append(slot)
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, report: ReportFault) -> None:
        """Start the thread; call it once, in the loop in which `report` must be called."""
        loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, args=(loop, report), name="nvml-events", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Make the thread end within `WAIT_MS`, without waiting for it."""
        self._stopped.set()

    def join(self) -> None:
        """Wait until the library is no longer in use here; call it in a thread that may block."""
        if self._thread is not None:
            self._thread.join()

    # ------------------------------------------------------------------------------------------- in the thread

    def _run(self, loop: asyncio.AbstractEventLoop, report: ReportFault) -> None:
        try:
            events = self._register()
        except (self._api.NVMLError, AttributeError) as error:
            log.info("no events of NVIDIA devices: %s", error)
            return
        if events is None:
            return
        try:
            while not self._stopped.is_set():
                self._wait_for_event(events, loop, report)
        finally:
            try:
                self._api.nvmlEventSetFree(events)
            except self._api.NVMLError:
                pass  # the driver is gone, and the event set with it

    def _register(self) -> Any:
        """Return an event set with every device that supports a wanted event; None if none does."""
        api, events, heard = self._api, self._api.nvmlEventSetCreate(), 0
        for uuid, handle in self._handles.items():
            try:
                wanted = api.nvmlDeviceGetSupportedEventTypes(handle) & (_XID | _DOUBLE_BIT)
                if wanted:
                    api.nvmlDeviceRegisterEvents(handle, wanted, events)
                    heard += 1
            except api.NVMLError as error:
                log.info("no events of %s: %s", uuid, error)
        if heard:
            return events
        api.nvmlEventSetFree(events)
        return None

    def _wait_for_event(self, events: Any, loop: asyncio.AbstractEventLoop, report: ReportFault) -> None:
        try:
            event = self._api.nvmlEventSetWait_v2(events, WAIT_MS)
        except self._api.NVMLError_Timeout:
            return
        except self._api.NVMLError as error:
            log.warning("waiting for events of the NVIDIA devices failed: %s", error)
            self._stopped.wait(AGAIN_S)  # the readings show which device fails
            return
        fault = _fault_of(int(event.eventType), int(event.eventData))
        if fault is None:
            return
        try:
            for slot in self._slots.get(self._name_of(event.device), ()):
                loop.call_soon_threadsafe(report, slot, fault)
        except RuntimeError:
            self._stopped.set()  # the loop is closed, so there is no listener

    def _name_of(self, handle: Any) -> str:
        try:
            uuid = self._api.nvmlDeviceGetUUID(handle)
        except self._api.NVMLError:
            # a lost device has no name any more, but its handle is a pointer, which stays the same
            pointer = _pointer(handle)
            return next((name for name, known in self._handles.items() if _pointer(known) == pointer), "")
        return uuid.decode(errors="replace") if isinstance(uuid, bytes) else str(uuid)


def _fault_of(kind: int, data: int) -> Fault | None:
    if kind == _XID:
        return of_xid(data)
    return of_xid(48) if kind == _DOUBLE_BIT else None


def _pointer(handle: Any) -> Any:
    """Return the address that a handle points at: two objects may have one pointer."""
    contents = getattr(handle, "contents", None)
    if contents is None:
        return id(handle)
    import ctypes

    return ctypes.addressof(contents)
