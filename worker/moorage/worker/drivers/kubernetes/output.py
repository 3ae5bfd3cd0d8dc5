"""Read the output of pods from the cluster while they run, store it in the worker's files, and publish it.

A cluster deletes a pod's output with the pod, and does not tell stderr from stdout: all of it counts as standard
output.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from moorage.schemas.attempt import AttemptName
from moorage.schemas.frames import LogPage, ReadLog
from moorage.worker.attempt.output_cleaner import OutputBounds, OutputCleaner
from moorage.worker.drivers.container.output import ContainerOutput, LiveOutput, clear_marks, opened, read_out
from moorage.worker.drivers.kubernetes.api import Cluster, ClusterDown, ClusterError
from moorage.worker.drivers.kubernetes.pod import CONTAINER
from moorage.worker.drivers.supervisor_link import key_of
from moorage.worker.supervisor.protocol import Ended as ChildEnded

RETRY_S: Final = 0.5
#: seconds within which more output must arrive once a container is over
QUIET_S: Final = 10.0

log = logging.getLogger("moorage.worker")


class PodOutputs:
    """The output of one driver's pods."""

    def __init__(
        self, cluster: Cluster, folder: Path, owner: str, bounds: OutputBounds, cap_bytes: int, live: LiveOutput
    ) -> None:
        self.keeper = OutputCleaner(folder, bounds)
        self.live = live
        self._cluster = cluster
        self._folder = folder
        self._owner = owner
        self._cap_bytes = cap_bytes
        self._sweeps: asyncio.Task[None] | None = None

    async def open(self, names: Collection[AttemptName]) -> None:
        """Begin to keep the output in the folder within its limits; `names` are the living attempts. Raises OSError."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        keys = [key_of(self._owner, name) for name in names]
        clear_marks(self._folder, self._owner, keys)
        self.keeper.begin(await asyncio.to_thread(self.keeper.scan), keys)
        self._sweeps = asyncio.get_running_loop().create_task(self.keeper.run())

    async def close(self) -> None:
        self.live.publish_pieces()
        if self._sweeps is not None:
            self._sweeps.cancel()
            await asyncio.wait((self._sweeps,))

    async def page(self, name: AttemptName, ask: ReadLog, is_over: bool, worker: str) -> LogPage:
        """Return a page of an attempt's stored output. Raises Refused (`not-kept`)."""
        return await self.keeper.page(key_of(self._owner, name), ask, is_over, worker)

    async def follow(self, name: AttemptName, pod: str, over: asyncio.Event) -> None:
        """Store and publish the output of a pod whose container has started, until it is `over` and all is read.

        After `over`, the rest is read while more arrives within each `QUIET_S` seconds. Then the streams are ended.
        """
        key = key_of(self._owner, name)
        self.keeper.started(key)
        output = await opened(self._folder, key, self._cap_bytes)
        reading = asyncio.get_running_loop().create_task(self._read(name, pod, output, over))
        try:
            await over.wait()
            await read_out(reading, output, QUIET_S)
            is_whole = reading.done() and reading.exception() is None and reading.result()
        except asyncio.CancelledError:
            self.live.publish_pieces()
            output.close(is_over=False)
            raise
        finally:
            reading.cancel()
            await asyncio.wait((reading,))
        ended = ChildEnded(key=key, reason="exit", proof="never-ran")
        self.live.end(name, output, ended, is_whole=is_whole)
        self.keeper.ended(key)

    async def _read(self, name: AttemptName, pod: str, output: ContainerOutput, over: asyncio.Event) -> bool:
        """Store the output to its end; return False if the cluster deleted it before that."""
        while True:
            was_over = over.is_set()  # then this pass reads all that there will be
            try:
                await self._read_on(name, pod, output, follow=not was_over)
                if was_over:
                    return True
            except ClusterError as error:
                if was_over and error.status < 500 and error.status != 429:
                    return False
                log.debug("%s: its output: %s", name[1], error)
            except ClusterDown as error:
                log.debug("%s: its output: %s", name[1], error)
            if not over.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_S):
                        await over.wait()
            else:
                await asyncio.sleep(RETRY_S if was_over else 0)

    async def _read_on(self, name: AttemptName, pod: str, output: ContainerOutput, *, follow: bool) -> None:
        since_s = int(output.since)
        since = datetime.fromtimestamp(since_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if since_s else ""
        await self.live.keep(name, output, self._cluster.output(pod, CONTAINER, since, follow))
