"""The calls in a member's hands, in a mapped file: whoever outlives the member tells their callers what became of them.

A write is a store to memory, with no system call. The kernel keeps it whatever kills the process.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from moorage.schemas.held_calls import (
    FREE,
    IS_MEMBER,
    MAGIC,
    REPLY_BYTES_MAX,
    RUNS,
    SLOT_BYTES,
    WAITS,
    HeldCall,
    Holder,
    file_bytes,
    held_in,
)

#: an answer that was given to the connection is on its way to the kernel this much later. Until then its call counts as
#: held: its caller hears twice of it rather than never, and drops the second
SENT_S: Final = 0.02

log = logging.getLogger("moorage.calls")


class HeldCalls:
    """The calls that a member holds, by their reply subjects. Without a file, which `open` makes, it keeps nothing.

    Of several calls with one reply subject it keeps the first: their caller cannot tell their answers apart either.
    """

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None
        self._path: Path | None = None
        self._file = -1
        self._free: list[int] = []
        self._slots: dict[str, int] = {}
        self._leaving: list[int] = []  # slots of calls whose answers are on their way
        self._timer: asyncio.TimerHandle | None = None

    def open(self, path: Path, most: int, prefix: str, tenant: str, holder: Holder) -> Sequence[HeldCall]:
        """Keep calls of this member in this file from now on; return those that a member of before has left in it.

        Where there can be no file, or a living member has it, none is kept, and a warning says so.
        """
        size = file_bytes(most)
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left = list(held_in(os.pread(file, size, 0), most, prefix, tenant))
                os.ftruncate(file, 0)
                os.posix_fallocate(file, 0, size)  # a disk that is full later must not end the member
                os.pwrite(file, MAGIC, 0)
                told = " ".join(holder).encode()
                os.pwrite(file, bytes((IS_MEMBER, len(told))) + told, size - SLOT_BYTES)
                self._map = mmap.mmap(file, size)
            except BaseException:
                os.close(file)
                raise
        except OSError as error:
            log.warning(
                "%s: callers hear of this member's sudden end by their time-outs alone: %s", path, error.strerror
            )
            return []
        self._file, self._path = file, path
        self._free = list(range(size - 2 * SLOT_BYTES, len(MAGIC) - 1, -SLOT_BYTES))
        return left

    def waits(self, reply: str) -> None:
        """A call waits here, and has not begun to run."""
        self._put(reply, WAITS)

    def runs(self, reply: str) -> None:
        """A call is given to the program: it may have run from now on."""
        self._put(reply, RUNS)

    def over(self, reply: str) -> None:
        """A call is here no longer: another member has it, or nobody waits for it."""
        slot = self._slots.pop(reply, None)
        if slot is not None:
            self._let_go(slot)

    def answered(self, reply: str) -> None:
        """The answer to a call was given to the connection."""
        slot = self._slots.pop(reply, None)
        if slot is None:
            return
        self._leaving.append(slot)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SENT_S, self._let_all_go)

    def close(self) -> None:
        """Remove the file, unless calls are left in it."""
        if self._timer is not None:
            self._timer.cancel()
        self._let_all_go()
        if self._map is None or self._path is None:
            return
        if not self._slots:
            self._path.unlink(missing_ok=True)
        self._map.close()
        self._map = None
        os.close(self._file)

    def _put(self, reply: str, state: int) -> None:
        kept = self._map
        if kept is None:
            return
        slot = self._slots.get(reply)
        if slot is None:
            data = reply.encode()
            if len(data) > REPLY_BYTES_MAX:
                return
            if not self._free:
                self._let_all_go()
                if not self._free:
                    return
            slot = self._slots[reply] = self._free.pop()
            kept[slot + 1] = len(data)
            kept[slot + 2 : slot + 2 + len(data)] = data
        kept[slot] = state

    def _let_all_go(self) -> None:
        self._timer = None
        leaving, self._leaving = self._leaving, []
        for slot in leaving:
            self._let_go(slot)

    def _let_go(self, slot: int) -> None:
        if self._map is not None:
            self._map[slot] = FREE
        self._free.append(slot)
