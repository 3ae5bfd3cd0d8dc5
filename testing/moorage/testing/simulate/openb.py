"""Reader of the openb traces: Alibaba's GPU-sharing cluster of 2023, and others in its format.

A folder holds one list of hosts (`openb_node_list_*.csv`: `sn,cpu_milli,memory_mib,gpu,model`) and lists of tasks
(`openb_pod_list_*.csv`: `name,cpu_milli,memory_mib,num_gpu,gpu_milli` and, optional, `gpu_spec`, `creation_time`,
`deletion_time`). `gpu_milli` is thousandths of one GPU, below 1000 only where one GPU is asked for; `gpu_spec` names
alternatives of a host's `model` in whole words, `V100M16|V100M32`; empty is any.

Source: Weng et al., "Beware of Fragmentation: Scheduling GPU-Sharing Workloads with Fragmentation Gradient Descent",
USENIX ATC 2023.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from moorage.schemas.gpu import GPUS_PER_REPLICA_MAX
from moorage.testing.simulate.rows import Row, read_rows, trouble

#: rows of one file that are read at most; the published lists have some 10,000
ROWS_MAX: Final = 1_000_000
NODE_LISTS: Final = "openb_node_list_*.csv"
POD_LISTS: Final = "openb_pod_list_*.csv"
_NODE_COLUMNS: Final = ("sn", "cpu_milli", "memory_mib", "gpu", "model")
_POD_COLUMNS: Final = ("name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli")


class TraceError(ValueError):
    """The folder does not contain the files of a trace, or contains several node lists."""


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

    `models` are the models that will do, whole words; empty is any. Where the trace has no time, `created_s` is 0 and
    `ended_s` None.
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
        """All that the task asks for, in thousandths of a GPU."""
        return self.gpus * self.gpu_milli

    @property
    def is_share(self) -> bool:
        return self.gpus == 1 and self.gpu_milli < 1000


def read_hosts(path: Path) -> list[TraceHost]:
    """Return the hosts of a node list, in its order. Raises Refused."""
    lines: dict[str, int] = {}
    hosts = []
    for row in _rows(path, _NODE_COLUMNS):
        host = TraceHost(
            row.text("sn"),
            row.whole("cpu_milli"),
            row.whole("memory_mib"),
            row.whole("gpu", most=GPUS_PER_REPLICA_MAX),
            row.text("model", empty=row.raw("gpu") == "0"),
        )
        if (first := lines.setdefault(host.name, row.line)) != row.line:
            raise row.wrong("sn", f"a name of its own: that is the host of line {first}")
        hosts.append(host)
    return hosts


def read_tasks(path: Path) -> list[TraceTask]:
    """Return the tasks of a pod list, in its order. Raises Refused."""
    return [task for _, task in numbered_tasks(path)]


def numbered_tasks(path: Path) -> Iterator[tuple[Row, TraceTask]]:
    """Yield each task with its row. Raises Refused."""
    return ((row, _task(row)) for row in _rows(path, _POD_COLUMNS))


def node_list(folder: Path) -> Path:
    """Return the one node list of a folder. Raises TraceError where there is none, or several."""
    found = sorted(folder.glob(NODE_LISTS))
    if len(found) != 1:
        said = ", ".join(path.name for path in found) or "none"
        raise TraceError(
            f"{folder}: one file {NODE_LISTS} is needed, found {said}; name it, or keep the others elsewhere"
        )
    return found[0]


def pod_lists(folder: Path) -> dict[str, Path]:
    """Return a folder's pod lists by the word that ends their names (default, gpuspec33 …). Raises TraceError."""
    prefix = POD_LISTS.removesuffix("*.csv")
    found = {path.stem.removeprefix(prefix): path for path in sorted(folder.glob(POD_LISTS))}
    if not found:
        raise TraceError(f"{folder}: no file {POD_LISTS}; give the folder that holds the trace's CSV files")
    return found


def _task(row: Row) -> TraceTask:
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


def _rows(path: Path, columns: tuple[str, ...]) -> Iterator[Row]:
    count = 0
    for count, row in enumerate(read_rows(path, columns), 1):
        if count > ROWS_MAX:
            raise trouble(path, row.line, f"more than {ROWS_MAX} rows", next="split the list")
        yield row
    if not count:
        raise trouble(path, 0, "no rows below the first line")
