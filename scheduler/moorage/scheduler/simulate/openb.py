"""Reader of the openb traces: Alibaba's GPU-sharing cluster of 2023, and others in its format.

A folder holds one list of hosts (`openb_node_list_*.csv`: `sn,cpu_milli,memory_mib,gpu,model`) and lists of tasks
(`openb_pod_list_*.csv`: `name,cpu_milli,memory_mib,num_gpu,gpu_milli` and, optional, `gpu_spec`, `creation_time`,
`deletion_time`). `gpu_milli` is thousandths of one GPU, below 1000 only where one GPU is asked for; `gpu_spec` names
alternatives of a host's `model` in whole words, `V100M16|V100M32`; empty is any.

Source: Weng et al., "Beware of Fragmentation: Scheduling GPU-Sharing Workloads with Fragmentation Gradient Descent",
USENIX ATC 2023.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from moorage.schemas.gpu import GPUS_PER_REPLICA_MAX

#: rows of one file that are read at most; the published lists have some 10,000
ROWS_MAX: Final = 1_000_000
NODE_LISTS: Final = "openb_node_list_*.csv"
POD_LISTS: Final = "openb_pod_list_*.csv"
_NODE_COLUMNS: Final = ("sn", "cpu_milli", "memory_mib", "gpu", "model")
_POD_COLUMNS: Final = ("name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli")


class TraceError(ValueError):
    """A trace that cannot be read: names the file, the line, the column, what was found and what is allowed."""


@dataclass(frozen=True, slots=True)
class TraceHost:
    """One host: `gpus` devices of one `model`. Processors in thousandths, memory in MiB."""

    name: str
    cpu_milli: int
    memory_mib: int
    gpus: int
    model: str


@dataclass(frozen=True, slots=True)
class TraceTask:
    """One task. `gpu_milli` is what it takes of each of its GPUs, 1000 for the whole; times are seconds.

    `models` are the models that will do, whole words; empty is any. `ended_s` is None where the trace does not say.
    """

    name: str
    cpu_milli: int
    memory_mib: int
    gpus: int
    gpu_milli: int
    models: tuple[str, ...] = ()
    created_s: float = 0.0
    ended_s: float | None = None

    @property
    def gpu_demand_milli(self) -> int:
        """What it asks for in all, in thousandths of a GPU."""
        return self.gpus * self.gpu_milli

    @property
    def is_share(self) -> bool:
        return self.gpus == 1 and self.gpu_milli < 1000


def read_hosts(path: Path) -> list[TraceHost]:
    """The hosts of a node list, in its order. Raises TraceError."""
    hosts = [
        TraceHost(
            row.text("sn"),
            row.whole("cpu_milli"),
            row.whole("memory_mib"),
            row.whole("gpu", most=GPUS_PER_REPLICA_MAX),
            row.text("model", empty=row.raw("gpu") == "0"),
        )
        for row in _rows(path, _NODE_COLUMNS)
    ]
    names = {host.name for host in hosts}
    if len(names) != len(hosts):
        raise TraceError(f"{path.name}: {len(hosts) - len(names)} hosts have the name of another; names must differ")
    return hosts


def read_tasks(path: Path) -> list[TraceTask]:
    """The tasks of a pod list, in its order. Raises TraceError."""
    return [_task(row) for row in _rows(path, _POD_COLUMNS)]


def node_list(folder: Path) -> Path:
    """The one node list of a folder. Raises TraceError where there is none, or several."""
    found = sorted(folder.glob(NODE_LISTS))
    if len(found) != 1:
        said = ", ".join(path.name for path in found) or "none"
        raise TraceError(
            f"{folder}: one file {NODE_LISTS} is needed, found {said}; name it, or keep the others elsewhere"
        )
    return found[0]


def pod_lists(folder: Path) -> dict[str, Path]:
    """The pod lists of a folder by the word that ends their names: default, gpuspec33 … Raises TraceError for none."""
    prefix = POD_LISTS.removesuffix("*.csv")
    found = {path.stem.removeprefix(prefix): path for path in sorted(folder.glob(POD_LISTS))}
    if not found:
        raise TraceError(f"{folder}: no file {POD_LISTS}; give the folder that holds the trace's CSV files")
    return found


def _task(row: _Row) -> TraceTask:
    gpus = row.whole("num_gpu", most=GPUS_PER_REPLICA_MAX)
    milli = row.whole("gpu_milli", most=1000) if gpus else 0
    if gpus and not milli:
        raise row.wrong("gpu_milli", "1..1000 where GPUs are asked for")
    if gpus > 1 and milli != 1000:
        raise row.wrong("gpu_milli", "1000 where several GPUs are asked for: only one GPU can be shared")
    models = tuple(dict.fromkeys(part.strip() for part in row.raw("gpu_spec").split("|") if part.strip()))
    created, ended = row.seconds("creation_time"), row.seconds("deletion_time")
    return TraceTask(
        row.text("name"), row.whole("cpu_milli"), row.whole("memory_mib"), gpus, milli, models, created or 0.0, ended
    )


class _Row:
    """One line of a file; its getters raise TraceError with all that a reader needs to mend it."""

    def __init__(self, path: Path, line: int, fields: dict[str, str | None]) -> None:
        self._path = path
        self._line = line
        self._fields = fields

    def raw(self, column: str) -> str:
        return (self._fields.get(column) or "").strip()

    def text(self, column: str, empty: bool = False) -> str:
        value = self.raw(column)
        if not value and not empty:
            raise self.wrong(column, "a word")
        return value

    def whole(self, column: str, most: int = 1 << 40) -> int:
        value = self.raw(column)
        if not (value.isascii() and value.isdigit()) or int(value) > most:
            raise self.wrong(column, f"a whole number 0..{most}")
        return int(value)

    def seconds(self, column: str) -> float | None:
        """None where the column is missing or empty: a task that had not ended."""
        value = self.raw(column)
        if not value:
            return None
        try:
            found = float(value)
        except ValueError:
            found = -1.0
        if not 0 <= found < 1e12:
            raise self.wrong(column, "seconds, 0 or more")
        return found

    def wrong(self, column: str, allowed: str) -> TraceError:
        return TraceError(
            f"{self._path.name} line {self._line}: {column} is {self.raw(column)[:60]!r}, allowed: {allowed}"
        )


def _rows(path: Path, columns: tuple[str, ...]) -> Iterator[_Row]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from error
    reader = csv.DictReader(io.StringIO(text, newline=""))
    missing = [column for column in columns if column not in (reader.fieldnames or ())]
    if missing:
        found = ", ".join(reader.fieldnames or ()) or "an empty file"
        raise TraceError(f"{path.name}: the first line must name {', '.join(columns)}; it lacks {missing[0]}: {found}")
    count = 0
    try:
        for fields in reader:
            count += 1
            if count > ROWS_MAX:
                raise TraceError(f"{path.name}: more than {ROWS_MAX} rows; split the list")
            yield _Row(path, reader.line_num, fields)
    except csv.Error as error:
        raise TraceError(f"{path.name} line {reader.line_num}: no CSV: {error}") from error
    if not count:
        raise TraceError(f"{path.name}: no rows below the first line")
