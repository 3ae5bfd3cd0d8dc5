"""Run a command in a running attempt as a caller does, over plain nats-py: see `schemas.frames.running`."""

from __future__ import annotations

import asyncio
import secrets
from typing import Final, NamedTuple

import msgspec
from nats.aio.msg import Msg

from moorage.schemas.attempt import AttemptName
from moorage.schemas.codec import encode
from moorage.schemas.frames import BEAT_S, CommandEnd, Exec, Mark, Terminal, piece, read_piece
from moorage.testing.conformance.leader import NeverHappened, ScriptedLeader

_decode_end: Final = msgspec.json.Decoder(CommandEnd)


class Ran(NamedTuple):
    """How a command ended, and what it wrote to its standard output and to its standard error."""

    end: CommandEnd
    out: str
    err: str


async def run_command(
    leader: ScriptedLeader, worker: str, name: AttemptName, argv: list[str], given: bytes, limit_s: float
) -> Ran:
    """Run a command in an attempt, with `given` as its whole standard input. Raises `NeverHappened` after `limit_s`.

    It acknowledges nothing: a command that writes more than the window holds does not end.
    """
    stream, tenant = secrets.token_hex(16), name[0]
    into, out = (leader.subjects.tty(tenant, worker, stream, way) for way in ("in", "out"))
    wrote = {Mark.OUT: b"", Mark.ERR: b""}
    is_started, ended = False, asyncio.get_running_loop().create_future()

    async def on_message(msg: Msg) -> None:
        nonlocal is_started
        mark, _, rest = read_piece(msg.data)
        if mark is Mark.READY:
            await leader.nc.publish(into, piece(Mark.GO, 0, encode(Terminal())))
        elif mark is Mark.STARTED and not is_started:
            is_started = True
            if given:
                await leader.nc.publish(into, piece(Mark.INPUT, 0, given))
            await leader.nc.publish(into, piece(Mark.EOF, len(given), b"\0"))
        elif mark in wrote:
            wrote[mark] += rest
        elif mark is Mark.END and not ended.done():
            ended.set_result(_decode_end.decode(rest))

    async def beat() -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            await leader.nc.publish(into, piece(Mark.BEAT, len(given) + 1 if is_started else 0))

    heard = await leader.nc.subscribe(out, cb=on_message)
    beating = asyncio.create_task(beat())
    try:
        await leader.want(worker, Exec(*name, stream, argv))
        async with asyncio.timeout(limit_s):
            end = await ended
    except TimeoutError:
        raise NeverHappened(f"the end of the command {argv} in {name}: not within {limit_s:g} s") from None
    finally:
        beating.cancel()
        await heard.unsubscribe()
    return Ran(end, wrote[Mark.OUT].decode(), wrote[Mark.ERR].decode())
