"""The request, and the states of a job."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Any, Final, Literal, get_args

import msgspec
from msgspec import UNSET, UnsetType

from moorage.schemas.capabilities import DRIVER_DEFAULT, Capabilities
from moorage.schemas.driver_config import Fault, canonical_id, check, devices_asked, image_trouble, is_id, takes_image
from moorage.schemas.gpu import GPUS_PER_REPLICA_MAX, GpuSpec, Share
from moorage.schemas.names import ENV_NAME, LABEL_KEY, SECRET_WORDS, is_files, is_job, is_secret
from moorage.schemas.trouble import Trouble, quoted

REPLICAS_MAX: Final = 1024
PRIORITY_MAX: Final = 100
ARGV_MAX: Final = 1024
ENV_MAX: Final = 512
TEXT_BYTES_MAX: Final = 32 * 1024
DURATION_S_MAX: Final = 366 * 86400.0
RETRIES_MAX: Final = 1000
LABELS_MAX: Final = 64
#: values that `requires` lists in all, and characters of one, of a driver and of a vendor: more would take more memory
#: than the request is counted for
REQUIRED_MAX: Final = 256
WORD_CHARS_MAX: Final = 256
#: patterns in `keep`
KEEP_MAX: Final = 64
#: parts of such a pattern with two stars: the time of a match multiplies with each
KEEP_STARS_MAX: Final = 2
#: bytes of a path, with the NUL behind it: PATH_MAX of limits.h
PATH_BYTES_MAX: Final = 4096
#: the greatest user id: 2**32 - 1 is -1, which setuid(2) takes for no user
UID_MAX: Final = 2**32 - 2
#: not what useradd allows but what no user database can hold, or a command would take for an option
_USER: Final = re.compile(r"(?!-)[^\s:/\0]+")
CHECKPOINT_SIGNALS: Final = (
    "SIGUSR1",
    "SIGUSR2",
    "SIGHUP",
    "SIGINT",
    "SIGQUIT",
    "SIGTERM",
    "SIGALRM",
    "SIGURG",
    "SIGWINCH",
    "SIGCONT",
)


#: a job's quality of service, the lowest first
Qos = Literal["low", "medium", "high", "critical"]
QOS: Final[tuple[Qos, ...]] = get_args(Qos)


class Secret(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A reference to a secret that the worker resolves from a folder only its agent reads; never a value."""

    secret: str


class Resources(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """Host resources per replica: `cpu_milli` in thousandths of a core, `memory_mib` in MiB."""

    cpu_milli: int = 0  # thousandths of a CPU core: 4000 is four cores
    memory_mib: int = 0  # memory of the host, MiB
    enforce: Literal["advisory", "hard"] = "advisory"  # hard: only a worker that ends a job which takes more memory

    def __post_init__(self) -> None:
        if not 0 <= self.cpu_milli <= 10**9:
            raise ValueError(f"cpu_milli must be 0..1000000000, found {self.cpu_milli}")
        if not 0 <= self.memory_mib <= 2**31:
            raise ValueError(f"memory_mib must be 0..{2**31}, found {self.memory_mib}")


class Run(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """The workload of every replica. Durations are in seconds.

    The checkpoint signal is sent once in each attempt: before `timeout_s` or the job's `deadline_s` ends it (at once if
    less time is left than `checkpoint_before_s`), before a planned drain, a failing GPU or a preemption ends it, and to
    a guest before it gives its devices back. It goes to the main process, or, if that has no handler for it, to the
    nearest processes below it that have one, and never to a process that it would kill. A function sees
    `context.checkpoint_asked`. In all other cases a job ends by SIGTERM, and has `grace_s` to save what there is.
    """

    driver: str = DRIVER_DEFAULT  # name of the driver; workers say in hello which drivers they have
    argv: list[str] = []  # the program and its arguments; no shell reads them
    env: dict[str, str | Secret] = {}  # variables; a secret is named and never sent
    image: str | None = None  # container or VM image; `driver_config.<driver>.image` overrides it
    #: working directory: absolute on the worker, or relative to the attempt's own folder; null is the attempt's folder
    cwd: str | None = None
    #: SHA-256 of the tar file that is unpacked into the attempt's folder before it starts. It is the name of an object
    #: in the tenant's bucket `<PREFIX>_FILES_<tenant>`, compressed by gzip
    files: str | None = None
    #: patterns as in a .gitignore: the files of the attempt's folder that are stored at its end, before the job has
    #: SUCCEEDED
    keep: list[str] = []
    user: str | None = None  # user that the job runs as; null is the agent's own user
    timeout_s: float | None = None  # most seconds that one attempt may run
    grace_s: float = 10.0  # seconds from SIGTERM to SIGKILL
    checkpoint_signal: str | None = None  # signal that gives the job time to save, such as SIGUSR1; see above
    checkpoint_before_s: float = 60.0  # seconds from that signal to the end of the attempt

    def __post_init__(self) -> None:
        check_command(self.driver, self.argv)
        if self.env:
            _check_env(self.env)
        check_duration("timeout_s", self.timeout_s)
        check_duration("grace_s", self.grace_s)
        check_duration("checkpoint_before_s", self.checkpoint_before_s)

    @property
    def needs_folder(self) -> bool:
        """Whether the workload can only run if its attempt has a folder of its own."""
        return self.files is not None or bool(self.keep) or (self.cwd is not None and not self.cwd.startswith("/"))


def check_command(driver: str, argv: list[str]) -> None:
    """Raise ValueError if a workload of that driver cannot have this `argv`."""
    if driver == DRIVER_DEFAULT and not argv:  # what other drivers need, their workers say
        raise ValueError(f"argv must name a command for the driver {driver}, found none")
    if len(argv) > ARGV_MAX:
        raise ValueError(f"argv must have at most {ARGV_MAX} words, found {len(argv)}")
    for word in argv:
        if "\0" in word or len(word) > TEXT_BYTES_MAX:
            raise ValueError(
                f"argv must have words of at most {TEXT_BYTES_MAX} characters without NUL, found {_odd(word)}"
            )


def _check_env(env: dict[str, str | Secret]) -> None:
    if len(env) > ENV_MAX:
        raise ValueError(f"env must have at most {ENV_MAX} names, found {len(env)}")
    for key, value in env.items():
        if not ENV_NAME.fullmatch(key):
            raise ValueError(
                f"env must have names of letters, digits and _ that start with no digit, found {key[:80]!r}"
            )
        if isinstance(value, str) and ("\0" in value or len(value) > TEXT_BYTES_MAX):
            raise ValueError(f"env.{key} must be at most {TEXT_BYTES_MAX} characters without NUL, found {_odd(value)}")


def names_a_program(argv: list[str]) -> bool:
    """Return false if the first word of a command is empty. A command without words is true: some drivers need none."""
    return not argv or bool(argv[0])


def _command_trouble(run: Run) -> Trouble | None:
    for name, text in (("user", run.user), ("cwd", run.cwd), ("driver", run.driver)):
        if text and "\0" in text:
            return Trouble(f"run.{name}", f"{name} may not hold a NUL", text, "text without NUL")
    if len(run.driver) > WORD_CHARS_MAX:
        return _too_long("run.driver", run.driver)
    if not names_a_program(run.argv):
        return Trouble(
            "run.argv", "argv must begin with the name of a program", quoted(run.argv[0]), "a name or a whole path"
        )
    if run.cwd is not None and not (
        run.cwd
        and (run.cwd.startswith("/") or stays_below(run.cwd))
        and len(run.cwd.encode(errors="surrogatepass")) < PATH_BYTES_MAX
    ):
        message = "cwd must be an absolute path on the worker, or a path below the attempt's folder"
        allowed = f"a path below {PATH_BYTES_MAX} bytes; null is the attempt's folder"
        return Trouble("run.cwd", message, quoted(run.cwd), allowed)
    if run.files is not None and not is_files(run.files):
        message = "files must be the address of an archive"
        return Trouble("run.files", message, quoted(run.files), "64 hexadecimal digits: the SHA-256 of a tar file")
    for at, pattern in enumerate(run.keep):
        if not is_quick(pattern):
            message = (
                f"keep: a part of a path may have at most two stars, and at most {KEEP_STARS_MAX} parts may have two"
            )
            return Trouble(f"run.keep[{at}]", message, quoted(pattern[:80]), 'as in "out/**", "*.log", "out/**/*a*.pt"')
        if at >= KEEP_MAX or not pattern.strip() or "\0" in pattern or len(pattern) > WORD_CHARS_MAX:
            message = f"keep may list {KEEP_MAX} patterns of 1..{WORD_CHARS_MAX} characters"
            return Trouble(f"run.keep[{at}]", message, quoted(pattern[:80]), 'patterns as in a .gitignore: "out/**"')
    if run.user is not None and not is_user(run.user):
        return Trouble(
            "run.user", "user must be a user of the worker's host", quoted(run.user), f"a name, or 0..{UID_MAX}"
        )
    for name, value in run.env.items():
        if isinstance(value, Secret) and not is_secret(value.secret):
            return Trouble(
                f"run.env.{name}.secret", "secret must be the name of a secret", quoted(value.secret), SECRET_WORDS
            )
    return None


def is_quick(pattern: str) -> bool:
    """Return whether no file name takes long to match with a pattern of `keep`, which is turned into a regular
    expression."""
    stars = [part.count("*") for part in pattern.split("/")]
    return max(stars) <= 2 and stars.count(2) <= KEEP_STARS_MAX


def stays_below(path: str) -> bool:
    """Return whether a relative path names something below the folder that it is read in, or that folder."""
    return not path.startswith("/") and ".." not in path.split("/") and "\0" not in path


def is_user(user: str) -> bool:
    """Return whether a host may have a user of that name or number."""
    if len(user) > WORD_CHARS_MAX or _USER.fullmatch(user) is None:
        return False
    return not user.isdecimal() or (user.isascii() and int(user) <= UID_MAX)


def _too_long(field: str, text: str) -> Trouble:
    name = field.rpartition(".")[2]
    allowed = f"at most {WORD_CHARS_MAX} characters"
    return Trouble(field, f"{name} may have {allowed}", text, allowed)


def _checkpoint_trouble(run: Run) -> Trouble | None:
    if run.checkpoint_signal is None:
        return None
    if run.checkpoint_signal not in CHECKPOINT_SIGNALS:
        allowed = ", ".join(CHECKPOINT_SIGNALS)
        message = f"checkpoint_signal must be one of {allowed}"
        return Trouble("run.checkpoint_signal", message, run.checkpoint_signal, allowed)
    if run.timeout_s is not None and run.checkpoint_before_s >= run.timeout_s:
        message = f"checkpoint_before_s must be below timeout_s = {run.timeout_s:g}"
        return Trouble("run.checkpoint_before_s", message, run.checkpoint_before_s, f"below {run.timeout_s:g}")
    return None


def _odd(text: str) -> str:
    """Describe a text that is too long or holds a NUL without showing it: it may be a secret."""
    return "a NUL" if "\0" in text else f"{len(text)} characters"


def check_duration(name: str, seconds: float | None) -> None:
    """Raise ValueError unless `seconds` is None or 0..366 days; NaN is refused too."""
    if seconds is not None and not 0 <= seconds <= DURATION_S_MAX:
        raise ValueError(f"{name} must be 0..{DURATION_S_MAX:.0f} seconds, found {seconds}")


class GpuCount(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """What OpenShell asks of GPUs: a count and, in an interim form, exact devices."""

    count: int | None = None
    # not written where it was not sent
    device_ids: list[str] | UnsetType = UNSET  # the same as `driver_config.<driver>.gpu_device_ids`; [] is none
    device_id: str | list[str] | UnsetType = UNSET  # one device id or several, in place of `device_ids`

    def __post_init__(self) -> None:
        if self.count is not None and self.count < 1:
            raise ValueError(f"count must be at least 1, found {self.count}")
        if self.device_ids is not UNSET and self.device_id is not UNSET:
            raise ValueError("device_ids and device_id say the same: send one of them")
        if len(self.devices) > GPUS_PER_REPLICA_MAX or not all(map(is_id, self.devices)):
            raise ValueError(f"device_ids must list at most {GPUS_PER_REPLICA_MAX} ids, none of them blank")

    @property
    def devices(self) -> list[str]:
        """The ids of the exact devices; empty means any."""
        if isinstance(self.device_id, str):
            return [self.device_id]
        return self.device_id or self.device_ids or []


#: an amount as Kubernetes and OpenShell write it
_QUANTITY: Final = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)(m|[kMGTPE]|[KMGTPE]i)?")
_SUFFIXES: Final = "kMGTPE"


def _quantity(field: str, text: str | int, unit: Fraction) -> int:
    """Return an amount such as `500m`, `2` or `1.5Gi` in `unit`s, rounded up. Raises ValueError."""
    found = _QUANTITY.fullmatch(str(text))
    if found is None:
        raise ValueError(f"{field} must be a quantity such as 500m, 2 or 1.5Gi, found {str(text)[:80]!r}")
    suffix = found[2] or ""
    power = _SUFFIXES.index(suffix[0].replace("K", "k")) + 1 if suffix and suffix != "m" else 0
    scale = Fraction(1, 1000) if suffix == "m" else Fraction(1024 if suffix.endswith("i") else 1000) ** power
    return math.ceil(Fraction(found[1]) * scale / unit)


class ResourceRequirements(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """What OpenShell asks of a host. It is read as `gpu` and `resources`."""

    gpu: GpuCount | None = None
    cpu: str | int | None = None  # cores as a quantity: 2, "500m"; the same as `resources.cpu_milli`
    memory: str | int | None = None  # bytes as a quantity: "2Gi"; the same as `resources.memory_mib`


class Template(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """Where OpenShell puts what a sandbox is made of. It is read as the request's own fields."""

    driver_config: dict[str, Any] = {}  # the same as `driver_config`
    image: str | None = None  # the same as `run.image`
    environment: dict[str, str] = {}  # the same as `run.env`
    labels: dict[str, str] = {}  # the same as `labels`


class Request(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """What a service asks for. Only `run` is required. Unknown fields are refused."""

    job: str | None = None  # the job's id, `[A-Za-z0-9_-]{1,64}`: it makes sending a request twice harmless
    replicas: int = 1  # number of copies of `run`, 1..1024, each with `gpu.count` GPUs of one host
    priority: int = 50  # 0..100, higher first
    gpu: GpuSpec | None = None  # GPUs of each replica; null asks for none
    resources: Resources | None = None  # the host's CPU cores and memory for each replica; null counts none
    #: a worker's labels: each has one of these values, at most 256 in all and of 256 characters
    requires: dict[str, list[str]] = {}
    run: Run | None = None  # the program, its driver and its limits; required
    #: each driver's own settings, as `{"process": {"gpu_device_ids": ["0"]}}`; those of the job's driver are checked
    driver_config: dict[str, Any] = {}
    deadline_s: float | None = None  # most seconds for the whole job, from its acceptance
    start_within_s: float | None = None  # most seconds until its first start; then it is EXPIRED
    retries: int = 0  # number of further attempts after a failure
    retries_on_lost: int = 3  # number of further attempts after its worker was lost
    #: action if its worker is cut off: end it and start it elsewhere, or let it live and wait for that worker
    on_partition: Literal["kill", "keep"] = "kill"
    on_no_match: Literal["wait", "reject"] = "wait"  # action if no known worker could ever run it: wait or reject
    events: Literal["job", "tenant"] = "job"  # subjects of its events: its own and the tenant's, or the tenant's alone
    labels: dict[str, str] = {}  # the caller's own notes
    #: ledger record of a plan; the request is refused with `moved-on` if something was decided since
    if_seq: int | None = None
    #: the same as `gpu` with a count and exact devices, and as `resources`, as OpenShell asks
    resource_requirements: ResourceRequirements | None = None
    #: the same as `driver_config`, `run.image`, `run.env` and `labels`, as OpenShell asks
    template: Template | None = None
    #: whether it may have the GPUs of a frozen job if no others are free, until that job needs them: then it ends
    #: within its grace, and is queued again
    guest: bool = False
    #: order in which a worker freezes unused jobs: `low` first, `critical` not at all by default
    qos: Qos = "medium"

    def __post_init__(self) -> None:
        if self.job is not None and not is_job(self.job):
            raise ValueError(f"job must match [A-Za-z0-9_-]{{1,64}}, found {self.job[:80]!r}")
        if not 1 <= self.replicas <= REPLICAS_MAX:
            raise ValueError(f"replicas must be 1..{REPLICAS_MAX}, found {self.replicas}")
        if not 0 <= self.priority <= PRIORITY_MAX:
            raise ValueError(f"priority must be 0..{PRIORITY_MAX}, found {self.priority}")
        if self.run is None:
            raise ValueError("run is missing: say what to run, as {'run': {'argv': ['nvidia-smi', '-L']}}")
        if not 0 <= self.retries <= RETRIES_MAX:
            raise ValueError(f"retries must be 0..{RETRIES_MAX}, found {self.retries}")
        if not 0 <= self.retries_on_lost <= RETRIES_MAX:
            raise ValueError(f"retries_on_lost must be 0..{RETRIES_MAX}, found {self.retries_on_lost}")
        if self.if_seq is not None and not 0 <= self.if_seq < 2**63:
            raise ValueError(f"if_seq must be a ledger sequence, 0..{2**63 - 1}, found {self.if_seq}")
        check_duration("deadline_s", self.deadline_s)
        check_duration("start_within_s", self.start_within_s)
        if self.template is not None:
            self._read_template(self.template, self.run)
        if self.resource_requirements is not None:
            self._read_amounts(self.resource_requirements)
        if self.requires or self.labels:
            self._check_labels()
        if self.on_partition == "keep" and self.gpu is not None and self.gpu.scheduling == "gang":
            raise ValueError("on_partition must be kill for a gang, found keep")  # a kept rank would hold up the rest
        if self.resource_requirements is not None and self.gpu is not None:
            raise ValueError("gpu and resource_requirements.gpu say the same: send one of them")
        if self.template is not None and self.template.driver_config and self.driver_config:
            raise ValueError("driver_config and template.driver_config say the same: send one of them")

    def _read_template(self, template: Template, run: Run) -> None:
        """Take what OpenShell's template has besides `driver_config` over into the request's own fields."""
        if template.image is not None and run.image is not None:
            raise ValueError("run.image and template.image say the same: send one of them")
        for place, ours, theirs in (
            ("run.env", run.env.keys(), template.environment.keys()),
            ("labels", self.labels.keys(), template.labels.keys()),
        ):
            if both := sorted(ours & theirs):
                raise ValueError(f"{place} and the template name the same key: send one of them, found {both[0][:80]}")
        env = run.env | template.environment
        run = msgspec.structs.replace(run, image=run.image if template.image is None else template.image, env=env)
        msgspec.structs.force_setattr(self, "run", run)
        msgspec.structs.force_setattr(self, "labels", self.labels | template.labels)
        kept = Template(template.driver_config) if template.driver_config else None
        msgspec.structs.force_setattr(self, "template", kept)

    def _read_amounts(self, wanted: ResourceRequirements) -> None:
        """Take OpenShell's cores and memory over into `resources`."""
        if wanted.cpu is None and wanted.memory is None:
            return
        ours = self.resources or Resources()
        if (wanted.cpu is not None and ours.cpu_milli) or (wanted.memory is not None and ours.memory_mib):
            raise ValueError("resources and resource_requirements say the same: send one of them")
        cpu_milli, memory_mib = ours.cpu_milli, ours.memory_mib
        if wanted.cpu is not None:
            cpu_milli = _quantity("resource_requirements.cpu", wanted.cpu, Fraction(1, 1000))
        if wanted.memory is not None:
            memory_mib = _quantity("resource_requirements.memory", wanted.memory, Fraction(1 << 20))
        msgspec.structs.force_setattr(self, "resources", Resources(cpu_milli, memory_mib, ours.enforce))
        kept = None if wanted.gpu is None else ResourceRequirements(wanted.gpu)
        msgspec.structs.force_setattr(self, "resource_requirements", kept)

    def _check_labels(self) -> None:
        for name, keys in (("requires", self.requires.keys()), ("labels", self.labels.keys())):
            if len(keys) > LABELS_MAX:
                raise ValueError(f"{name} must have at most {LABELS_MAX} keys, found {len(keys)}")
            for key in keys:
                if not LABEL_KEY.fullmatch(key):
                    raise ValueError(f"{name} must have keys of 1..63 letters, digits and _./-, found {key[:80]!r}")
        for key, values in self.requires.items():
            if not values or len(values) > LABELS_MAX:
                raise ValueError(f"requires.{key} must list 1..{LABELS_MAX} values, found {len(values)}")

    def with_part(self, part: tuple[int, int] | None) -> Request:
        """Return the request with this part of each GPU, memory in MiB and compute in percent; None stands for the
        request's own."""
        if part is None or self.gpu is None:
            return self
        return msgspec.structs.replace(self, gpu=msgspec.structs.replace(self.gpu, share=Share(*part)))

    @property
    def effective_gpu(self) -> GpuSpec | None:
        """The GPU spec, from `gpu` or in OpenShell's form; None if it asks for no GPU."""
        if self.gpu is not None:
            return self.gpu
        if self.resource_requirements is not None and self.resource_requirements.gpu is not None:
            return GpuSpec(count=self.resource_requirements.gpu.count or 1)
        return None

    @property
    def trouble(self) -> Trouble | None:
        """What no worker could do, as far as decoding does not already refuse it; None if there is nothing.

        Admission and the SDK ask for it. A request in the ledger was accepted, and is read whatever this says.
        """
        return (
            _command_trouble(self.workload)
            or (None if self.gpu is None else self.gpu.trouble)
            or self._distributed_trouble
            or self._guest_trouble
            or self._length_trouble
            or _checkpoint_trouble(self.workload)
            or self._driver_trouble
        )

    @property
    def _distributed_trouble(self) -> Trouble | None:
        gpu = self.gpu
        if gpu is None or gpu.distributed is None or self.replicas == 1 or gpu.scheduling == "gang":
            return None
        message = "distributed with several replicas needs scheduling gang: its ranks start together or not at all"
        return Trouble("gpu.distributed", message, f"{self.replicas} replicas", 'scheduling "gang", or one replica')

    @property
    def _guest_trouble(self) -> Trouble | None:
        if not self.guest:
            return None
        gpu = self.effective_gpu
        if gpu is None:
            return Trouble("guest", "a guest needs GPUs", "no gpu", "false without a gpu")
        if gpu.effective_sharing != "exclusive":
            return Trouble("guest", "a guest may not share a GPU", gpu.effective_sharing, "false with sharing")
        if gpu.effective_scheduling == "gang":
            return Trouble("guest", "ranks of a gang may not be guests: the end of one would end all", "gang", "false")
        if gpu.profile is not None:
            return Trouble("guest", "a guest gets whole GPUs", quoted(gpu.profile), "false with a profile")
        if self.on_partition == "keep":
            return Trouble("on_partition", "a guest ends with its worker's lease", "keep", "kill with guest")
        return None

    @property
    def blocks(self) -> dict[str, Any]:
        """What the request says to drivers, by their names, from either place."""
        return self.driver_config or (self.template.driver_config if self.template is not None else {})

    @property
    def image(self) -> str:
        """The image to run; "" for none."""
        block = self.blocks.get(self.workload.driver)
        image = block.get("image") if isinstance(block, dict) else None
        return image if isinstance(image, str) else self.workload.image or ""

    @property
    def device_ids(self) -> tuple[str, ...]:
        """The ids of the exact devices for each replica; empty means any that fit.

        Also empty if one of them is invalid: such a request is refused.
        """
        if not self.driver_config and self.template is None and self.resource_requirements is None:
            return ()
        driver = self.workload.driver
        ids = devices_asked(driver, self.blocks.get(driver), self._interim)[1]
        if not ids or self.driver_fault(None) is not None:
            return ()
        return tuple(canonical_id(one) for one in ids if one)

    @property
    def _interim(self) -> list[str]:
        wanted = self.resource_requirements
        return wanted.gpu.devices if wanted is not None and wanted.gpu is not None else []

    def driver_fault(self, capabilities: Capabilities | None) -> Fault | None:
        """Return the fault in what the request says to its driver, or None; see `driver_config.check`."""
        driver = self.workload.driver
        block = self.blocks.get(driver, msgspec.UNSET)
        return check(driver, block, self.effective_gpu, capabilities, self._interim)

    @property
    def active_alone(self) -> Request:
        """The request without the blocks of other drivers in `driver_config`."""
        driver, blocks = self.workload.driver, self.blocks
        if self.template is None and all(name == driver for name in blocks):
            return self
        config = {driver: blocks[driver]} if driver in blocks else {}
        return msgspec.structs.replace(self, driver_config=config, template=None)

    @property
    def _driver_trouble(self) -> Trouble | None:
        run = self.workload
        if run.image is not None and not takes_image(run.driver):
            return Trouble("run.image", f"the driver {run.driver} runs no image", quoted(run.image), "null")
        if run.image is not None and (not run.image.strip() or len(run.image) > WORD_CHARS_MAX or "\0" in run.image):
            return Trouble("run.image", "image must name an image", quoted(run.image), "the name of an image")
        fault = self.driver_fault(None)
        return self.image_trouble if fault is None else fault.trouble

    @property
    def image_trouble(self) -> Trouble | None:
        """What is wrong with the image for the job's driver; None if nothing is."""
        driver = self.workload.driver
        block = self.blocks.get(driver)
        named = isinstance(block, dict) and isinstance(block.get("image"), str)
        return image_trouble(driver, self.image, f"driver_config.{driver}.image" if named else "run.image")

    @property
    def _length_trouble(self) -> Trouble | None:
        """A vendor, a list of `requires` or a value in one that is too long; None if there is none."""
        gpu = self.gpu
        if gpu is not None and gpu.vendor is not None and len(gpu.vendor) > WORD_CHARS_MAX:
            return _too_long("gpu.vendor", gpu.vendor)
        if not self.requires:
            return None
        values = [value for values in self.requires.values() for value in values]
        if len(values) > REQUIRED_MAX:
            message = f"requires may list {REQUIRED_MAX} values in all, found {len(values)}"
            return Trouble("requires", message, len(values), f"at most {REQUIRED_MAX} values")
        for value in values:
            if len(value) > WORD_CHARS_MAX:
                message = f"requires may list values of at most {WORD_CHARS_MAX} characters"
                return Trouble("requires", message, value, f"at most {WORD_CHARS_MAX} characters")
        return None

    @property
    def workload(self) -> Run:
        """The field `run`, which every accepted request has."""
        assert self.run is not None
        return self.run


# ------------------------------------------------------------------------------------------------------- states

ACCEPTED: Final = "ACCEPTED"  # of a job as a whole: its first transition, and no state of a replica
QUEUED: Final = "QUEUED"
PLACED: Final = "PLACED"
CLAIMED: Final = "CLAIMED"
RUNNING: Final = "RUNNING"
EXITED: Final = "EXITED"  # a gang's rank that ended well and waits for the others
ENDING: Final = "ENDING"  # asked to end: its gang failed, or its deadline passed
CANCELLING: Final = "CANCELLING"
LOST_KEPT: Final = (
    "LOST_KEPT"  # worker lost under on_partition keep: not placed again until the worker reports, or a requeue
)
SUCCEEDED: Final = "SUCCEEDED"
FAILED: Final = "FAILED"
TIMED_OUT: Final = "TIMED_OUT"
CANCELLED: Final = "CANCELLED"
EXPIRED: Final = "EXPIRED"
REJECTED: Final = "REJECTED"
FROZEN: Final = "FROZEN"  # an operator had it frozen: it keeps its devices, and their memory is in the host's RAM

#: The states of a replica by number, as the ledger writes them. Append only: numbers are in every ledger.
STATES: Final = (
    QUEUED,
    PLACED,
    CLAIMED,
    RUNNING,
    EXITED,
    ENDING,
    CANCELLING,
    LOST_KEPT,
    SUCCEEDED,
    FAILED,
    TIMED_OUT,
    CANCELLED,
    EXPIRED,
    REJECTED,
    FROZEN,
)
STATE_NUMBER: Final = {name: number for number, name in enumerate(STATES)}
TERMINAL: Final = frozenset({SUCCEEDED, FAILED, TIMED_OUT, CANCELLED, EXPIRED, REJECTED})

#: Every legal step of a replica; anything else raises. The diagram in the docs is drawn from this table.
TRANSITIONS: Final[dict[str, frozenset[str]]] = {
    QUEUED: frozenset({PLACED, CANCELLED, EXPIRED, REJECTED, FAILED}),
    PLACED: frozenset({CLAIMED, QUEUED, CANCELLING, ENDING, EXITED, LOST_KEPT, FAILED}),
    CLAIMED: frozenset({RUNNING, QUEUED, SUCCEEDED, FAILED, TIMED_OUT, CANCELLING, ENDING, LOST_KEPT, EXITED}),
    RUNNING: frozenset({SUCCEEDED, FAILED, TIMED_OUT, QUEUED, CANCELLING, ENDING, LOST_KEPT, EXITED, FROZEN}),
    FROZEN: frozenset({RUNNING, SUCCEEDED, FAILED, TIMED_OUT, QUEUED, CANCELLING, ENDING, LOST_KEPT}),
    EXITED: frozenset({SUCCEEDED, QUEUED, FAILED, CANCELLED, TIMED_OUT}),
    ENDING: frozenset({QUEUED, FAILED, TIMED_OUT, CANCELLED, SUCCEEDED, CANCELLING, LOST_KEPT, EXITED}),
    CANCELLING: frozenset({CANCELLED, SUCCEEDED}),
    LOST_KEPT: frozenset({RUNNING, SUCCEEDED, FAILED, TIMED_OUT, QUEUED, CANCELLED}),
    SUCCEEDED: frozenset(),
    FAILED: frozenset(),
    TIMED_OUT: frozenset(),
    CANCELLED: frozenset(),
    EXPIRED: frozenset(),
    REJECTED: frozenset(),
}

_WORST_FIRST: Final = (REJECTED, FAILED, TIMED_OUT, EXPIRED, CANCELLED, SUCCEEDED)
_LIVE_FIRST: Final = (CANCELLING, ENDING, RUNNING, FROZEN, LOST_KEPT, CLAIMED, PLACED, EXITED, QUEUED)


def derive_state(states: set[str]) -> str:
    """Return a job's state from the states of its replicas: live while any is live, SUCCEEDED only if all are.

    Raises ValueError for an empty set.
    """
    for name in _LIVE_FIRST:
        if name in states:
            return name
    for name in _WORST_FIRST:
        if name in states:
            return name
    raise ValueError("a job has at least one replica")
