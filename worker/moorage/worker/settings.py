"""Everything about a worker that an operator may set, with bounds; nothing else reads files or variables for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from moorage.schemas.errors import refuse
from moorage.schemas.gpu import SHARERS_MAX
from moorage.schemas.names import LABEL_KEY, is_worker
from moorage.schemas.subjects import PREFIX_DEFAULT

LABELS_MAX: Final = 64
LEASE_UIDS_MAX: Final = 64
LOAD_S_DEFAULT: Final = 2.0
#: at most so many load frames a second when leases change
LOADS_ON_CHANGE_PER_S_MAX: Final = 5
FREE_WAIT_S_DEFAULT: Final = 10.0
OUTPUT_CAP_BYTES_DEFAULT: Final = 64 * 1024 * 1024
#: modes that a worker offers by itself; mps needs a daemon, so an operator (or a simulated worker) adds it
MODES_DEFAULT: Final = ("exclusive", "time-slice")


class WorkerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of one worker. Raises ValueError for what cannot be (a ValidationError where msgspec decodes it).

    `worker` is its id, None for the host's name. `state_dir` holds the journals (made 0700). `load_s` is seconds
    between load frames, 0.2..60. `free_wait_s` is how long a device may keep a dead job's memory before it is
    quarantined, 0..600. `address` is where gang members reach rank 0, None to find out; `interface` its network
    interface for NCCL and gloo, None to leave it to them. `lent_slots` None lends all. `secrets_dir` is the folder
    that only the agent reads. `simulate` is a fleet's word or file (see `inventory.simulated`). `output_cap_bytes`
    bounds each of a job's two output files. `leases`: lend GPUs to processes that already run on this host, over the
    socket `lease_socket` (None: `lease.sock` in `state_dir`); beside the agent's own user and root to the users
    `lease_uids`, who need a `lease_gid` that may reach the socket.
    """

    state_dir: Path
    worker: str | None = None
    prefix: str = PREFIX_DEFAULT
    labels: dict[str, str] = {}
    modes: tuple[str, ...] = MODES_DEFAULT
    sharers_max: dict[str, int] = {}
    lent_slots: tuple[int, ...] | None = None
    simulate: str | None = None
    drivers: tuple[str, ...] = ("process",)
    load_s: float = LOAD_S_DEFAULT
    free_wait_s: float = FREE_WAIT_S_DEFAULT
    address: str | None = None
    interface: str | None = None
    secrets_dir: Path | None = None
    stream_output: bool = True
    output_cap_bytes: int = OUTPUT_CAP_BYTES_DEFAULT
    leases: bool = True
    lease_socket: Path | None = None
    lease_uids: tuple[int, ...] = ()
    lease_gid: int | None = None

    def __post_init__(self) -> None:
        if self.worker is not None and not is_worker(self.worker):
            raise ValueError(f"worker must match [A-Za-z0-9_-]{{1,64}}, found {self.worker[:80]!r}")
        if len(self.labels) > LABELS_MAX:
            raise ValueError(f"labels may have at most {LABELS_MAX} keys, found {len(self.labels)}")
        for key in self.labels:
            if not LABEL_KEY.fullmatch(key):
                raise ValueError(f"label key {key[:80]!r} must be 1..63 letters, digits and _./-")
        for mode in (*self.modes, *self.sharers_max):
            if mode != "exclusive" and mode not in SHARERS_MAX:
                raise ValueError(f"modes must be exclusive, mps or time-slice, found {mode!r}")
        if len(self.lease_uids) > LEASE_UIDS_MAX:
            raise ValueError(f"lease_uids may have at most {LEASE_UIDS_MAX} users, found {len(self.lease_uids)}")
        if not 0.2 <= self.load_s <= 60:
            raise ValueError(f"load_s must be 0.2..60 seconds, found {self.load_s}")
        if not 0 <= self.free_wait_s <= 600:
            raise ValueError(f"free_wait_s must be 0..600 seconds, found {self.free_wait_s}")
        if not 0 <= self.output_cap_bytes <= 2**40:
            raise ValueError(f"output_cap_bytes must be 0..{2**40}, found {self.output_cap_bytes}")


def settings_from(table: Mapping[str, Any]) -> WorkerSettings:
    """Settings from a table, as TOML, JSON or the command line give it. Raises Refused, naming the field."""
    try:
        return msgspec.convert(table, WorkerSettings, dec_hook=_decode_path)
    except (msgspec.MsgspecError, ValueError) as error:
        raise refuse("failed-precondition", f"these settings cannot be: {error}", field="$") from error


def _decode_path(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise NotImplementedError(f"no setting is a {kind.__name__}")
