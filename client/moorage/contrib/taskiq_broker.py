"""A broker for taskiq: each task that is kicked is a job, recorded, placed on GPUs and run once, however long it takes.

There is no `taskiq worker`: workers of moorage start a process for each task, which imports the broker's module. A task
of hours is never redelivered. Needs the package `taskiq` here and in the job's Python.
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import os
import sys
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Unpack

from taskiq import AckableMessage, AsyncBroker, AsyncResultBackend, BrokerMessage, TaskiqResult
from taskiq.receiver import Receiver

from moorage.client import AsyncClient, ClientError, JobFailed, NotFound
from moorage.client.fields import FIELDS, Fields
from moorage.schemas.job import TERMINAL

#: in a job: the message of its task
MESSAGE: Final = "TASKIQ_MESSAGE"
#: in the job's folder, and kept: the result of its task
RESULT: Final = "taskiq-result.json"


class JobResults(AsyncResultBackend[Any]):
    """The results of tasks: a job writes its own into a file that it keeps, and callers read that."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def set_result(self, task_id: str, result: TaskiqResult[Any]) -> None:
        """Write the result, in the task's job. Raises ValueError for a value that JSON cannot hold."""
        Path(RESULT).write_text(result.model_dump_json())

    async def is_result_ready(self, task_id: str) -> bool:
        """Return whether the task's job has ended. False for one that is not known (yet)."""
        try:
            return (await self._client.job(task_id).show()).state in TERMINAL
        except NotFound:
            return False

    async def get_result(self, task_id: str, with_logs: bool = False) -> TaskiqResult[Any]:
        """Wait for the task's job to end and return its result; `with_logs` adds the end of its error output.

        One that ended without a result, as at its time limit, has the `JobFailed` as its error. Raises `NotFound`,
        `TimedOut` (the job goes on) and what else `Job.result` raises.
        """
        job, failed = self._client.job(task_id), None
        try:
            await job.result()
        except JobFailed as error:
            failed = error
        with TemporaryDirectory(prefix="moorage-taskiq-") as folder:
            try:
                [file] = await job.files(Path(folder) / "kept", RESULT)
            except ClientError:
                if failed is None:
                    raise
                result = TaskiqResult[Any](is_err=True, return_value=None, execution_time=0, error=failed)
            else:
                result = TaskiqResult[Any].model_validate_json(file.read_text())
        if with_logs:
            result.log = "".join([piece.text async for piece in job.logs() if piece.stream == "err"])
        return result


class MoorageBroker(AsyncBroker):
    """`MoorageBroker("tasks:broker", files="tasks.py")` is the variable `broker` of the module `tasks`.

    `target` and `tenant` are those of `AsyncClient`, `python` is the host's interpreter; all other keyword arguments
    are fields of each task's job (`gpu`, `limit`, `files`, `retries`, ...). Labels of a task with such a name go before
    them: `@broker.task(gpu="2xH100", limit="2h")`. A task's id is its job's id.
    """

    def __init__(
        self,
        where: str,
        /,
        target: str | None = None,
        *,
        tenant: str | None = None,
        python: str = "python3",
        gpu: str | int | None = None,
        **fields: Unpack[Fields],
    ) -> None:
        super().__init__()
        self._client = AsyncClient(target, tenant=tenant, name=f"taskiq {where}")
        self._is_open = False
        self._argv = [python, "-m", "moorage.contrib.taskiq_broker", where]
        self._gpu = gpu
        self._fields = fields
        self.result_backend = JobResults(self._client)

    async def startup(self) -> None:
        """Connect. Raises what `AsyncClient` raises when it opens."""
        await super().startup()
        if not self.is_worker_process and not self._is_open:
            await self._client.__aenter__()
            self._is_open = True

    async def shutdown(self) -> None:
        """Close the connection; jobs go on."""
        await super().shutdown()
        if self._is_open:
            self._is_open = False
            await self._client.__aexit__(None, None, None)

    async def kick(self, message: BrokerMessage) -> None:
        """Submit the task as a job, and return once it is recorded. The same id again is the same job.

        Raises what `AsyncClient.submit` raises; taskiq makes it a `SendTaskError`.
        """
        sent = self.formatter.loads(message.message)
        sent.parse_labels()
        named: dict[str, Any] = {**self._fields, **{key: sent.labels[key] for key in FIELDS & sent.labels.keys()}}
        named["env"] = {**named.get("env", {}), MESSAGE: base64.b64encode(message.message).decode()}
        named["keep"] = [*named.get("keep", ()), RESULT]
        named["labels"] = {"task": sent.task_name, **named.get("labels", {})}
        await self._client.submit(self._argv, sent.labels.get("gpu", self._gpu), message.task_id, **named)

    async def listen(self) -> AsyncGenerator[bytes | AckableMessage, None]:
        """Raise RuntimeError: workers of moorage start the tasks."""
        raise RuntimeError("no `taskiq worker` is needed: moorage's workers run each task as a job")
        yield b""


async def run(where: str) -> int:
    """Run the task of this job, as a worker of taskiq would, and return 1 if it raised, else 0."""
    module, _, name = where.partition(":")
    broker: MoorageBroker = getattr(importlib.import_module(module), name)
    broker.is_worker_process = True  # so it does not connect
    await broker.startup()
    with ThreadPoolExecutor(1) as pool:
        receiver = Receiver(broker, pool, max_async_tasks=1)
        await receiver.callback(base64.b64decode(os.environ[MESSAGE]), raise_err=True)
    await broker.shutdown()
    return int(TaskiqResult[Any].model_validate_json(Path(RESULT).read_text()).is_err)


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())
    sys.exit(asyncio.run(run(sys.argv[1])))
