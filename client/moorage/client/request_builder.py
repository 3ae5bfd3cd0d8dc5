"""Small pure things that the SDK and the command share: durations, job ids, and a request from its parts."""

from __future__ import annotations

import copy
import functools
import os
import random
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypedDict, TypeVar

import msgspec

from moorage.client.errors import Rejected, rejected
from moorage.schemas.codec import encode
from moorage.schemas.decode_errors import explain_decode_error
from moorage.schemas.gpu import GpuSpec, Scheduling, parse_token
from moorage.schemas.job import DURATION_S_MAX, Request, Resources, Secret
from moorage.schemas.names import JOB_ID_DIGITS, is_job
from moorage.schemas.units import duration_s

Duration = float | str

H = TypeVar("H")

_DIGITS: Final = 14
_CHANCE_BITS: Final = 25
_TEXT: Final = frozenset({str})
#: what the words of a command are nearly always given as
COMMAND: Final = (tuple, list)
#: what `str` makes words of that nobody meant
_NO_WORDS: Final = (bytes, bytearray, memoryview, type(None), list, tuple, dict, set, frozenset)
_MODELS: Final = re.compile(r"\s*[=A-Za-z][^:@]*")


class Fields(TypedDict, total=False):
    """What `submit` takes by name beside argv and gpu: fields of a request and of its `run`, as on the wire."""

    replicas: int
    priority: int
    resources: Resources
    requires: dict[str, list[str]]
    driver_config: dict[str, Any]
    deadline_s: float
    start_within_s: float
    retries: int
    retries_on_lost: int
    on_partition: Literal["kill", "keep"]
    on_no_match: Literal["wait", "reject"]
    if_seq: int
    events: Literal["job", "tenant"]
    labels: dict[str, str]
    driver: str
    env: Mapping[str, str | Secret]
    cwd: str | os.PathLike[str]
    user: str
    timeout_s: float
    grace_s: float
    checkpoint_signal: str
    checkpoint_before_s: float


#: the names of these, as one may ask for them
FIELDS: Final = frozenset(Fields.__annotations__)
_OF_RUN: Final = (
    "driver",
    "env",
    "cwd",
    "user",
    "timeout_s",
    "grace_s",
    "checkpoint_signal",
    "checkpoint_before_s",
)


def seconds(duration: Duration) -> float:
    """`90`, `"90"`, `"1h30m"`, `"500ms"` → seconds, 0..366 days. Raises `Rejected` for anything else."""
    if isinstance(duration, str):
        try:
            value = duration_s(duration)
        except ValueError:
            value = -1.0
    else:
        value = float(duration)
    if not 0 <= value <= DURATION_S_MAX:
        raise rejected(
            "invalid-argument",
            f"not a duration: {duration!r}",
            found=str(duration),
            allowed="0s..366d",
            next="write it as 90s, 10m, 1h30m or 2d",
        )
    return value


def age(milliseconds: float | None) -> str:
    """`850ms`, `12s`, `3m12s`, `2h10m`, `3d4h`; `-` for none."""
    if milliseconds is None:
        return "-"
    if 0 <= milliseconds < 1000:
        return f"{int(milliseconds)}ms"
    left = int(abs(milliseconds) // 1000)
    for unit, size, next_unit, next_size in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if left >= size:
            rest = left % size // next_size
            return f"{left // size}{unit}" + (f"{rest}{next_unit}" if rest else "")
    return f"{left}s"


def who() -> str:
    """The login name, for acts that say whose they are; empty where there is none."""
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""


def fresh_job_id() -> str:
    """A job id that sorts by time: `j`, 9 digits of milliseconds in base 32, 5 of chance.

    Those of one process sort in the order in which they were made: within a millisecond the chance counts up.
    """
    global _last
    drawn = int(time.time() * 1000) << _CHANCE_BITS | _chance.getrandbits(_CHANCE_BITS)
    _last = number = drawn if drawn >> _CHANCE_BITS > _last >> _CHANCE_BITS else _last + 1
    pairs = [_PAIRS[number >> shift & 1023] for shift in _SHIFTS]
    return "j" + "".join(pairs)


_last = 0
#: a service asks for the same again and again
_parsed: Final = functools.lru_cache(256)(parse_token)
_PAIRS: Final = [one + two for one in JOB_ID_DIGITS for two in JOB_ID_DIGITS]
_SHIFTS: Final = range(5 * (_DIGITS - 2), -1, -10)
#: of our own, so that nobody's seed makes two processes draw the same; a fork's child draws anew
_chance: Final = random.Random()
os.register_at_fork(after_in_child=_chance.seed)


def build_request(
    what: Request | Sequence[str] | Mapping[str, Any],
    gpu: GpuSpec | str | int | None = None,
    key: str | None = None,
    fields: Mapping[str, Any] | None = None,
) -> Request:
    """A checked request that has a job id: from argv, from a mapping as on the wire, or from a `Request`.

    `gpu` may be a token (`2xH100:80G`, `3x2xA100` for three replicas), a count or a spec. What is given beside a
    request replaces its fields. Raises `Rejected` with invalid-argument, naming the field, and TypeError for an unknown
    field.
    """
    named = dict(fields or {})
    if not named.keys() <= FIELDS:
        from moorage.client.keywords import check_keywords

        check_keywords(named, FIELDS)
    if isinstance(what, Request):
        body = msgspec.to_builtins(what)
    elif isinstance(what, Mapping):
        body = dict(what)
    elif isinstance(what, str | bytes) or not isinstance(what, Iterable):
        raise rejected(
            "invalid-argument",
            f"a command is a list of words, not {'one text' if isinstance(what, str | bytes) else type(what).__name__}",
            field="$.run.argv",
            found=str(what),
            next="use a list, as ['python3', '/srv/train.py'], or ['sh', '-c', '…']",
        )
    else:
        body = {"run": {"argv": _argv(what)}}
    run = {name: named.pop(name) for name in _OF_RUN if name in named}
    if run:
        body["run"] = {**(body.get("run") or {}), **msgspec.to_builtins(run, enc_hook=_plainer)}
    body.update(msgspec.to_builtins(named, enc_hook=_plainer))
    if gpu is not None:
        replicas, spec = gpu_spec(gpu)
        body["gpu"] = msgspec.to_builtins(spec)
        if replicas != 1:
            if body.get("replicas", 1) not in (1, replicas):
                raise rejected(
                    "invalid-argument",
                    f"the GPU token says {replicas} replicas, and replicas says {body['replicas']}",
                    field="$.replicas",
                    next="say it once",
                )
            body["replicas"] = replicas
    if key is not None:
        body["job"] = key
    if body.get("job") is None:
        body["job"] = fresh_job_id()
    try:
        request = msgspec.convert(body, Request)
    except msgspec.ValidationError as error:
        raise Rejected(explain_decode_error(error, Request)) from None
    if request.run is not None and request.run.cwd is not None and not request.run.cwd.startswith("/"):
        raise rejected(
            "invalid-argument",
            "cwd is a folder of the worker's, not of this process: it is absolute",
            field="$.run.cwd",
            found=request.run.cwd,
            allowed="a path that begins with /; left out: /",
            next="name the whole path, as the worker sees it",
        )
    return request


def _argv(words: Iterable[object]) -> list[str]:
    """The words of a command as text: numbers and paths are as `str` says them. Raises `Rejected` for what is none."""
    return [word if type(word) is str else _word(at, word) for at, word in enumerate(words)]


def _word(at: int, word: object) -> str:
    if isinstance(word, _NO_WORDS):
        raise rejected(
            "invalid-argument",
            f"{type(word).__name__} is no word of a command",
            field=f"$.run.argv[{at}]",
            found=repr(word),
            next="give text, a number or a path; of a list of words each by itself, as [*words]",
        )
    return str(word)


def _plainer(value: object) -> object:
    """What msgspec has no word for and a request has."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"{type(value).__name__} is nothing that a request can say: {value!r:.80}")


def body_of(request: Request) -> bytes:
    """As it is sent. Raises `Rejected` for text that is no UTF-8, as names of files may be."""
    try:
        return encode(request)
    except UnicodeEncodeError as error:
        raise rejected(
            "invalid-argument",
            "a request is text in UTF-8, and some of this is none",
            found=ascii(error.object)[:80],
        ) from None


class RequestBuilder:
    """`build_request` for a caller that submits similar requests: what stays the same is checked only once.

    The fields that requests share are kept as a template. If the command is the same too, only the job's id is new.
    """

    def __init__(self) -> None:
        self._gpu: GpuSpec | str | int | None = None
        self._fields: Mapping[str, Any] = {}
        self._template: Request | None = None
        self._words: Sequence[str] | None = None
        self._command: Request | None = None  # the template with these words
        self._body_after_id = b""  # its body after the job's id

    def build(
        self,
        what: Request | Sequence[str] | Mapping[str, Any],
        gpu: GpuSpec | str | int | None = None,
        key: str | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> Request:
        """As `build_request`."""
        return self.encoded(what, gpu, key, fields)[0]

    def encoded(
        self,
        what: Request | Sequence[str] | Mapping[str, Any],
        gpu: GpuSpec | str | int | None = None,
        key: str | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> tuple[Request, bytes]:
        """As `build_request`, and the body that says it."""
        checked = self._checked_before(what, gpu, fields or {}) if isinstance(what, COMMAND) else None
        job = fresh_job_id() if key is None else key
        if checked is None or not isinstance(job, str) or not is_job(job):  # `build_request` says what is wrong
            request = build_request(what, gpu, key, fields)
            return request, body_of(request)
        request = copy.copy(checked)
        msgspec.structs.force_setattr(request, "job", job)
        return request, b'{"job":"%b"%b' % (job.encode(), self._body_after_id)

    def _checked_before(
        self, words: Sequence[str], gpu: GpuSpec | str | int | None, fields: Mapping[str, Any]
    ) -> Request | None:
        """A checked request for this command, whatever its job id; None where something is wrong with it."""
        if self._template is None or gpu != self._gpu or fields != self._fields:
            template = build_request(("a command",), gpu, None, fields)
            self._gpu, self._fields, self._template = gpu, copy.deepcopy(fields), template
            self._words = None
        # 1, 1.0 and True are equal, and three words; and a handler has none
        if words != self._words or not _TEXT.issuperset(map(type, words)):
            self._words = None
            try:
                run = msgspec.structs.replace(self._template.workload, argv=_argv(words))
                self._command = msgspec.structs.replace(self._template, job="j", run=run)
                self._body_after_id = encode(self._command).removeprefix(b'{"job":"j"')
            except ValueError:
                return None
            self._words = copy.copy(words)
        return self._command


def Gpu(
    model: str = "any",
    *,
    count: int = 1,
    memory: str | int = "",
    share: str = "",
    scheduling: Scheduling | None = None,
    vendor: str | None = None,
) -> GpuSpec:
    """The GPUs of one replica, in parts: `Gpu("H100 | A100", count=2, memory="80G")` is `2xH100|A100:80G`.

    `memory` is nominal (`80G`) or exact (`70000M`, or a number of MiB); `share` is what a token has after its `@`:
    `time-slice`, `mps`, `mps=50%,4G`. `vendor` None means any vendor if a model is named, else nvidia. Raises
    `Rejected`.
    """
    if not _MODELS.fullmatch(model):
        raise rejected(
            "invalid-argument",
            f"not a model: {model!r}",
            field="$.gpu.model",
            found=model,
            next="count, memory and share are named beside it; alternatives are split by |",
        )
    asked = f"{memory}M" if isinstance(memory, int) else memory
    _, spec = gpu_spec(f"{count}x{model}{asked and ':'}{asked}{share and '@'}{share}")
    return msgspec.structs.replace(spec, scheduling=scheduling, vendor=vendor)


def gpu_spec(gpu: GpuSpec | str | int) -> tuple[int, GpuSpec]:
    """(replicas, spec) of a token, a count or a spec. Raises `Rejected`."""
    if isinstance(gpu, GpuSpec):
        return 1, gpu
    try:
        return _parsed(str(gpu))
    except ValueError as error:
        raise rejected(
            "invalid-argument",
            str(error),
            field="$.gpu",
            found=str(gpu),
            allowed="a count, a model or both",
            next="for example 1xH100, 2xH100:80G, 3x2xA100 or 1xL40S@mps=50%; with a count any model may be named, as"
            " 1xTITAN",
        ) from None


def handles(jobs: Iterable[H], kind: type[H]) -> Iterator[H]:
    """These handles, as they come. Raises TypeError for what is none of this kind of client."""
    if isinstance(jobs, kind):
        raise TypeError(f"several jobs are waited for here: a list of them; {jobs!r} by itself: job.result()")
    for job in jobs:
        if isinstance(job, kind):
            yield job
        elif isinstance(job, list | tuple):
            raise TypeError(
                f"a {type(job).__name__} is no {kind.__name__}: gather takes them one by one, gather(*jobs)"
            )
        else:
            made = f"job({job!r})" if isinstance(job, str) else "job(id)"
            raise TypeError(
                f"{job!r} is no {kind.__name__}: name jobs by their handles, as submit or {made} makes them"
            )
