"""fsyncs for each acknowledged append to the ledger: `python -m tests.release.chaos.fsyncs`. Needs strace.

Counted at the server, by the kernel's own record of its system calls, while one append is in flight at a time.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Final

from moorage.bus.connection import connect
from moorage.bus.embedded import EmbeddedServer
from moorage.bus.jetstream import Ack, JetStream
from moorage.scheduler.ledger.ledger import Ledger
from moorage.schemas.subjects import Subjects
from tests.waiting import until

APPENDS: Final = 1000
RECORD_BYTES: Final = 4096
_CALL: Final = re.compile(r"\b(?:fsync|fdatasync)\(")


async def count(sync_always: bool) -> float:
    """fsyncs an append, on a server that syncs always, or at its own interval."""
    with tempfile.TemporaryDirectory(prefix="mf-") as name:
        folder = Path(name)
        server = await EmbeddedServer.start(folder / "nats", sync_always=sync_always)
        trace = folder / "trace"
        strace = None
        try:
            async with await connect(server.ledger_url, "fsyncs") as connection:
                subjects, js = Subjects(), JetStream(connection)
                await Ledger(js, subjects, 1).ensure()
                assert isinstance(await js.append(subjects.ledger_record, b"first"), Ack)
                strace = await asyncio.create_subprocess_exec(
                    "strace", "-f", "-e", "trace=fsync,fdatasync", "-o", str(trace), "-p", str(server.pid),
                    stderr=asyncio.subprocess.PIPE,
                )  # fmt: skip
                assert strace.stderr is not None
                said = await strace.stderr.readline()
                if b"attached" not in said:
                    sys.exit(f"strace: {said.decode().strip()}")
                await until(trace.exists, what="strace's file")
                for number in range(APPENDS):
                    answer = await js.append(subjects.ledger_record, number.to_bytes(4, "big") * (RECORD_BYTES // 4))
                    assert isinstance(answer, Ack), answer
                strace.send_signal(signal.SIGINT)
                await strace.wait()
                return len(_CALL.findall(trace.read_text())) / APPENDS
        finally:
            if strace is not None and strace.returncode is None:
                strace.kill()
                await strace.wait()
            await server.stop()


def main() -> None:
    if shutil.which("strace") is None:
        sys.exit("strace is not installed: apt-get install strace")
    always, seldom = asyncio.run(count(True)), asyncio.run(count(False))
    print(
        f"{APPENDS} appends of {RECORD_BYTES} bytes: {always:.2f} fsyncs each with sync_interval always (as we run it),"
    )
    print(f"{seldom:.3f} each with the server's default of 2 minutes")
    sys.exit(0 if always >= 1 else 1)


if __name__ == "__main__":
    main()
