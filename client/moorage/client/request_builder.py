"""Build checked requests: a single one, or many similar ones for a caller that submits again and again."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec

from moorage.client.durations import seconds
from moorage.client.errors import Rejected, rejected
from moorage.client.fields import FIELDS, RUN_FIELDS
from moorage.client.gpus import gpu_spec
from moorage.client.job_ids import fresh_job_id
from moorage.schemas.codec import encode
from moorage.schemas.decode_errors import explain_decode_error
from moorage.schemas.driver_config import DEVICE_KEYS
from moorage.schemas.gpu import GpuSpec
from moorage.schemas.handler import NOT_FINITE, not_finite
from moorage.schemas.job import After, Request, Run, check_command, names_a_program
from moorage.schemas.names import is_job
from moorage.schemas.trouble import NONE, Trouble

_TEXT: Final = frozenset({str})
#: the usual types of a command given as words
COMMAND: Final = (tuple, list)
#: types that `str` would turn into a word, but surely by mistake
_NO_WORDS: Final = (bytes, bytearray, memoryview, type(None), list, tuple, dict, set, frozenset)
#: the beginning of a template's body
_ID_OF_TEMPLATE: Final = b'{"job":"j"'
#: fields with several entries, each by its name
_MERGED: Final = ("resources", "requires", "labels", "env")
#: what to do about a field that is refused
_NEXT: Final = {
    "run.argv": "give the program to run: its name in the worker's PATH, or its full path",
    "run.cwd": "give the full path as the worker sees it, or a path below the attempt's own folder",
    "run.image": "give a driver that runs images: driver='docker', --driver docker",
    "run.stall_s": "ask for a GPU, or leave it out",
    "run.on_stall": "say how long, as stall_s=600 or --stall 10m; or leave it out",
    "run.checkpoint_signal": "write it as SIGUSR1",
    "run.checkpoint_before_s": "it is 60 s unless you say less: checkpoint_before_s=5, --checkpoint-before 5s; or give "
    "the job longer, with limit= or --time-limit",
    "retries": "leave out retries, or restart; max_restarts bounds the further attempts of restart",
    "retry": "name a cause once, without retries, retries_on_lost and restart: --retry failure:3 --retry lost:10",
    "run.max_restarts": 'add restart: "on-failure" or "always", or leave it out',
    "run.restart_unready_s": 'add a check as ready, and restart: "on-failure" or "always"; or leave it out',
    "run.restart": "leave out the gang, or restart; retries start all ranks of a gang again",
    "run.ports": "leave out ports, or take another driver",
    "run.ready": "give one check: {'call': True} of moorage serve, {'http': 'PORT/up'} with ports=1, {'file': 'ready'}",
    "run.ready.tcp": "name a port as PORT with ports=1, or by its number",
    "run.ready.http": "name a port and a path, as PORT/health with ports=1",
    "run.ready.file": "give a path below the attempt's folder, as ready",
    "run.ready.call": "add service={'name': …}, --service NAME; or look at a port or a file",
    "run.items.file": "bring the file, with files= or --with; or give the items as a list",
    "service": "leave out the gang, or the service: ranks answer no calls",
    "instead_of": "name the service, as service={'name': 'embed'} or --service embed; or leave instead_of out",
    "service.name": "name it as embed or text-to-speech",
    "service.concurrency": "say how many calls one attempt runs at the same time, as 8",
    "service.batch.most": "say how many calls a batch has at most, as {'most': 32, 'wait_ms': 5} or --batch 32,5ms",
    "service.batch.wait_ms": "say how long a call waits for others, as {'most': 32, 'wait_ms': 5} or --batch 32,5ms",
    "service.queue.most": "say how many calls wait at a member, as {'most': 200} or --queue 200",
    "service.queue.wait_s": "say how long a call waits, as {'most': 200, 'wait_s': 10} or --queue 200,10s",
    "service.sleep_after_s": "give a time, as {'sleep_after_s': 300} or --sleep-after 5m, and GPUs of its own: --gpu 1,"
    " or memory of one: --gpu 1xL40S@time-slice=10G",
    "service.wake_within_s": "say how soon a call has a member awake, as {'wake_within_s': 10} or --wake-within 10s",
    "service.sleep_by.sleep": "give paths of the server, as --sleep-by /sleep?level=1,/wake_up",
    "service.sleep_by.wake": "give paths of the server, as --sleep-by /sleep?level=1,/wake_up",
    "service.awake_s": "say how long a member keeps its GPUs, as {'awake_s': 30} or --awake-at-least 30s",
    "service.input_bytes": "give at most 1 GiB, as 1073741824 or --service embed:8,input=1GiB",
    "service.output_bytes": "give at most 1 GiB, as 1073741824 or --service embed:8,answer=1GiB",
    "replicas": "give a number; two are for a gang, or for a service: service={'name': …}, --service NAME",
    "indices": "leave out the gang; or give the number of its ranks, as replicas=4 or --replicas 4",
    "max_running": "leave it out, or give a number as replicas",
    "start_within_s": "leave it out, or keep one member with replicas.min 1",
    "run.user": "give a user of the worker's host, or leave it out",
}

#: and about one that needs another one beside it, or that is missing itself
_NEXT_WITHOUT: Final = {
    "run.image": "name the image: image='python:3.13-slim', --image python:3.13-slim",
    "run.checkpoint_step": "name the checkpoint: checkpoint='ck', --checkpoint ck; or leave checkpoint_step out",
    "run.checkpoint_every_s": "name the checkpoint: checkpoint='ck', --checkpoint ck; or leave checkpoint_every_s out",
    "run.checkpoint_before_s": "name the signal: checkpoint_signal='SIGUSR1', --checkpoint-signal SIGUSR1; or leave"
    " checkpoint_before_s out",
    "run.setup_s": "give the command: setup='…', --setup '…'; or leave setup_s out",
    "service.awake_s": "let it sleep: sleep_after_s=300, --sleep-after 5m; or leave awake_s out",
    "service.wake_within_s": "let it sleep: sleep_after_s=300, --sleep-after 5m; or leave wake_within_s out",
    "service.sleep_by": "let it sleep: sleep_after_s=300, --sleep-after 5m; or leave sleep_by out",
}

What = Request | Sequence[str] | Mapping[str, Any]


def build_request(
    what: What,
    gpu: GpuSpec | str | int | None = None,
    job: str | None = None,
    fields: Mapping[str, Any] | None = None,
) -> Request:
    """Return a checked request that has a job id: from argv, from a mapping as on the wire, or from a `Request`.

    `gpu` may be a token (`2xH100:80G`, `3x2xA100` for three replicas), a count or a spec. Arguments replace the fields
    of the request. Raises `Rejected` (invalid-argument, with the field), and TypeError for an unknown field.
    """
    named = dict(_by_ids(fields or {}))
    if not named.keys() <= FIELDS:
        from moorage.client.keywords import check_keywords

        check_keywords(named, FIELDS)
    body = _body(what)
    if 0 in (named.get("max_failed", 1), body.get("max_failed", 1)) and not isinstance(what, Request):
        raise rejected(
            "invalid-argument", "max_failed must be a number from 1 on, or None for never", field="$.max_failed",
            found=0, next="1 ends the job with its first failure; leave it out for 20, or 5 % of the replicas if that "
            "is more",
        )  # fmt: skip
    run = {name: named.pop(name) for name in RUN_FIELDS if name in named}
    if (limit := run.pop("limit", None)) is not None:
        run["timeout_s"] = _limit(limit) if isinstance(limit, str) else limit
    if run:
        body["run"] = {**(body.get("run") or {}), **msgspec.to_builtins(run, enc_hook=plainer)}
    body.update(msgspec.to_builtins(named, enc_hook=plainer))
    if gpu is not None:
        _set_gpus(body, gpu)
    if job is not None:
        body["job"] = job
    if body.get("job") is None:
        body["job"] = fresh_job_id()
    return _checked(body)


def _limit(text: str) -> float:
    """Return the seconds of `limit`. Raises `Rejected` with its field."""
    try:
        return seconds(text)
    except Rejected as refused:
        told = msgspec.structs.replace(refused.problem, field="$.run.timeout_s")
        raise Rejected(msgspec.structs.replace(told, message=f"limit: {told.message}")) from None


def merged(body: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with which a request is changed: of those with several entries, such as `env`, what the request
    has and `fields` do not name stays."""
    changed = dict(fields)
    for name in _MERGED:
        if name in changed:
            held = (body.get("run") or {}) if name == "env" else body
            changed[name] = {**(held.get(name) or {}), **msgspec.to_builtins(changed[name], enc_hook=plainer)}
    return changed


def ids_after(fields: Mapping[str, Any]) -> list[str]:
    """Return the ids of the jobs after which a job with these fields starts."""
    after = _by_ids(fields).get("after") or ()
    return [each if isinstance(each, str) else str(msgspec.to_builtins(each)["job"]) for each in after]


def _by_ids(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields with a list of ids in place of the handles, or of the one job, in `after`."""
    after = fields.get("after")
    if after is None:
        return fields
    several = isinstance(after, Iterable) and not isinstance(after, str | Mapping)
    return {**fields, "after": [_id_or_end(one) for one in (after if several else (after,))]}


def _id_or_end(one: object) -> object:
    id = None if isinstance(one, After) else getattr(one, "job", None)
    return id if isinstance(id, str) else one


def _body(what: object) -> dict[str, Any]:
    """Return a request as on the wire, not checked yet. Raises `Rejected` for an invalid command."""
    if isinstance(what, Request):
        body: dict[str, Any] = msgspec.to_builtins(what)
        return body
    if isinstance(what, Mapping):
        return dict(what)
    if isinstance(what, str | bytes) or not isinstance(what, Iterable):
        raise rejected(
            "invalid-argument",
            f"a command is a list of words, not {'a string' if isinstance(what, str | bytes) else type(what).__name__}",
            field="$.run.argv",
            found=str(what),
            next="map(function, items) runs it for each item"
            if callable(what)
            else "use a list, as ['python3', '/srv/train.py'], or ['sh', '-c', '…']",
        )
    return {"run": {"argv": _argv(what)}}


def _set_gpus(body: dict[str, Any], gpu: GpuSpec | str | int) -> None:
    """Set the request's GPUs, and its replicas if the token has more than one.

    Raises `Rejected` if the request says otherwise how many it has: `2x4xH100` with two items may mean two hosts each.
    """
    replicas, spec = gpu_spec(gpu)
    body["gpu"] = msgspec.to_builtins(spec)
    if replicas == 1:
        return
    each = "item" if (body.get("run") or {}).get("items") is not None else "index" if body.get("indices") else ""
    if each or body.get("replicas", 1) not in (1, replicas):
        has = f"has one for each {each}" if each else f"has {body['replicas']}"
        raise rejected(
            "invalid-argument", f"{gpu} asks for {replicas} replicas, and the job {has}", field="$.gpu", found=str(gpu),
            next=f"leave out the first number: {str(gpu).partition('x')[2]} are the GPUs of one replica; a trial on "
            f"{replicas} hosts is --gpu {str(gpu).partition('x')[2]} --hosts {replicas}",
        )  # fmt: skip
    body["replicas"] = replicas


def _checked(body: dict[str, Any]) -> Request:
    for field, value in (
        ("run.items", (body.get("run") or {}).get("items")),
        ("driver_config", body.get("driver_config")),
    ):
        if value and (place := not_finite(field, value)):
            raise rejected("invalid-argument", f"{place} is {NOT_FINITE}", field=f"$.{field}", next="write it as text")
    try:
        request = msgspec.convert(body, Request)
    except msgspec.ValidationError as error:
        raise _odd_variable(body) or Rejected(explain_decode_error(error, Request, plain=body)) from None
    if (trouble := request.trouble) is not None:
        raise rejected(
            "invalid-argument",
            trouble.message,
            field=f"$.{trouble.field}",
            found=trouble.found,
            allowed=trouble.allowed,
            next=_next(trouble),
        )
    return request


def _next(trouble: Trouble) -> str:
    """Return what to do about a refused field; "" if the error's `allowed` says enough."""
    field = trouble.field
    if field.partition("[")[0].rpartition(".")[2] in DEVICE_KEYS:
        return "leave the ids out for any GPU that fits"
    is_for_want = trouble.found == "null" or trouble.allowed.startswith(f"{NONE} ")
    return (_NEXT_WITHOUT.get(field, "") if is_for_want else "") or _NEXT.get(field, "")


def _odd_variable(body: dict[str, Any]) -> Rejected | None:
    """Return the error for the first environment variable that is neither text nor a mapping; None if there is none.

    The error names the variable, as msgspec's does not. It leaves out the value, which may be a secret.
    """
    run = body.get("run")
    env = run.get("env") if isinstance(run, Mapping) else None
    for name, value in env.items() if isinstance(env, Mapping) else ():
        if not isinstance(value, str | Mapping):
            return rejected(
                "invalid-argument",
                f"the variable {name} must be text, found {type(value).__name__}",
                field=f"$.run.env.{name}",
                found=type(value).__name__,
                allowed="text, or a Secret",
                next=f"env={{{name!r}: str(…)}}",
            )
    return None


def _argv(words: Iterable[object]) -> list[str]:
    """Return the words of a command as text; `str` converts numbers and paths. Raises `Rejected` for other types."""
    return [word if type(word) is str else _word(at, word) for at, word in enumerate(words)]


def _word(at: int, word: object) -> str:
    if isinstance(word, _NO_WORDS):
        raise rejected(
            "invalid-argument",
            f"a word of a command cannot be of type {type(word).__name__}",
            field=f"$.run.argv[{at}]",
            found=repr(word),
            next="give text, a number or a path; unpack a list of words: [*words]",
        )
    return str(word)


def plainer(value: object) -> object:
    """Convert a value that msgspec does not know and a request may have: a mapping or a path."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"a request cannot have a value of type {type(value).__name__}: {value!r:.80}")


def body_of(request: Request) -> bytes:
    """Return the request's body as it is sent. Raises `Rejected` for text that is not UTF-8, as file names may be."""
    try:
        return encode(request)
    except UnicodeEncodeError as error:
        raise rejected(
            "invalid-argument",
            "a request must be text in UTF-8, and a part of this one is not",
            found=ascii(error.object)[:80],
        ) from None


class RequestBuilder:
    """`build_request` for a caller that submits similar requests: equal parts are checked only once.

    The fields of the last request are kept as a template. If the command is the same too, only the job's id is new.
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
        job: str | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> Request:
        """Return the checked request, as `build_request` does."""
        return self.encoded(what, gpu, job, fields)[0]

    def encoded(
        self,
        what: What,
        gpu: GpuSpec | str | int | None = None,
        job: str | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> tuple[Request, bytes]:
        """Return the checked request, as `build_request` does, and its body."""
        id, asked, body = self.prepared(what, gpu, job, fields)
        if asked.job != id:
            asked = _with(asked, "job", id)
        return asked, body

    def prepared(
        self,
        what: What,
        gpu: GpuSpec | str | int | None = None,
        job: str | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> tuple[str, Request, bytes]:
        """Return the job's id, the checked request, and the body to send. Raises as `build_request`.

        Jobs with equal requests share one `Request` object, so its `job` may be the id of another job.
        """
        fields = _by_ids(fields or {})
        checked = self._checked_before(what, gpu, fields) if isinstance(what, COMMAND) else None
        if checked is None or not (job is None or (isinstance(job, str) and is_job(job))):
            request = build_request(what, gpu, job, fields)  # raises the error that says what is wrong
            assert request.job is not None
            return request.job, request, body_of(request)
        id = fresh_job_id() if job is None else job
        return id, checked, b'{"job":"%b"%b' % (id.encode(), self._body_after_id)

    def _checked_before(
        self, words: Sequence[str], gpu: GpuSpec | str | int | None, fields: Mapping[str, Any]
    ) -> Request | None:
        """Return a checked request for this command, with any job id; None if the command is invalid, and if it has
        items, which are checked with it."""
        if "items" in fields:
            return None
        if self._template is None or gpu != self._gpu or fields != self._fields:
            template = build_request(("a command",), gpu, "j", fields)
            self._gpu, self._fields, self._template = gpu, copy.deepcopy(fields), template
            self._words = None
        # words of other types are converted again: 1, 1.0 and True are equal, but are three different words
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
    """Return a copy with another value of one field. Nothing is checked: `structs.replace` would check everything."""
    other = copy.copy(checked)
    msgspec.structs.force_setattr(other, field, value)
    return other
