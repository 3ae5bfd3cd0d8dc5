"""The request, and the states of a job."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Any, Final, Literal, NamedTuple, get_args

import msgspec
from msgspec import UNSET, UnsetType

from moorage.schemas.capabilities import DRIVER_DEFAULT, KNOWN, Capabilities
from moorage.schemas.driver_config import Fault, canonical_id, check, devices_asked, image_trouble, is_id, takes_image
from moorage.schemas.gpu import GPUS_PER_REPLICA_MAX, GpuSpec, Share, format_token
from moorage.schemas.groups import GROUP_NAME, GROUPS_MAX, group_at
from moorage.schemas.items import ItemsFile, item_of, missing, no_column
from moorage.schemas.names import ENV_NAME, LABEL_KEY, PERSON, SECRET_WORDS, is_files, is_job, is_person, is_secret
from moorage.schemas.ranges import NUMBERS_MAX, Ranges, count_of, first_numbers, parse_ranges
from moorage.schemas.retrying import RULES_MAX, Retry
from moorage.schemas.service import FAIR_KEY_CHARS_MAX, WAIT_TARGET_MS, Scale, ServiceSpec
from moorage.schemas.staying import PORTS_MAX, RESTARTS_MAX, Ready
from moorage.schemas.trouble import NONE, Trouble, quoted
from moorage.schemas.where import LABEL_FORM, SAME_MAX, SITE, is_label, prefers_trouble, where_trouble

#: parts of the cases in which a job is to start in time, see `Request.or_refuse`
OR_REFUSE: Final = (0.5, 0.9)
REPLICAS_MAX: Final = NUMBERS_MAX
#: the most ranks of a gang
GANG_MAX: Final = 1_024
#: how the reason begins for which a gang's ranks are taken away that found no room as it started
STARTS_WITH: Final = "starts with "
#: of a request with `max_failed` 0: the number of replicas, or the percentage of them, whichever is more
FAILED_MAX: Final = 20
FAILED_MAX_PERCENT: Final = 5
PRIORITY_MAX: Final = 100
ARGV_MAX: Final = 1024
ENV_MAX: Final = 512
DURATION_S_MAX: Final = 366 * 86400.0
RETRIES_MAX: Final = 1000
REPAIR_S_MAX: Final = 86400.0
LABELS_MAX: Final = 64
#: values that `requires` lists in all, and characters of one, of a driver and of a vendor: more would take more memory
#: than the request is counted for
REQUIRED_MAX: Final = 256
WORD_CHARS_MAX: Final = 256
#: with which the names of counters begin that are of a host, as its worker has them
HOST_COUNTER: Final = "host."
#: the greatest weight of a fair key
FAIR_WEIGHT_MAX: Final = 100
#: counters of one request, and the most of one
USES_MAX: Final = 16
COUNTER_MAX: Final = 1_000_000
#: patterns in `keep`
KEEP_MAX: Final = 64
#: parts of such a pattern with two stars: the time of a match multiplies with each
KEEP_STARS_MAX: Final = 2
#: sources of `run.data`; how one begins that is the address of sent files, or what a job has kept
DATA_MAX: Final = 16
DATA_OBJECT: Final = "object:"
DATA_JOB: Final = "job:"
_DATA_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,31}")
_DATA_SOURCE: Final = re.compile(
    r"(?!.{2049})(/[!-~]+|[a-z][a-z0-9+.-]{0,31}://[!-~]+|hf:(datasets/)?[\w.-]+/[\w.-]+(@[\w./-]+)?|object:[0-9a-f]{64}"
    r"|job:[A-Za-z0-9_-]{1,64}(:[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*)?(@[0-9]{1,15})?(/[!-~]+)?)",
    re.ASCII,
)
#: the variable that names the folder which `run.setup` fills
SETUP_VARIABLE: Final = "MOORAGE_SETUP"
#: bytes of a path, with the NUL behind it: PATH_MAX of limits.h
PATH_BYTES_MAX: Final = 4096
#: the greatest user id: 2**32 - 1 is -1, which setuid(2) takes for no user
UID_MAX: Final = 2**32 - 2
#: not what useradd allows but what no user database can hold, or a command would take for an option
_USER: Final = re.compile(r"(?!-)[^\s:/\0]+")
#: a checkpoint is stored no more often than this while its attempt runs, except when the job asks for it
CHECKPOINT_EVERY_S_MIN: Final = 1.0
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


#: code of the warning about a time that is longer than the deadline leaves
DEADLINE: Final = "deadline"
#: jobs that `after` names at most
AFTER_MAX: Final = 100
#: which end of a job another one waits for: SUCCEEDED, any, or any but SUCCEEDED
When = Literal["succeeded", "any", "failed"]
WHENS: Final[tuple[When, ...]] = get_args(When)
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


class GroupSpec(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """Ranks of a gang that ask for the same and run the same.

    To torch they are a world of their own: `RANK` and `WORLD_SIZE` count them alone, and `MASTER_ADDR` is their first
    rank. Each rank finds the first rank of every group in `MOORAGE_GROUP_<NAME>_ADDRESS`, as `address:port`.
    """

    name: str  # 1..16 small letters, digits and _, a letter first
    replicas: int = 1  # its ranks
    gpu: GpuSpec | None = None  # GPUs of each, which it has alone; null asks for none
    resources: Resources | None = None  # the host's CPU cores and memory for each; null counts none
    argv: list[str] = []  # its program and arguments; [] is `run.argv`
    env: dict[str, str] = {}  # variables beside those of `run.env`

    def __post_init__(self) -> None:
        if not GROUP_NAME.fullmatch(self.name):
            raise ValueError(f"name must match {GROUP_NAME.pattern}, found {self.name[:80]!r}")
        if not 1 <= self.replicas <= GANG_MAX:
            raise ValueError(f"replicas must be 1..{GANG_MAX}, found {self.replicas}")
        if self.argv and not names_a_program(self.argv):
            raise ValueError("argv must begin with the name of a program, found an empty word")

    @property
    def asks(self) -> GpuSpec | None:
        """Its GPUs as those of a gang."""
        return None if self.gpu is None else msgspec.structs.replace(self.gpu, scheduling="gang")


class FilesOf(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """Files that a job has kept, for another job."""

    job: str  # its id, of the same tenant
    #: numbers of its replicas, as in `0-99`: the files of each are in `<job>/<number>`; null: they are in `<job>`
    replicas: str | None = None
    #: when that job was accepted, ms since 1970: files of an earlier job with that id are not brought; 0: of any
    accepted_ms: int = 0

    def __post_init__(self) -> None:
        if not is_job(self.job):
            raise ValueError(f"job must match [A-Za-z0-9_-]{{1,64}}, found {self.job[:80]!r}")
        if self.replicas is not None:
            parse_ranges(self.replicas)


class Run(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """The workload of every replica. Durations are in seconds.

    The checkpoint signal is sent once in each attempt: before `timeout_s` or the job's `deadline_s` ends it (at once if
    less time is left than `checkpoint_before_s`), and before a planned drain, a failing GPU or a preemption ends it. It
    goes to the main process, or, if that has no handler for it, to the nearest processes below it that have one, and
    never to a process that it would kill. A function sees `context.checkpoint_asked`. In all other cases a job ends by
    SIGTERM, and has `grace_s` to save what there is.
    """

    driver: str = DRIVER_DEFAULT  # name of the driver; workers say in hello which drivers they have
    argv: list[str] = []  # the program and its arguments; no shell reads them
    env: dict[str, str | Secret] = {}  # variables; a secret is named and never sent
    image: str | None = None  # container or VM image; `driver_config.<driver>.image` overrides it
    #: working directory: absolute on the worker, or relative to the attempt's own folder; null is the attempt's folder
    cwd: str | None = None
    #: SHA-256 of the tar file that is unpacked into the attempt's folder before it starts. It is the name of an object
    #: in the tenant's bucket `<PREFIX>_FILES_<tenant>`, compressed by gzip; or, with the header `Moorage-Parts`, a list
    #: of `[SHA-256, bytes]` of its parts in their order as JSON, each of which is the object `part.<SHA-256>`, likewise
    files: str | None = None
    #: jobs whose kept files are in the attempt's folder before it starts, as far as their replicas have SUCCEEDED by
    #: then; it waits for none of them (see `after`). An attempt that finds no file of one of them fails: `files-gone`.
    #: At most 16 jobs, with 10,000 replicas in all
    files_of: list[FilesOf] = []
    #: what each replica works on, by its number: a list of texts or JSON values, or a file among `files`. A replica
    #: reads its item in `MOORAGE_ITEM`, a column in `MOORAGE_ITEM_<COLUMN>`; in `argv`, `{item}` and `{column}` stand
    #: for them, and `{{` for a brace. Without `replicas` and `indices` a list has a replica for each item
    items: list[Any] | ItemsFile | None = None
    #: patterns as in a .gitignore: the files of the attempt's folder that are stored at its end, before the job has
    #: SUCCEEDED
    keep: list[str] = []
    #: a folder below the attempt's folder, a file, or a link there to one of these, that is stored while an attempt
    #: runs, and when it ends, as far as its grace allows; the replica's next attempt has the newest from its start. The
    #: newest two of a replica are kept, for a week, or until it has succeeded
    checkpoint: str | None = None
    #: seconds after which the checkpoint is stored again while the attempt runs, once it has changed and then been
    #: quiet for a moment; at once when the job touches the file in `MOORAGE_CHECKPOINT_NOW`. 0: at its end alone
    checkpoint_every_s: float = 600.0
    #: text with one `(\d+)` in it, which finds the step in the names of the checkpoint's files and folders, as
    #: `step-(\d+)`; the largest counts. Without it what counts of a gang is what all ranks had at a moment before which
    #: none of their checkpoints changed, for ten seconds or a quarter of `checkpoint_every_s`; its step is then the
    #: number of that moment
    checkpoint_step: str | None = None
    #: command line for `/bin/sh -c` that prepares a worker, before the first attempt that starts there. It runs as the
    #: job does, with its user, image, files, variables and resources, and without devices. What it writes to the folder
    #: `MOORAGE_SETUP`, whose `bin` is the first in `PATH`, stays for the other attempts there, and for later jobs of
    #: the tenant with the same driver, image (by what its name stands for there), user, `files`, `setup` and variables
    #: of `env`, secrets aside. Exit code 75, a signal (also as a shell tells
    #: it, 129 to 192) or want of room sends the job to another worker; any other code but 0 ends it: `setup-failed`.
    #: For processes and containers alone
    setup: str | None = None
    setup_s: float = 1800.0  # most seconds that it may run
    #: what it reads and does not change, by name: `/path` below the worker's `data_dirs`; an `https://` or `http://`
    #: address, or one that fsspec knows, as `s3://`, perhaps with `#sha256=` and the digest of the file behind it;
    #: `hf:org/name@revision`; `object:` and the address of sent files; `job:` and the id of a job of the tenant, whose
    #: kept files they are, as `job:sweep:0-9@1764543600000/out` with its replicas and when it was accepted (ms since
    #: 1970). The variable `MOORAGE_DATA_` and the name in
    #: capitals has its path. It is fetched once a worker as the job's user, with the job's secrets, and shared
    #: read-only by jobs of the tenant with the same user, source and secrets. For processes and containers alone
    data: dict[str, str] = {}
    user: str | None = None  # user that the job runs as; null is the agent's own user
    timeout_s: float | None = None  # most seconds that one attempt may run
    grace_s: float = 10.0  # seconds from SIGTERM to SIGKILL
    checkpoint_signal: str | None = None  # signal that gives the job time to save, such as SIGUSR1; see above
    checkpoint_before_s: float = 60.0  # seconds from that signal to the end of the attempt
    #: seconds without output and progress, on GPUs that do no work all the while, after which an attempt counts as
    #: stalled; null: never. A GPU does no work at 0 %, and at 100 % with low power
    stall_s: float | None = None
    #: action for a stalled attempt: an event once (`warn`), or its end as a failure (`end`)
    on_stall: Literal["warn", "end"] = "warn"
    #: whether a replica whose attempt has ended starts again, outside of `retries` and `retries_on_lost`: after an end
    #: without success (`on-failure`), or after any (`always`). It waits 1 s, then twice as long each time, at most 5
    #: min; an attempt that ran for 10 min makes it 1 s again. Only a cancel, `deadline_s` and `max_restarts` end it
    restart: Literal["never", "on-failure", "always"] = "never"
    max_restarts: int | None = None  # most such further attempts of one replica; null sets no bound
    #: seconds for which an attempt that was ready may be so no more. Then it is ended and starts again, which counts as
    #: a failure; not while it moves or its worker is drained. Null: it lives on
    restart_unready_s: float | None = None
    ready: Ready | None = None  # how the worker finds out that an attempt is ready for work; null: it does not look
    #: ports of the worker for each replica, 0..16, in the variables `PORT`, `PORT_1` and so on; see the worker's
    #: setting `ports`
    ports: int = 0
    #: where standard input comes from: nowhere, or a terminal that a caller holds (`stream`). Its screen is also the
    #: stored standard output. A caller holds it by the verb `exec` with `attach`. The end of input follows 60 s after a
    #: caller was lost, and 60 s after the start if none came; not after one that left it by its own will (`DETACH`)
    stdin: Literal["none", "stream"] = "none"
    #: it calls services of its tenant: it gets a key for that and nothing else, and the server's address
    calls: bool = False

    def __post_init__(self) -> None:
        check_command(self.driver, self.argv)
        if self.env:
            _check_env(self.env)
        check_duration("timeout_s", self.timeout_s)
        check_duration("grace_s", self.grace_s)
        check_duration("checkpoint_every_s", self.checkpoint_every_s)
        check_duration("checkpoint_before_s", self.checkpoint_before_s)
        check_duration("setup_s", self.setup_s)
        check_duration("stall_s", self.stall_s)
        if self.stall_s is not None and self.stall_s < 1:
            raise ValueError(f"stall_s must be at least 1 second, found {self.stall_s:g}")
        check_duration("restart_unready_s", self.restart_unready_s)
        if self.restart_unready_s is not None and self.restart_unready_s < 1:
            raise ValueError(f"restart_unready_s must be at least 1 second, found {self.restart_unready_s:g}")
        if self.max_restarts is not None and not 1 <= self.max_restarts <= RESTARTS_MAX:
            raise ValueError(f"max_restarts must be 1..{RESTARTS_MAX}, found {self.max_restarts}")
        if not 0 <= self.ports <= PORTS_MAX:
            raise ValueError(f"ports must be 0..{PORTS_MAX}, found {self.ports}")
        if self.checkpoint is not None and (path := plain_path(self.checkpoint)) != self.checkpoint:
            msgspec.structs.force_setattr(self, "checkpoint", path)

    @property
    def stays(self) -> bool:
        """Whether an attempt that ends badly is followed by another one, however many there were."""
        return self.restart != "never"


def check_command(driver: str, argv: list[str]) -> None:
    """Raise ValueError if a workload of that driver cannot have this `argv`."""
    if driver == DRIVER_DEFAULT and not argv:  # what other drivers need, their workers say
        raise ValueError(f"argv must name a command for the driver {driver}, found none")
    if len(argv) > ARGV_MAX:
        raise ValueError(f"argv must have at most {ARGV_MAX} words, found {len(argv)}")
    if any("\0" in word for word in argv):  # how long words are is bounded by the request's own bytes
        raise ValueError("argv must have text without NUL, found a NUL")


def _check_env(env: dict[str, str | Secret]) -> None:
    if len(env) > ENV_MAX:
        raise ValueError(f"env must have at most {ENV_MAX} names, found {len(env)}")
    for key, value in env.items():
        if not ENV_NAME.fullmatch(key):
            raise ValueError(
                f"env must have names of letters, digits and _ that start with no digit, found {key[:80]!r}"
            )
        if isinstance(value, str) and "\0" in value:  # which is not shown: it may be a secret
            raise ValueError(f"env.{key} must be text without NUL, found a NUL")


def names_a_program(argv: list[str]) -> bool:
    """Return false if the first word of a command is empty. A command without words is true: some drivers need none."""
    return not argv or bool(argv[0])


def _command_trouble(run: Run) -> Trouble | None:
    for name, text in (("user", run.user), ("cwd", run.cwd), ("driver", run.driver)):
        if text and "\0" in text:
            return Trouble(f"run.{name}", f"{name} may not hold a NUL", text, "text without NUL")
    if not run.driver:
        return Trouble("run.driver", "driver must be the name of a driver", quoted(run.driver), "a name, as process")
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
    if len(run.files_of) > FILES_OF_MAX:
        message = f"files_of may name {FILES_OF_MAX} jobs"
        return Trouble("run.files_of", message, f"{len(run.files_of)} jobs", f"0..{FILES_OF_MAX}")
    brought = sum(1 if each.replicas is None else count_of(parse_ranges(each.replicas)) for each in run.files_of)
    if brought > FILES_OF_REPLICAS_MAX:
        message = f"files_of may name {FILES_OF_REPLICAS_MAX} replicas in all"
        return Trouble("run.files_of", message, f"{brought} replicas", f"0..{FILES_OF_REPLICAS_MAX}")
    for at, pattern in enumerate(run.keep):
        if not is_quick(pattern):
            message = (
                f"keep: a part of a path may have at most two stars, and at most {KEEP_STARS_MAX} parts may have two"
            )
            return Trouble(f"run.keep[{at}]", message, quoted(pattern[:80]), 'as in "out/**", "*.log", "out/**/*a*.pt"')
        if at >= KEEP_MAX or not pattern.strip() or "\0" in pattern or len(pattern) > WORD_CHARS_MAX:
            message = f"keep may list {KEEP_MAX} patterns of 1..{WORD_CHARS_MAX} characters"
            return Trouble(f"run.keep[{at}]", message, quoted(pattern[:80]), 'patterns as in a .gitignore: "out/**"')
        first, *_ = parts = pattern.removeprefix("!").split("/")
        if ".." in parts or (first.startswith("~") and len(parts) > 1):
            message = "keep names what is below the attempt's folder, and this pattern can match nothing there"
            return Trouble(f"run.keep[{at}]", message, quoted(pattern[:80]), 'as in "out/**", "*.log"')
    if run.checkpoint is not None and _CHECKPOINT.fullmatch(run.checkpoint) is None:
        message = "checkpoint must be a path below the attempt's folder"
        return Trouble(
            "run.checkpoint", message, quoted(run.checkpoint[:80]), "letters, digits and _.-/, as checkpoints"
        )
    if run.setup is not None and (not run.setup.strip() or "\0" in run.setup):
        return Trouble("run.setup", "setup must be a command line for /bin/sh", quoted(run.setup[:80]), "null for none")
    if run.setup is not None and run.driver in KNOWN and not KNOWN[run.driver].sets_up:  # of the others workers say it
        message = f"jobs of the driver {run.driver} have no setup"
        return Trouble("run.setup", message, quoted(run.driver), "process, docker or podman; null for none")
    if (trouble := _data_trouble(run)) is not None:
        return trouble
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


def _data_trouble(run: Run) -> Trouble | None:
    if len(run.data) > DATA_MAX:
        return Trouble("run.data", f"data may list {DATA_MAX} sources", str(len(run.data)), f"0..{DATA_MAX}")
    if run.data and run.driver in KNOWN and not KNOWN[run.driver].sets_up:  # of the others workers say it
        message = f"jobs of the driver {run.driver} have no data"
        return Trouble("run.data", message, quoted(run.driver), "process, docker or podman; none of it")
    if len({name.upper() for name in run.data}) < len(run.data):
        return Trouble("run.data", "two names differ by capitals alone", quoted(", ".join(run.data)[:80]), "others")
    for name, source in run.data.items():
        if _DATA_NAME.fullmatch(name) is None:
            message = "data must have names for variables"
            return Trouble("run.data", message, quoted(name[:80]), "a letter, then up to 31 letters, digits and _")
        if _DATA_SOURCE.fullmatch(source) is None or "/../" in f"{source}/":
            allowed = "/path, https://…, s3://…, hf:org/name@revision, job:ID/path, object:ADDRESS; no blanks"
            return Trouble(f"run.data.{name}", "data must name a source", quoted(source[:80]), allowed)
        if "@" in source.partition("://")[2].partition("/")[0]:
            message = "a source has no password in it, as requests are shown"
            return Trouble(f"run.data.{name}", message, "user:…@", "the keys as --secret, as AWS_SECRET_ACCESS_KEY=aws")
    return None


def data_variable(name: str) -> str:
    """Return the variable with the path of a job's data of this name."""
    return f"MOORAGE_DATA_{name.upper()}"


def _items_trouble(run: Run) -> Trouble | None:
    items = run.items
    if items is None:
        return None
    if isinstance(items, ItemsFile):
        if run.files is None:
            message = "file is one of the job's files, and it brings none"
            return Trouble("run.items.file", message, quoted(items.file), "a file among files, or a list of items")
        if not items.file.strip("./") or not stays_below(items.file) or len(items.file) > WORD_CHARS_MAX:
            message = "file must be the path of a file among the job's files"
            allowed = f"a path below the job's folder, of at most {WORD_CHARS_MAX} characters"
            return Trouble("run.items.file", message, quoted(items.file[:80]), allowed)
        return None
    for at, value in enumerate(items):
        try:
            item = item_of(value)
        except ValueError as error:
            wanted, _, found = str(error).partition(", found ")
            return Trouble(f"run.items[{at}]", f"items[{at}] {wanted}", found, wanted.removeprefix("must "))
        if name := missing(run.argv, item.columns):
            message = no_column(name, item.columns, f"item {at}")
            return Trouble("run.argv", message, f"{{{name}}}", "{item}, or {column} for a column of every item")
    return None


def is_quick(pattern: str) -> bool:
    """Return whether no file name takes long to match with a pattern of `keep`, which is turned into a regular
    expression."""
    stars = [part.count("*") for part in pattern.split("/")]
    return max(stars) <= 2 and stars.count(2) <= KEEP_STARS_MAX


def kept_pattern(pattern: str) -> str:
    """Return a pattern of `keep` as it is matched: `./out` begins at the attempt's folder, as `/out` does, and `a//b`
    and `a/./b` are `a/b`."""
    bare = pattern.removeprefix("!")
    sign = pattern[: len(pattern) - len(bare)]
    first, *rest = bare.split("/")
    inner = [part for part in rest[:-1] if part not in ("", ".")]
    parts = ["" if first == "." else first, *inner, *(part for part in rest[-1:] if part != ".")]
    return sign + (("/".join(parts)) if any(parts) else "**")


def plain_path(path: str) -> str:
    """Return a relative path without `./`, doubled slashes and a slash at its end: `./ck/` is `ck`. An absolute one
    stays absolute, and the folder itself is ""."""
    parts = "/".join(part for part in path.split("/") if part not in ("", "."))
    return f"/{parts}" if path.startswith("/") else parts


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


#: replicas whose kept files one job may bring: a worker asks for each
FILES_OF_REPLICAS_MAX: Final = 10_000
#: jobs whose kept files one job may bring
FILES_OF_MAX: Final = 16
#: parts of a path, none of which begins with a dot: a pattern of `keep` takes each letter for itself
_CHECKPOINT: Final = re.compile(r"(?!.{256})[A-Za-z0-9_-][A-Za-z0-9_.-]*(/[A-Za-z0-9_-][A-Za-z0-9_.-]*)*")


def step_pattern(text: str) -> re.Pattern[str] | None:
    """Return what finds the step of a checkpoint in a name; None if `checkpoint_step` may not be so.

    A match holds the interpreter lock of the worker, so the text has no other pattern in it.
    """
    before, digits, behind = text.partition(r"(\d+)")
    if not digits or len(text) > WORD_CHARS_MAX or not _STEP_TEXT.fullmatch(before + behind):
        return None
    return re.compile(f"{before}([0-9]{{1,18}}){behind}")


#: text that stands for itself in a pattern
_STEP_TEXT: Final = re.compile(r"(?:[A-Za-z0-9_/=@%,~ -]|\\\.)*")


#: fields of `Run` that say how something is done, by what that is
_ABOUT: Final = {
    "checkpoint_step": "checkpoint",
    "checkpoint_every_s": "checkpoint",
    "checkpoint_before_s": "checkpoint_signal",
    "setup_s": "setup",
}
_DEFAULTS: Final = {field.name: field.default for field in msgspec.structs.fields(Run)}


def _unused_trouble(run: Run) -> Trouble | None:
    """Return the first field that would not be used, as what it is about is not asked for; None if each is used."""
    for name, about in _ABOUT.items():
        value = getattr(run, name)
        if getattr(run, about) is None and value != _DEFAULTS[name]:
            found = quoted(value[:80]) if isinstance(value, str) else value
            message = f"{name} says how {about} is done, and the request has no {about}"
            return Trouble(f"run.{name}", message, found, f"{NONE} {name} without {about}")
    return None


def _checkpoint_trouble(run: Run) -> Trouble | None:
    if run.checkpoint_step is not None and step_pattern(run.checkpoint_step) is None:
        message = r"checkpoint_step must be a name's text with one (\d+) in it, and a backslash before a dot"
        return Trouble("run.checkpoint_step", message, quoted(run.checkpoint_step[:80]), r"as in step-(\d+)")
    if 0 < run.checkpoint_every_s < CHECKPOINT_EVERY_S_MIN:
        message = f"checkpoint_every_s must be at least {CHECKPOINT_EVERY_S_MIN:g} seconds"
        return Trouble("run.checkpoint_every_s", message, run.checkpoint_every_s, "0 for at the end alone")
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


def check_duration(name: str, seconds: float | None) -> None:
    """Raise ValueError unless `seconds` is None or 0..366 days; NaN is refused too."""
    if seconds is not None and not 0 <= seconds <= DURATION_S_MAX:
        raise ValueError(f"{name} must be 0..{DURATION_S_MAX:.0f} seconds, found {seconds}")


def check_uses(uses: dict[str, int]) -> None:
    """Raise ValueError for names or numbers that no counter has."""
    if len(uses) > USES_MAX:
        raise ValueError(f"uses must have at most {USES_MAX} names, found {len(uses)}")
    for name, count in uses.items():
        if not LABEL_KEY.fullmatch(name):
            raise ValueError(f"uses must have names of 1..63 letters, digits and _./-, found {name[:80]!r}")
        if not 1 <= count <= COUNTER_MAX:
            raise ValueError(f"uses.{name} must be 1..{COUNTER_MAX}, found {count}")


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


class After(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """A job whose end another job waits for."""

    job: str  # its id, of the same tenant; known, so it was accepted before
    when: When = "succeeded"  # the end that counts: SUCCEEDED, any, or `failed`: any but SUCCEEDED

    def __post_init__(self) -> None:
        if not is_job(self.job):
            raise ValueError(f"job must match [A-Za-z0-9_-]{{1,64}}, found {self.job[:80]!r}")


class Request(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """What a service asks for. Only `run` is required. Unknown fields are refused."""

    job: str | None = None  # the job's id, `[A-Za-z0-9_-]{1,64}`: it makes sending a request twice harmless
    #: number of copies of `run`, 1..1000000 (of a gang 1..1024), each with `gpu.count` GPUs of one host. With `service`
    #: also `{"min": 1, "max": 8, "wait_target_ms": 200}`: as many as the calls need. Of a gang also `{"min": 2, "max":
    #: 8}`: as many as have room once `min` have; it keeps that number
    replicas: int | Scale = 1
    #: the numbers of the copies, as in `0-99,205`; null numbers them from 0 on. Each copy reads its own in
    #: `MOORAGE_INDEX`
    indices: str | None = None
    max_running: int | None = None  # most replicas that run at once; null sets no bound
    #: number of failed replicas at which the others are cancelled; 0 is 20, or 5 % of them if that is more; null: never
    max_failed: int | None = 0
    priority: int = 50  # 0..100, higher first
    gpu: GpuSpec | None = None  # GPUs of each replica; null asks for none
    resources: Resources | None = None  # the host's CPU cores and memory for each replica; null counts none
    #: a worker's labels: each has one of these values, at most 256 in all and of 256 characters
    requires: dict[str, list[str]] = {}
    #: conditions about a worker's labels, as `gpu.driver>=570` and `zone!=b`: at most 64
    where: list[str] = []
    #: wishes about a worker's labels, as `gpu.model=H100` and those of `where`, the most important first: at most 8. A
    #: host with room that passes all is taken before one that passes all but the last, and so on; none keeps it waiting
    prefers: list[str] = []
    #: labels of workers, at most 4: all ranks of a gang run where these have one value each, as `["rack"]` for one
    #: rack. `site` is one of them anyway, where workers have that label; [] lets the ranks run in any places
    same: list[str] | None = None
    #: a label of workers: each copy goes where its value has the fewest of them, as long as there is room
    spread_over: str | None = None
    run: Run | None = None  # the program, its driver and its limits; required
    #: each driver's own settings, as `{"process": {"gpu_device_ids": ["0"]}}`; those of the job's driver are checked
    driver_config: dict[str, Any] = {}
    deadline_s: float | None = None  # most seconds for the whole job, from its acceptance
    #: most seconds until its first start; then it is EXPIRED. Of several replicas those that wait are EXPIRED if none
    #: was placed for so long
    start_within_s: float | None = None
    #: refuse it at once if by the forecast it starts after `start_within_s`, without that if it does not start now: in
    #: more than half of the cases (0.5) or in more than one of ten (0.9). Not looked at in the durable queue
    or_refuse: float | None = None
    retries: int = 0  # number of further attempts after a failure
    retries_on_lost: int = 3  # number of further attempts after its worker was lost
    #: action if its worker is cut off: end it and start it elsewhere, or let it live and wait for that worker
    on_partition: Literal["kill", "keep"] = "kill"
    #: action if no known worker could ever run it: wait or reject; one that is away is known for `history_keep`, and
    #: what was accepted because of it waits on after that
    on_no_match: Literal["wait", "reject"] = "wait"
    events: Literal["job", "tenant"] = "job"  # subjects of its events: its own and the tenant's, or the tenant's alone
    labels: dict[str, str] = {}  # the caller's own notes
    #: ledger record of a plan; the request is refused with `moved-on` if something was decided since
    if_seq: int | None = None
    #: the same as `gpu` with a count and exact devices, and as `resources`, as OpenShell asks
    resource_requirements: ResourceRequirements | None = None
    #: the same as `driver_config`, `run.image`, `run.env` and `labels`, as OpenShell asks
    template: Template | None = None
    #: whether it is ended, with its notice and grace, and queued again, as soon as a job that is not preemptible could
    #: start in its place, or a frozen job needs its GPUs. It may have the GPUs of frozen jobs too, which others may not
    preemptible: bool = False
    #: the service whose calls its attempts answer, as `{"name": "embed", "concurrency": 8}`; null is none
    service: ServiceSpec | None = None
    #: id of the live job with the same service that this one replaces, so it needs `run.ready`. As many replicas of it
    #: end, and wait, as this one has that were ready for `run.ready.for_s`; it ends once all of this one were. If this
    #: one finds no place, one of the other gives up its own. All come back if this one fails or is cancelled before
    instead_of: str | None = None
    #: order in which a worker freezes unused jobs: `low` first, `critical` not at all by default
    qos: Qos = "medium"
    #: jobs that have to end before it starts, at most 100: ids, each of which has to be SUCCEEDED, or
    #: `{"job": "prep", "when": "any"}`. If one ends otherwise, this one is CANCELLED
    after: list[str | After] = []
    #: seconds from its acceptance during which it is in no queue; `deadline_s` counts meanwhile, `start_within_s` not
    start_after_s: float | None = None
    again_of: str | None = None  # the job of which it is a run again, as the verb `again` answers it; a note
    #: how often it is tried again by how an attempt ended, at most 16 rows, in place of `retries` and
    #: `retries_on_lost`. The first row that fits counts: one that names the cause before one that names its exit code.
    #: Without a row that fits, a failure is the end, and a lost attempt is followed by another one three times.
    #: Attempts that were drained or preempted count for nothing
    retry: list[Retry] = []
    #: how many of each of an operator's counters a replica takes while it is on a worker, as `{"matlab": 1}`: at most
    #: 16 names of 1 to 63 characters. It waits until as many are left. `host.NAME` is a counter of each worker that has
    #: it in its hello's `counts`: the replica goes where as many are left
    uses: dict[str, int] = {}
    #: whether it waits on hold, in no queue, until its tenant releases it (the verb `change`) or an operator does; its
    #: times count meanwhile
    hold: bool = False
    #: for whom of its tenant it is, as a user or a customer: 1 to 64 printable characters. Keys of which jobs wait
    #: share what their tenant gets equally, by the GPU time that each has had of late
    fair_key: str = ""
    #: the weight of `fair_key` among its tenant's keys from now on, 1..100: a key of weight 2 gets twice as much as one
    #: of 1. 0: as the key has it by an earlier job, else 1
    fair_weight: int = 0
    #: of a gang: seconds for which the hosts of its other ranks take no other jobs once a rank is lost, 0..86400. All
    #: ranks end and start again with one attempt number; 0: any job may start there meanwhile
    repair_s: float = 0
    #: a gang of unlike parts, as a trainer and what feeds it: 1..8 groups in place of `gpu`, `resources`, `replicas`.
    #: All ranks of all groups start together or not at all, and end together; they are numbered group by group
    groups: list[GroupSpec] = []
    #: one replica on each worker that fits `where`, `requires` and `gpu`, which never runs on another one: `true` also
    #: on workers that join later, so it ends by a cancel or its deadline; `"once"`: on those of now. A replica has the
    #: number of its worker in the ledger
    each_worker: bool | Literal["once"] = False
    #: who of the tenant submitted it, by the key that nats-server stamped; the scheduler writes it, no request names
    #: it. It stays the last field: see `signed`
    person: str | None = None

    def __post_init__(self) -> None:
        if self.job is not None and not is_job(self.job):
            raise ValueError(f"job must match [A-Za-z0-9_-]{{1,64}}, found {self.job[:80]!r}")
        if self.again_of is not None and not is_job(self.again_of):
            raise ValueError(f"again_of must be the id of a job, found {self.again_of[:80]!r}")
        if self.person is not None and not is_person(self.person):
            raise ValueError(f"person must match {PERSON.pattern}, found {self.person[:80]!r}")
        if self.groups:
            self._take_groups()
        if self.replicas != 1 and not 1 <= self.copies <= REPLICAS_MAX:
            raise ValueError(f"replicas must be 1..{REPLICAS_MAX}, found {self.replicas}")
        if self.indices is not None:
            self._take_indices(self.indices)
        if self.run is not None and isinstance(self.run.items, list):
            self._take_items(len(self.run.items))
        if self.max_running is not None and not 1 <= self.max_running <= REPLICAS_MAX:
            raise ValueError(f"max_running must be 1..{REPLICAS_MAX}, found {self.max_running}")
        if self.max_failed is not None and not 0 <= self.max_failed <= REPLICAS_MAX:
            raise ValueError(f"max_failed must be 0..{REPLICAS_MAX}, found {self.max_failed}")
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
        if self.or_refuse is not None and self.or_refuse not in OR_REFUSE:
            raise ValueError(f"or_refuse must be 0.5 or 0.9, found {self.or_refuse:g}")
        if self.start_after_s is not None:
            check_duration("start_after_s", self.start_after_s)
            if self.deadline_s is not None and self.deadline_s <= self.start_after_s:
                raise ValueError(
                    f"deadline_s must be above start_after_s = {self.start_after_s:g}: both count from its acceptance"
                )
        if self.template is not None:
            self._read_template(self.template, self.run)
        if self.resource_requirements is not None:
            self._read_amounts(self.resource_requirements)
        if self.requires or self.labels:
            self._check_labels()
        if self.uses:
            check_uses(self.uses)
        if self.fair_key and (len(self.fair_key) > FAIR_KEY_CHARS_MAX or not self.fair_key.isprintable()):
            raise ValueError(
                f"fair_key must be 1..{FAIR_KEY_CHARS_MAX} printable characters, found {self.fair_key[:80]!r}"
            )
        if not 0 <= self.fair_weight <= FAIR_WEIGHT_MAX:
            raise ValueError(f"fair_weight must be 0..{FAIR_WEIGHT_MAX}, found {self.fair_weight}")
        if self.fair_weight and not self.fair_key:
            raise ValueError(f"fair_weight must have a fair_key beside it, found {self.fair_weight} without one")
        if self.repair_s and not 0 < self.repair_s <= REPAIR_S_MAX:
            raise ValueError(f"repair_s must be 0..{REPAIR_S_MAX:.0f} seconds, found {self.repair_s}")
        if self.after:
            self._read_after()
        if self.on_partition == "keep" and (self.groups or (self.gpu is not None and self.gpu.scheduling == "gang")):
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

    def _read_after(self) -> None:
        """Make an `After` of each id in `after`: equal requests are equal in either form."""
        for each in self.after:
            if isinstance(each, str) and not is_job(each):
                raise ValueError(f"after must match [A-Za-z0-9_-]{{1,64}}, found {each[:80]!r}")
        found = [After(each) if isinstance(each, str) else each for each in self.after]
        if len(found) > AFTER_MAX:
            raise ValueError(f"after must name at most {AFTER_MAX} jobs, found {len(found)}")
        names = [each.job for each in found]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"after must name each job once, found {twice[0]} twice")
        msgspec.structs.force_setattr(self, "after", found)

    @property
    def awaited(self) -> list[After]:
        """The jobs that have to end before it starts."""
        return [each for each in self.after if isinstance(each, After)]

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

    def with_bounds(self, max_running: int, timeout_ms: int) -> Request:
        """Return the request with these in place of its own `max_running` and `run.timeout_s`; negative: its own."""
        run, most = self.run, self.max_running if max_running < 0 else max_running
        if run is not None and timeout_ms >= 0:
            run = msgspec.structs.replace(run, timeout_s=timeout_ms / 1000)
        return msgspec.structs.replace(self, max_running=most, run=run)

    def with_copies(self, least: int, most: int) -> Request:
        """Return the request with `most` replicas in place of its own; as many as calls need, if `least` is not
        negative. Raises ValueError for numbers that no request may have."""
        if least < 0:
            return msgspec.structs.replace(self, replicas=most, indices=None)
        wait_ms = self.replicas.wait_target_ms if isinstance(self.replicas, Scale) else WAIT_TARGET_MS
        return msgspec.structs.replace(self, replicas=Scale(max=most, min=least, wait_target_ms=wait_ms), indices=None)

    def with_ranks(self, most: int) -> Request:
        """Return the request of a gang that started with `most` ranks, as its workers have it."""
        least = most if self.ranks is None else min(self.ranks.min, most)
        return msgspec.structs.replace(self, replicas=Scale(max=most, min=least))

    @property
    def token(self) -> str:
        """Its GPUs as every table prints them; of a gang with groups those of each group."""
        if self.groups:
            return "+".join(format_token(group.gpu, group.replicas) for group in self.groups)
        return format_token(self.effective_gpu, self.copies)

    def of_group(self, at: int) -> Request:
        """Return the request of a gang of this group alone."""
        group, run = self.groups[at], self.workload
        if group.argv or group.env:
            run = msgspec.structs.replace(run, argv=group.argv or run.argv, env=run.env | group.env)
        fields = {"gpu": group.asks, "resources": group.resources, "run": run, "replicas": group.replicas}
        return msgspec.structs.replace(self, groups=[], **fields)

    def of_rank(self, rank: int) -> Request:
        """Return the request as the worker of this rank has it: what its group asks for, and all groups."""
        if not self.groups:
            return self
        own = self.of_group(self.group_of(rank)[0])
        return msgspec.structs.replace(own, groups=self.groups, replicas=self.copies)

    @property
    def fleet_uses(self) -> tuple[tuple[str, int], ...]:
        """The counters of operators that a replica takes, each with how many, in order of their names."""
        return tuple(row for row in sorted(self.uses.items()) if not row[0].startswith(HOST_COUNTER))

    @property
    def host_uses(self) -> tuple[tuple[str, int], ...]:
        """The same of the counters of its host, by their names there."""
        rows = sorted(self.uses.items())
        return tuple((name[len(HOST_COUNTER) :], count) for name, count in rows if name.startswith(HOST_COUNTER))

    def group_of(self, rank: int) -> tuple[int, int]:
        """Return the place of a rank's group among `groups`, and the first rank of that group."""
        return group_at([group.replicas for group in self.groups], rank)

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
            or _items_trouble(self.workload)
            or (None if self.gpu is None else self.gpu.trouble)
            or self._distributed_trouble
            or self._groups_trouble
            or self._each_worker_trouble
            or self._gang_trouble
            or self._place_trouble
            or self._preemptible_trouble
            or self._service_trouble
            or self._instead_trouble
            or self._staying_trouble
            or self._retry_trouble
            or self._scale_trouble
            or self._length_trouble
            or self._time_trouble
            or _unused_trouble(self.workload)
            or _checkpoint_trouble(self.workload)
            or self._stall_trouble
            or self._driver_trouble
        )

    def _take_indices(self, text: str) -> None:
        """Set the number of replicas from their numbers. Raises ValueError for numbers that do not fit."""
        try:
            numbers = parse_ranges(text)
        except ValueError as error:
            raise ValueError(f"indices must be {error}") from None
        count = count_of(numbers)
        if isinstance(self.replicas, Scale):
            raise ValueError("indices must be left out where replicas has min and max: those are numbered from 0 on")
        if self.replicas not in (1, count):
            raise ValueError(f"replicas must be left out, or be {count} as indices says, found {self.replicas}")
        msgspec.structs.force_setattr(self, "replicas", count)

    def _take_groups(self) -> None:
        """Set the number of replicas from the sizes of the groups. Raises ValueError if it is another one."""
        count = sum(group.replicas for group in self.groups)
        if self.replicas not in (1, count):
            raise ValueError(f"replicas must be left out, or be {count} as groups says, found {self.replicas}")
        msgspec.structs.force_setattr(self, "replicas", count)

    def _take_items(self, count: int) -> None:
        """Set the number of replicas from the number of items. Raises ValueError for a replica without an item."""
        if not count:
            raise ValueError("run.items must have an item for each replica, found none")
        if self.indices is None:
            if self.replicas not in (1, count):
                raise ValueError(
                    f"replicas must be left out, or be {count} as run.items says, found {self.replicas};"
                    " indices names some of them"
                )
            msgspec.structs.force_setattr(self, "replicas", count)
        elif (last := self.numbers[-1][1]) >= count:
            raise ValueError(f"indices must be numbers of items, 0..{count - 1}, found {last}")

    @property
    def copies(self) -> int:
        """The number of copies of `run`; the most that there may be where their number follows the calls."""
        return self.replicas.max if isinstance(self.replicas, Scale) else self.replicas

    @property
    def scale(self) -> Scale | None:
        """The bounds of the number of copies that run, where this follows the calls of its service; else None."""
        return self.replicas if isinstance(self.replicas, Scale) and not self.is_gang else None

    @property
    def ranks(self) -> Scale | None:
        """The least and the most ranks of a gang that takes as many as have room; else None."""
        return self.replicas if isinstance(self.replicas, Scale) and self.is_gang else None

    @property
    def numbers(self) -> Ranges:
        """The numbers of its replicas."""
        return first_numbers(self.copies) if self.indices is None else parse_ranges(self.indices)

    @property
    def spreads(self) -> bool:
        """Whether each copy goes to the host with the fewest of them; so do those of a service, unless it says else."""
        gpu = self.effective_gpu
        if gpu is not None and gpu.scheduling is not None:
            return gpu.scheduling == "spread"
        return self.service is not None and not self.service.pack

    @property
    def failed_max(self) -> int | None:
        """The number of failed replicas at which the others are cancelled; None for never."""
        if self.max_failed == 0:
            if self.each_worker:
                return None  # it is not known how many there will be
            return max(FAILED_MAX, self.copies * FAILED_MAX_PERCENT // 100)
        return self.max_failed

    @property
    def _groups_trouble(self) -> Trouble | None:
        """What is wrong with its groups; None if nothing is."""
        groups = self.groups
        if not groups:
            return None
        if len(groups) > GROUPS_MAX:
            return Trouble("groups", f"a gang has at most {GROUPS_MAX} groups", len(groups), f"1..{GROUPS_MAX}")
        for field, value in (("gpu", self.gpu), ("resources", self.resources), ("preemptible", self.preemptible),
                             ("resource_requirements", self.resource_requirements), ("template", self.template),
                             ("run.items", self.workload.items), ("driver_config", self.driver_config)):  # fmt: skip
            if value:
                return Trouble(field, f"each group says for itself what it asks for, and has no {field}", "both", NONE)
        names = [group.name for group in groups]
        if twice := [name for name in names if names.count(name) > 1]:
            return Trouble("groups", "two groups have one name", quoted(twice[0]), "a name for each")
        if not any(group.gpu is not None for group in groups):
            return Trouble("groups", "some group of a gang has GPUs", "none", "gpu of one group")
        for at, group in enumerate(groups):
            place, gpu = f"groups[{at}]", group.asks
            if gpu is None or group.gpu is None:
                continue
            if gpu.effective_sharing != "exclusive" or group.gpu.scheduling is not None:
                message = "the ranks of a group have whole GPUs, and start together"
                return Trouble(f"{place}.gpu", message, "sharing or scheduling", "neither")
            if (trouble := gpu.trouble) is not None:
                return trouble._replace(field=f"{place}.{trouble.field}")
        return None

    @property
    def stands(self) -> bool:
        """Whether it runs on each worker that fits, and waits for others to join."""
        return self.each_worker is True

    @property
    def _each_worker_trouble(self) -> Trouble | None:
        if not self.each_worker:
            return None
        for field, value in (("replicas", self.replicas != 1), ("indices", self.indices), ("service", self.service),
                             ("groups", self.groups), ("run.items", self.workload.items), ("same", self.same),
                             ("spread_over", self.spread_over)):  # fmt: skip
            if value:
                message = f"each_worker makes one replica for each worker, so it has no {field.rpartition('.')[2]}"
                return Trouble(field, message, "both", "leave it out with each_worker")
        if self.gpu is not None and (self.gpu.scheduling is not None or self.gpu.distributed is not None):
            message = "each_worker says already where each replica runs"
            return Trouble("gpu.scheduling", message, "both", "leave it out with each_worker")
        if self.stands and self.start_within_s is not None:
            message = "each_worker waits for workers that join, whenever that is"
            return Trouble("start_within_s", message, f"{self.start_within_s:g}", 'leave it out, or each_worker "once"')
        return None

    @property
    def _gang_trouble(self) -> Trouble | None:
        if self.repair_s and not self.is_gang:
            message = "repair_s is about the other ranks of a gang, and the job is none and has no groups"
            return Trouble("repair_s", message, f"{self.repair_s:g}", "0 without a gang or groups")
        if not self.groups and (self.gpu is None or self.gpu.effective_scheduling != "gang"):
            return None
        if isinstance(self.replicas, Scale):
            if not self.replicas.min:
                message = "a gang starts with at least one rank"
                return Trouble("replicas.min", message, 0, f"1..{self.replicas.max}")
            if self.replicas.wait_target_ms != WAIT_TARGET_MS:
                message = "wait_target_ms is about calls, and a gang takes none"
                return Trouble("replicas.wait_target_ms", message, self.replicas.wait_target_ms, "leave it out")
        if self.copies > GANG_MAX:
            found = f"{self.copies} replicas"
            return Trouble("replicas", f"a gang has at most {GANG_MAX} ranks", found, f"1..{GANG_MAX}")
        for field, value in (("indices", self.indices), ("max_running", self.max_running)):
            if value is not None:
                message = f"ranks of a gang run together and are numbered from 0 on, so it has no {field}"
                return Trouble(field, message, str(value), "leave it out, or no gang")
        return None

    @property
    def _place_trouble(self) -> Trouble | None:
        if self.spread_over is not None and not is_label(self.spread_over):
            return Trouble("spread_over", "a label of workers", quoted(self.spread_over[:80]), LABEL_FORM)
        if self.same is None:
            return None
        if not self.groups and (self.gpu is None or self.gpu.effective_scheduling != "gang"):
            message = "the ranks of a gang share a place, and other replicas start one by one"
            return Trouble("same", message, quoted(", ".join(self.same)[:80]), "null without a gang")
        if len(self.same) > SAME_MAX:
            return Trouble("same", f"at most {SAME_MAX} labels", len(self.same), f"0..{SAME_MAX}")
        for at, label in enumerate(self.same):
            if not is_label(label):
                return Trouble(f"same[{at}]", "a label of workers", quoted(label[:80]), LABEL_FORM)
            if label == self.spread_over:
                message = f"the ranks cannot have one {label} and be spread over several"
                return Trouble(f"same[{at}]", message, quoted(label), "another label than spread_over")
        return None

    @property
    def same_labels(self) -> tuple[str, ...]:
        """The labels of which all ranks of a gang have one value: those that it names, and its site unless it says
        otherwise. Empty without a gang."""
        if not self.is_gang or self.same == []:
            return ()
        named = tuple(dict.fromkeys(self.same or ()))
        return named if SITE in named or self.spread_over == SITE else (*named, SITE)

    @property
    def _distributed_trouble(self) -> Trouble | None:
        gpu = self.gpu
        if gpu is None or gpu.distributed is None or self.replicas == 1 or gpu.scheduling == "gang":
            return None
        message = "distributed with several replicas needs scheduling gang: its ranks start together or not at all"
        return Trouble("gpu.distributed", message, f"{self.copies} replicas", 'scheduling "gang", or one replica')

    @property
    def _preemptible_trouble(self) -> Trouble | None:
        if not self.preemptible:
            return None
        gpu = self.effective_gpu
        if gpu is not None and gpu.effective_sharing != "exclusive":
            why = "the end of a job that shares a GPU makes no room"
            return Trouble("preemptible", why, gpu.effective_sharing, "false with sharing")
        if gpu is not None and gpu.effective_scheduling == "gang":
            why = "ranks of a gang may not be preemptible: the end of one would end all"
            return Trouble("preemptible", why, "gang", "false")
        if self.on_partition == "keep":
            why = "a preemptible job ends with its worker's lease"
            return Trouble("on_partition", why, "keep", "kill with preemptible")
        return None

    @property
    def _time_trouble(self) -> Trouble | None:
        """A time in which nothing can run; None if there is none."""
        for field, seconds in (("run.timeout_s", self.workload.timeout_s), ("deadline_s", self.deadline_s)):
            if seconds == 0:
                name = field.rpartition(".")[2]
                return Trouble(field, f"{name} leaves no time to run", "0", "above 0; null sets no bound")
        return None

    @property
    def cut_short(self) -> list[str]:
        """A warning for each time that its deadline does not leave."""
        deadline_s, run = self.deadline_s, self.workload
        found = (("timeout_s (--time-limit)", run.timeout_s), ("start_within_s (--start-within)", self.start_within_s))
        return [
            f"{DEADLINE}: deadline_s {deadline_s:g} (--deadline) ends the job before {name} {given_s:g} is over"
            for name, given_s in found
            if deadline_s is not None and given_s is not None and given_s > deadline_s
        ]

    @property
    def _stall_trouble(self) -> Trouble | None:
        run = self.workload
        if run.stall_s is not None and self.effective_gpu is None:
            message = "stall_s looks at the work of GPUs, and the request asks for none"
            return Trouble("run.stall_s", message, f"{run.stall_s:g}", "null without a gpu")
        if run.stall_s is None and run.on_stall != "warn":
            message = "on_stall needs stall_s: after how many seconds an attempt counts as stalled"
            return Trouble("run.on_stall", message, run.on_stall, "warn without stall_s")
        return None

    @property
    def is_gang(self) -> bool:
        """Whether it has several replicas, or as many as have room, which start together and end together."""
        gpu = self.gpu
        if self.groups:
            return True
        if gpu is None or gpu.effective_scheduling != "gang":
            return False
        return isinstance(self.replicas, Scale) or self.replicas > 1

    @property
    def _service_trouble(self) -> Trouble | None:
        """What keeps its attempts from answering or making calls, as far as it is the same on every worker."""
        if self.service is None and not self.workload.calls:
            return None
        driver = self.workload.driver
        if self.service is None:
            if driver in KNOWN and not KNOWN[driver].answers_calls:
                message = f"jobs of the driver {driver} cannot call services: they get no key"
                return Trouble("run.driver", message, quoted(driver), f"{DRIVER_DEFAULT}, for one")
            return None
        if self.workload.calls:
            message = "a member of a service has its key to answer calls, and none to call others"
            return Trouble("run.calls", message, "true", "false with a service")
        if driver in KNOWN and not KNOWN[driver].answers_calls:  # of the others their workers say it
            message = f"jobs of the driver {driver} cannot answer the calls of a service"
            return Trouble("run.driver", message, quoted(driver), f"{DRIVER_DEFAULT}, for one")
        if self.is_gang:
            return Trouble("service", "the ranks of a gang are no members of a service", "gang", "null with a gang")
        if self.service.sleep_after_s and not self.ends_idle and not self.sleeps:
            message = (
                "only a job that has its GPUs alone can sleep without calls, or asks for memory of shared ones by"
                " time-slice, as 1xL40S@time-slice=10G"
            )
            return Trouble("service.sleep_after_s", message, self.service.sleep_after_s, "0, or replicas.min 0")
        return self.service.trouble

    @property
    def sleeps(self) -> bool:
        """Whether its members give up their GPUs while no calls come, where their driver can freeze them."""
        gpu = self.effective_gpu
        if gpu is None or self.service is None or not self.service.sleep_after_s:
            return False
        if gpu.effective_sharing == "exclusive":
            return True
        # not by mps: a daemon keeps the GPU for its clients, also for those that sleep
        return gpu.effective_sharing == "time-slice" and gpu.share is not None and gpu.share.memory_mib > 0

    @property
    def ends_idle(self) -> bool:
        """Whether its last member may end while no calls come."""
        return self.scale is not None and self.scale.min == 0

    @property
    def _instead_trouble(self) -> Trouble | None:
        """What is wrong with the job that it replaces; None if nothing is."""
        if self.instead_of is None:
            return None
        if self.service is None:
            message = "instead_of replaces a job with the same service, and the request names none"
            return Trouble("instead_of", message, quoted(self.instead_of), "null without a service")
        if not is_job(self.instead_of):
            message = "instead_of must be the id of a job"
            return Trouble("instead_of", message, quoted(self.instead_of[:80]), "[A-Za-z0-9_-]{1,64}")
        if self.workload.ready is None:  # a replica that only runs may still load, or fail
            message = (
                f"job {self.instead_of} ends as far as this one is ready in its place, and nothing says when it is"
            )
            return Trouble("run.ready", message, "null", "with instead_of a check: call, tcp, http or file")
        return None

    @property
    def _staying_trouble(self) -> Trouble | None:
        """What is wrong with when it starts again and when it is ready; None if nothing is."""
        run = self.workload
        if run.max_restarts is not None and not run.stays:
            message = "max_restarts needs restart: on-failure or always"
            return Trouble("run.max_restarts", message, run.max_restarts, "null with restart never")
        if run.restart_unready_s is not None and not (run.stays and run.ready is not None):
            message = "restart_unready_s needs a check, ready, and restart: on-failure or always"
            found = "no check" if run.ready is None else "restart never"
            return Trouble("run.restart_unready_s", message, found, "null without a check, or with restart never")
        if run.stays and self.retries:
            message = f"retries are further attempts that restart {run.restart} has without them"
            return Trouble("retries", message, self.retries, "0 with restart; max_restarts bounds it")
        if run.stays and self.is_gang:
            message = "the ranks of a gang start together or not at all, so none starts again alone"
            return Trouble("run.restart", message, run.restart, "never with a gang; retries start all ranks again")
        if run.ready is None and not run.ports:
            return None
        if run.driver in KNOWN and not KNOWN[run.driver].reaches:  # of the others their workers say it
            field = "run.ports" if run.ports else "run.ready"
            message = f"jobs of the driver {run.driver} have no ports of their worker, which cannot look at them either"
            return Trouble(field, message, quoted(run.driver), f"{DRIVER_DEFAULT}, for one")
        if run.ready is None:
            return None
        return run.ready.trouble(run.ports, serves=self.service is not None)

    @property
    def _retry_trouble(self) -> Trouble | None:
        """What is wrong with its rows of `retry`; None if nothing is."""
        if not self.retry:
            return None
        if len(self.retry) > RULES_MAX:
            return Trouble("retry", f"retry has at most {RULES_MAX} rows", len(self.retry), f"0..{RULES_MAX}")
        named = [cause for row in self.retry for cause in row.causes]
        if twice := next((cause for cause in named if named.count(cause) > 1), ""):
            message = f"retry names {twice} twice, and the first row with it alone counts"
            return Trouble("retry", message, twice, "each cause once")
        for name, value, usual in (("retries", self.retries, 0), ("retries_on_lost", self.retries_on_lost, 3)):
            if value != usual:
                message = f"retry says by cause what {name} says of all: send one of them"
                return Trouble("retry", message, f"{name} {value}", f"{name} {usual}, or no retry")
        if self.workload.stays:
            message = f"retry allows further attempts that restart {self.workload.restart} has without it"
            return Trouble("retry", message, "restart and retry", "none with restart; max_restarts bounds it")
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
        if self.workload.stdin != "none":
            can = KNOWN.get(driver) if capabilities is None else capabilities  # of the others their workers say it
            if can is not None and not can.holds_stdin:
                instead = f": {can.exec_instead}" if can.exec_instead else ""
                message = f"jobs of the driver {driver} have no terminal that a caller holds{instead}"
                allowed = "none, or another driver, as process, docker or podman"
                trouble = Trouble("run.stdin", message, quoted(self.workload.stdin), allowed)
                return Fault("invalid-argument", trouble)
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
    def _scale_trouble(self) -> Trouble | None:
        if not isinstance(self.replicas, Scale) or self.is_gang:
            return None
        if self.service is None:
            message = "replicas with min and max is for a gang, or follows the calls of a service"
            return Trouble("replicas", message, "neither", "a number, a gang (--gang), or name the service")
        if self.max_running is not None:
            message = "replicas.max says already how many run at once"
            return Trouble("max_running", message, self.max_running, "leave it out with replicas.max")
        if self.start_within_s is not None and not self.replicas.min:
            message = "a service without members starts with its first call, whenever that comes"
            return Trouble("start_within_s", message, f"{self.start_within_s:g}", "leave it out with replicas.min 0")
        return None

    @property
    def _length_trouble(self) -> Trouble | None:
        """A vendor, a list of `requires` or a value in one that is too long; None if there is none."""
        gpu = self.gpu
        if gpu is not None and gpu.vendor is not None and len(gpu.vendor) > WORD_CHARS_MAX:
            return _too_long("gpu.vendor", gpu.vendor)
        if self.where and (wrong := where_trouble(self.where)):
            return wrong
        if self.prefers and (wrong := prefers_trouble(self.prefers)):
            return wrong
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
READY: Final = "READY"  # beside RUNNING: its worker has seen that it is ready for work; no state of a replica either
NOT_READY: Final = "NOT_READY"  # and that it is not any more
QUEUED: Final = "QUEUED"
PLACED: Final = "PLACED"
CLAIMED: Final = "CLAIMED"
RUNNING: Final = "RUNNING"
EXITED: Final = "EXITED"
ENDING: Final = "ENDING"
CANCELLING: Final = "CANCELLING"
LOST_KEPT: Final = "LOST_KEPT"
SUCCEEDED: Final = "SUCCEEDED"
FAILED: Final = "FAILED"
TIMED_OUT: Final = "TIMED_OUT"
CANCELLED: Final = "CANCELLED"
EXPIRED: Final = "EXPIRED"
REJECTED: Final = "REJECTED"
FROZEN: Final = "FROZEN"


class StateRow(NamedTuple):
    """A state of a replica, and all that sets it apart from the others; sets of states are made of these columns."""

    name: str
    rank: int  # a job whose replicas are in several states is in that of the least rank
    follows: frozenset[str]  # the states that may follow; any other step raises
    means: str  # what a replica in it is doing, for the reader of a job's transitions
    on_worker: bool = False  # an attempt is on a worker, and has not ended: it has no exit code
    has_devices: bool = False  # that attempt has all of its devices; one that was frozen has none, also while it leaves
    runs: bool = False  # its processes live, and its worker reports on them
    may_end: bool = False  # the attempt may be asked to end
    leaving: bool = False  # it was asked to end
    terminal: bool = False
    worked: bool = False  # an attempt that came to this state ended by itself: its time is that of the work


def _to(*states: str) -> frozenset[str]:
    return frozenset(states)


#: The states of a replica by number, as the ledger writes them: rows are added at the end. The diagram in the docs is
#: drawn from this table.
STATE_TABLE: Final = (
    StateRow(
        QUEUED, 6, _to(PLACED, CANCELLED, EXPIRED, REJECTED, FAILED),
        "waits for a place; `explain` says for what",
    ),
    StateRow(
        PLACED, 5, _to(CLAIMED, QUEUED, CANCELLING, ENDING, EXITED, LOST_KEPT, FAILED),
        "GPUs of a worker are proposed to it; its pool has not answered yet",
        on_worker=True, has_devices=True, may_end=True,
    ),
    StateRow(
        CLAIMED, 4, _to(RUNNING, QUEUED, SUCCEEDED, FAILED, TIMED_OUT, CANCELLING, ENDING, LOST_KEPT, EXITED),
        "the worker's pool holds the GPUs; in a gang, it waits for the others",
        on_worker=True, has_devices=True, may_end=True,
    ),
    StateRow(
        RUNNING, 1, _to(SUCCEEDED, FAILED, TIMED_OUT, QUEUED, CANCELLING, ENDING, LOST_KEPT, EXITED, FROZEN),
        "the worker has started it",
        on_worker=True, has_devices=True, runs=True, may_end=True,
    ),
    StateRow(
        EXITED, 9, _to(SUCCEEDED, QUEUED, FAILED, CANCELLED, TIMED_OUT),
        "a rank of a gang has ended well and waits for the others",
        worked=True,
    ),
    StateRow(
        ENDING, 7, _to(QUEUED, FAILED, TIMED_OUT, CANCELLED, SUCCEEDED, CANCELLING, LOST_KEPT, EXITED),
        "it is being ended, because its gang failed or its time is over",
        on_worker=True, leaving=True,
    ),
    StateRow(
        CANCELLING, 8, _to(CANCELLED, SUCCEEDED),
        "it is being ended because it was cancelled",
        on_worker=True, leaving=True,
    ),
    StateRow(
        LOST_KEPT, 3, _to(RUNNING, FROZEN, SUCCEEDED, FAILED, TIMED_OUT, QUEUED, CANCELLED),
        "its worker is lost, and it may still run there: `on_partition` is keep, or its driver cannot end it without"
        " the agent. It is placed nowhere else until the worker reports, or until it is requeued or cancelled",
        on_worker=True,
    ),
    StateRow(SUCCEEDED, 15, _to(), "over, with code 0", terminal=True, worked=True),
    StateRow(FAILED, 11, _to(), "over, with an error, and no retry is left", terminal=True, worked=True),
    StateRow(TIMED_OUT, 12, _to(), "over: it ran longer than `timeout_s` or `deadline_s`", terminal=True, worked=True),
    StateRow(
        CANCELLED, 14, _to(),
        "over, because it was cancelled, or a job that it names in `after` did not end as it asks",
        terminal=True,
    ),
    StateRow(
        EXPIRED, 13, _to(),
        "over: it could not start within `start_within_s`, or before its deadline",
        terminal=True,
    ),
    StateRow(
        REJECTED, 10, _to(),
        "over: no worker could ever run it, and `on_no_match` is reject",
        terminal=True,
    ),
    StateRow(
        FROZEN, 2, _to(RUNNING, SUCCEEDED, FAILED, TIMED_OUT, QUEUED, CANCELLING, ENDING, LOST_KEPT),
        "its processes are frozen, and it holds no GPU: its GPU memory is in its host's RAM until it is resumed",
        on_worker=True, runs=True, may_end=True,
    ),
)  # fmt: skip
STATES: Final = tuple(row.name for row in STATE_TABLE)
STATE_NUMBER: Final = {name: number for number, name in enumerate(STATES)}
TRANSITIONS: Final = {row.name: row.follows for row in STATE_TABLE}
TERMINAL: Final = frozenset(row.name for row in STATE_TABLE if row.terminal)
ON_WORKER: Final = frozenset(row.name for row in STATE_TABLE if row.on_worker)
#: states of an attempt that does not run yet
STARTING: Final = frozenset(row.name for row in STATE_TABLE if row.may_end and not row.runs)
_RANK: Final = {row.name: row.rank for row in STATE_TABLE}


def derive_state(states: set[str]) -> str:
    """Return a job's state from the states of its replicas: live while any is live, SUCCEEDED only if all are.

    Raises ValueError for an empty set.
    """
    if states:
        return min(states, key=_RANK.__getitem__)
    raise ValueError("a job has at least one replica")
