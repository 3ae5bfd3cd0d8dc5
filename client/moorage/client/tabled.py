"""A sweep as rows: of each replica its item, how it ended, and the values that it reported last or kept as JSON, over
its reruns.

A replica that did not succeed, and was run again, has the row of that run.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from moorage.client import map_runner
from moorage.client.durations import utc
from moorage.client.errors import ClientError, rejected
from moorage.client.failures import items_of
from moorage.client.kept_files import KEPT_BYTES_MAX
from moorage.client.replicas import ASKED_MAX
from moorage.client.reported import all_rows, newest, rows_of
from moorage.client.sending import bucket_of
from moorage.client.stored_file import stored_file
from moorage.schemas.handler import result_object
from moorage.schemas.job import SUCCEEDED
from moorage.schemas.ranges import numbers_in, ranges_of
from moorage.schemas.units import many
from moorage.system.archives import BadArchive, Inflating, stays_below, unpack

if TYPE_CHECKING:
    from moorage.client.answers import JobInfo, ReplicaInfo
    from moorage.client.connected import Connected

#: reruns of a job, and of its reruns, that are looked at
RERUNS_MAX: Final = 32
#: bytes of a file whose values are columns, and of kept files among which such files are looked for
FILE_BYTES_MAX: Final = 1 << 20
LOOKED_MAX: Final = 64 << 20
#: archives that are read at once
_AT_ONCE: Final = 8

Row = dict[str, Any]


async def table(client: Connected, job: str, path: str = "") -> tuple[list[Row], list[str]]:
    """Return a row for each replica of a job, in the order of their numbers, and lines about what could not be had.

    `path` names the file with the values, as `out/loss.json`; without it, all files that end in `.json` are looked at,
    where a replica has kept at most 64 MiB. Raises `NotFound`, `Rejected` for a path that leaves the job's folder, and
    what `Connected.again` raises.
    """
    if path and not stays_below(path):
        raise rejected("invalid-argument", f"{path!r} is not a path below the job's folder", found=path)
    shown = await client.show(job)
    runs, notes = await _runs(client, shown), list[str]()
    rows: dict[int, tuple[JobInfo, ReplicaInfo]] = {}
    for run in runs:
        for row in await _rows(client, run):
            if row.replica not in rows or rows[row.replica][1].state != SUCCEEDED:
                rows[row.replica] = run, row
    items = await items_of(client, shown.run, list(rows), None) if rows else {}
    at_once = asyncio.Semaphore(_AT_ONCE)

    async def one(number: int) -> Row:
        run, row = rows[number]
        async with at_once:
            values, note = await _values(client, run.job, row, path)
            values = newest([*await rows_of(client, run.job, row), values])
        if note:
            notes.append(f"replica {number}: {note}")
        return _row(items.get(number), run.job, row, values)

    made = await asyncio.gather(*map(one, sorted(rows)))
    return _even(made), notes


async def _runs(client: Connected, shown: JobInfo) -> list[JobInfo]:
    """Return a job and what was run of it again, in the order in which these were made."""
    found = {shown.job: shown}
    left = [*shown.again]
    while left and len(found) <= RERUNS_MAX:
        name = left.pop(0)
        if name not in found:
            found[name] = run = await client.show(name)
            left += run.again
    return list(found.values())


async def reports(client: Connected, job: str) -> list[Row]:
    """Return the last rows that each replica of a job has reported, with the number of its replica."""
    shown = await client.show(job)
    return _even(await all_rows(client, job, await _rows(client, shown)))


async def _rows(client: Connected, run: JobInfo) -> list[ReplicaInfo]:
    numbers = list(numbers_in(run.numbers))
    found: list[ReplicaInfo] = []
    for at in range(0, len(numbers), ASKED_MAX):
        found += (await client.show(run.job, ranges_of(numbers[at : at + ASKED_MAX]))).replica_states
    return found


async def _values(client: Connected, job: str, row: ReplicaInfo, path: str) -> tuple[dict[str, Any], str]:
    """Return the values that a replica has kept, by column, and why there are none."""
    if not row.fence:
        return {}, ""
    name = result_object(job, row.replica, row.fence)
    try:
        if path:
            content = await stored_file(client, name, path, FILE_BYTES_MAX)
            return ({}, f"it kept no {path}") if content is None else _columns(path, content)
        store = bucket_of(client)
        info = await client.again(partial(store.find, name))
        if info is None:
            return {}, ""
        if info.size > LOOKED_MAX:
            return {}, f"it kept {info.size >> 20} MiB: name the file with its values"
        with tempfile.TemporaryDirectory() as folder:
            await client.again(lambda: _unpacked(store.get(info), Path(folder, "files")))
            return await asyncio.to_thread(_all_columns, Path(folder, "files"))
    except (ClientError, BadArchive, OSError) as error:
        return {}, str(error)


async def _unpacked(pieces: Any, into: Path) -> None:
    into.mkdir(exist_ok=True)
    with tempfile.TemporaryFile() as plain:
        inflating = Inflating(plain, KEPT_BYTES_MAX)
        async for piece in pieces:
            await asyncio.to_thread(inflating.feed, piece)
        inflating.address()
        plain.seek(0)
        await asyncio.to_thread(_unpack, plain, into)


def _unpack(plain: IO[bytes], into: Path) -> None:
    unpack(plain, into, KEPT_BYTES_MAX)


def _all_columns(folder: Path) -> tuple[dict[str, Any], str]:
    found: dict[str, Any] = {}
    notes: list[str] = []
    for path in sorted(folder.rglob("*.json")):
        if path.is_file() and not path.is_symlink() and path.stat().st_size <= FILE_BYTES_MAX:
            columns, note = _columns(path.name, path.read_bytes())
            found |= {name: value for name, value in columns.items() if name not in found}
            notes += [note] if note else []
    return found, "; ".join(notes)


def _columns(name: str, content: bytes) -> tuple[dict[str, Any], str]:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return {}, f"{name} is no JSON"
    if Path(name).name == map_runner.VALUE:  # of a function that was mapped over items
        value = value.get("value") if isinstance(value, Mapping) else None
        value = value if isinstance(value, Mapping) else {} if value is None else {"value": value}
    if not isinstance(value, Mapping):
        return {Path(name).stem: _cell(value)}, ""
    return dict(_flat(value, "")), ""


def _flat(value: Mapping[str, Any], above: str) -> Iterator[tuple[str, Any]]:
    for name, each in value.items():
        if isinstance(each, Mapping) and each:
            yield from _flat(each, f"{above}{name}.")
        else:
            yield f"{above}{name}", _cell(each)


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | dict) else value


def _row(item: Any, job: str, row: ReplicaInfo, values: Mapping[str, Any]) -> Row:
    own: Row = {"replica": row.replica}
    if isinstance(item, Mapping):
        own |= {name: _cell(each) for name, each in item.items()}
    elif item is not None:
        own["item"] = _cell(item)
    ended = utc(row.ended_ms) if row.ended_ms else None
    how = {"state": row.state, "code": row.code, "attempts": row.attempt, "ended": ended, "why": row.why, "job": job}
    for name, value in (*how.items(), *values.items()):
        if name not in own:
            own[name] = value
        elif str(own[name]) != str(value):  # as a file that repeats its item has it
            own[f"kept.{name}"] = value
    return own


def _even(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with the same columns in each, None where one has no such value."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return [{name: row.get(name) for name in names} for row in rows]


def said(notes: Sequence[str], most: int = 5) -> list[str]:
    """Return the first of these lines, and how many more there are."""
    return [*notes[:most], *([f"… and {many(len(notes) - most, 'more replica')}"] if len(notes) > most else [])]
