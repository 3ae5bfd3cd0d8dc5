"""`moorage call --each`: call a service with each line of a file, here or as a job."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from moorage.cli.framework.console import print_err, print_out
from moorage.cli.framework.files import cannot_read, cannot_write
from moorage.cli.framework.options import Options, with_client
from moorage.cli.jobs.flag_values import pairs
from moorage.client.call_answers import ANSWERS_BYTES_MAX, CallError, Outcome, encode_outcome
from moorage.client.durations import seconds
from moorage.client.errors import rejected
from moorage.client.many_calls import call_each as call_with_each
from moorage.schemas.ranges import parse_ranges
from moorage.schemas.units import many

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient

_OF_JSON: Final = (".jsonl", ".ndjson")


class Each(NamedTuple):
    """What the command line says."""

    service: str
    file: str
    data: str
    lines: str | None
    to: Path | None
    at_once: int
    within: str
    priority: int | None
    affinity: str | None
    headers: tuple[str, ...]
    submits: bool
    job: str | None


def call_each(said: Each, options: Options) -> int:
    """Do it, and return the exit code. Raises `Rejected`."""
    if said.data:
        why = "--each names the data of the calls, and so does the word behind the service"
        raise rejected("invalid-argument", why, found=said.data[:80], next="leave the word out")
    if said.at_once < 1:
        raise rejected("invalid-argument", "--at-once must be at least 1", found=said.at_once, next="leave it out")
    if said.submits and said.affinity is not None:
        raise rejected(
            "invalid-argument", "--affinity: a job of --submit calls with all lines", found=said.affinity[:80],
            next="leave out --affinity or --submit",
        )  # fmt: skip
    if said.job is not None and not said.submits:
        raise rejected("invalid-argument", "--job names the job of --submit", found=said.job, next="add --submit")
    if said.submits and (said.lines is not None or said.to is not None):
        why = "a job of --submit calls with all lines, and keeps its answers"
        raise rejected("invalid-argument", why, next="leave out --lines and --to")
    if seconds(said.within) <= 0:
        raise rejected("invalid-argument", "--within: a call needs time", found=said.within, next="--within 30s")
    within_s, headers = seconds(said.within), dict(pairs("header", list(said.headers)))
    first, last = _lines_of(said.lines)
    items = [item for at, item in enumerate(_items(said.file)) if first <= at and (last is None or at <= last)]
    if not items:
        raise rejected(
            "invalid-argument", f"{said.file} has no line to call with", next="name a file with an item a line"
        )

    async def submit(client: AsyncClient) -> None:
        service = client.service(said.service, priority=said.priority, headers=headers)
        job = await service.submit_many(items, job=said.job, at_once=said.at_once, timeout=within_s)
        print_out(job.job)
        print_err(f"accepted: {many(len(items), 'call')} of {said.service}; moorage get {job.job} fetches the answers")

    async def call(client: AsyncClient) -> int:
        service = client.service(said.service, priority=said.priority, headers=headers, affinity=said.affinity)
        with _written(said.to) as file:
            writing = _Writing(file, ANSWERS_BYTES_MAX if said.to is not None else sys.maxsize)
            await call_with_each(service, items, first, writing.write, at_once=said.at_once, within_s=within_s)
        return int(writing.has_failed)

    return with_client(options, submit if said.submits else call, sends=said.submits)


def _lines_of(text: str | None) -> tuple[int, int | None]:
    if text is None:
        return 0, None
    try:
        ranges = parse_ranges(text)
    except ValueError as error:
        raise rejected("invalid-argument", f"--lines: {error}", found=text, next="--lines 100-199") from None
    if len(ranges) != 1:
        raise rejected("invalid-argument", "--lines takes one range", found=text, next="--lines 100-199")
    return ranges[0]


def _items(path: str) -> Iterator[Any]:
    """Yield the item of each line that is not blank. Raises `Rejected`."""
    is_json = path.lower().endswith(_OF_JSON)
    with _read(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield msgspec.json.decode(line) if is_json else line.decode().rstrip("\r\n")
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                kind = "no JSON value" if is_json else "no text"
                why = f"line {number} of {path} is {kind}: {error}"
                raise rejected("invalid-argument", why, next="a .jsonl has a JSON value on each line") from None


@contextlib.contextmanager
def _read(path: str) -> Iterator[IO[bytes]]:
    if path == "-":
        yield sys.stdin.buffer
        return
    try:
        file = open(path, "rb")  # noqa: SIM115  closed below
    except OSError as error:
        raise cannot_read(path, error.strerror, "name a file with an item on each line") from None
    with file:
        yield file


@contextlib.contextmanager
def _written(path: Path | None) -> Iterator[IO[bytes]]:
    if path is None:
        yield sys.stdout.buffer
        return
    try:
        file = path.open("wb")
    except OSError as error:
        raise cannot_write(path, error.strerror, "name a file that can be written") from None
    with file:
        yield file


class _Writing:
    """The lines that are written: at most so many bytes, and behind them short errors in place of values."""

    def __init__(self, file: IO[bytes], bytes_max: int) -> None:
        self.has_failed = False
        self._file = file
        self._left = bytes_max

    def write(self, outcome: Outcome) -> None:
        line = encode_outcome(outcome) + b"\n"
        if len(line) > self._left:
            told = f"the answers of these items have more than {ANSWERS_BYTES_MAX >> 20} MiB: take fewer per replica"
            outcome = Outcome(outcome.item, error=CallError("too-large", told))
            line = encode_outcome(outcome) + b"\n"
        self._left -= len(line)
        self._file.write(line)
        self._file.flush()
        self.has_failed |= outcome.error is not None
