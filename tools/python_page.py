"""The Python reference and the page for extensions: public names with fields, types, defaults and docstrings."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from importlib import import_module
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

import moorage.client
from moorage.client.fields import RUN_FIELDS, Fields
from moorage.schemas.described import notes
from moorage.schemas.job import Request, Run
from tools.wire_types import default_of, table

#: names of the worker's side that a user of the library meets, by module
WORKER_API: Final[dict[str, tuple[str, ...]]] = {
    "moorage.worker": ("EmbeddedWorker", "HandlerContext", "HandlerCancelled", "WorkerSettings"),
    "moorage.bus.lend.client": ("borrow", "BorrowedLease", "LeaseRefused"),
}
#: names for drivers and rankers of one's own, by module: the page `reference/extending.md`
EXTENDING_API: Final[dict[str, tuple[str, ...]]] = {
    "moorage.worker.driver": ("Driver", "Freezes", "Executes", "KeepsOutput", "KeepsFolders", "Assignment"),
    "moorage.worker.drivers.kit": ("Kit",),
    "moorage.schemas.capabilities": ("Capabilities",),
    "moorage.worker.devices.readers.base": ("Inventory", "Host", "SlotReading"),
    "moorage.scheduler.core.rank.ranker": ("Ranker", "Choice"),
}
#: what an operator gives and gets, by module
OPERATOR_API: Final[dict[str, tuple[str, ...]]] = {
    "moorage.client": ("AsyncFleet", "Fleet", "AsyncAdmin", "Admin"),
    "moorage.schemas.operate": (
        "Changed",
        "Counter",
        "Done",
        "Hold",
        "Limit",
        "Share",
        "Drain",
        "Resized",
        "TenantRow",
    ),
}
EVENTS: Final = "Events and steps"
SERVE: Final = "What a service's function imports"
ERRORS: Final = "What it raises"
#: the SDK's page: title -> the modules whose public names stand below it; those of other modules come last
CLIENT_API: Final[dict[str, tuple[str, ...]]] = {
    "The client": ("moorage.client.client",),
    "A job": (
        "moorage.client.job",
        "moorage.client.follow.job_history",
        "moorage.client.follow.watch",
        "moorage.client.command",
        "moorage.client.forward",
        "moorage.schemas.frames.told",
    ),
    "Functions": ("moorage.client.executor",),
    "Answers": (
        "moorage.client.answers",
        "moorage.schemas.answers.fleet",
        "moorage.schemas.answers.jobs",
        "moorage.schemas.answers.letters",
        "moorage.schemas.answers.operators",
        "moorage.schemas.plan",
        "moorage.schemas.frames.use",
    ),
    "Services": ("moorage.client.services", "moorage.client.call_options", "moorage.schemas.served"),
    SERVE: ("moorage.serve",),
    "Schedules": ("moorage.client.schedules", "moorage.schemas.schedules"),
    "A request": ("moorage.schemas.job", "moorage.schemas.gpu"),
    EVENTS: ("moorage.client.events",),
    ERRORS: ("moorage.client.errors",),
    "For your tests": (
        "moorage.testing.sim_fleet",
        "moorage.testing.sim_driver",
        "moorage.testing.bus.clock",
    ),
}
REST: Final = "Leases, handlers, GPUs"
#: their methods are those of another class, without `await`
TWINS: Final = {
    name: f"Async{name}"
    for name in moorage.client.__all__
    if getattr(getattr(moorage.client, name), "__module__", "") == "moorage.client.sync"
}
#: classes that a user makes objects of, whose fields are no table
CONSTRUCTED: Final = frozenset({"AsyncClient", "CallError", "EmbeddedWorker", "SimFleet", "SimulatedClock"})
#: what other parts of moorage call, and no user does
INTERNAL: Final[dict[str, frozenset[str]]] = {
    "GpuSpec": frozenset({"trouble", "levels_required", "enforced", "models", "effective_vendor", "slice_profile"}),
    "Request": frozenset({
        "with_part", "effective_gpu", "trouble", "blocks", "image", "device_ids", "driver_fault", "active_alone",
        "workload",
    }),
    "JobInfo": frozenset({"run", "driver", "numbers"}),
    "Run": frozenset({"stays"}),
    "Share": frozenset({"has_compute"}),
    "WorkerSettings": frozenset({"modes_offered", "kept_devices", "freezes_after_s", "modes_lent"}),
}  # fmt: skip
#: its fields have a page of their own
#: keywords whose default is another one than that of the wire
OF_THE_SDK: Final = {"on_no_match": "`'reject'`", "events": "`'tenant'`", "max_failed": "20, or 5 %"}
FIELDS_ELSEWHERE: Final = {"WorkerSettings": "the keys of [`[worker]`](settings.md#worker)"}
HEAD: Final = """# Python

Names of the SDK are imported from `moorage.client`, unless the line below their title says otherwise. Start with
[`AsyncClient`](#asyncclient), or with [`Client`](#client) where there is no event loop. Each object of `Client` has the
name of that of `AsyncClient`, less the `Async`. What a job asks for is said by name:
[what `submit` takes](#what-submit-takes-by-name).
"""
SUBMIT_TAKES: Final = "What submit takes by name"
EXTENDING_HEAD: Final = """# Extending

What drivers, readers of devices and rankers of your own are made of. How to begin:
[write your own driver](../how-to/write-your-own-driver.md),
[write your own ranking](../how-to/write-your-own-ranking.md).
What a service imports is on the page [Python](python.md).

"""

#: the public names of the SDK, of its events and for functions of services, with the module that a user imports
_PUBLIC: Final = {
    name: (module, getattr(import_module(module), name))
    for module in ("moorage.serve", "moorage.client.events", "moorage.client")
    for name in import_module(module).__all__
}
#: those that have a heading: steps and errors are rows of a table
_HEADED: Final = frozenset(
    name
    for name, (_, public) in _PUBLIC.items()
    if getattr(public, "__module__", "") not in ("moorage.client.steps", "moorage.client.errors")
    or name in ("Step", "ClientError")
)
_BLANK_LINES: Final = re.compile(r"\n{3,}")
_STARS: Final[dict[Any, str]] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


def python_api() -> str:
    """The page of what a service imports."""
    parts = [HEAD]
    for title, public in client_groups().items():
        parts.append(f"## {title}\n")
        if title == "A request":
            parts.append(_what_submit_takes())
        if title == ERRORS:
            parts.append(_errors(public))
            continue
        steps = [name for name in public if _is_step(name)]
        for name in public:
            if name not in steps:
                module, found = _PUBLIC[name]
                parts.append(_described(name, found, "" if module == "moorage.client" else module))
        if steps:
            parts.append(_steps(steps))
    for title, api in (("An operator's orders", OPERATOR_API), ("The worker's side", WORKER_API)):
        parts += [f"## {title}\n", *_of_modules(api)]
    return _page(parts)


def extending() -> str:
    """The page of what drivers and rankers are made of. The SDK's names have their headings on the page Python."""
    return _page([EXTENDING_HEAD, *_of_modules(EXTENDING_API, level=2)]).replace("](#", "](python.md#")


def _page(parts: list[str]) -> str:
    return _BLANK_LINES.sub("\n\n", "\n".join(parts)).rstrip() + "\n"


def _of_modules(api: dict[str, tuple[str, ...]], *, level: int = 3) -> Iterator[str]:
    for module, names in api.items():
        for name in names:
            yield _described(name, getattr(import_module(module), name), module, level=level)


def _steps(names: list[str]) -> str:
    """The common fields of all steps, then a table of their classes."""
    rows = [(f"`{name}`", _doc(_PUBLIC[name][1])) for name in names if name != "Step"]
    module, base = _PUBLIC["Step"]
    return _described("Step", base, module) + "\n\n" + table([("class", "when"), *rows]) + "\n"


def _is_step(name: str) -> bool:
    return getattr(_PUBLIC[name][1], "__module__", "") == "moorage.client.steps"


def _errors(names: list[str]) -> str:
    """The base of all errors, then a table of the others: what each builds on, when it is raised, and what it has."""
    rows = [("class", "is a", "raised when, and what it has besides")]
    for name in names:
        error = getattr(moorage.client, name)
        if error is not moorage.client.ClientError:
            own = [f"`{member}`: {_doc(value)}" for member, value in vars(error).items() if isinstance(value, property)]
            bases = [base.__name__ for base in error.__bases__]
            rows.append((f"`{name}`", ", ".join(f"`{base}`" for base in bases), " ".join([_doc(error), *own])))
    return _described("ClientError", moorage.client.ClientError) + "\n\n" + table(rows) + "\n"


def client_groups() -> dict[str, list[str]]:
    """The SDK's public names below the titles of `CLIENT_API`, by the module that they are imported from or defined in.

    An object without `await` stands beside the one that it is made of.
    """
    groups: dict[str, list[str]] = {title: [] for title in CLIENT_API}
    title_of = {module: title for title, modules in CLIENT_API.items() for module in modules}
    for name, (module, public) in _PUBLIC.items():
        if name in OPERATOR_API["moorage.client"]:
            continue
        defined = getattr(_PUBLIC[TWINS[name]][1] if name in TWINS else public, "__module__", "")
        groups.setdefault(title_of.get(module) or title_of.get(defined, REST), []).append(name)
    return groups


def _what_submit_takes() -> str:
    """The table of the names that `submit`, `run`, `plan` and their like take beside the command and `gpu`."""
    said, said_of_run = notes(Request), notes(Run)
    hints = get_type_hints(Fields)
    rows = []
    for name in hints:
        struct = Run if name in RUN_FIELDS else Request
        wire = "timeout_s" if name == "limit" else name
        default = next(_default(field) for field in msgspec.structs.fields(struct) if field.name == wire)
        default = OF_THE_SDK.get(name, default)
        rows.append((f"`{name}`", python_type(hints[name]), default, (said_of_run if struct is Run else said)[wire]))
    return (
        f"### {SUBMIT_TAKES}\n\n`submit`, `run`, `submit_many`, `submit_handler` and `plan` take these by name,"
        " beside the command (a list of words, a mapping as on the wire, or a `Request`), `gpu` (a token such as"
        " `2xH100:80G`, a count, or a `GpuSpec`) and `job` (the job's id). Durations are in seconds.\n\n"
        f"{_table(rows)}\n"
    )


def _described(name: str, public: Any, module: str = "", *, level: int = 3) -> str:
    parts = [f"{'#' * level} {name}\n"]
    if module:
        parts.append(f"`from {module} import {name}`\n")
    if name in TWINS:
        twin = TWINS[name]
        parts.append(f"What [`{twin}`](#{twin.lower()}) has, without `await`.\n")
        return "\n".join(parts)
    if not inspect.isclass(public):
        if inspect.isfunction(public):
            parts.append(_signature(name, public))
            parts.append(_doc(public))
        else:
            parts.append(f"One of {python_type(public)}.\n")
        return "\n".join(parts)
    if name in CONSTRUCTED:
        parts.append(_signature(name, vars(public).get("__init__", public.__init__), drop_self=True))
    parts.append(_doc(public))
    if name in FIELDS_ELSEWHERE:
        parts.append(f"Its fields are {FIELDS_ELSEWHERE[name]}.\n")
    elif rows := list(_fields(public)):
        parts.append(_table(rows) + "\n")
    members = dict(_members(name, public))
    if properties := [row for member, found in members.items() if (row := _property(member, found))]:
        parts.append(table([("property", "type", "what"), *properties]) + "\n")
    for member, value in members.items():
        found = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if inspect.isfunction(found):
            is_method = not isinstance(value, staticmethod)
            parts.append(f"{'#' * level}# {name}.{member}\n")
            parts.append(f"{_signature(member, found, drop_self=is_method)}\n{_doc(found)}")
    return "\n".join(parts)


def _members(name: str, public: type) -> Iterator[tuple[str, Any]]:
    """Its public properties and methods, those of its bases in moorage as well, in the order of the sources."""
    seen = set(INTERNAL.get(name, ()))
    for base in public.__mro__:
        if not base.__module__.startswith("moorage.") or (base is not public and issubclass(base, msgspec.Struct)):
            continue
        for member, value in vars(base).items():
            if not member.startswith("_") and member not in seen:
                seen.add(member)
                if inspect.getdoc(value.__func__ if isinstance(value, classmethod | staticmethod) else value):
                    yield member, value


def _property(name: str, found: Any) -> tuple[str, str, str] | None:
    if not isinstance(found, property):
        return None
    hint = found.fget.__annotations__.get("return", "") if found.fget is not None else ""
    return f"`{name}`", f"`{hint}`", _doc(found)


def _doc(of: Any) -> str:
    """The docstring as Markdown: code that is only indented there goes into a block."""
    return (inspect.getdoc(of) or "") + "\n"


def _signature(name: str, function: Any, *, drop_self: bool = False) -> str:
    """As Python code: one line where it fits, else a line for each argument."""
    found = inspect.signature(function)
    words: list[str] = []
    for at, parameter in enumerate(found.parameters.values()):
        if at == 0 and drop_self:
            continue
        stars = _STARS.get(parameter.kind, "")
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not {"*"} & {word[:1] for word in words}:
            words.append("*")
        noted = parameter.annotation is not inspect.Parameter.empty
        word = f"{stars}{parameter.name}" + (f": {parameter.annotation}" if noted else "")
        if parameter.default is not inspect.Parameter.empty:
            default = getattr(parameter.default, "__name__", None) or repr(parameter.default)
            word += f" = {default}" if noted else f"={default}"
        words.append(word)
    returned = "" if found.return_annotation in (inspect.Signature.empty, "None") else f" -> {found.return_annotation}"
    awaited = "async def " if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function) else "def "
    begin = "" if function.__name__ == "__init__" else awaited
    line = f"{begin}{name}({', '.join(words)}){returned}"
    if len(line) > 100:
        line = f"{begin}{name}(\n{_filled(words)}){returned}"
    return f'```python title="signature"\n{line}\n```\n'


def _filled(words: list[str]) -> str:
    """Arguments in lines of at most 100 characters."""
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + len(word) < 98:
            lines[-1] += f" {word},"
        else:
            lines.append(f"    {word},")
    return "".join(f"{line}\n" for line in lines)


def _fields(public: type) -> Iterator[tuple[str, str, str, str]]:
    """Name, type, default and what the code says of each field of a struct or of a dataclass."""
    if issubclass(public, msgspec.Struct):
        said = {name: text for base in reversed(public.__mro__) for name, text in _notes_of(base).items() if text}
        for field in msgspec.structs.fields(public):
            yield f"`{field.name}`", python_type(field.type), _default(field), said.get(field.name, "")
    elif dataclasses.is_dataclass(public):
        hints = get_type_hints(public, include_extras=True)
        for each in dataclasses.fields(public):
            default = "required"
            if each.default is not dataclasses.MISSING:
                default = f"`{each.default!r}`"
            elif each.default_factory is not dataclasses.MISSING:
                default = f"`{each.default_factory()!r}`"
            yield f"`{each.name}`", python_type(hints[each.name]), default, _meta_of(hints[each.name])
    elif issubclass(public, tuple) and hasattr(public, "_fields"):
        hints = get_type_hints(public)
        for name in public._fields:
            default = f"`{public._field_defaults[name]!r}`" if name in public._field_defaults else "required"  # type: ignore[attr-defined]
            yield f"`{name}`", python_type(hints[name]), default, ""


def _notes_of(base: type) -> dict[str, str]:
    return notes(base) if issubclass(base, msgspec.Struct) and base is not msgspec.Struct else {}


def _meta_of(kind: Any) -> str:
    """What a setting's own declaration says of it."""
    for note in get_args(kind)[1:] if get_origin(kind) is Annotated else ():
        if isinstance(note, msgspec.Meta) and note.description:
            return note.description
    return ""


def _default(field: msgspec.structs.FieldInfo) -> str:
    return default_of(field, lambda value: f"`{value!r}`")


def python_type(kind: Any) -> str:
    """A type as one writes it in Python; names that have a heading on the page are links."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return python_type(inner[0]) + _bounds(inner[1:])
    if kind in (NoneType, None):
        return "`None`"
    if origin is Literal:
        return " or ".join(f"`{json.dumps(value)}`" for value in inner)
    if origin in (Union, UnionType):
        return " or ".join(python_type(each) for each in inner if each is not msgspec.UnsetType)
    if origin is not None and inner:
        each = ", ".join(python_type(one) for one in inner if one is not Ellipsis)
        return f"`{getattr(origin, '__name__', origin)}` of {each}"
    name = getattr(kind, "__name__", str(kind))
    return f"[`{name}`](#{name.lower()})" if name in _HEADED else f"`{name}`"


def _bounds(extra: tuple[Any, ...]) -> str:
    """`, 1 to 64`, where the type says so."""
    for meta in extra:
        if isinstance(meta, msgspec.Meta):
            low = meta.ge if meta.ge is not None else meta.gt
            high = meta.le if meta.le is not None else meta.lt
            if low is not None and high is not None:
                return f", {low} to {high}"
            if low is not None:
                return f", at least {low}" if meta.ge is not None else f", above {low}"
    return ""


def _table(rows: list[tuple[str, str, str, str]]) -> str:
    """The fields: a table where one of them is explained, else a sentence, since their class explains them."""
    if any(row[3] for row in rows):
        return table([("name", "type", "default", "what"), *rows])
    told = (f"{name} ({kind}{'' if default == 'required' else f' = {default}'})" for name, kind, default, _ in rows)
    return "\n".join(textwrap.wrap(f"Fields: {', '.join(told)}.", 140, break_long_words=False, break_on_hyphens=False))
