"""Make `Client` and its handles, which need no event loop, from the asynchronous classes.

A member keeps its name and signature. A coroutine runs in the client's private thread, an asynchronous iterator is
iterated over there, and the rest is called at once. BODIES has the few members that are more than a call.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

CLIENT: Final = Path(__file__).resolve().parents[1] / "client" / "moorage" / "client"
TARGET: Final = CLIENT / "sync.py"
WIDTH: Final = 120

Function = ast.FunctionDef | ast.AsyncFunctionDef

HEAD: Final = '''"""The SDK without `await`: `Client` and its objects, for scripts and services that have no event loop.

Made by tools/sync_twin.py from the asynchronous classes: edit those, then `make docs`. A private thread runs a loop
with an `AsyncClient` in it; every call here passes a coroutine to that loop and waits for it. The docstrings here are
the first paragraphs of those of the asynchronous methods, which say the rest, such as the errors.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack, overload

from moorage.client.call_options import CallOptions
from moorage.client.durations import Duration
from moorage.client.errors import BatchRejected
from moorage.client.fields import Fields, Paths
from moorage.client.follow.job_history import Result
from moorage.client.follow.watch import AsyncWatch
from moorage.client.job import AsyncJob, handles
from moorage.client.loop_thread import called, entered, read_here
from moorage.client.output import Piece
from moorage.client.replicas import Which
from moorage.client.request_builder import What
from moorage.client.steps import Step
from moorage.client.sync_base import ClientBase, Handle
from moorage.schemas.answers.letters import Letter, LetterDone, LetterRow
from moorage.schemas.answers.operators import ActsAnswer, Demand
from moorage.schemas.frames import USE_KEPT_S, Accepted, Event, FleetEvent, FleetFrame, UsePage
from moorage.schemas.gpu import GpuSpec
from moorage.schemas.job import Request
from moorage.schemas.operate import Changed, Counter, Done, SignalSent, TenantRow
from moorage.schemas.schedules import Overlap, ScheduleRow

if TYPE_CHECKING:
    from moorage.bus.lend.client import AskedBack
    from moorage.client.admin import AsyncAdmin  # noqa: F401  below in quotes
    from moorage.client.answers import Audit, Cancelled, Explanation, FleetInfo, JobInfo, JobList, JobRow
    from moorage.client.command import Executed
    from moorage.client.fleet import AsyncFleet  # noqa: F401  below in quotes
    from moorage.client.forward import AsyncForward  # noqa: F401  below in quotes
    from moorage.client.handlers import OnProgress
    from moorage.client.lease import AsyncLease, OnAskedBack  # noqa: F401  below in quotes
    from moorage.client.mapping import Errors, Travel
    from moorage.client.planning import Quota, Share
    from moorage.client.schedules import AsyncSchedules  # noqa: F401  below in quotes
    from moorage.client.services import AsyncService  # noqa: F401  below in quotes
    from moorage.schemas.answers.jobs import ServiceRow
    from moorage.schemas.frames import Device
    from moorage.schemas.gpu import Sharing
    from moorage.schemas.plan import Plan
    from moorage.schemas.served import Answer

T = TypeVar("T")
'''


class Twin(NamedTuple):
    """A class to make: its first lines, the class it is made of, and where this is defined, its base class first."""

    head: str
    of: str
    defined_in: tuple[tuple[str, str], ...]
    attributes: dict[str, str]  # set in the constructor: name and type
    left_out: frozenset[str] = frozenset()


TWINS: Final = (
    Twin(
        '''class Job(Handle[AsyncJob]):
    """A handle on one job, as `AsyncJob`, without `await`."""

    def _ipython_display_(self) -> None:
        self._twin._display(repr(self), self._thread.begin)
''',
        "AsyncJob",
        (("job.py", "AsyncJob"),),
        {"job": "str", "state": "str", "worker": "str", "accepted": "Accepted | None"},
    ),
    Twin(
        '''class Watch(Handle[AsyncWatch]):
    """Events and output of one job, as `AsyncWatch`, without `await`. Open it before the submit to miss no output."""

    def __enter__(self) -> Watch:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Event | Piece]:
        return self.follow()
''',
        "AsyncWatch",
        (("follow/watch.py", "AsyncWatch"),),
        {"lost": "int"},
    ),
    Twin(
        '''class Forward(Handle["AsyncForward"]):
    """A port here that leads to a port of a job, as `AsyncForward`, without `await`."""

    def __enter__(self) -> Forward:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
''',
        "AsyncForward",
        (("forward.py", "AsyncForward"),),
        {"port": "int"},
    ),
    Twin(
        '''class Lease(Handle["AsyncLease"]):
    """Leased devices of this host, as `AsyncLease`, without `await`: for a block, or until `give_back`."""

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()
''',
        "AsyncLease",
        (("lease.py", "AsyncLease"),),
        {
            "worker": "str",
            "devices": "tuple[Device, ...]",
            "uuids": "tuple[str, ...]",
            "mode": "Sharing",
            "simulated": "bool",
            "environment": "Mapping[str, str]",
        },
    ),
    Twin(
        '''class Service(Handle["AsyncService"]):
    """A service of the tenant, as `AsyncService`, without `await`."""
''',
        "AsyncService",
        (("services.py", "AsyncService"),),
        {"name": "str"},
    ),
    Twin(
        'class Schedules(Handle["AsyncSchedules"]):\n    """AsyncSchedules of the tenant, without `await`."""\n',
        "AsyncSchedules",
        (("schedules.py", "AsyncSchedules"),),
        {},
    ),
    Twin(
        'class Fleet(Handle["AsyncFleet"]):\n    """The workers of a fleet, as `AsyncFleet`, without `await`."""\n',
        "AsyncFleet",
        (("fleet.py", "AsyncFleet"),),
        {},
    ),
    Twin(
        'class Admin(Handle["AsyncAdmin"]):\n    """The orders of an operator, as `AsyncAdmin`, without `await`."""\n',
        "AsyncAdmin",
        (("admin.py", "AsyncAdmin"),),
        {},
    ),
    Twin(
        '''class Client(ClientBase):
    """A client without `await`: `with Client() as moorage: …`. Several threads may share it; none may run a loop.

    Arguments, names and errors are those of `AsyncClient`. `on_wait` is called in the private thread.
    Raises RuntimeError inside a running event loop, but for that of a notebook, which waits for its cells in any case.
    """
''',
        "AsyncClient",
        (("client.py", "AsyncClient"),),
        {"tenant": "str"},
        frozenset({"open", "close"}),
    ),
)
#: the handle that is made of what a member returns
HANDLES: Final = {
    "AsyncJob": "Job",
    "AsyncAdmin": "Admin",
    "AsyncFleet": "Fleet",
    "AsyncForward": "Forward",
    "AsyncSchedules": "Schedules",
    "AsyncService": "Service",
}
#: by class and member, what is more than a call
BODIES: Final[dict[str, str]] = {
    "AsyncClient.submit_many": """
        many = read_here(many)
        try:
            accepted = self._thread.call(CALL)
        except BatchRejected as refused:
            jobs = [job and Job(self._thread, job) for job in refused.jobs]
            raise BatchRejected(jobs, refused.problems) from None
        return [Job(self._thread, job) for job in accepted]
        """,
    "AsyncClient.map": """
        items = read_here(items)
        mapped = CALL
        return Job(self._thread, self._thread.call(mapped))
        """,
    "AsyncService.submit_many": """
        how: dict[str, Any] = {"job": job, "at_once": at_once, "timeout": timeout, "per_replica": per_replica, **fields}
        return Job(self._thread, self._thread.call(self._twin.submit_many(read_here(items), **how)))
        """,
    "AsyncService.map": """
        if isinstance(items, AsyncIterable | Collection):
            more: dict[str, Any] = {"returns": returns, "return_exceptions": return_exceptions, **how}
            return self._thread.iterate(self._twin.map(items, at_once=at_once, **more))
        return self._thread.in_order(self._twin._each(items, at_once, returns, return_exceptions, how), at_once)
        """,
    "AsyncJob.again": """
        again = self._thread.call(CALL)
        return Job(self._thread, again)
        """,
    "AsyncClient.watch": """
        watch = called(lambda: CALL)
        return Watch(self._thread, self._thread.call(watch))
        """,
    "AsyncClient.as_completed": """
        given = {job.job: job for job in handles(jobs, Job)}
        for over in self._thread.iterate(self._twin.as_completed([job._twin for job in given.values()], wait)):
            yield given[over.job]
        """,
    "AsyncClient.gather": """
        twins = [job._twin for job in handles(jobs, Job)]
        return self._thread.call(self._twin.gather(*twins, wait=wait))
        """,
    "AsyncClient.wait": """
        return self._thread.call(self._twin.wait([job._twin for job in handles(jobs, Job)], wait))
        """,
    "AsyncForward.open": """
        self._thread.call(CALL)
        return self
        """,
    "AsyncLease.give_back": """
        if self._thread.runs and not self._thread.is_of_parent:
            self._thread.call(CALL)
        """,
    "AsyncClient.lease": """
        lending = CALL
        return Lease(self._thread, self._thread.call(entered(lending)))
        """,
}
#: by class and member, the sentences that its docstring has beside those of the asynchronous one
NOTES: Final[dict[str, list[str]]] = {
    "AsyncClient.as_completed": ["The handles are those that were given."],
    "AsyncClient.lease": [
        "The lease is taken at once, for a block or until `give_back`, and ends with the client.",
        "`on_asked_back` is called in the private thread.",
    ],
    "AsyncClient.submit_many": ["The `jobs` of a `BatchRejected` are `Job`s too."],
    "AsyncService.map": ["Items that are read one by one are read in this thread, which meanwhile yields no answers."],
    "AsyncJob.result": ["`on_progress` is called in the private thread."],
}


def sync_twin() -> str:
    """Return the text of the module."""
    return "\n\n".join([HEAD, *("\n".join(_class(twin)) for twin in TWINS)])


def _class(twin: Twin) -> Iterator[str]:
    yield twin.head
    for name, kind in twin.attributes.items():
        yield _property(twin.of, name, kind)
    for file, name in twin.defined_in:
        source = (CLIENT / file).read_text()
        defined = next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name)
        for node in defined.body:
            if isinstance(node, Function) and not node.name.startswith("_") and node.name not in twin.left_out:
                if _is_overload(node):
                    yield _overload(node, source)
                    continue
                is_property = any(isinstance(each, ast.Name) and each.id == "property" for each in node.decorator_list)
                if is_property:
                    yield _property(twin.of, node.name, _text(source, node.returns), node)
                else:
                    yield _method(twin.of, node, source)


def _is_overload(node: Function) -> bool:
    return any(isinstance(each, ast.Name) and each.id == "overload" for each in node.decorator_list)


def _overload(node: Function, source: str) -> str:
    parameters = list(_parameters(node.args, source))
    return f"    @overload\n{_signature(node.name, parameters, _synced(_text(source, node.returns)))} ...\n"


def _property(of: str, name: str, kind: str, node: Function | None = None) -> str:
    value, returned = f"self._twin.{name}", _synced(kind)
    if kind in HANDLES:
        returned = HANDLES[kind]
        value = f"{returned}(self._thread, {value})"
    head = f"    @property\n    def {name}(self) -> {returned}:\n"
    return head + textwrap.indent(f"{_doc(f'{of}.{name}', node)}\nreturn {value}\n", " " * 8)


def _doc(member: str, node: Function | None) -> str:
    """Return the docstring: what the first paragraph of the asynchronous member's says."""
    said = (ast.get_docstring(node) or "").split("\n\n")[0] if node is not None else ""
    said = " ".join([said or f"Same as `{member}`.", *NOTES.get(member, ())])
    lines = textwrap.wrap(said, WIDTH - len('        """"""'))
    return '"""' + "\n".join(lines) + ('\n"""' if len(lines) > 1 else '"""')


def _method(of: str, node: Function, source: str) -> str:
    returned, member = _text(source, node.returns), f"{of}.{node.name}"
    call = f"self._twin.{node.name}({', '.join(_passed(node.args))})"
    if returned.startswith("AsyncIterator["):
        body = f"return self._thread.iterate({call})"
    else:
        value = f"self._thread.call({call})" if isinstance(node, ast.AsyncFunctionDef) else call
        body = value if returned == "None" else f"return {_handled(returned, value)}"
    if len(body) > WIDTH - 8:
        inner = call if len(call) <= WIDTH - 12 else _cut(call.partition("(")[0], list(_passed(node.args)))
        body = f"{body.removesuffix(f'{call})')}\n    {inner}\n)"
    body = textwrap.dedent(BODIES.get(member, body)).strip().replace("CALL", call)
    signature = _signature(node.name, list(_parameters(node.args, source)), _synced(returned))
    return signature + "\n" + textwrap.indent(f"{_doc(member, node)}\n{body}\n", " " * 8)


def _cut(called: str, passed: list[str]) -> str:
    """Return a call cut into lines, as ruff does."""
    inner = ", ".join(passed)
    if len(inner) > WIDTH - 16:
        inner = ",\n        ".join(passed) + ","
    return f"{called}(\n        {inner}\n    )"


def _handled(returned: str, value: str) -> str:
    return f"{HANDLES[returned]}(self._thread, {value})" if returned in HANDLES else value


def _parameters(args: ast.arguments, source: str) -> Iterator[str]:
    """Yield each parameter as it stands in the source, `self` without its type."""
    plain = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(plain) - len(args.defaults)) + list(args.defaults)
    for at, (arg, default) in enumerate(zip(plain, defaults, strict=True), 1):
        yield _parameter(arg, default, source)
        if at == len(args.posonlyargs):
            yield "/"
    if args.vararg is not None:
        yield "*" + _parameter(args.vararg, None, source)
    elif args.kwonlyargs:
        yield "*"
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        yield _parameter(arg, default, source)
    if args.kwarg is not None:
        yield "**" + _parameter(args.kwarg, None, source)


def _parameter(arg: ast.arg, default: ast.expr | None, source: str) -> str:
    typed = arg.arg if arg.annotation is None else f"{arg.arg}: {_synced(_text(source, arg.annotation))}"
    return typed if default is None else f"{typed} = {_text(source, default)}"


def _passed(args: ast.arguments) -> Iterator[str]:
    """Yield the arguments of the call."""
    yield from (arg.arg for arg in [*args.posonlyargs, *args.args][1:])
    if args.vararg is not None:
        yield f"*{args.vararg.arg}"
    yield from (f"{arg.arg}={arg.arg}" for arg in args.kwonlyargs)
    if args.kwarg is not None:
        yield f"**{args.kwarg.arg}"


def _signature(name: str, parameters: list[str], returned: str) -> str:
    """Return the line of a `def`, cut into lines as ruff does."""
    line = f"    def {name}({', '.join(parameters)}) -> {returned}:"
    if len(line) <= WIDTH:
        return line
    inner = f"        {', '.join(parameters)}"
    if len(inner) > WIDTH:
        inner = "\n".join(f"        {each}," for each in parameters)
    return f"    def {name}(\n{inner}\n    ) -> {returned}:"


def _synced(annotation: str) -> str:
    """Return the type that the member without `await` has."""
    text = annotation.replace("AsyncIterator", "Iterator").replace("Lending", "AsyncLease")
    return re.sub(r"\bAsync(Job|Watch|Lease|Service|Forward|Schedules|Fleet|Admin)\b", r"\1", text)


def _text(source: str, node: ast.expr | None) -> str:
    return (node and ast.get_source_segment(source, node)) or "None"


if __name__ == "__main__":  # for a module that cannot be imported any more, as all pages need it
    TARGET.write_text(sync_twin())
