"""A function mapped over items: what travels with its job, and the values that come back.

Each item is a replica, which runs `map_runner` and keeps the value or the error as a file. A job of one replica loads
the function first, so that a missing module fails once and not for each item.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import msgspec

from moorage.client import map_runner
from moorage.client.by_value import copy_cloudpickle, pickled
from moorage.client.call_answers import ANSWERS, ANSWERS_BYTES_MAX, is_of_calls, read_outcomes, shares_of
from moorage.client.changed import changed
from moorage.client.errors import ItemFailed, rejected
from moorage.client.handlers import OnProgress, Progress
from moorage.client.job_ids import fresh_job_id
from moorage.client.replicas import ASKED_MAX
from moorage.client.stored_file import stored_file
from moorage.client.sweeps import Sweep
from moorage.schemas.answers.jobs import ReplicaInfo
from moorage.schemas.frames import Event
from moorage.schemas.handler import result_object
from moorage.schemas.job import SUCCEEDED, TERMINAL
from moorage.schemas.names import JOB_CHARS_MAX, word_of
from moorage.schemas.ranges import count_of, numbers_in, ranges_of
from moorage.schemas.unreadable import UNREADABLE

if TYPE_CHECKING:
    from moorage.client.answers import JobInfo
    from moorage.client.connected import Connected

#: how a function travels: its module is imported on the host, or the function itself is pickled by cloudpickle
Travel = Literal["module", "cloudpickle"]
#: whether failures are raised in their turn, or given in their places
Errors = Literal["raise", "return"]
#: bytes around a value in its file
_ENVELOPE_BYTES: Final = 64
#: what the id of a job ends with that loads the function for another one
_CHECK: Final = "-check"
#: shortest time between two questions about the replicas, in seconds
ASK_S: Final = 0.2
#: most values that are read from the bucket at once
READS_MAX: Final = 16
#: fields that only the job of the items has, not that of the check
_OF_ITEMS: Final = frozenset({"replicas", "indices", "items", "max_running", "max_failed", "keep"})


class _Error(msgspec.Struct, frozen=True):
    kind: str
    message: str
    traceback: str = ""


class _Outcome(msgspec.Struct, frozen=True):
    value: Any = None
    error: _Error | None = None


_decode_outcome: Final = msgspec.json.Decoder(_Outcome).decode


def check_of(job: str) -> str:
    """Return the id of the job that loads the function for another one."""
    return f"{job}{_CHECK}"


def waits_for(request: Mapping[str, Any], job: str) -> bool:
    """Return whether a request, as `show` has it, names a job in its `after`."""
    return any((each["job"] if isinstance(each, Mapping) else each) == job for each in request.get("after", ()))


def check_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the job that only loads the function."""
    return {name: value for name, value in fields.items() if name not in _OF_ITEMS}


def listed(fields: Mapping[str, Any], name: str) -> list[Any]:
    """Return the entries of a field. Raises `Rejected` for a text, whose letters would be the entries."""
    found = fields.get(name, ())
    if isinstance(found, str):
        raise rejected(
            "invalid-argument", f"{name} is a list, and not a text", field=f"$.{name}", found=found,
            next=f"{name}=[{found!r}]",
        )  # fmt: skip
    return list(found)


def named(job: str | None, *, check: bool) -> str:
    """Return the id of a mapped job. Raises `Rejected` for one that leaves no room for that of its `check`, and inside
    such a job, whose function's module maps as well."""
    if map_runner.VARIABLE in os.environ:
        raise rejected(
            "failed-precondition", "a job loads this module for its function, and the module submits a job itself",
            next="put what submits below: if __name__ == '__main__':",
        )  # fmt: skip
    if check and job is not None and len(job) > JOB_CHARS_MAX - len(_CHECK):
        raise rejected(
            "invalid-argument", f"the id of a mapped job has to leave room for {_CHECK}, the end of its check's id",
            field="$.job", found=job, allowed=f"1..{JOB_CHARS_MAX - len(_CHECK)} characters",
            next="shorten it, or leave the check out: check=False",
        )  # fmt: skip
    return fresh_job_id() if job is None else job


@contextlib.contextmanager
def travelling(function: Callable[[Any], Any], how: Travel, items: Sweep) -> Iterator[tuple[list[str], list[str]]]:
    """Within the block, the words behind `python3` that load a function, and the paths that travel with the job.

    Raises `Rejected` for a function that cannot travel so.
    """
    if any(map(_yields, (function, type(function).__call__, getattr(function, "func", None)))):
        raise rejected(
            "invalid-argument", "the function is a generator, and map takes one value for each item",
            found=repr(function)[:80], allowed="a function that returns a value, plain or async",
            next="return a list",
        )  # fmt: skip
    with tempfile.TemporaryDirectory() as stage:
        folder = Path(stage, map_runner.FOLDER)
        folder.mkdir()
        runner = folder / map_runner.RUNNER
        shutil.copyfile(map_runner.__file__, runner)
        values = items.values
        content = items.content if values is None else b"\n".join(map(msgspec.json.encode, values))
        Path(stage, map_runner.ITEMS).write_bytes(content + b"\n")
        paths = [stage]
        if how == "cloudpickle":
            words = ["pickle", "{}.{}".format(*sys.version_info)]
            _pickle(function, folder)
        else:
            module, name, file = _module_of(function)
            words = ["module", module, name]
            paths += [file] if file else []
        yield [f"{map_runner.FOLDER}/{map_runner.RUNNER}", *words], paths


def travel_of(function: Callable[[Any], Any]) -> Travel:
    """Return how a function travels that may do so in either way: as a module, if an import finds it in one."""
    name, module = getattr(function, "__qualname__", ""), inspect.getmodule(function)
    is_of_module = name and "<" not in name and getattr(module, "__file__", None) is not None
    return "module" if is_of_module else "cloudpickle"


def python_for(how: Travel) -> str:
    """Return the interpreter that a host runs a function with: this one's path where it has to be of its version, or is
    that of an environment, which a host is likely to have at the same place."""
    return sys.executable if how == "cloudpickle" or sys.prefix != sys.base_prefix else "python3"


def _yields(function: Any) -> bool:
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def _pickle(function: Callable[[Any], Any], folder: Path) -> None:
    (folder / map_runner.PICKLE).write_bytes(pickled(function, "the function"))
    copy_cloudpickle(folder)


def _module_of(function: Callable[[Any], Any]) -> tuple[str, str, str]:
    """Return the module of a function, its name there, and the file to send: "" of a package or an installed module.

    Raises `Rejected` for a function that no import finds.
    """
    name, module = getattr(function, "__qualname__", ""), inspect.getmodule(function)
    file = getattr(module, "__file__", None)
    if not name or "<" in name or module is None or file is None:
        raise rejected(
            "invalid-argument",
            f"no module has the function {name or function!r}: it is a lambda, local, or of a notebook's cell",
            found=name, allowed="a function of a module's top level", next="how='cloudpickle' sends it itself",
        )  # fmt: skip
    there = reduce(lambda found, part: getattr(found, part, None), name.split("."), cast("Any", module))
    if there != function:  # a method of an object, or what a decorator has replaced by another
        raise rejected(
            "invalid-argument",
            f"{module.__name__}.{name} is not this function: it is a method of an object, or was decorated otherwise",
            found=repr(function)[:80], allowed="a function of a module's top level, by its own name there",
            next="how='cloudpickle' sends it itself, with its object",
        )  # fmt: skip
    path = Path(file).resolve()
    module_name = module.__name__
    if module_name == "__main__":
        spec = getattr(module, "__spec__", None)
        module_name = path.stem if spec is None else spec.name
    installed = {Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "purelib", "platlib")}
    is_sent = path.name == f"{module_name}.py" and not installed.intersection(path.parents)
    return module_name, name, str(path) if is_sent else ""


async def outcomes(
    client: Connected, job: str, changes: Callable[[], AsyncIterator[Event]], on_progress: OnProgress | None
) -> AsyncGenerator[tuple[int, Any], None]:
    """Yield the number of each item, and its value or `ItemFailed`, as they come, until all have ended.

    `changes` yields events of the job until its end. Raises what that raises, and `Rejected` for a job without a
    function.
    """
    shown = await client.show(job)
    if is_of_calls(shown.run):
        async for pair in _outcomes_of_calls(client, job, shown, changes, on_progress):
            yield pair
        return
    if map_runner.VALUE not in shown.run.get("keep", ()):
        raise rejected(
            "failed-precondition", f"job {job} calls no function, so it has no answers", job=job,
            next=f"moorage show {word_of(job)}",
        )  # fmt: skip
    done, failed, of = 0, 0, count_of(shown.numbers)
    async with contextlib.aclosing(rows_of(client, job, numbers_in(shown.numbers), changes)) as looks:
        async for ended, _ in looks:
            for some in batches_of(ended, READS_MAX):
                answers = await asyncio.gather(*(_answer(client, job, row) for row in some))
                for row, answer in zip(some, answers, strict=True):
                    done, failed = done + 1, failed + isinstance(answer, ItemFailed)
                    if on_progress is not None:
                        text = f"{done} of {of}" + (f", {failed} failed" if failed else "")
                        on_progress(Progress(done / of, text, row.replica))
                    yield row.replica, answer


async def _outcomes_of_calls(
    client: Connected,
    job: str,
    shown: JobInfo,
    changes: Callable[[], AsyncIterator[Event]],
    on_progress: OnProgress | None,
) -> AsyncGenerator[tuple[int, Any], None]:
    """The same of a job of `submit_many`, whose replicas have several items each."""
    shares = dict(shares_of(shown.run, shown.numbers))
    done, failed, of = 0, 0, sum(map(len, shares.values()))
    async with contextlib.aclosing(rows_of(client, job, shares, changes)) as looks:
        async for ended, _ in looks:
            for row in ended:
                async for number, answer in _answers_of_calls(client, job, row, shares[row.replica]):
                    done, failed = done + 1, failed + isinstance(answer, ItemFailed)
                    if on_progress is not None:
                        text = f"{done} of {of}" + (f", {failed} failed" if failed else "")
                        on_progress(Progress(done / of, text, row.replica))
                    yield number, answer


async def _answers_of_calls(
    client: Connected, job: str, row: ReplicaInfo, items: range
) -> AsyncGenerator[tuple[int, Any], None]:
    """Yield the answers of the items of a replica that has ended."""
    name = result_object(job, row.replica, row.fence) if row.fence else ""
    content = await stored_file(client, name, ANSWERS, ANSWERS_BYTES_MAX) if name else None
    found = {} if content is None else read_outcomes(content)
    for number in items:
        outcome = found.get(number)
        if outcome is None:
            why = "its answer is no longer kept" if row.state == SUCCEEDED else row.why
            yield number, ItemFailed(job, row.replica, row.state, row.code, why, item=number)
        elif (error := outcome.error) is not None:
            why, kind = error.message, error.kind
            yield number, ItemFailed(job, row.replica, row.state, row.code, why, kind=kind, item=number)
        else:
            yield number, outcome.answer


def items_of(shown: JobInfo) -> Iterator[int]:
    """Yield the numbers of a job's items in their order."""
    if not is_of_calls(shown.run):
        return numbers_in(shown.numbers)
    return (number for _, items in shares_of(shown.run, shown.numbers) for number in items)


async def rows_of(
    client: Connected, job: str, numbers: Iterable[int], changes: Callable[[], AsyncIterator[Event]]
) -> AsyncGenerator[tuple[list[ReplicaInfo], list[ReplicaInfo]], None]:
    """Yield the rows of replicas that have ended, each once, and of those that have not, until all have ended.

    `changes` yields events of the job until its end. Raises what that raises.
    """
    left = list(numbers)
    async with changed(changes) as (event, listening):
        while left:
            over = listening.done()
            event.clear()
            asked = left[:ASKED_MAX]
            shown = await client.show(job, ranges_of(asked))
            rows = {row.replica: row for row in shown.replica_states}
            if over:
                listening.result()
                ended = [rows.get(number) or ReplicaInfo(replica=number, state=shown.state) for number in asked]
            else:
                ended = [row for row in rows.values() if row.state in TERMINAL]
            found = {row.replica for row in ended}
            yield ended, [row for row in rows.values() if row.replica not in found]
            left = [number for number in left if number not in found]
            if left and not over:
                if not ended:
                    await event.wait()
                await asyncio.sleep(ASK_S)


async def in_order(pairs: AsyncIterator[tuple[int, Any]], numbers: Iterator[int]) -> AsyncGenerator[Any, None]:
    """Yield what comes with numbers in the order of these numbers."""
    early: dict[int, Any] = {}
    wanted = next(numbers, None)
    async for number, answer in pairs:
        early[number] = answer
        while wanted in early:
            yield early.pop(wanted)
            wanted = next(numbers, None)


def batches_of(rows: Sequence[ReplicaInfo], size: int) -> Iterator[list[ReplicaInfo]]:
    left = iter(rows)
    while some := list(islice(left, size)):
        yield some


async def _answer(client: Connected, job: str, row: ReplicaInfo) -> Any:
    """Return the value of an item that has ended, or why it has none."""
    number, state = row.replica, row.state
    found = await _kept_outcome(client, result_object(job, number, row.fence)) if row.fence else None
    if found is not None and found.error is None and state == SUCCEEDED:
        return found.value
    if found is not None and found.error is not None:
        error = found.error
        return ItemFailed(job, number, state, row.code, error.message, kind=error.kind, text=error.traceback)
    why = "its value is no longer kept, or it ended itself" if state == SUCCEEDED else row.why
    return ItemFailed(job, number, state, row.code, why)


async def _kept_outcome(client: Connected, name: str) -> _Outcome | None:
    """Return what a replica has kept; None if that is not there, or is something else."""
    found = await stored_file(client, name, map_runner.VALUE, map_runner.VALUE_BYTES_MAX + _ENVELOPE_BYTES)
    with contextlib.suppress(*UNREADABLE):
        return None if found is None else _decode_outcome(found)
    return None
