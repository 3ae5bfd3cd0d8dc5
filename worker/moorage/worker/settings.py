"""Declare every setting of a worker with its bounds; no other module reads files or variables for them."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec.structs import replace

from moorage.bus.results import RESULT_BYTES_DEFAULT, RESULT_KEEP_DEFAULT
from moorage.schemas.capabilities import DRIVER_DEFAULT
from moorage.schemas.errors import refuse
from moorage.schemas.frames import LEAVING_S_MAX, OTHERS, Device
from moorage.schemas.frames.fleet import LEASE_S_MAX, LOAD_S_DEFAULT
from moorage.schemas.gpu import GPUS_PER_REPLICA_MAX, SHARERS_MAX
from moorage.schemas.job import QOS, UID_MAX, Qos, check_uses
from moorage.schemas.names import LABEL_KEY, TENANT, WORKER, is_tenant, is_worker
from moorage.schemas.settings import NO_FILE, Found, SettingsFile, made, setting, settle
from moorage.schemas.staying import port_range
from moorage.schemas.subjects import PREFIX_DEFAULT
from moorage.schemas.where import LABEL_FORM, VALUE_CHARS_MAX, is_label
from moorage.worker.devices.device_health import PROBATION_S
from moorage.worker.devices.readers import READERS
from moorage.worker.devices.readers.base import FREE_WAIT_S
from moorage.worker.interruption import check_notice

SECTION: Final = "worker"
LABELS_MAX: Final = 64
GUARD_GRACE_S: Final = 1.0
IDLE_WARN_S: Final = 1800.0
CHECK_EVERY_S: Final = 3600.0
CHECK_TIMEOUT_S: Final = 120.0
IDLE_RECLAIM_S_MAX: Final = 366 * 86400
#: seconds without use of its GPUs after which a job is frozen where the settings say no other number; 0 is never
AUTO_FREEZE_S: Final[dict[Qos, int]] = {"low": 300, "medium": 300, "high": 300, "critical": 0}
LEASE_UIDS_MAX: Final = 64
PORTS_DEFAULT: Final = "20000-29999"
#: a host's name, or its address in version 4 or 6, also with a zone: fe80::1%eth0
_ADDRESS: Final = re.compile(r"[A-Za-z0-9_.:%-]{1,255}")
#: a network interface: Linux's own bound
_INTERFACE: Final = re.compile(r"[^\s/]{1,15}")
#: most tenants in one setting
TENANTS_MAX: Final = 1_000
#: most load frames a second when leases change
LOADS_ON_CHANGE_PER_S_MAX: Final = 5
_MIB: Final = 1 << 20
_GIB: Final = 1 << 30
DISK_RESERVE_DEFAULT: Final = 64 * _MIB
OUTPUT_CAP_BYTES_DEFAULT: Final = 64 * _MIB
OUTPUT_KEEP_DEFAULT: Final = 24 * 3600.0
OUTPUT_BYTES_DEFAULT: Final = 10 * _GIB
OUTPUT_MEMBERS_DEFAULT: Final = 50_000
FOLDER_BYTES_DEFAULT: Final = 100 * _GIB
FOLDER_KEEP_DEFAULT: Final = 600.0
FILES_BYTES_DEFAULT: Final = _GIB
FILES_CACHE_DEFAULT: Final = 4 * _GIB
CHECKPOINT_BYTES_DEFAULT: Final = 10 * _GIB
CHECKPOINT_RATE_DEFAULT: Final = 100 * _MIB
SETUP_BYTES_DEFAULT: Final = 64 * _GIB
DATA_BYTES_DEFAULT: Final = 256 * _GIB
LIMITER_CONTEXT_DEFAULT: Final = 512 * _MIB
#: drivers that take a GPU from its host: a check could not open it there
_GPUS_ELSEWHERE: Final = ("kubernetes", "vm")
#: modes that a worker offers by default; mps needs a daemon, so an operator (or a simulated worker) adds it
MODES_DEFAULT: Final = ("exclusive", "time-slice")
MODES_SIMULATED: Final = ("exclusive", "mps", "time-slice")
#: drivers that a worker offers by default, and a simulated one
DRIVERS_DEFAULT: Final = (DRIVER_DEFAULT,)
DRIVERS_SIMULATED: Final = (DRIVER_DEFAULT, "noop")


class WorkerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of one worker. Raises ValueError for invalid values (a ValidationError where msgspec decodes it).

    Each key's meaning, unit and bounds are in its declaration and in `docs/reference/settings.md`.
    """

    state_dir: Annotated[Path, setting("Folder of its journals and its supervisor, made 0700.", flag="state")]
    worker: Annotated[str | None, setting("The worker's id; the host's name by default.", of_site="always")] = (
        msgspec.field(name="id", default=None)
    )
    prefix: Annotated[str, setting("Beginning of every subject, one word or several, as gpu.eu.", of_site="always")] = (
        PREFIX_DEFAULT
    )
    labels: Annotated[dict[str, str], setting("Labels that requests may require, as zone=a.", flag="label")] = {}
    counts: Annotated[
        dict[str, int],
        setting("Counters of which jobs take with --uses host.NAME=1, as camera=2 for two cameras.", flag="count"),
    ] = {}
    modes: Annotated[
        tuple[str, ...],
        setting("Sharing modes on offer: exclusive, time-slice, and mps where MPS daemons run (see the setting mps)."),
    ] = MODES_DEFAULT
    sharers_max: Annotated[
        dict[str, int], setting("Sharers of one device, by mode: mps 0..8, time-slice 0..4; 0 does not offer the mode.")
    ] = {}
    slot_modes: Annotated[
        dict[str, str],
        setting(
            "Modes that a device is reserved for, by its position, separated by blanks; without an entry, all of modes."
        ),
    ] = {}
    slot_labels: Annotated[
        dict[str, str],
        setting(
            "Labels of a single device, by its position, separated by blanks; each takes the place of the worker's of"
            " that name."
        ),
    ] = {}
    device_fence: Annotated[
        Literal["auto", "require", "off"],
        setting(
            "Whether the kernel refuses GPUs that a job of the driver process does not lease: auto if it can (as root);"
            " require: the worker does not start where it cannot; off: only a variable names a job's GPUs."
        ),
    ] = "auto"
    mps: Annotated[
        Literal["operator", "managed"],
        setting(
            "Who runs the MPS daemons: operator, or managed: the worker starts one for each GPU that a job shares."
        ),
    ] = "operator"
    mps_dir: Annotated[
        Path | None,
        setting("Folder of the sockets of managed MPS daemons; by default one in /run as root, else in state_dir."),
    ] = None
    visible_devices: Annotated[
        Literal["auto", "uuid"],
        setting(
            "What CUDA_VISIBLE_DEVICES has: uuid; or auto: numbers, but uuids beside GPUs in MIG mode or the driver vm."
        ),
    ] = "auto"
    lent_slots: Annotated[
        tuple[int, ...] | None, setting("Positions of the devices that the scheduler may use; all by default.")
    ] = None
    cores_per_gpu: Annotated[
        float,
        setting(
            "Cores that are kept for each GPU (of a GPU in slices, for each slice): jobs without a GPU get the rest.",
            ge=0,
            le=1024,
        ),
    ] = 0.0
    simulate: Annotated[
        str | None, setting("Simulated hosts instead of this one: 4x8xH100, 2x4xL40S+8xH100, or a .toml or .json file.")
    ] = None
    play_freezing: Annotated[
        bool,
        setting("With simulate: jobs of the driver process can be frozen, which takes a second and stops nothing."),
    ] = False
    drivers: Annotated[
        tuple[str, ...],
        setting("Ways to run a job: process, docker, podman, kubernetes, vm, a package's driver, or module:Class."),
    ] = DRIVERS_DEFAULT
    readers: Annotated[
        tuple[str, ...],
        setting("Where devices come from: nvidia (NVML, or CDI specs), drm, a package's reader, or module:Class."),
    ] = tuple(READERS)
    load_s: Annotated[float, setting("Seconds between load frames.", unit="s", ge=0.2, le=60)] = LOAD_S_DEFAULT
    lease_s: Annotated[
        float,
        setting(
            "How long its jobs go on without an answer of a scheduler, and so begin nowhere else: 30s in a machine"
            " room, 10m behind a slow link. The scheduler's lease_s is the least, its lease_most the most.",
            unit="s",
            ge=0,
            le=LEASE_S_MAX,
        ),
    ] = 0.0
    free_wait_s: Annotated[
        float,
        setting("How long a device may keep a dead job's memory before it is quarantined.", unit="s", ge=0, le=600),
    ] = FREE_WAIT_S
    leave: Annotated[
        float,
        setting(
            "How long a worker that is told to end lets members of services go on, until others serve in their place;"
            " its other jobs end at once. 0: all run on for the next agent, if their driver can.",
            unit="s",
            ge=0,
            le=LEAVING_S_MAX,
        ),
    ] = 0.0
    join: Annotated[
        Path | None,
        setting(
            "File with a join token, or /dev/stdin: by it this machine gets its id and a key of its own once, which are"
            " kept in state_dir.",
        ),
    ] = None
    notice: Annotated[
        str,
        setting(
            "Where the coming end of this machine is told, so that its jobs move before: a file that appears (its whole"
            " path), an address that answers (http://…), or the metadata of aws, google or azure.",
        ),
    ] = ""
    probation: Annotated[
        float,
        setting(
            "How long a GPU that failed must be without a fault before it is used again; doubles with each failure "
            "within a day.",
            unit="s",
            ge=0,
            le=86400,
        ),
    ] = PROBATION_S
    check_command: Annotated[
        tuple[str, ...],
        setting(
            "Program that checks one GPU, and its arguments: it runs on idle GPUs, as the user of jobs; exit code 0 is"
            " well, another one closes the GPU. Empty: none."
        ),
    ] = ()
    check_every: Annotated[
        float, setting("How often each GPU is checked while it is idle; 0: never.", unit="s", ge=0, le=30 * 86400)
    ] = CHECK_EVERY_S
    check_on_join: Annotated[bool, setting("Check idle GPUs at the worker's start, before jobs come.")] = True
    check_after_fault: Annotated[
        bool, setting("Check a GPU that is in use again: after a fault, or released by an operator.")
    ] = True
    check_timeout: Annotated[
        float, setting("How long a check may take; then it is killed, and has failed.", unit="s", ge=0.1, le=86400)
    ] = CHECK_TIMEOUT_S
    guard: Annotated[
        bool, setting("End jobs that use more of a shared GPU's memory than their share, where that can be measured.")
    ] = True
    guard_grace_s: Annotated[
        float, setting("How long a job may use more of a shared GPU's memory than its share.", unit="s", ge=0, le=600)
    ] = GUARD_GRACE_S
    idle_warn_s: Annotated[
        float,
        setting(
            "After each such time without use of its GPUs, a job that has GPUs alone gets an event; 0: never.",
            unit="s",
            ge=0,
            le=30 * 86400,
        ),
    ] = IDLE_WARN_S
    idle_reclaim_s: Annotated[
        dict[str, int],
        setting(
            "Seconds without use of its GPUs after which a tenant's job is ended; * is every other tenant, 0 is never."
        ),
    ] = {}
    auto_freeze: Annotated[
        bool,
        setting(
            "Freeze a job that has GPUs alone and does not use them, until it uses them again. It needs limiter = true."
        ),
    ] = False
    auto_freeze_s: Annotated[
        dict[str, int],
        setting(
            "Seconds without use of its GPUs after which a job is frozen, by its qos: low, medium, high or critical;"
            " 0 is never. By default 300, and never for critical."
        ),
    ] = {}
    limiter: Annotated[
        bool, setting("Have jobs load a library that enforces their share of a GPU inside the job. It needs glibc.")
    ] = False
    limiter_context: Annotated[
        int,
        setting(
            "What the limiter counts for a process's CUDA context until NVML has measured it; and what a job that obeys"
            " the limiter may hold beyond its share.",
            unit="bytes",
            ge=0,
            le=1 << 40,
        ),
    ] = LIMITER_CONTEXT_DEFAULT
    address: Annotated[str | None, setting("Address of this host for the ranks of a gang; detected by default.")] = None
    ports: Annotated[
        str,
        setting(
            "Ports of this host that jobs may ask for with run.ports, free for this worker alone, as 20000-29999; empty"
            ' (""): none.'
        ),
    ] = PORTS_DEFAULT
    interface: Annotated[str | None, setting("Network interface for NCCL and gloo; their choice by default.")] = None
    secrets_dir: Annotated[Path | None, setting("Folder of secrets that only the agent reads.", flag="secrets")] = None
    calls_url: Annotated[
        str | None,
        setting("URL at which jobs that answer calls reach NATS; the worker's own, without login, by default."),
    ] = None
    drivers_for: Annotated[
        dict[str, str],
        setting(
            "Drivers that a tenant may use, split by blanks; the tenant * is every other one. Where this is set, a "
            "tenant without an entry may use none."
        ),
    ] = {}
    programs_for: Annotated[
        dict[str, str],
        setting(
            "Programs that a tenant may start, split by blanks: full paths (* stands for any characters) or names; the "
            "tenant * is every other one. Where this is set, a tenant without an entry may start none."
        ),
    ] = {}
    secrets_for: Annotated[
        dict[str, str],
        setting(
            "Secrets that a tenant may use, split by blanks (* stands for any characters); the tenant * is every other "
            "one. Where this is set, a tenant without an entry may use none."
        ),
    ] = {}
    run_as: Annotated[
        str | None,
        setting(
            "User that runs every job; without it the request's user, or the agent's own. Needs root.",
            of_site="unprivileged",
        ),
    ] = None
    run_as_for: Annotated[
        dict[str, str],
        setting(
            "User that runs a tenant's jobs, name or uid; * is every other tenant, by default run_as. Needs root.",
            of_site="unprivileged",
        ),
    ] = {}
    root_jobs: Annotated[
        Literal["warn", "refuse"],
        setting(
            "What an agent that runs as root does with processes that would run as root: start them, and warn of it at"
            " its start, or refuse them. Containers and guests have users of their own."
        ),
    ] = "warn"
    disk_reserve: Annotated[
        int,
        setting(
            "Room on the disk of state_dir that is kept for the journal, at most an eighth of the disk: with it the"
            " ends of jobs are reported though the disk is full. 0: none.",
            unit="bytes",
            ge=0,
            le=1 << 40,
        ),
    ] = DISK_RESERVE_DEFAULT
    stream_output: Annotated[bool, setting("Publish the jobs' output while they run; it is kept in any case.")] = True
    output_cap_bytes: Annotated[
        int,
        setting(
            "Size limit of each of a job's two output files: of a longer stream its first quarter and its end stay.",
            unit="bytes",
            ge=0,
            le=1 << 40,
        ),
    ] = OUTPUT_CAP_BYTES_DEFAULT
    output_keep: Annotated[
        float, setting("How long the output of finished jobs is kept.", unit="s", ge=0, le=366 * 86400)
    ] = OUTPUT_KEEP_DEFAULT
    output_bytes: Annotated[
        int,
        setting(
            "Size limit of all output; beyond it the output of the job that finished first is deleted.",
            unit="bytes",
            ge=0,
            le=1 << 50,
        ),
    ] = OUTPUT_BYTES_DEFAULT
    output_members: Annotated[
        int, setting("Finished attempts whose output is kept; beyond it the oldest is deleted.", ge=0, le=10**6)
    ] = OUTPUT_MEMBERS_DEFAULT
    folder_dir: Annotated[
        Path | None,
        setting("Folder of the attempts' folders; by default in state_dir. The jobs' users must be able to enter it."),
    ] = None
    folder_bytes: Annotated[
        int,
        setting(
            "Size limit of an attempt's folder on disk, and of a setup's; what exceeds it is ended.",
            unit="bytes",
            ge=_MIB,
            le=1 << 50,
        ),
    ] = FOLDER_BYTES_DEFAULT
    folder_keep: Annotated[
        float,
        setting(
            "How long the folder of a finished attempt stays; an empty one is deleted at once.",
            unit="s",
            ge=0,
            le=366 * 86400,
        ),
    ] = FOLDER_KEEP_DEFAULT
    files_bytes: Annotated[
        int,
        setting(
            "Size limit of the files that a job brings, unpacked, and of the files that it keeps.",
            unit="bytes",
            ge=_MIB,
            le=1 << 40,
        ),
    ] = FILES_BYTES_DEFAULT
    files_cache: Annotated[
        int,
        setting(
            "Size limit of the cache of files that jobs brought; the least recently used are deleted first.",
            unit="bytes",
            ge=0,
            le=1 << 50,
        ),
    ] = FILES_CACHE_DEFAULT
    checkpoint_bytes: Annotated[
        int,
        setting(
            "Size limit of a replica's checkpoint: of one that is stored at an attempt's end, and of two together while"
            " it runs, with what they share counted once.",
            unit="bytes",
            ge=_MIB,
            le=1 << 40,
        ),
    ] = CHECKPOINT_BYTES_DEFAULT
    checkpoint_rate: Annotated[
        int,
        setting(
            "Bytes per second at which checkpoints of jobs that run are read to be stored, all together; 0: no bound.",
            unit="bytes",
            ge=0,
            le=1 << 40,
        ),
    ] = CHECKPOINT_RATE_DEFAULT
    data_dirs: Annotated[
        tuple[str, ...],
        setting("Folders of this host below which a job's --data may name a path."),
    ] = ()
    data_bytes: Annotated[
        int,
        setting(
            "Size limit of the data that were fetched for jobs, for each driver; the least recently used go first.",
            unit="bytes",
            ge=_MIB,
            le=1 << 50,
        ),
    ] = DATA_BYTES_DEFAULT
    setup_bytes: Annotated[
        int,
        setting(
            "Size limit of what jobs' setups left, for each driver; the least recently used go first.",
            unit="bytes",
            ge=_MIB,
            le=1 << 50,
        ),
    ] = SETUP_BYTES_DEFAULT
    result_keep: Annotated[
        float,
        setting(
            "How long results of handlers stay in a bucket that this worker makes.", unit="s", ge=60, le=366 * 86400
        ),
    ] = RESULT_KEEP_DEFAULT
    result_bytes: Annotated[
        int,
        setting(
            "Size of a result bucket that this worker makes; JetStream reserves it at once.",
            unit="bytes",
            ge=_MIB,
            le=1 << 50,
        ),
    ] = RESULT_BYTES_DEFAULT
    leases: Annotated[bool, setting("Lend GPUs to processes that already run on this host, over a socket.")] = True
    lease_socket: Annotated[Path | None, setting("Socket for lent GPUs; lease.sock in state_dir by default.")] = None
    lease_uids: Annotated[
        tuple[int, ...], setting("Users who may borrow, besides the agent's own and root; they need lease_gid.")
    ] = ()
    lease_gid: Annotated[int, setting("Group that may reach the socket.", ge=0, le=UID_MAX)] | None = None
    nats: Annotated[
        str | None,
        setting("URL or nats context of the server; else the one that the nats command would use.", of_site="always"),
    ] = None
    log_level: Annotated[
        Literal["DEBUG", "INFO", "WARNING", "ERROR"], setting("Least severity that is logged, to stderr.")
    ] = "INFO"
    log_format: Annotated[
        Literal["text", "json"], setting("How an entry of the log is written; json: one object a line.")
    ] = "text"

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            given = getattr(self, name)
            if isinstance(given, Path) and not given.is_absolute():  # the supervisor has another current folder
                msgspec.structs.force_setattr(self, name, given.absolute())
        if self.worker is not None and not is_worker(self.worker):
            raise ValueError(f"id must match {WORKER.pattern}, found {self.worker[:80]!r}")
        for name, form in (("address", _ADDRESS), ("interface", _INTERFACE)):
            given = getattr(self, name)
            if given is not None and not form.fullmatch(given):
                raise ValueError(f"{name} must match {form.pattern}, found {given[:80]!r}")
        port_range(self.ports)
        if len(self.labels) > LABELS_MAX:
            raise ValueError(f"labels may have at most {LABELS_MAX} keys, found {len(self.labels)}")
        for key in self.labels:
            if not LABEL_KEY.fullmatch(key):
                raise ValueError(f"labels must have keys of 1..63 letters, digits and _./-, found {key[:80]!r}")
        try:
            check_uses(self.counts)
        except ValueError as error:
            raise ValueError(str(error).replace("uses", "counts")) from None
        for mode in self.modes:
            if mode != "exclusive" and mode not in SHARERS_MAX:
                raise ValueError(f"modes must be exclusive, mps or time-slice, found {mode!r}")
        for mode, sharers in self.sharers_max.items():
            if mode not in SHARERS_MAX:
                raise ValueError(f"sharers_max must name mps or time-slice, found {mode!r}")
            if not 0 <= sharers <= SHARERS_MAX[mode]:
                raise ValueError(f"sharers_max must be 0..{SHARERS_MAX[mode]} for {mode}, found {sharers}")
        for name, slots in (("slot_modes", self.slot_modes), ("slot_labels", self.slot_labels)):
            for slot in slots:
                if not slot.isdecimal() or str(int(slot)) != slot or int(slot) >= GPUS_PER_REPLICA_MAX:
                    raise ValueError(
                        f"{name} must have positions 0..{GPUS_PER_REPLICA_MAX - 1} as keys, found {slot[:80]!r}"
                    )
        for slot, words in self.slot_labels.items():
            _labels_in(slot, words)
        for slot, words in self.slot_modes.items():
            if not words.split() or not set(words.split()) <= set(self.modes_offered):
                offered = ", ".join(self.modes_offered)
                raise ValueError(f"slot_modes must name some of {offered} for slot {slot}, found {words[:80]!r}")
        check_rules("idle_reclaim_s", dict.fromkeys(self.idle_reclaim_s, ""))
        for tenant, seconds in self.idle_reclaim_s.items():
            if not 0 <= seconds <= IDLE_RECLAIM_S_MAX:
                raise ValueError(f"idle_reclaim_s must be 0..{IDLE_RECLAIM_S_MAX} for {tenant}, found {seconds}")
        for qos, seconds in self.auto_freeze_s.items():
            if qos not in QOS:
                raise ValueError(f"auto_freeze_s must name {', '.join(QOS)}, found {qos[:80]!r}")
            if not 0 <= seconds <= IDLE_RECLAIM_S_MAX:
                raise ValueError(f"auto_freeze_s must be 0..{IDLE_RECLAIM_S_MAX} for {qos}, found {seconds}")
        if self.play_freezing and not self.simulate:
            raise ValueError("play_freezing is of simulated hosts: give simulate, or leave it out")
        if self.auto_freeze and not self.limiter:
            raise ValueError(
                "auto_freeze needs limiter = true: without the limiter's library nothing resumes a job as it uses its"
                " GPUs again; set limiter = true, or take auto_freeze out"
            )
        check_notice(self.notice)
        if self.check_command and (elsewhere := [each for each in self.drivers if each in _GPUS_ELSEWHERE]):
            raise ValueError(
                f"check_command runs on the host, and the driver {elsewhere[0]} has the GPUs elsewhere: remove one"
            )
        for name in ("drivers_for", "programs_for", "secrets_for", "run_as_for"):
            check_rules(name, getattr(self, name))
        if len(self.lease_uids) > LEASE_UIDS_MAX:
            raise ValueError(f"lease_uids may have at most {LEASE_UIDS_MAX} users, found {len(self.lease_uids)}")
        for uid in self.lease_uids:
            if not 0 <= uid <= UID_MAX:
                raise ValueError(f"lease_uids must be 0..{UID_MAX}, found {uid}")

    @property
    def ports_lent(self) -> range:
        """The ports that its jobs may have."""
        return port_range(self.ports)

    @property
    def modes_offered(self) -> tuple[str, ...]:
        """The sharing modes on offer, without modes that `sharers_max` sets to 0."""
        return tuple(mode for mode in self.modes if self.sharers_max.get(mode, 1) > 0)

    def kept_devices(self, devices: Sequence[Device]) -> list[Device]:
        """Return a host's devices with the modes that each is kept for, and with their labels.

        Raises Refused for a position without a device in slot_modes, slot_labels or lent_slots.
        """
        kept = {int(slot): words.split() for slot, words in self.slot_modes.items()}
        labels = {int(slot): _labels_in(slot, words) for slot, words in self.slot_labels.items()}
        for name, slots in (("slot_modes", kept), ("slot_labels", labels), ("lent_slots", self.lent_slots or ())):
            if unknown := [slot for slot in slots if not 0 <= slot < len(devices)]:
                raise refuse(
                    "failed-precondition",
                    f"{name} names position {unknown[0]}, and this host has {len(devices)} devices",
                    field=f"$.{name}",
                    found=unknown[0],
                    allowed=f"0..{len(devices) - 1}" if devices else "none: the host has no device",
                    next=f"give {name} positions of this host's devices, which begin with 0, or remove it",
                )
        return [
            replace(one, modes=kept.get(slot, one.modes), labels=labels.get(slot, one.labels))
            for slot, one in enumerate(devices)
        ]

    def shows_uuids(self, devices: Sequence[Device]) -> bool:
        """Return whether NVIDIA devices of this host are shown to CUDA by uuid, not by number.

        By a setting, or where numbers change or mean something else: CUDA does not count GPUs in MIG mode as NVML does,
        and counts no GPU that a VM has.
        """
        return self.visible_devices == "uuid" or "vm" in self.drivers or any(device.mig for device in devices)

    def freezes_after_s(self, qos: Qos) -> int:
        """Return after how many seconds without use of its GPUs a job of that `qos` is frozen; 0: never."""
        return self.auto_freeze_s.get(qos, AUTO_FREEZE_S[qos]) if self.auto_freeze else 0

    @property
    def modes_lent(self) -> tuple[str, ...]:
        """The modes in which the worker lends GPUs to processes of this host: those on offer, without a managed mps."""
        return tuple(mode for mode in self.modes_offered if mode != "mps" or self.mps != "managed")


def _labels_in(slot: str, words: str) -> dict[str, str]:
    """Return the labels of the device in a slot. Raises ValueError for a text that gives it none, or some twice."""
    found: dict[str, str] = {}
    for word in words.split():
        label, _, value = word.partition("=")
        if not is_label(label) or not 1 <= len(value) <= VALUE_CHARS_MAX or "," in value or label in found:
            raise ValueError(
                f"slot_labels must give slot {slot} each label once, as tier=fast wall=a: a name ({LABEL_FORM}) and a"
                f" value of 1..{VALUE_CHARS_MAX} characters without a comma, found {word[:80]!r}"
            )
        found[label] = value
    if not 1 <= len(found) <= LABELS_MAX:
        raise ValueError(f"slot_labels must give slot {slot} 1..{LABELS_MAX} labels, found {len(found)}")
    return found


def mps_folder(settings: WorkerSettings) -> Path:
    """Return the directory of a worker's MPS daemons; jobs of other users must be able to reach it."""
    if settings.mps_dir is not None:
        return settings.mps_dir
    if os.geteuid() != 0:
        return settings.state_dir / "mps"
    state = os.fsencode(settings.state_dir.absolute())
    return Path(f"/run/moorage-mps-{hashlib.blake2b(state, digest_size=6).hexdigest()}")


def worker_settings(
    flags: Mapping[str, Any],
    folder: Path,
    env: Mapping[str, str] | None = None,
    file: SettingsFile = NO_FILE,
) -> tuple[WorkerSettings, dict[str, Found]]:
    """Return the settings of a worker process, and for each where it comes from.

    By default its state is under `folder`, and a simulated worker offers all modes and the driver noop. Raises Refused
    with bad-settings.
    """
    found = settle(SECTION, WorkerSettings, flags=flags, env=env, file=file)
    simulate = found["simulate"].value
    defaults: dict[str, Any] = {"state_dir": folder / (found["id"].value or ("simulated" if simulate else "here"))}
    if simulate:
        defaults |= {"modes": MODES_SIMULATED, "drivers": DRIVERS_SIMULATED}
    found = settle(SECTION, WorkerSettings, flags=flags, env=env, file=file, defaults=defaults)
    return made(WorkerSettings, found), found


def settings_from(table: Mapping[str, Any]) -> WorkerSettings:
    """Return settings from a table of plain values, as JSON gives them. Raises Refused; its text names the field."""
    try:
        return msgspec.convert(table, WorkerSettings, dec_hook=_decode_path)
    except (msgspec.MsgspecError, ValueError) as error:
        raise refuse("failed-precondition", f"these settings cannot be used: {error}", field="$") from error


def _decode_path(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise NotImplementedError(f"no setting is a {kind.__name__}")


def check_rules(name: str, rules: Mapping[str, str]) -> None:
    """Raise ValueError for invalid or too many tenants, and in `run_as` settings for a tenant without a user."""
    if len(rules) > TENANTS_MAX:
        raise ValueError(f"{name} may have at most {TENANTS_MAX} tenants, found {len(rules)}")
    for tenant, words in rules.items():
        if tenant != OTHERS and not is_tenant(tenant):
            raise ValueError(
                f"{name} must have tenants as keys ({TENANT.pattern}, * for all others), found {tenant[:80]!r}"
            )
        if not words.strip() and name.startswith("run_as"):
            raise ValueError(f"{name} must name a user for {tenant}")
