"""What moorage means by a word, without a server: `errors`, `schema`, and codes in `explain`."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple

from moorage.cli.arguments import Parameter
from moorage.cli.console import emit, tell
from moorage.cli.exit_codes import EXIT_FAILED, EXIT_OF_CODE
from moorage.cli.options import LOCAL, LOCAL_ROWS, LocalOptions, LocalRowOptions, guarded
from moorage.cli.render import facts, table
from moorage.schemas.nearest import nearest
from moorage.schemas.reasons import REASONS

if TYPE_CHECKING:
    from moorage.client.errors import NotFound

#: what helps against an error or an end, where a line can say it; {job} is filled in. See also `fix_of`
FIXES: Final[dict[str, str]] = {
    "invalid-argument": "correct what the error names; moorage schema request has every field of a request",
    "unknown-verb": "moorage help",
    "too-large": "put large data into a store and hand its address to the job",
    "not-found": "moorage ls, or moorage fleet",
    "over-memory": "ask for a larger share, with room for the CUDA context, or for a GPU of its own",
    "conflict": "choose another job id; or send the same content, which is the same job",
    "no-match": "moorage fleet shows what there is; without --on-no-match reject the job waits for a worker",
    "moved-on": "moorage plan again, and submit with the ledger record that it shows",
    "cannot-start-in-time": "give it longer than the error says, or ask for what moorage fleet shows as free",
    "queue-full": "send the same job again after the time that the answer names",
    "no-scheduler": "moorage scheduler starts one; moorage doctor looks for what is wrong",
    "cannot-connect": "moorage up starts a server; --nats, NATS_CONTEXT or NATS_URL name another",
    "not-authorized": "moorage doctor shows which context is used, and from which file",
    "permission-refused": "ask who runs the server for the permissions of your role; moorage doctor tries each",
    "bad-context": "nats context ls; nats context edit",
    "timed-out": "moorage explain JOB; wait longer with --at-most",
    "job-expired": "moorage explain JOB while it waits; give it longer, or ask for what moorage fleet shows as free",
    "job-rejected": "moorage fleet shows what there is",
    "job-failed": "moorage show JOB",
    # of ends
    "start-failed": "mend what the message names (a program, a folder, a user that the worker has): moorage show {job}",
    "timeout": "give it longer, with --time-limit or --deadline; what it did until then: moorage logs {job}",
}

#: what a person may take for granted and is otherwise
NOTES: Final[dict[str, str]] = {
    "job-expired": "start_within_s bounds the wait: what by all estimates cannot make it is refused at once with "
    "cannot-start-in-time; anything else is accepted, waits, and is EXPIRED by event when the time is over",
    "cannot-start-in-time": "the bound is optimistic: it counts on the shortest run ever seen of all that runs, and on "
    "nobody before it in the queue; nothing was recorded",
    "queue-full": "nothing of the request was recorded; the durable queue takes it and waits: "
    "nats req moorage.request.TENANT.submit",
    "no-scheduler": "a request without an answer may still be recorded: send it again with the same job id",
    "disconnected": "it may have been recorded: send it again with the same job id",
    "too-large": "a request has at most 64 KiB, a frame 900 KiB; the SDK and the command split what is many",
    "conflict": "the first request stands and is not touched",
    "permission-refused": "NATS says no, not moorage: over plain NATS it is a -ERR line and no answer",
    "no-match": "only when on_no_match says reject: else it is a warning, and the job waits",
}


class Code(NamedTuple):
    """An error's code, or the reason of a job that waits or of an attempt that ended (`fault` is then "")."""

    code: str
    fault: str
    means: str
    of: Literal["error", "waiting", "end"] = "error"

    @property
    def exit_code(self) -> int | None:
        """Of the command that ends with it; None for a reason, which ends none."""
        return EXIT_OF_CODE.get(self.code, EXIT_FAILED) if self.fault else None


def error_codes() -> dict[str, Code]:
    """Every code of an error that a user can meet."""
    from moorage.bus.errors import BUS_CODES
    from moorage.client.errors import CLIENT_CODES
    from moorage.schemas.errors import CODES

    known = {**CODES, **BUS_CODES, **CLIENT_CODES}
    return {code: Code(code, fault, means) for code, (fault, means) in known.items()}


def reasons() -> dict[str, Code]:
    """Every reason for which a job waits."""
    return {name: Code(name, "", reason.means, "waiting") for name, reason in REASONS.items()}


def ends() -> dict[str, Code]:
    """Every reason for which an attempt ends that does not end by itself."""
    from moorage.schemas.errors import ENDS

    return {code: Code(code, "", means, "end") for code, means in ENDS.items()}


def code_of(word: str) -> Code | None:
    """The code of an error or the reason for waiting that a word is, where it is one."""
    return error_codes().get(word) or reasons().get(word)


def fix_of(code: str) -> str:
    """What helps against an error, a reason or an end; empty where no line can say it."""
    return REASONS[code].fix if code in REASONS else FIXES.get(code, "")


def errors(
    code: Annotated[str | None, Parameter(help="One code; without it all of them.")] = None,
    /,
    *,
    options: LocalRowOptions = LOCAL_ROWS,
) -> int:
    """What the codes of errors, of waiting and of ends mean, whose fault they are, and the exit codes."""

    def act() -> int | None:
        every = {**error_codes(), **reasons(), **ends()}
        known = list(every.values()) if code is None else [every.get(code)]
        if known == [None]:
            raise _nothing("code", code or "", every, "moorage errors")
        found = [each for each in known if each is not None]
        if options.json:
            for each in found:
                emit(frame(each))
        elif options.shown({}, map(frame, found)):
            pass
        elif code is not None:
            tell(page(found[0]))
        else:
            rows = [[each.code, each.fault or each.of, each.exit_code, each.means] for each in found]
            tell(table(["CODE", "FAULT", "EXIT", "MEANS"], rows, numbers=("EXIT",)))
        return None

    return guarded(options, act)


_KINDS: Final = {
    "waiting": "a reason for waiting: the job is queued and goes on by itself",
    "end": "how an attempt of a job ended: the first word of its why",
}


def frame(code: Code) -> dict[str, Any]:
    """What `--json` says of a code."""
    return {"kind": "code", **code._asdict(), "exit_code": code.exit_code, "fix": fix_of(code.code)}


def page(code: Code) -> str:
    """Everything that is known of a code."""
    where = {"caller": "the caller's", "fleet": "the fleet's, not yours", "moorage": "moorage's own: report it"}
    fix = fix_of(code.code).format(job="JOB", asks="the request")
    return facts(
        [
            ("code", code.code),
            ("means", code.means),
            ("fault", where.get(code.fault)),
            ("kind", _KINDS.get(code.of)),
            ("exit code", code.exit_code),
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
    """The JSON Schema of the request, or of a frame, as this release reads and writes it."""

    def act() -> int | None:
        known = _structs()
        if name is None:
            for each in sorted(known):
                if options.json:
                    emit({"kind": "schema", "name": each})
                else:
                    tell(each)
            return None
        struct = known.get(name.lower())
        if struct is None:
            raise _nothing("schema", name, known, "moorage schema")
        import msgspec

        from moorage.schemas.described import json_schema

        text = msgspec.json.encode(json_schema(struct))
        tell((text if options.json else msgspec.json.format(text, indent=2)).decode())
        return None

    return guarded(options, act)


def _structs() -> dict[str, type]:
    """Every frame by its kind, and the request."""
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
    from moorage.client.errors import not_found

    near = nearest(word, known)
    return not_found(f"no {kind} {word!r}", found=word, next=f"{verb} {near}" if near else f"{verb} lists them")
