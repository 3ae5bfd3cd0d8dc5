"""`"run": {"driver": "commands", "argv": ["make", "all"]}` runs a program of the worker's host, as the agent's user."""

import asyncio
import codecs
import contextlib
import logging
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import IO, Literal

from moorage.schemas.capabilities import Capabilities
from moorage.schemas.codec import encode
from moorage.schemas.errors import MoorageError
from moorage.schemas.frames import Output
from moorage.system.device_environment import HostAtFault
from moorage.system.proctree import kill_process, marks_of, scan_marks
from moorage.worker.drivers.base import CODE_CANNOT_START, Assignment, Driver, Living
from moorage.worker.drivers.kit import Kit
from moorage.worker.job.environment import process_environment
from moorage.worker.job.secret_files import resolve_secrets
from moorage.worker.session.member_messages import Ended, MemberName, NotStarted, Started, StartFailed, Stuck


class Commands(Driver):
    name = "commands"
    capabilities = Capabilities(needs_argv=True, ends_streams=True)

    @classmethod
    def from_kit(cls, kit: Kit) -> "Commands":
        return cls(kit.settings.state_dir / "commands", kit.settings.secrets_dir, simulated=kit.simulated)

    def __init__(self, folders: Path, secrets_dir: Path | None, *, simulated: bool) -> None:
        super().__init__()
        self.folders, self.secrets_dir, self.simulated = folders, secrets_dir, simulated
        self.tasks: dict[MemberName, asyncio.Task[None]] = {}
        self.running: dict[MemberName, subprocess.Popen[bytes]] = {}
        self.reasons: dict[MemberName, str] = {}

    async def open(self) -> list[Living]:
        await kill_all((self.mark.encode(),))  # left by an agent that was killed
        shutil.rmtree(self.folders, ignore_errors=True)
        self.folders.mkdir(parents=True)
        return []

    async def close(self) -> None:
        for name in self.tasks:
            self.end(name, 0.0, "the worker stops")
        await asyncio.gather(*self.tasks.values())

    @property
    def mark(self) -> str:
        return f"COMMANDS_OF={self.folders}"

    def start(self, assignments: list[Assignment]) -> None:
        for each in assignments:
            self.reasons[each.name] = "exit"
            self.tasks[each.name] = asyncio.get_running_loop().create_task(self.live(each))

    def end(self, name: MemberName, grace_s: float, why: str) -> None:
        if name in self.tasks:
            self.stop(name, "end", grace_s)

    def stop(self, name: MemberName, reason: str, grace_s: float) -> None:
        if self.reasons[name] == "exit":
            self.reasons[name] = reason
        self.signal(name, signal.SIGTERM)
        asyncio.get_running_loop().call_later(grace_s, self.signal, name, signal.SIGKILL)

    def signal(self, name: MemberName, number: int) -> None:
        if name in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.running[name].pid, number)

    async def live(self, each: Assignment) -> None:
        """Run one member from its start to its end, and report what became of it whatever happens."""
        name, folder = each.name, tempfile.mkdtemp(dir=self.folders)
        try:
            self.report(await self.run(each, folder))
        except HostAtFault as error:
            self.report(NotStarted([(name, error.problem.message)]))
        except MoorageError as error:
            self.report(StartFailed([(name, CODE_CANNOT_START, error.problem.message)]))
        except Exception:
            logging.exception("commands broke on %s", name)
            self.report(Stuck([name]))
        finally:
            del self.tasks[name], self.reasons[name]
            self.running.pop(name, None)
            shutil.rmtree(folder, ignore_errors=True)

    async def run(self, each: Assignment, folder: str) -> Ended | Stuck:
        name, run, limits = each.name, each.run, each.request.resources
        ours = each.environment(simulated=self.simulated)
        variables = process_environment(resolve_secrets(run.env, self.secrets_dir), ours, folder=folder)
        marks, (key, value) = marks_of(variables), self.mark.split("=", 1)
        # the job dies with the agent; prlimit bounds its memory where the request does
        argv = ["setpriv", "--pdeathsig", "KILL", "--", *run.argv]
        if limits is not None and limits.memory_mib:
            argv = ["prlimit", f"--data={limits.memory_mib << 20}", "--", *argv]
        process = subprocess.Popen(  # noqa: ASYNC220  it takes a millisecond
            argv, env={**variables, key: value}, cwd=os.path.join(folder, run.cwd or ""), start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.running[name] = process
        self.report(Started([name]))
        loop, over, handle = asyncio.get_running_loop(), asyncio.Event(), os.pidfd_open(process.pid)
        loop.add_reader(handle, over.set)
        timer = run.timeout_s is not None and loop.call_later(run.timeout_s, self.stop, name, "timeout", run.grace_s)
        if self.reasons[name] != "exit":  # it was ended before this task ran
            self.signal(name, signal.SIGKILL)
        pumps = [
            loop.create_task(self.pump(name, "out", process.stdout)),
            loop.create_task(self.pump(name, "err", process.stderr)),
        ]
        await over.wait()
        del self.running[name]  # its pid is free for another process once it is waited for
        loop.remove_reader(handle)
        os.close(handle)
        if timer:
            timer.cancel()
        code = process.wait()
        if not await kill_all(marks):  # what it started and left behind
            return Stuck([name])
        await asyncio.gather(*pumps)
        return Ended([(name, code, self.reasons[name])])

    async def pump(self, name: MemberName, stream: Literal["out", "err"], pipe: IO[bytes] | None) -> None:
        reader, decoder = asyncio.StreamReader(), codecs.getincrementaldecoder("utf-8")("replace")
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        offset = read = 0
        while True:
            piece = await reader.read(65536)
            text = decoder.decode(piece, final=not piece)
            read += len(piece)
            behind = read - len(decoder.getstate()[0])  # a character that is cut in two waits for its rest
            if text or not piece:
                self.publish(name, encode(Output(name[3], stream, offset, text, end=not piece, next=behind)))
            offset = behind
            if not piece:
                transport.close()  # uvloop, on which a worker runs, does not do it at the end of the pipe
                return


async def kill_all(marks: tuple[bytes, ...]) -> bool:
    """Kill all processes that have these variables; return False if some are still there after five seconds."""
    for _ in range(100):
        found = scan_marks({"job": marks}, os.getuid()).marked.get("job", [])
        if not found:
            return True
        for each in found:
            kill_process(each)
        await asyncio.sleep(0.05)
    return False
