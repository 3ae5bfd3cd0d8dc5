"""What a request asks of GPUs: the `gpu` object, its checks, and tokens such as `2xH100:80G@mps=50%`."""

from __future__ import annotations

import functools
import re
from typing import Final, Literal

import msgspec

from moorage.schemas.capabilities import ADVISORY, Enforced, Level, job_enforced, level_number
from moorage.schemas.tflops import parse_tflops
from moorage.schemas.trouble import Trouble, quoted

Sharing = Literal["exclusive", "mps", "time-slice"]
Scheduling = Literal["best-effort", "gang", "spread"]
MODES: Final = ("native", "vm")
#: the vendor whose devices `mode` is looked at for
APPLE: Final = "apple"
SHARING_MODES: Final[tuple[Sharing, ...]] = ("exclusive", "mps", "time-slice")

GPUS_PER_REPLICA_MAX: Final = 64  # a worker's slots are one 64-bit mask in the ledger
MODELS_MAX: Final = 16
MEMORY_MIB_MAX: Final = 16 * 1024 * 1024
#: sharers a GPU takes unless the worker says less
SHARERS_MAX: Final[dict[str, int]] = {"mps": 8, "time-slice": 4}
#: an "80 GB" card shows a little more or less than 80e9 bytes; the token is nominal within this tolerance
NOMINAL_TOLERANCE: Final = 0.02
#: behind a number of TFLOPS in a token
TFLOPS: Final = "tflops"


#: as NVIDIA names them: 1g.10gb, 1g.10gb+me, 2c.3g.40gb
_PROFILE: Final = re.compile(r"(?:[1-7]c\.)?[1-7]g\.[0-9]{1,4}gb(?:[+-][a-z.]{1,16})*")


class Distributed(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """How the ranks of a gang meet. One replica that is no gang is rank 0 of 1, and meets itself on its host."""

    backend: str = "nccl"  # name of the backend: nccl, gloo, mpi or any other word
    master_port: int = 29500  # TCP port, 1..65535; if it is taken, the next free one

    def __post_init__(self) -> None:
        if not 1 <= self.master_port <= 65535:
            raise ValueError(f"master_port must be 1..65535, found {self.master_port}")


class Share(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """The part of one device that a sharer asks for."""

    memory_mib: int = 0  # MiB of each GPU; 0 is not counted
    compute_percent: int = 100  # percentage of a GPU's compute time, 1..100
    #: TFLOPS in place of compute_percent: a number, alone or followed by m, k, K, M or G. The request names one model;
    #: the scheduler turns the number into a percentage as it accepts the job
    tflops: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.memory_mib <= MEMORY_MIB_MAX:
            raise ValueError(f"share.memory_mib must be 0..{MEMORY_MIB_MAX}, found {self.memory_mib}")
        if not 1 <= self.compute_percent <= 100:
            raise ValueError(f"share.compute_percent must be 1..100, found {self.compute_percent}")
        if self.tflops is not None:
            if self.compute_percent != 100:
                raise ValueError("share.compute_percent and share.tflops say the same: send one of them")
            if parse_tflops(self.tflops) <= 0:
                raise ValueError(f"share.tflops must be above 0, found {self.tflops!r}")

    @property
    def has_compute(self) -> bool:
        """Whether the share names a part of the compute: TFLOPS, or less than 100 percent."""
        return self.compute_percent < 100 or self.tflops is not None


class Enforce(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """The lowest levels at which the worker must keep the job to its part of a GPU; null accepts any level."""

    memory: Level | None = None  # hard, guarded or advisory
    compute: Level | None = None  # hard, guarded or advisory


class GpuSpec(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """The `gpu` object of a request. `{}` is one NVIDIA GPU of any model, exclusive, best effort.

    What no fleet could have is refused as `invalid-argument`, with the path of the field.
    """

    count: int = 1  # number of GPUs of a replica, 1..64, all of one host
    vendor: str | None = None  # vendor of the GPU; "" is any. null: nvidia, or any vendor if a model is named
    mode: str | None = None  # native or vm; reserved for Apple GPUs, which no driver supports: it waits
    model: str | list[str] | None = None  # whole words of the GPU's name, in any case; `~A10` also inside a word
    min_memory_mib: int | None = None  # least memory of each GPU, MiB
    #: least compute capability of each GPU, as NVIDIA counts it: 8.0; GPUs of other vendors have none
    min_compute_capability: str | None = None
    #: a MIG slice of this profile, as 1g.10gb, in place of a whole GPU; without it a slice answers only a request that
    #: names nothing but memory
    profile: str | None = None
    sharing: Sharing | None = None  # sharing mode: exclusive, mps or time-slice; null is exclusive
    share: Share | None = None  # part of each GPU, with mps and time-slice
    enforce: Enforce | None = None  # least enforcement of its part; workers that do less are left out
    #: when replicas start: each as there is room, all at once or none, or as there is room on the hosts with the fewest
    #: of them; null is the last for a service, else the first
    scheduling: Scheduling | None = None
    #: whether each replica of a gang has a host of its own; without it, as many as fit may be on one host
    distinct_hosts: bool = False
    #: a sharer's GPU: the one with the most other sharers, or with the fewest; null: as the ranker chooses
    prefer: Literal["pack", "spread"] | None = None
    #: how the GPUs of a replica, two or more, are joined: by NVLink, directly or through others of them; it waits for
    #: such ones. null prefers them
    topology: Literal["nvlink"] | None = None
    distributed: Distributed | None = None  # settings of the processes of a gang, or of one replica
    mps_pipe_dir: str | None = None  # the MPS daemon's pipe directory, absolute, with sharing mps; null is the default
    mps_log_dir: str | None = None  # the MPS daemon's log directory, absolute, with sharing mps; null is the default
    time_slice_index: int | None = None  # index of the one GPU of the host that the job takes, with time-slice
    time_slicing_config_path: str | None = None  # absolute path of a file that must exist on the host, with time-slice

    def __post_init__(self) -> None:
        if not 1 <= self.count <= GPUS_PER_REPLICA_MAX:
            more = " (more are replicas of a gang, as 16x8xH100 with --gang)" if self.count > 0 else ""
            raise ValueError(f"count must be 1..{GPUS_PER_REPLICA_MAX}{more}, found {self.count}")
        if self.min_memory_mib is not None and not 0 <= self.min_memory_mib <= MEMORY_MIB_MAX:
            raise ValueError(f"min_memory_mib must be 0..{MEMORY_MIB_MAX}, found {self.min_memory_mib}")
        if self.min_compute_capability is not None and not capability_of(self.min_compute_capability):
            raise ValueError(f"min_compute_capability must look like 8.0, found {self.min_compute_capability[:80]!r}")
        model = self.model
        if model is not None:
            patterns = [model] if isinstance(model, str) else model
            if not patterns or len(patterns) > MODELS_MAX:
                raise ValueError(f"model must name 1..{MODELS_MAX} patterns, found {len(patterns)}")
            for pattern in patterns:
                check_pattern("model", pattern)
        if self.time_slice_index is not None:
            if self.sharing != "time-slice":
                raise ValueError("time_slice_index needs sharing time-slice")
            if self.count != 1:
                raise ValueError(f"time_slice_index needs count 1, found {self.count}")
            if not 0 <= self.time_slice_index < GPUS_PER_REPLICA_MAX:
                raise ValueError(
                    f"time_slice_index must be 0..{GPUS_PER_REPLICA_MAX - 1}, found {self.time_slice_index}"
                )
        if self.share is not None and self.sharing in (None, "exclusive"):
            raise ValueError("share needs sharing mps or time-slice")

    @property
    def trouble(self) -> Trouble | None:
        """A field without effect, or without a meaning on any host; None if there is none. See `Request.trouble`."""
        if self.mode is not None and self.mode not in MODES:
            allowed = f"{', '.join(MODES)}, or null"
            return Trouble("gpu.mode", f"mode must be one of {allowed}", quoted(self.mode), allowed)
        if self.distinct_hosts and self.effective_scheduling != "gang":
            message = "distinct_hosts is about the replicas of a gang, which start together or not at all"
            return Trouble(
                "gpu.distinct_hosts", message, quoted(self.effective_scheduling), "scheduling gang, or false"
            )
        if self.topology is not None and (self.count == 1 or self.effective_sharing != "exclusive"):
            message = "topology is about two or more GPUs of a replica, which are its own"
            found = f"{self.count} GPU" if self.count == 1 else self.effective_sharing
            return Trouble("gpu.topology", message, found, "null with one GPU, and with a shared one")
        if self.prefer is not None and self.effective_sharing == "exclusive":
            return Trouble("gpu.prefer", "prefer needs sharing mps or time-slice", self.prefer, "null without sharing")
        if self.profile is not None and (trouble := self._profile_trouble(self.profile)) is not None:
            return trouble
        if self.enforce is not None and (trouble := self._enforce_trouble(self.enforce)) is not None:
            return trouble
        for name, path, sharing in (
            ("mps_pipe_dir", self.mps_pipe_dir, "mps"),
            ("mps_log_dir", self.mps_log_dir, "mps"),
            ("time_slicing_config_path", self.time_slicing_config_path, "time-slice"),
        ):
            if path is None:
                continue
            if self.sharing != sharing:
                return Trouble(
                    f"gpu.{name}", f"{name} needs sharing {sharing}", quoted(path), f"null without sharing {sharing}"
                )
            if not path.startswith("/") or "\0" in path:
                return Trouble(
                    f"gpu.{name}", f"{name} must be an absolute path on the worker", quoted(path), "a path from /"
                )
        return None

    def _profile_trouble(self, profile: str) -> Trouble | None:
        if not _PROFILE.fullmatch(profile):
            message = "profile must be the name of a MIG profile"
            return Trouble("gpu.profile", message, quoted(profile), "such as 1g.10gb, or null")
        if self.count != 1:
            message = "a process can use one MIG slice: CUDA shows no second one"
            return Trouble("gpu.count", message, str(self.count), "1 with a profile")
        if self.effective_sharing != "exclusive":
            return Trouble("gpu.sharing", "a MIG slice cannot be shared", self.effective_sharing, "null with a profile")
        return None

    def _enforce_trouble(self, enforce: Enforce) -> Trouble | None:
        if self.effective_sharing == "exclusive":
            return None
        share = self.share or Share()
        for name, level, part, has_part in (
            ("memory", enforce.memory, "share.memory_mib", share.memory_mib > 0),
            ("compute", enforce.compute, "share.compute_percent below 100", share.has_compute),
        ):
            if level not in (None, "advisory") and not has_part:
                return Trouble(
                    f"gpu.enforce.{name}", f"enforce.{name} needs {part}: else the job has no part to be kept to",
                    quoted(str(level)), f"null without {part}",
                )  # fmt: skip
        return None

    @property
    def levels_required(self) -> tuple[int, int]:
        """Return the lowest accepted enforcement levels of memory and compute, as positions in `LEVELS`."""
        if self.enforce is None:
            return 0, 0
        return level_number(self.enforce.memory or ADVISORY.memory), level_number(self.enforce.compute or "advisory")

    def enforced(self, by_mode: Enforced) -> Enforced:
        """Return how strictly a job with this spec is kept to its part, if its worker can do this for its mode."""
        share = self.share or Share()
        return job_enforced(
            by_mode, self.effective_sharing,
            has_memory=share.memory_mib > 0, has_compute=share.has_compute,
        )  # fmt: skip

    @property
    def models(self) -> tuple[str, ...]:
        """The models of which any will do; empty means any model at all."""
        if self.model is None:
            return ()
        return (self.model,) if isinstance(self.model, str) else tuple(self.model)

    @property
    def effective_vendor(self) -> str:
        """The vendor to match, in lower case; "" matches any."""
        if self.vendor is None:
            return "" if self.model is not None else "nvidia"
        return self.vendor.lower()

    @property
    def effective_sharing(self) -> Sharing:
        return self.sharing or "exclusive"

    @property
    def slice_profile(self) -> str | None:
        """Return the profile of the MIG slice that the job takes, "" for any profile, or None if it takes only whole
        devices."""
        if self.profile is not None:
            return self.profile
        takes_any = (
            self.count == 1 and self.effective_sharing == "exclusive" and self.min_memory_mib and not self.models
        )
        return "" if takes_any else None

    @property
    def effective_scheduling(self) -> Scheduling:
        return self.scheduling or "best-effort"


_CAPABILITY: Final = re.compile(r"([1-9][0-9]?)\.([0-9])")


def capability_of(text: str) -> int:
    """Return a CUDA compute capability as a number that orders: 86 of `8.6`; 0 of any other text, such as `gfx942`."""
    found = _CAPABILITY.fullmatch(text)
    return 0 if found is None else 10 * int(found[1]) + int(found[2])


def takes_part(asked: str | None, profile: str) -> bool:
    """Return whether a request with this `slice_profile` takes a slice of `profile`; `profile` "" is a whole device."""
    return asked in ("", profile) if profile else not asked


def mig_profile(name: str) -> str:
    """Return the profile in the name of a MIG slice, as in `NVIDIA H100 80GB HBM3 MIG 1g.10gb`; "" for a whole GPU."""
    _, is_slice, profile = name.rpartition(" MIG ")
    return profile if is_slice else ""


_SUPERCHIP: Final = re.compile(r"\bg[hb]\d")
#: how well a name answers that has the pattern as a word of its own
WHOLE_WORDS: Final = 2
#: answers that are remembered: a fleet has few names, and requests few patterns
MATCHES_KNOWN: Final = 16_384


def check_pattern(field: str, pattern: str) -> None:
    """Raise ValueError for a pattern of models that is blank or too long."""
    if not pattern.strip("=~ ") or len(pattern) > 64:
        raise ValueError(f"{field} must have patterns of 1..64 characters, found {pattern[:80]!r}")


@functools.lru_cache(MATCHES_KNOWN)
def model_matches(pattern: str, name: str) -> int:
    """Return how well a device name matches a model pattern: 2 as whole words, 1 inside a word, 0 not at all.

    Upper and lower case are the same. `A10` matches whole words only, so it does not match an A100; `=A10` is the same.
    `~A10` matches inside a word, too, but never inside the name of a superchip: the host of a GH200 has another
    processor architecture than that of an H200.
    """
    wanted = bare_model(pattern).lower()
    text = name.lower()
    start = text.find(wanted)
    best = 0
    while start >= 0:
        end = start + len(wanted)
        begins = start == 0 or not text[start - 1].isalnum()
        if begins and (end == len(text) or not text[end].isalnum()):
            return WHOLE_WORDS
        best |= begins or not _SUPERCHIP.search(text, 0, end)
        start = text.find(wanted, start + 1)
    return int(best) if pattern.startswith("~") else 0


def bare_model(pattern: str) -> str:
    """Return a model pattern without the sign that says how it matches."""
    return pattern.lstrip("=~").strip()


def is_superchip(name: str) -> bool:
    """Return whether a device name is that of a GPU with an Arm processor beside it, such as GH200 or GB200."""
    return _SUPERCHIP.search(name.lower()) is not None


# ---------------------------------------------------------------------------------------------------- the token

_TOKEN: Final = re.compile(
    r"(?:(?P<outer>\d{1,6})x(?=\d+x))?(?:(?P<count>\d{1,6})x)?(?P<models>[^:@]*?)"
    r"(?::(?P<memory>\d{1,9}(?:\.\d{1,6})?)(?P<unit>[A-Za-z]{1,3}))?"
    r"(?:@(?P<sharing>mps|time-slice|exclusive)(?:=(?P<share>[0-9a-zA-Z%,.]+))?)?",
    re.ASCII,
)
#: the numbers in front, also with blanks or a large X: `2 X H100` is read as 2xH100
_IN_FRONT: Final = re.compile(r"(?:\d{1,6} *[xX] *)+")
_LOOKS_LIKE: Final = "it looks like 2xH100:80G, 3x2xA100 or 1xL40S@mps=50%"
#: what other tools call a number of GPUs: gpu=2, gpus:2
_GPUS: Final = re.compile(r"gpus?[=:](\d{1,3})", re.IGNORECASE)
#: as other tools write a count: A100:8
_COUNT_BEHIND: Final = re.compile(r"(?P<model>[^:@]*[A-Za-z][^:@]*):(?P<count>\d{1,6})(?P<rest>@.*)?")


_DIGIT: Final = re.compile("[0-9]")
#: a count where no token has one, as in xH100 and H100x2; a model that is called so is named with a count: 1xxH100
_NO_COUNT: Final = re.compile(r"x(?P<model>[A-Za-z]{1,4}\d[0-9A-Za-z]*)")
_BEHIND: Final = re.compile(r"(?P<model>[A-Za-z]+\d[0-9A-Za-z]*?) ?x ?(?P<count>\d{1,2})")
#: a part of a GPU as Ray and others write it: 0.5, 0.5xH100
_PART: Final = re.compile(r"(?P<part>0?\.\d{1,2})(x(?P<model>[^@:]+))?")
_NOMINAL: Final = {"g": 1e9, "gb": 1e9, "gi": float(1 << 30), "gib": float(1 << 30)}
_EXACT: Final = {"m": float(1 << 20), "mi": float(1 << 20), "mib": float(1 << 20), "mb": 1e6}


def nominal_mib(gigabytes: float, unit: float = 1e9) -> int:
    """Return the least MiB that a device sold with `gigabytes` GB (1e9 bytes) may report: 2 % less than nominal."""
    return int(gigabytes * unit * (1 - NOMINAL_TOLERANCE) / (1024 * 1024))


def parse_token(token: str) -> tuple[int, GpuSpec]:
    """Return the replicas and the `GpuSpec` of a token such as `3x2xH100|A100:80G@mps=50%,4G`. Raises ValueError, which
    names the wrong part.

    `2xH100` is two GPUs, `3x2xH100` three replicas of two. `:80G`, `:80GB` and `:80GiB` are nominal sizes, `:70000M`
    (or `MiB`) exact MiB. Without a count, a model must have a digit in its name or be `any`, because a lone word
    (`lots`, `True`) is hardly ever meant as a model. After `@mps=` or `@time-slice=` stands a share of the compute in
    percent or as `30tflops`, a share of the memory in G or M, or both.
    """
    text = token.strip()
    if text.isdigit():  # `--gpu 2` is two GPUs of any model
        text += "xany"
    if numbers := _IN_FRONT.match(text):
        text = numbers[0].replace(" ", "").lower() + text[numbers.end() :]
    found = _TOKEN.fullmatch(text)
    mode = re.fullmatch(r"[^@]*@([^=]*)(=.*)?", text)
    if mode is not None and mode[1] not in SHARING_MODES:
        raise ValueError(f"not a GPU token: {token!r}; {mode[1]!r} is not a sharing mode: {', '.join(SHARING_MODES)}")
    if (part := _PART.fullmatch(text)) and (percent := round(100 * float(part["part"]))):
        meant = f"1x{part['model'] or 'any'}@mps={percent}%"
        raise ValueError(f"not a GPU token: {token!r}; a part of a GPU is a share of it: {meant}")
    if gpus := _GPUS.fullmatch(text):
        raise ValueError(f"not a GPU token: {token!r}; did you mean {gpus[1]}")
    if found is None and (swapped := _COUNT_BEHIND.fullmatch(text)):
        with_unit = f"{swapped['model']}:{swapped['count']}G{swapped['rest'] or ''}"
        is_count = not numbers and int(swapped["count"]) <= GPUS_PER_REPLICA_MAX
        as_count = f"a count stands in front: {swapped['count']}x{swapped['model']}; and " if is_count else ""
        raise ValueError(f"not a GPU token: {token!r}; {as_count}memory has a unit: {with_unit}")
    if not text or found is None:
        raise ValueError(f"not a GPU token: {token!r}; {_LOOKS_LIKE}")
    if re.fullmatch(r"\d+x\d+", text):
        raise ValueError(f"not a GPU token: {token!r}; a model is missing: {text}xany")
    models = [part.strip() for part in found["models"].split("|")] if found["models"] else []
    if "," in found["models"]:
        meant = re.sub(r" *, *", "|", text)
        raise ValueError(f"not a GPU token: {token!r}; alternatives are split by |: did you mean {meant}")
    if models and re.match(r"\d+x", models[0]):
        raise ValueError(f"not a GPU token: {token!r}; two numbers are replicas and GPUs of each, as in 3x2xA100")
    if models and (joined := re.match(r"(\d+) *([A-Za-z].*)", models[0])):
        raise ValueError(f"not a GPU token: {token!r}; did you mean {joined[1]}x{joined[2]}")
    if any("=" in part.lstrip("=") for part in models):
        raise ValueError(f"not a GPU token: {token!r}; a model has no =; {_LOOKS_LIKE}")
    if any(not part for part in models) or any(not re.match(r"[=~A-Za-z]", part) for part in models):
        raise ValueError(f"not a GPU token: {token!r}; a model starts with a letter, alternatives are split by |")
    if not found["count"] and (meant := next(filter(None, map(_misplaced, models)), "")):
        raise ValueError(f"not a GPU token: {token!r}; did you mean {meant}")
    if not found["count"] and any(part != "any" and not _DIGIT.search(part) for part in models):
        raise ValueError(f"not a GPU token: {token!r} is neither a count nor a model with a number in its name")
    memory = None
    if found["memory"]:
        unit = found["unit"].lower()
        if unit not in (*_NOMINAL, *_EXACT):
            raise ValueError(f"not a GPU token: {token!r}; the unit of memory is G or M, found {found['unit']!r}")
        size = float(found["memory"])
        memory = nominal_mib(size, _NOMINAL[unit]) if unit in _NOMINAL else int(size * _EXACT[unit] / (1 << 20))
    share = parse_share(found["share"], token) if found["share"] else None
    sharing: Sharing | None = next((mode for mode in SHARING_MODES if found["sharing"] == mode), None)
    spec = GpuSpec(
        count=int(found["count"] or 1),
        model=None if not models or models == ["any"] else (models[0] if len(models) == 1 else models),
        min_memory_mib=memory,
        sharing=sharing,
        share=share,
    )
    return int(found["outer"] or 1), spec


def _misplaced(model: str) -> str:
    """Return the token that is probably meant by a text that has an x without a count before it; "" for a model."""
    if found := _NO_COUNT.fullmatch(model):
        return f"1x{found['model']}"
    if found := _BEHIND.fullmatch(model):
        return f"{int(found['count'])}x{found['model']}"
    return ""


#: the bytes of each unit of memory in a token, in lower case: g is 1e9 bytes, m a MiB
UNITS: Final = _NOMINAL | _EXACT
_PART_SIZE: Final = re.compile(r"(?P<size>\d{1,9}(?:\.\d{1,6})?)(?P<unit>[A-Za-z]{1,3})")


def parse_share(text: str, token: str) -> Share:
    """Return the share that stands after @mps= or @time-slice= in a token. Raises ValueError."""
    percent, memory, tflops = 100, 0, None
    for part in text.split(","):
        if part.endswith("%") and part[:-1].isdigit():
            percent = int(part[:-1])
        elif part.endswith(TFLOPS):
            tflops = part.removesuffix(TFLOPS)
        elif (size := _PART_SIZE.fullmatch(part)) and (unit := size["unit"].lower()) in UNITS:
            memory = int(float(size["size"]) * UNITS[unit] / (1 << 20))
        else:
            raise ValueError(
                f"not a share: {part!r} in {token!r}; a share is 50% (or 30tflops) or 4G or both: @mps=50%,4G"
            )
    return Share(memory, percent, tflops)


def _share_mib(gigabytes: float) -> int:
    return int(gigabytes * 1e9 / (1024 * 1024))


def _share_size(mib: int) -> str:
    """Return a size of memory as it was asked for if that was in whole gigabytes (`10G`), else exactly (`9500M`)."""
    gigabytes = round(mib * 1024 * 1024 / 1e9)
    return f"{gigabytes}G" if _share_mib(gigabytes) == mib else f"{mib}M"


def format_token(spec: GpuSpec | None, replicas: int = 1) -> str:
    """Return the token of a spec, as every table prints it: replicas, count, models, memory and sharing.

    Without a spec it is `-`, or `3x-` for three replicas.
    """
    if spec is None:
        return "-" if replicas == 1 else f"{replicas}x-"
    text = f"{spec.count}x{'|'.join(spec.models) or 'any'}"
    if replicas != 1:
        text = f"{replicas}x{text}"
    if spec.min_memory_mib:
        gigabytes = round(spec.min_memory_mib * 1024 * 1024 / (1 - NOMINAL_TOLERANCE) / 1e9)
        exact = nominal_mib(gigabytes) == spec.min_memory_mib
        text += f":{gigabytes}G" if exact else f":{spec.min_memory_mib}M"
    if spec.effective_sharing != "exclusive":
        text += f"@{spec.sharing}"
        if spec.share is not None:
            parts = [f"{spec.share.compute_percent}%"] if spec.share.compute_percent != 100 else []
            parts += [] if spec.share.tflops is None else [f"{spec.share.tflops}{TFLOPS}"]
            parts += [_share_size(spec.share.memory_mib)] if spec.share.memory_mib else []
            text += f"={','.join(parts)}" if parts else ""
    return text


def as_one_replica(spec: GpuSpec, replicas: int) -> str:
    """Return the token for one replica with all GPUs of these replicas, or with as many as one replica may have."""
    whole = min(spec.count * replicas, GPUS_PER_REPLICA_MAX)
    return format_token(msgspec.structs.replace(spec, count=whole))


def with_token(spec: GpuSpec | None, token: str) -> GpuSpec | None:
    """Return the spec with the count, models, memory and sharing of a token; its other fields, such as vendor and
    scheduling, stay.

    Returns None without a spec, if both do not go together, or if the token cannot be read: a request may name a model
    that no token can name, such as 4090.
    """
    if spec is None:
        return None
    try:
        said = parse_token(token)[1]
        return msgspec.structs.replace(
            spec,
            count=said.count,
            model=said.model,
            min_memory_mib=said.min_memory_mib,
            sharing=said.sharing,
            share=said.share,
        )
    except ValueError:
        return None
