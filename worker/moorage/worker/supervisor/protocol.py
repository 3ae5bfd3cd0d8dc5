"""Define the frames between the agent and the supervisor, on the supervisor's UNIX stream socket.

A frame (`system.framing`) has msgpack as its body. The agent sends one request per frame. The supervisor sends an array
of messages per frame: all messages of one turn of its loop, unless they need several frames.
Every request has a number `n`, which its answer (`Done`, `Listed` or `Refused`) repeats; events have none.

The frames have no version field: `Hello.protocol` says which version the supervisor speaks. In every version the first
message is `Hello`, and `Shutdown` ends all attempts and then the supervisor: both may get more fields, each with a
default. The same holds for the records of the supervisor's journal. Times named `*_boottime_s` are seconds of
CLOCK_BOOTTIME, which also counts while the machine is suspended.
"""

from typing import Final, Literal, TypeAlias

import msgspec

from moorage.system.framing import framed

PROTOCOL: Final = 1
"""An agent uses a supervisor of this version alone. It has another one end its attempts and itself: each number has its
line in docs/upgrade.md, which says to drain the host first."""
FRAME_BYTES_MAX: Final = 16 * 1024 * 1024
KEY_CHARS_MAX: Final = 512
OUTPUT_CHUNK_BYTES_MAX: Final = 64 * 1024
SOCKET_NAME: Final = "supervisor.sock"
LOCK_NAME: Final = "supervisor.lock"
JOURNAL_NAME: Final = "members.journal"
LOG_NAME: Final = "supervisor.log"
MARK_NAME: Final = "mark"
OUTPUT_FOLDER: Final = "output"

OnPartition: TypeAlias = Literal["kill", "keep"]
Stream: TypeAlias = Literal["stdout", "stderr"]
SHUTS_DOWN: Final = "the supervisor shuts down"
"""Why an attempt ends with its supervisor, if no request asked for the end of this attempt."""
Reason: TypeAlias = Literal["exit", "timeout", "end", "fence", "start-failed", "supervisor-died"]
Proof: TypeAlias = Literal["cgroup", "walk", "scan", "reboot", "never-ran", "container"]
"""What proves that no process of an attempt is left.

`cgroup`: its cgroup v2 is empty. `walk`: the supervisor, its subreaper, has no descendant of it. `scan`: the former
supervisor is dead and no process has the attempt's marks in its environment. `reboot`: the machine has booted since.
`never-ran`: no process of it was ever created. `container`: no process is left that has the container's id in its
cgroup, and its init was seen.
"""


class MpsDaemon(msgspec.Struct, frozen=True, kw_only=True):
    """An MPS daemon: its control program, empty if that is not installed, and its directories."""

    program: str
    pipe: str
    log: str

    @property
    def environment(self) -> dict[str, str]:
        """The variables that lead a client, or the control program, to this daemon."""
        return {"CUDA_MPS_PIPE_DIRECTORY": self.pipe, "CUDA_MPS_LOG_DIRECTORY": self.log}


class StartAttempt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One child to start.

    `key` is opaque, 1..512 characters; a key has one child until it is forgotten. `env` is the whole environment. `cwd`
    null is `/`. `user` is a name or uid, null is the supervisor's own. Without `timeout_s` there is no limit of time.
    `ends_in_s` is when the agent will end it. Both are counted from its start. `checkpoint_signal` is sent once,
    `checkpoint_before_s` before the earlier of these two times, or with the notice of an end (`checkpoint.py` says
    which processes get it). `output_cap_bytes` holds for each of stdout and stderr. `refused_nodes` are the character
    devices, as (major, first minor, last minor), that the kernel refuses to it; if it cannot be made to, the attempt
    does not start (stage `devices`). Empty refuses nothing. With `terminal` its streams are a terminal of its own, see
    `terminal.py`. `mps` is the daemon that its processes are clients of: their ends are announced to it
    (`mps_notice.py`).
    """

    key: str
    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str | None = None
    user: str | int | None = None
    timeout_s: float | None = None
    ends_in_s: float | None = None
    grace_s: float = 10.0
    checkpoint_signal: str | None = None
    checkpoint_before_s: float | None = None
    on_partition: OnPartition = "kill"
    output_cap_bytes: int = 64 * 1024 * 1024
    stream_output: bool = False
    terminal: bool = False
    cpu_milli: int | None = None
    memory_bytes: int | None = None
    refused_nodes: tuple[tuple[int, int, int], ...] = ()
    mps: MpsDaemon | None = None


class Contain(msgspec.Struct, frozen=True, kw_only=True, tag="contain"):
    """Take on an attempt that is a container, created by an engine and not started; start the container after the
    answer.

    Only the key, the times, the checkpoint signal, `on_partition` and `mps` of `attempt` are used. If the supervisor
    refuses, do not start the container; `fenced`, `full` and `journal` say that nothing may start now. The container
    has a PID namespace of its own and no restart policy. `Started` follows when its init is seen (`Ran`), and `Ended`
    when none of its processes is left and none can come.
    """

    n: int
    attempt: StartAttempt = msgspec.field(name="member")
    container: str


class Ran(msgspec.Struct, frozen=True, kw_only=True, tag="ran"):
    """The engine has started the container of this attempt; an unknown key is ignored.

    `pid` is its init by the engine's word, which counts once it was seen to be in the container; 0 if the container is
    over already.
    """

    n: int
    key: str
    pid: int


class Removed(msgspec.Struct, frozen=True, kw_only=True, tag="removed"):
    """The engine has removed the containers of these attempts: none can start any more. Other keys are ignored."""

    n: int
    keys: tuple[str, ...]


class EndAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """Ask one attempt to end: SIGTERM to its process group, after `grace_s` SIGKILL to the whole tree; 0 kills at once.

    With `notice_s`, an attempt that has a checkpoint signal first gets that signal, and is asked to end `notice_s`
    later unless it has ended by then; an attempt without one is asked at once. A later request may only shorten the
    wait.
    """

    key: str
    grace_s: float
    why: str = ""
    notice_s: float = 0.0


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    n: int
    attempts: tuple[StartAttempt, ...] = msgspec.field(name="members")


class End(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    n: int
    attempts: tuple[EndAttempt, ...] = msgspec.field(name="members")


class Relimit(msgspec.Struct, frozen=True, kw_only=True, tag="relimit"):
    """Give a running attempt another time limit, from its start on; one that is over ends it as a timeout."""

    n: int
    key: str
    timeout_s: float


class Signal(msgspec.Struct, frozen=True, kw_only=True, tag="signal"):
    """Send a signal, such as `SIGUSR1`, to the topmost processes of a running attempt that handle it."""

    n: int
    key: str
    signal: str


#: in `Hello.takes`: requests that came within this version of the protocol
TAKES: Final = ("relimit", "signal")


class Fence(msgspec.Struct, frozen=True, kw_only=True, tag="fence"):
    """Replace the fence deadline; null removes it, and a passed deadline ends the attempts at once.

    `grace_s` bounds the grace of each attempt that is ended by the fence.
    """

    n: int
    deadline_boottime_s: float | None
    grace_s: float


class List(msgspec.Struct, frozen=True, kw_only=True, tag="list"):
    n: int


class Forget(msgspec.Struct, frozen=True, kw_only=True, tag="forget"):
    """Drop these attempts, whose ends are dealt with: those that have ended, and those of a former supervisor of which
    processes may be left, but which an operator has said are over. Keys of running attempts are ignored.
    """

    n: int
    keys: tuple[str, ...]


class Ping(msgspec.Struct, frozen=True, kw_only=True, tag="ping"):
    n: int


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="shutdown"):
    """End every attempt with its own grace, at most `grace_s`, then exit; with attempts left, 10 s after the longest.

    `why` is the reason in their ends, which stay in the journal for the next supervisor. With `idle_only` the
    supervisor exits only if it has no attempts, and else refuses with `busy`.
    """

    n: int
    grace_s: float
    idle_only: bool = False
    why: str = SHUTS_DOWN


Request: TypeAlias = Start | Contain | Ran | Removed | End | Relimit | Signal | Fence | List | Forget | Ping | Shutdown


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """The supervisor's first message in every version of the protocol.

    `boot_id` and `start_ticks` (of /proc/PID/stat) together are its identity.
    """

    protocol: int
    pid: int
    boot_id: str
    start_ticks: int
    cgroup: str | None
    controllers: tuple[str, ...] = ()
    device_fence: str = ""
    """How the kernel can be made to refuse devices to attempts here: `cgroup2`, `cgroup1`, or empty."""
    no_device_fence: str = ""
    """Why it cannot; empty if it can."""
    takes: tuple[str, ...] = ()
    """Which requests it takes that came within this version of the protocol."""


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    n: int


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    n: int
    code: str
    message: str


class Started(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="started"):
    """The child runs its program, or has not failed to for 1 s. `ignored` names the limits that could not be set here.

    If the program cannot be run after all, an `Ended` with `start-failed` follows.
    """

    key: str
    pid: int
    started_boottime_s: float
    ignored: tuple[str, ...] = ()


class MemoryAtEnd(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the kernel says of the memory of an attempt's cgroup: see `GroupMemory`."""

    oom_kills: int = 0
    at_limit: bool = False
    peak_bytes: int = 0
    max_bytes: int = 0


class Ended(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="ended"):
    """The whole process tree of an attempt is gone.

    `exit_code` or `signal` is the main process's own end, whatever `reason` first asked for it: an attempt that was
    asked to end may still have exited with 0. Both are null for a container, whose engine knows its status, for an
    attempt that never ran, and if the status was lost with a former supervisor. `errno`, `stage` and `message` say why
    a start failed.
    """

    key: str
    reason: Reason
    proof: Proof
    exit_code: int | None = None
    signal: int | None = None
    errno: int | None = None
    stage: str = ""
    message: str = ""
    why: str = ""
    mps_not_asked: str = ""
    """Why its MPS daemon was not asked to stop its work before its processes ended; empty if it was, or had none."""
    pid: int | None = None
    started_boottime_s: float | None = None
    ended_boottime_s: float = 0.0
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    dropped_bytes: int = 0
    memory: MemoryAtEnd | None = None
    """Null where its memory is not counted: without a cgroup of version 2 with that controller."""
    cpu_ms: int | None = None
    """CPU time of all its processes; without a cgroup, of its main process and those that this one has waited for."""
    largest_bytes: int = 0
    """The most memory that one of the latter had; 0 if its main process is none of the supervisor's."""


class Output(msgspec.Struct, frozen=True, kw_only=True, tag="output"):
    """A piece of an attempt's output. A gap in `offset` is output dropped because the agent read too slowly."""

    key: str
    stream: Stream
    offset: int
    data: bytes


class Unproven(msgspec.Struct, frozen=True, kw_only=True, tag="unproven"):
    """An attempt of which processes may be left (see `Proof`); an `Ended` follows once none is."""

    key: str
    pids: tuple[int, ...]
    message: str


class Listed(msgspec.Struct, frozen=True, kw_only=True, tag="listed"):
    """Everything that the supervisor has. `waiting` are the keys that are accepted and not yet reported as `Started`.

    An attempt in `unproven` is also in `waiting` or `running`, unless a former supervisor started it.
    """

    n: int
    waiting: tuple[str, ...]
    running: tuple[Started, ...]
    ended: tuple[Ended, ...]
    unproven: tuple[Unproven, ...]

    @property
    def living(self) -> list[str]:
        """The keys of attempts of which processes may be left; a key may be there twice."""
        return [*self.waiting, *(each.key for each in self.running), *(each.key for each in self.unproven)]


Event: TypeAlias = Started | Ended | Output | Unproven
Message: TypeAlias = Hello | Done | Refused | Listed | Event

_encoder: Final = msgspec.msgpack.Encoder()
decode_request: Final = msgspec.msgpack.Decoder(Request).decode
decode_messages: Final = msgspec.msgpack.Decoder(list[Message]).decode
_decode_each: Final = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_decode_first: Final = msgspec.msgpack.Decoder(Hello | Refused).decode


def first_of(body: bytes) -> Hello | Refused:
    """Return the first message of a connection by its first frame, whatever version the rest of the frame is of.

    Raises one of `UNREADABLE`.
    """
    messages = _decode_each(body)
    if not messages:
        raise ValueError("the first frame has no message")
    first: Hello | Refused = _decode_first(messages[0])
    return first


def encode_request(request: Request) -> bytes:
    """Return a request as a frame. Raises `FrameTooLarge`."""
    return framed(_encoder.encode(request), FRAME_BYTES_MAX)


def encode_messages(messages: list[Message]) -> bytes:
    """Return the messages as frames, in order: one frame unless it would be too large.

    Raises `FrameTooLarge` if a single message is too large.
    """
    body = _encoder.encode(messages)
    if len(body) <= FRAME_BYTES_MAX or len(messages) == 1:
        return framed(body, FRAME_BYTES_MAX)
    half = len(messages) // 2
    return encode_messages(messages[:half]) + encode_messages(messages[half:])
