"""The items of a job that has a replica for each: read, checked, and put into its request or among its files."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import msgspec

from moorage.client.errors import Rejected, rejected
from moorage.client.request_builder import plainer
from moorage.schemas.capabilities import DRIVER_DEFAULT, KNOWN, UNKNOWN
from moorage.schemas.handler import NOT_FINITE, not_finite
from moorage.schemas.items import Format, Item, ItemsFile, item_of, missing, no_column
from moorage.schemas.job import Request
from moorage.schemas.ranges import NUMBERS_MAX, parse_ranges
from moorage.system.item_files import items_in

#: items of more bytes are a file among the job's files: the request goes to a worker with each replica
INLINE_BYTES_MAX: Final = 16 * 1024
#: the same for a driver that may bring no files
INLINE_BYTES_WITHOUT_FILES: Final = 48 * 1024
#: the name of that file if the items were in none
FILE_NAME: Final = "moorage-items.jsonl"
_FIELD: Final = "$.run.items"
_ITEM: Final = "an item is a line of text, a row of CSV or a JSON value, of at most 32 KiB"
_HEADER: Final = "the first row of a .csv names the columns, divided by commas; a file of plain lines: --each-line"


class Sweep(NamedTuple):
    """The items of a job, `size` of them: `values` in its request, or the `file` that is to be among its files.

    That file is at `path`, or has the `content`.
    """

    size: int
    values: list[Any] | None
    file: ItemsFile | None = None
    path: str = ""
    content: bytes = b""

    def fields(self, replicas: object, indices: str | None) -> dict[str, Any]:
        """Return the fields of a request with these items; a file is not among them before it is sent.

        Raises `Rejected` if the caller asks for other replicas than there are items.
        """
        found: dict[str, Any] = {} if self.values is None else {"items": self.values}
        if indices is None and replicas not in (None, self.size):
            raise rejected(
                "invalid-argument", f"{replicas} replicas are asked for, and there are {self.size} items",
                field="$.replicas", found=replicas, allowed=f"{self.size}: a replica for each item",
                next="leave out the number of replicas; to run some of the items: --array 0-9, or indices='0-9'",
            )  # fmt: skip
        if indices is None:
            return found | {"replicas": self.size}
        with contextlib.suppress(ValueError):  # the request's own check says what is wrong
            if (last := parse_ranges(indices)[-1][1]) >= self.size:
                raise rejected(
                    "invalid-argument", f"replica {last} has no item, as there are {self.size}",
                    field="$.indices", found=indices, allowed=f"0-{self.size - 1}",
                    next="the first item has the number 0",
                )  # fmt: skip
        return found

    @contextlib.contextmanager
    def to_send(self) -> Iterator[list[str]]:
        """Within the block, the paths to send with the job's files: one, or none if the items are in the request."""
        if self.file is None:
            yield []
        elif self.path:
            yield [self.path]
        else:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, FILE_NAME)
                path.write_bytes(self.content)
                yield [str(path)]


def inline_bytes(driver: str | None) -> int:
    """Return how many bytes of items stand in the request of a job of this driver, None for the default."""
    brings_files = KNOWN.get(driver or DRIVER_DEFAULT, UNKNOWN).brings_files
    return INLINE_BYTES_MAX if brings_files else INLINE_BYTES_WITHOUT_FILES


def argv_of(what: object) -> Sequence[str]:
    """Return the words of a command that is to be submitted, before it is checked."""
    if isinstance(what, Request):
        return what.workload.argv
    if isinstance(what, Mapping):
        run = what.get("run")
        what = run.get("argv") if isinstance(run, Mapping) else ()
    return [word for word in what if isinstance(word, str)] if isinstance(what, Iterable) else ()


def sweep_of_values(values: Iterable[Any], argv: Sequence[str], inline: int = INLINE_BYTES_MAX) -> Sweep:
    """Return the items with these JSON values for a command, up to `inline` bytes as values.

    Raises `Rejected` for the first that is wrong.
    """
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        kinds = {"a text": str | bytes, "a mapping": Mapping, "one value": object}
        found = next(name for name, kind in kinds.items() if isinstance(values, kind))
        raise _refused(f"items are a list of values, not {found}")
    plain: list[Any] = []
    lines: list[bytes] = []
    for at, value in enumerate(values):
        try:
            if isinstance(value, bytes | bytearray):
                raise TypeError("must be text, found bytes: decode them")
            given = msgspec.to_builtins(value, enc_hook=plainer)
            if place := not_finite("", [given]):  # such as [0]['lr'], in which the first is the item itself
                raise ValueError(f"has {NOT_FINITE}{f' at {place[3:]}' if place[3:] else ''}: write it as text")
            item = item_of(given)
            lines.append(msgspec.json.encode(given))
        except (ValueError, TypeError, RecursionError) as error:
            raise _refused(f"item {at} {error}") from None
        if at == NUMBERS_MAX:
            raise _refused(f"a job has at most {NUMBERS_MAX} items")
        _check_columns(argv, item, f"item {at}")
        plain.append(given)
    if not plain:
        raise _refused("there are no items")
    content = b"\n".join(lines)
    if len(content) <= inline:
        return Sweep(len(plain), plain)
    return Sweep(len(plain), None, ItemsFile(FILE_NAME, "jsonl"), content=content)


def sweep_of_file(
    path: str, source: IO[bytes], format: Format, argv: Sequence[str], inline: int = INLINE_BYTES_MAX
) -> Sweep:
    """Return the items in the file at `path`, opened as `source`, for a command, up to `inline` bytes as values.

    Raises `Rejected` for the first that is wrong, OSError.
    """
    count = taken = 0
    values: list[Any] = []
    try:
        for line, item in items_in(source, format):
            _check_columns(argv, item, f"line {line} of {path}")
            count, taken = count + 1, taken + len(item.text)
            if taken <= inline:
                values.append(item.value)
    except ValueError as error:
        fix = _HEADER if format == "csv" and "must have columns" in str(error) else _ITEM
        raise _refused(f"{path}: {error}", fix) from None
    if not count:
        raise _refused(f"{path} has no items")
    if len(values) == count and len(msgspec.json.encode(values)) <= inline:
        return Sweep(count, values)
    return Sweep(count, None, ItemsFile(Path(path).name, format), path)


def _check_columns(argv: Sequence[str], item: Item, which: str) -> None:
    if column := missing(argv, item.columns):
        allowed = ", ".join(f"{{{name}}}" for name in ("item", *item.columns))
        raise rejected(
            "invalid-argument", no_column(column, item.columns, which),
            field="$.run.argv", found=f"{{{column}}}", allowed=allowed, next="name a column that each item has",
        )  # fmt: skip


def _refused(why: str, fix: str = _ITEM) -> Rejected:
    return rejected("invalid-argument", why, field=_FIELD, next=fix)
