"""A driver as its author would write it from the how-to alone: commands as subprocesses of the agent, no supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from pathlib import Path
from typing import IO

from moorage.schemas.capabilities import Capabilities
from moorage.schemas.codec import encode
from moorage.schemas.errors import MoorageError
from moorage.schemas.frames import Output
from moorage.schemas.frames.output import StreamName
from moorage.system.proctree import descendants
from moorage.worker.drivers.base import CODE_CANNOT_START, Assignment, Driver
from moorage.worker.drivers.kit import Kit
from moorage.worker.environment import process_environment
from moorage.worker.member_messages import Ended, MemberName, Started, StartFailed
from moorage.worker.secret_files import resolve_secrets


class Subprocesses(Driver):
    name = "subprocesses"
    capabilities = Capabilities(needs_argv=True, ends_streams=True)

    @classmethod
    def from_kit(cls, kit: Kit) -> Subprocesses:
        return cls(kit.settings.secrets_dir, kit.simulated)

    def __init__(self, secrets: Path | None, simulated: bool) -> None:
        super().__init__()
        self.secrets = secrets
        self.simulated = simulated
        self.running: dict[MemberName, tuple[asyncio.Task[None], subprocess.Popen[bytes]]] = {}
        self.below: dict[MemberName, set[int]] = {}
        self.ending: dict[MemberName, str] = {}
        self.starting: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        for name, (_, process) in list(self.running.items()):
            self.kill(process.pid)
            await self.running[name][0]

    def start(self, assignments: list[Assignment]) -> None:
        for each in assignments:
            task = asyncio.get_running_loop().create_task(self.run(each))
            self.starting.add(task)
            task.add_done_callback(self.starting.discard)

    def end(self, name: MemberName, grace_s: float, why: str) -> None:
        if name in self.running:
            self.ask_to_end(name, "end", grace_s)

    def ask_to_end(self, name: MemberName, reason: str, grace_s: float) -> None:
        _, process = self.running[name]
        self.ending.setdefault(name, reason)
        self.below[name].update(descendants([process.pid]))  # once it is over, they are not found any more
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)
        asyncio.get_running_loop().call_later(grace_s, self.kill, process.pid)

    def kill(self, pid: int) -> None:
        for each in (*descendants([pid]), pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)

    async def run(self, each: Assignment) -> None:
        name, run = each.name, each.run
        try:
            ours = each.environment(simulated=self.simulated)
            variables = process_environment(resolve_secrets(run.env, self.secrets), ours, cwd=run.cwd)
            process = subprocess.Popen(  # noqa: ASYNC220
                run.argv,
                env=variables,
                cwd=run.cwd or "/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except MoorageError as error:
            self.report(StartFailed([(name, CODE_CANNOT_START, f"start-failed: {error.problem.message}")]))
            return
        except OSError as error:
            self.report(StartFailed([(name, CODE_CANNOT_START, f"start-failed: {error.strerror}")]))
            return
        task = asyncio.current_task()
        assert task is not None
        self.running[name], self.below[name] = (task, process), set()
        self.report(Started([name]))
        assert process.stdout is not None
        assert process.stderr is not None
        timeout = None
        if run.timeout_s is not None:
            timeout = asyncio.get_running_loop().call_later(
                run.timeout_s, self.ask_to_end, name, "timeout", run.grace_s
            )
        pumps = [
            asyncio.create_task(self.pump(name, "out", process.stdout)),
            asyncio.create_task(self.pump(name, "err", process.stderr)),
        ]
        code = await asyncio.to_thread(process.wait)
        if timeout is not None:
            timeout.cancel()
        for pid in self.below.pop(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.gather(*pumps)
        del self.running[name]
        self.report(Ended([(name, code, self.ending.pop(name, "exit"))]))

    async def pump(self, name: MemberName, stream: StreamName, source: IO[bytes]) -> None:
        offset = 0
        while chunk := await asyncio.to_thread(os.read, source.fileno(), 4096):
            text = chunk.decode(errors="replace")
            self.publish(name, encode(Output(name[3], stream, offset, text, next=offset + len(chunk))))
            offset += len(chunk)
        self.publish(name, encode(Output(name[3], stream, offset, "", end=True, next=offset)))
        source.close()
