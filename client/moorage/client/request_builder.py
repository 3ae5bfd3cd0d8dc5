"""A checked request from its parts: one by one, and for callers that submit similar ones."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec

from moorage.client.errors import Rejected, rejected
from moorage.client.fields import FIELDS, RUN_FIELDS
from moorage.client.gpus import gpu_spec
from moorage.client.job_ids import fresh_job_id
from moorage.schemas.codec import encode
from moorage.schemas.decode_errors import explain_decode_error
from moorage.schemas.driver_config import DEVICE_KEYS
from moorage.schemas.gpu import GpuSpec
from moorage.schemas.job import Request, Run, check_command, names_a_program
from moorage.schemas.names import is_job

_TEXT: Final = frozenset({str})
#: what the words of a command are nearly always given as
COMMAND: Final = (tuple, list)
#: what `str` makes words of that nobody meant
_NO_WORDS: Final = (bytes, bytearray, memoryview, type(None), list, tuple, dict, set, frozenset)
#: how the body of a template begins
_ID_OF_TEMPLATE: Final = b'{"job":"j"'
#: what to do about a field that is refused
_NEXT: Final = {
    "run.argv": "give the program that is to run: its name in the worker's PATH, or its whole path",
    "run.cwd": "name the whole path as the worker sees it, or a path below the attempt's own folder",
    "run.image": "name a driver that runs images",
    "run.user": "name a user of the worker's host, or leave it out",
}

What = Request | Sequence[str] | Mapping[str, Any]


def build_request(
    what: What,
    gpu: GpuSpec | str | int | None = None,
    key: str | None = None,
    fields: Mapping[str, Any] | None = None,
) -> Request:
    """Return a checked request that has a job id: from argv, from a mapping as on the wire, or from a `Request`.

    `gpu` may be a token (`2xH100:80G`, `3x2xA100` for three replicas), a count or a spec. What is given beside a
    request replaces its fields. Raises `Rejected` with invalid-argument, naming the field, and TypeError for an unknown
    field.
    """
    named = dict(fields or {})
    if not named.keys() <= FIELDS:
        from moorage.client.keywords import check_keywords

        check_keywords(named, FIELDS)
    body = _body(what)
    run = {name: named.pop(name) for name in RUN_FIELDS if name in named}
    if run:
        body["run"] = {**(body.get("run") or {}), **msgspec.to_builtins(run, enc_hook=_plainer)}
    body.update(msgspec.to_builtins(named, enc_hook=_plainer))
    if gpu is not None:
        _set_gpus(body, gpu)
    if key is not None:
        body["job"] = key
    if body.get("job") is None:
        body["job"] = fresh_job_id()
    return _checked(body)


def _body(what: object) -> dict[str, Any]:
    """Return a request as on the wire, yet to be checked. Raises `Rejected` for what is no command."""
    if isinstance(what, Request):
        body: dict[str, Any] = msgspec.to_builtins(what)
        return body
    if isinstance(what, Mapping):
        return dict(what)
    if isinstance(what, str | bytes) or not isinstance(what, Iterable):
        raise rejected(
            "invalid-argument",
            f"a command is a list of words, not {'one text' if isinstance(what, str | bytes) else type(what).__name__}",
            field="$.run.argv",
            found=str(what),
            next="use a list, as ['python3', '/srv/train.py'], or ['sh', '-c', '…']",
        )
    return {"run": {"argv": _argv(what)}}


def _set_gpus(body: dict[str, Any], gpu: GpuSpec | str | int) -> None:
    """What a token says of replicas holds for the request, too. Raises `Rejected` where the two differ."""
    replicas, spec = gpu_spec(gpu)
    body["gpu"] = msgspec.to_builtins(spec)
    if replicas == 1:
        return
    if body.get("replicas", 1) not in (1, replicas):
        raise rejected(
            "invalid-argument",
            f"the GPU token says {replicas} replicas, and replicas says {body['replicas']}",
            field="$.replicas",
            next="say it once",
        )
    body["replicas"] = replicas


def _checked(body: dict[str, Any]) -> Request:
    try:
        request = msgspec.convert(body, Request)
    except msgspec.ValidationError as error:
        raise _odd_variable(body) or Rejected(explain_decode_error(error, Request)) from None
    if (trouble := request.trouble) is not None:
        raise rejected(
            "invalid-argument",
            trouble.message,
            field=f"$.{trouble.field}",
            found=trouble.found,
            allowed=trouble.allowed,
            next=_next(trouble.field),
        )
    return request


def _next(field: str) -> str:
    """What to do about a field that is refused; "" where its `allowed` says it."""
    names_devices = field.partition("[")[0].rpartition(".")[2] in DEVICE_KEYS
    return "leave the ids out for any GPU that fits" if names_devices else _NEXT.get(field, "")


def _odd_variable(body: dict[str, Any]) -> Rejected | None:
    """The name of the first variable whose value is not text: msgspec names none. The value may be a secret."""
    run = body.get("run")
    env = run.get("env") if isinstance(run, Mapping) else None
    for name, value in env.items() if isinstance(env, Mapping) else ():
        if not isinstance(value, str | Mapping):
            return rejected(
                "invalid-argument",
                f"the variable {name} is {type(value).__name__}, and variables are text",
                field=f"$.run.env.{name}",
                found=type(value).__name__,
                allowed="text, or a Secret",
                next=f"env={{{name!r}: str(…)}}",
            )
    return None


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
        what: What,
        gpu: GpuSpec | str | int | None = None,
        key: str | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> Request:
        """As `build_request`."""
        return self.encoded(what, gpu, key, fields)[0]

    def encoded(
        self,
        what: What,
        gpu: GpuSpec | str | int | None = None,
        key: str | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> tuple[Request, bytes]:
        """As `build_request`, and the body that says it."""
        job, asked, body = self.prepared(what, gpu, key, fields)
        if asked.job != job:
            asked = _with(asked, "job", job)
        return asked, body

    def prepared(
        self,
        what: What,
        gpu: GpuSpec | str | int | None = None,
        key: str | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> tuple[str, Request, bytes]:
        """Return the job's id, what it asks for, and the body that says both. Raises as `build_request`.

        Jobs that ask for the same share the request, so that its own `job` may be another one's.
        """
        checked = self._checked_before(what, gpu, fields or {}) if isinstance(what, COMMAND) else None
        if checked is None or not (key is None or (isinstance(key, str) and is_job(key))):
            request = build_request(what, gpu, key, fields)  # it says what is wrong
            assert request.job is not None
            return request.job, request, body_of(request)
        job = fresh_job_id() if key is None else key
        return job, checked, b'{"job":"%b"%b' % (job.encode(), self._body_after_id)

    def _checked_before(
        self, words: Sequence[str], gpu: GpuSpec | str | int | None, fields: Mapping[str, Any]
    ) -> Request | None:
        """Return a checked request for this command, whatever its job id; None where something is wrong with it."""
        if self._template is None or gpu != self._gpu or fields != self._fields:
            template = build_request(("a command",), gpu, "j", fields)
            self._gpu, self._fields, self._template = gpu, copy.deepcopy(fields), template
            self._words = None
        # 1, 1.0 and True are equal, and three words; and a handler has none
        if words != self._words or not _TEXT.issuperset(map(type, words)):
            self._words = None
            workload = self._template.workload
            try:
                argv = _argv(words)
                check_command(workload.driver, argv)
                if not names_a_program(argv):
                    return None
                self._command = _with(self._template, "run", _with(workload, "argv", argv))
                self._body_after_id = encode(self._command).removeprefix(_ID_OF_TEMPLATE)
            except ValueError:
                return None
            self._words = copy.copy(words)
        return self._command


R = TypeVar("R", Request, Run)


def _with(checked: R, field: str, value: object) -> R:
    """The same with another value, which was checked as well: `structs.replace` would check the rest once more."""
    other = copy.copy(checked)
    msgspec.structs.force_setattr(other, field, value)
    return other
