"""Fetch the files that a job kept (`keep` of its request), or that its attempts left, from the tenant's bucket."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shlex
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, NamedTuple

import msgspec

from moorage.bus.object_store import ObjectInfo, ObjectStore
from moorage.client.errors import ClientError, NoOutput, NotFound, Overloaded, Rejected, Unreachable, rejected
from moorage.client.follow.job_history import replicas_in
from moorage.client.replicas import ASKED_MAX
from moorage.client.sending import bucket_of
from moorage.client.transitions import last_attempts
from moorage.schemas.errors import problem
from moorage.schemas.frames import Rescued
from moorage.schemas.handler import result_object
from moorage.schemas.job import RUNNING, SUCCEEDED
from moorage.schemas.names import word_of
from moorage.schemas.printable import in_one_line
from moorage.schemas.ranges import Ranges, count_of, is_in, numbers_in, parse_ranges
from moorage.schemas.unreadable import UNREADABLE
from moorage.system.archives import LEFT_OUT, BadArchive, Inflating, stays_below, unpack

if TYPE_CHECKING:
    from moorage.client.answers import JobInfo
    from moorage.client.connected import Connected

#: most replicas of a job that are asked for patterns that matched nothing
UNMATCHED_ASKED_MAX: Final = 16
#: most bytes of the files of one replica
KEPT_BYTES_MAX: Final = 1 << 40
#: how often it is asked whether what an attempt left is stored, and for how long
RESCUE_WAIT_S: Final = 0.2
RESCUE_S_MAX: Final = 600.0


class _LeftOut(msgspec.Struct, frozen=True):
    """The header `LEFT_OUT` of a stored archive: what matched and was left out, and patterns that matched nothing."""

    count: int
    names: list[tuple[str, str]]
    unmatched: list[str] = []


_decode_left_out: Final = msgspec.json.Decoder(_LeftOut).decode


class Fetched(NamedTuple):
    """The paths of the files, links and empty folders that were fetched, and lines about what the worker left out."""

    paths: list[Path]
    left_out: list[str]


async def fetch(
    client: Connected,
    job: str,
    into: str | os.PathLike[str],
    only: Ranges | None,
    path: str,
    *,
    merge: bool = False,
    rescue: bool = False,
) -> Fetched:
    """Fetch a job's kept files into a folder; see `Job.files`."""
    folder = Path(into)
    if path and not stays_below(path):
        raise rejected(
            "invalid-argument",
            f"{path!r} is not a path below the job's folder",
            found=path,
            next="for example out/a.txt",
        )
    if folder.exists() and not (merge and folder.is_dir()) and (not folder.is_dir() or any(folder.iterdir())):
        raise rejected(
            "invalid-argument",
            f"{folder} exists and is not an empty folder",
            found=str(folder),
            next="name a new or empty folder, or merge the replicas into it: --merge, merge=True",
        )
    shown = await client.show(job)
    fences = await _fences(client, shown, only)
    asked = shown.numbers if only is None else only
    replicas = list(numbers_in(asked))
    store = bucket_of(client)
    found, left_out, lost = list[Path](), list[str](), list[ClientError]()
    for number in replicas:
        if number not in fences:  # it was never placed
            continue
        of = f"replica {number}: " if len(replicas) > 1 else ""
        try:
            name = await _rescued(client, job, number, path) if rescue else result_object(job, number, fences[number])
        except (NoOutput, NotFound, Rejected, Unreachable) as error:  # others may have left something
            lost.append(error)
            left_out.append(f"{of}{error.problem.message}")
            continue
        info = await client.again(partial(store.find, name))
        if info is not None:
            place = folder / str(number) if merge or len(replicas) > 1 else folder
            found += await _unpacked(store, info, place, path)
            left_out += _left_out(info, of, unmatched=not rescue)
    if not found and lost:
        raise lost[0]
    if not found and rescue:
        what = f"nothing at {path}" if path else "nothing"
        message, fix = "\n".join([f"job {job} has left {what}", *left_out]), f"moorage get {word_of(job)} --rescue"
        raise NotFound(problem("not-found", message, job=job, next=fix if path else f"moorage show {word_of(job)}"))
    if not found:
        message, fix = why_none(path, shown, asked)
        raise NotFound(problem("not-found", "\n".join([message, *left_out]), job=job, next=fix))
    return Fetched(found, left_out)


async def _fences(client: Connected, shown: JobInfo, only: Ranges | None) -> dict[int, int]:
    """Return the fences of the last attempts of a job's replicas, or at least of those `only`, by number."""
    if replicas_in(shown) is not None and only is not None and count_of(only) <= ASKED_MAX:
        shown = await client.show(shown.job, only)
    elif replicas_in(shown) is not None or not shown.replica_states:  # they are no longer in memory
        ends = await last_attempts(client, shown, count_of(shown.numbers))
        return {each: change.fence for each, change in ends.items()}
    return {row.replica: row.fence for row in shown.replica_states if row.fence}


async def _rescued(client: Connected, job: str, replica: int, path: str) -> str:
    """Have the worker store what a replica's last attempt left, wait for it, and return the object's name."""
    asked = {"job": job, "replica": replica, "path": path}
    began_s = time.monotonic()
    while True:
        wait_s = RESCUE_WAIT_S
        try:
            answer = msgspec.convert(await client.read("rescue", asked), Rescued)
            if answer.stored:
                return answer.object
        except Overloaded as busy:
            wait_s = busy.problem.retry_after_s or RESCUE_WAIT_S
        if time.monotonic() - began_s > RESCUE_S_MAX:
            raise Unreachable(problem("unreachable", f"what it left was not stored within {RESCUE_S_MAX:g} s", job=job))
        await asyncio.sleep(wait_s)


def _left_out(info: ObjectInfo, of: str, *, unmatched: bool = True) -> list[str]:
    """Return a line for each entry that the worker has named as left out, and for each pattern that matched nothing.

    Any client of the tenant can write these.
    """
    try:
        said = _decode_left_out(info.headers[LEFT_OUT][0])
    except (KeyError, IndexError, *UNREADABLE):
        return []
    lines = [f"{of}{in_one_line(name)} was left out: {in_one_line(why)}" for name, why in said.names]
    more = said.count - len(said.names)
    lines += [f"{of}{more} more were left out"] if more > 0 else []
    return lines + [f"{of}{_matched_nothing(pattern)}" for pattern in said.unmatched if unmatched]


def _matched_nothing(pattern: str) -> str:
    return f"nothing matched {in_one_line(pattern)!r} of keep, which begins at the attempt's folder"


async def unmatched(client: Connected, shown: JobInfo) -> list[str]:
    """Return a line for each pattern of `keep` that matched nothing, though its job, as `show` has it, has SUCCEEDED.

    Of a job of many replicas the first `UNMATCHED_ASKED_MAX` are looked at. Raises what `Connected.again` raises.
    """
    if shown.state != SUCCEEDED or not shown.run.get("keep"):
        return []
    job, numbers = shown.job, shown.numbers
    first = list(itertools.islice(numbers_in(numbers), UNMATCHED_ASKED_MAX))
    only = None if len(first) == count_of(numbers) else parse_ranges(",".join(map(str, first)))
    fences = await _fences(client, shown, only)
    store = bucket_of(client)
    lacking: dict[str, list[int]] = {}
    for number in first:
        if number not in fences:
            continue
        info = await client.again(partial(store.find, result_object(job, number, fences[number])))
        with contextlib.suppress(KeyError, IndexError, *UNREADABLE):
            for pattern in _decode_left_out(info.headers[LEFT_OUT][0]).unmatched if info is not None else ():
                lacking.setdefault(pattern, []).append(number)
    return [
        _matched_nothing(pattern) + (f": replica {', '.join(map(str, of))}" if count_of(numbers) > 1 else "")
        for pattern, of in lacking.items()
    ]


def why_none(path: str, shown: JobInfo, replicas: Ranges) -> tuple[str, str]:
    """Return why these replicas of a job, as `show` has it, have no kept files, and what to do.

    What it wrote can still be had while it runs, and for some minutes from its last worker.
    """
    job, keep, rows = shown.job, shown.run.get("keep", ()), shown.replica_states
    what = f"{path} of job {job}" if path else f"job {job}"
    why = "its request has no keep patterns"
    if keep:
        why = f"files that match {', '.join(keep)} when it ends are kept for some days"
    word = word_of(job)
    runs = next((row for row in rows if row.state == RUNNING and is_in(replicas, row.replica)), None)
    if runs is not None or (not rows and shown.state == RUNNING):
        which = word if runs is None or len(rows) < 2 else f"{word}/{runs.replica}"
        fix = f"while it runs: moorage exec {which} -- tar c {shlex.quote(path or '.')} | tar x"
    else:
        fix = f"for ten minutes after its end (folder_keep of its worker): moorage get {word} --rescue"
        fix += "" if keep else "; next time submit it with --keep 'out/**'"
    return f"no file of {what} is kept: {why}", fix


async def _unpacked(store: ObjectStore, info: ObjectInfo, place: Path, path: str) -> list[Path]:
    with tempfile.TemporaryFile() as plain:
        inflating = Inflating(plain, KEPT_BYTES_MAX)
        async for piece in store.get(info):
            await asyncio.to_thread(inflating.feed, piece)
        try:
            inflating.address()
            plain.seek(0)
            return await asyncio.to_thread(_written, plain, place, path)
        except BadArchive as error:
            raise rejected("invalid-argument", f"the stored files of the job cannot be unpacked: {error}") from None


def _written(plain: IO[bytes], place: Path, path: str) -> list[Path]:
    """Unpack an archive into `place`, whole or not at all, and return the files; [] if it has nothing at `path`.

    What is there already is replaced: it is of an earlier run of this replica.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    is_there = place.exists()  # perhaps the folder that the caller is in, if it is empty
    is_full = is_there and any(place.iterdir())
    beside = place if is_there and not is_full else place.parent
    with tempfile.TemporaryDirectory(dir=beside, prefix=".moorage-") as folder:
        fresh = Path(folder, "files")
        fresh.mkdir()
        if not unpack(plain, fresh, KEPT_BYTES_MAX, only=path.strip("/"), keep_modes=True):
            return []
        if is_full:
            place.rename(Path(folder, "earlier"))
            fresh.rename(place)
        elif is_there:
            for entry in list(fresh.iterdir()):
                entry.rename(place / entry.name)
        else:
            fresh.rename(place)
    return sorted(each for each in place.rglob("*") if not _is_full_folder(each))


def _is_full_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and any(path.iterdir())
