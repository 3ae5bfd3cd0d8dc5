"""`moorage errors`, `moorage schema` and the codes in `moorage explain`: what a word of moorage means, told without a
server."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Final

from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.codes import NOTES, Code, ends, error_codes, fix_of, frame, of_calls, reasons, states
from moorage.cli.framework.console import emit, print_out
from moorage.cli.framework.exit_codes import EXIT_FAILED
from moorage.cli.framework.options import LOCAL, LOCAL_ROWS, LocalOptions, LocalRowOptions, guarded
from moorage.cli.framework.render import facts, table
from moorage.client.errors import NotFound, not_found
from moorage.schemas.nearest import nearest


def errors(
    code: Annotated[str | None, Parameter(help="One code; without it all of them.")] = None,
    /,
    *,
    options: LocalRowOptions = LOCAL_ROWS,
) -> int:
    """List the codes of errors, of waiting and of ends: what they mean, whose fault it is, and the exit codes."""

    def act() -> int | None:
        every = {**error_codes(), **reasons(), **ends(), **of_calls()}
        known = list(every.values()) if code is None else [(every | states()).get(code)]
        if known == [None]:
            raise _nothing("code", code or "", every, "moorage errors")
        found = [each for each in known if each is not None]
        if options.json:
            for each in found:
                emit(frame(each))
        elif options.shown({}, map(frame, found)):
            pass
        elif code is not None:
            print_out(page(found[0]))
        else:
            rows = [[each.code, each.fault or each.of, each.exit_code, each.means] for each in found]
            print_out(table(["CODE", "FAULT", "EXIT", "MEANS"], rows, numbers=("EXIT",)))
        return None

    return guarded(options, act)


_KINDS: Final = {
    "waiting": "a reason for waiting: the job is queued and goes on by itself",
    "state": "a state of a job, and of each of its replicas",
    "call": "what a caller of a service without the SDK hears, in Nats-Service-Error",
    "end": "how an attempt of a job ended: the first word of its why",
}


def _exit_code(code: Code) -> int | str | None:
    """Return the exit code in words, where it is that of the job."""
    if code.exit_code is None and code.fault:
        return f"the job's own, 128 + the signal that ended it, or {EXIT_FAILED} without either"
    return code.exit_code


def page(code: Code) -> str:
    """Return everything that is known of a code, as text."""
    where = {
        "caller": "the caller's",
        "service": "the service's: its function's",
        "fleet": "the fleet's, not yours",
        "moorage": "moorage's own: report it",
    }
    fix = fix_of(code.code).format(job="JOB", asks="the request")
    return facts(
        [
            ("code", code.code),
            ("means", code.means),
            ("fault", where.get(code.fault)),
            ("kind", _KINDS.get(code.of)),
            ("exit code", _exit_code(code)),
            ("note", NOTES.get(code.code, "")),
            ("fix", fix),
        ]
    )


def schema(
    name: Annotated[
        str | None, Parameter(help="request, or a frame's kind as `event`; without it their names.")
    ] = None,
    /,
    *,
    options: LocalOptions = LOCAL,
) -> int:
    """Print the JSON Schema of the request, or of a frame, as this release reads and writes it."""

    def act() -> int | None:
        known = _structs()
        if name is None:
            for each in sorted(known):
                if options.json:
                    emit({"kind": "schema", "name": each})
                else:
                    print_out(each)
            return None
        struct = known.get(name.lower())
        if struct is None:
            raise _nothing("schema", name, known, "moorage schema")
        import msgspec

        from moorage.schemas.described import json_schema

        text = msgspec.json.encode(json_schema(struct))
        print_out((text if options.json else msgspec.json.format(text, indent=2)).decode())
        return None

    return guarded(options, act)


def _structs() -> dict[str, type]:
    """Return the struct of every frame by its kind, and that of the request."""
    import msgspec

    from moorage.schemas import frames
    from moorage.schemas.errors import Problem
    from moorage.schemas.job import Request

    found: dict[str, type] = {"request": Request, "error": Problem}
    for struct in vars(frames).values():
        if isinstance(struct, type) and issubclass(struct, msgspec.Struct):
            tag = struct.__struct_config__.tag
            if isinstance(tag, str):
                found[tag] = struct
    return found


def _nothing(kind: str, word: str, known: Collection[str], verb: str) -> NotFound:
    near = nearest(word, known)
    return not_found(f"no {kind} {word!r}", found=word, next=f"{verb} {near}" if near else f"{verb} lists them")
