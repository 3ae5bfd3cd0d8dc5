"""The service of the real worlds: it works on a call for as long as its data say, and notes its begin and its end."""

from __future__ import annotations

import asyncio
import os
import time


def _note(what: str, number: str) -> None:
    file = os.open(os.environ["RUNS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, f"{what} {number} {time.time():.4f}\n".encode())
    finally:
        os.close(file)


async def timed(data: bytes) -> bytes:
    number, _, takes_s = bytes(data).decode().partition(" ")
    _note("began", number)
    await asyncio.sleep(float(takes_s))
    _note("ended", number)
    return number.encode()
