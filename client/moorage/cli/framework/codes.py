"""What the codes of moorage mean (of errors, of waiting, of ends), and what helps against each."""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple

from moorage.cli.framework.exit_codes import EXIT_FAILED, EXIT_OF_CODE
from moorage.schemas.reasons import REASONS

#: what helps against an error or an end, where a line can say it; {job} is filled in. See also `fix_of`
FIXES: Final[dict[str, str]] = {
    "invalid-argument": "correct what the error names",
    "unknown-verb": "moorage help",
    "too-large": "put large data into a store and pass its address to the job",
    "not-found": "moorage ls shows the jobs there are; moorage fleet, of an operator, the workers",
    "over-memory": "ask for a larger share, with room for the CUDA context, or for a GPU of its own",
    "mps-fault": "moorage logs {job} has its CUDA error; a GPU of its own keeps it from harming other jobs",
    "idle": "ask for GPUs once the job is to use them, and end it when it has: moorage logs {job}",
    "stalled": "see where it stands (moorage logs {job}, moorage use {job}); a rank that is named stopped, or waits for"
    " what another host does: try that host without it, moorage submit --instead-of {job}",
    "conflict": "choose another job id; or send the same content, which is the same job",
    "unknown-job": "moorage ls shows the jobs there are; --after takes an id in full, of a job submitted before",
    "failed-precondition": "change what the message names: moorage plan says what would fit, moorage ls shows the jobs",
    "no-match": "moorage plan says what would fit; with --on-no-match wait the job waits for a worker",
    "moved-on": "moorage plan again, and submit with the ledger record that it shows",
    "queue-full": "send the same job again after the time that the answer names",
    "no-scheduler": "moorage scheduler starts one; moorage doctor looks for what is wrong",
    "cannot-connect": "moorage up starts a server; --nats, NATS_URL or NATS_CONTEXT name another",
    "not-authorized": "moorage doctor shows which context is used, and from which file",
    "permission-refused": "ask the server's operator for the permissions of your role; moorage doctor tries each",
    "bad-context": "nats context ls; nats context edit",
    "timed-out": "moorage explain JOB; wait longer with --at-most",
    "job-expired": "moorage explain JOB while it waits; give it longer, or ask for what starts sooner: moorage plan",
    "job-rejected": "moorage plan says what would fit",
    "job-failed": "moorage show JOB",
    # of what bare callers hear
    "expired": "call again, or give the call longer in Moorage-Wait-Ms",
    "input-refused": "put the data where the service can fetch them, and send their address",
    "no-endpoint": "call it as this version of the service says",
    # of ends
    "start-failed": "mend what the message names (a program, a folder, a user that the worker has): moorage show {job}",
    "not-here": "mend what the message names, or put it on a worker; then moorage again {job}",
    "cannot-run": "moorage again {job}, with what the message names changed",
    "setup-failed": "moorage logs {job} has what its setup wrote; then moorage again {job}, with another --setup",
    "timeout": "give it longer: moorage again {job} --failed --time-limit 2h; what it did before: moorage logs {job}",
}

#: what a person may take for granted and is otherwise
NOTES: Final[dict[str, str]] = {
    "busy": "a caller of a service without the SDK hears this word, too: all members that were asked are full",
    "job-expired": "start_within_s bounds the wait: a job that has not started then is EXPIRED; moorage explain says "
    "earlier if it is not expected to start in time",
    "queue-full": "nothing of the request was recorded; the durable queue takes it and waits: "
    "nats req moorage.request.TENANT.submit",
    "no-scheduler": "a request without an answer may still be recorded: send it again with the same job id",
    "disconnected": "it may have been recorded: send it again with the same job id",
    "too-large": "a request has at most 64 KiB, a frame 900 KiB; the SDK and the command split long lists",
    "conflict": "the first request is unchanged",
    "permission-refused": "NATS refuses it, not moorage: over plain NATS it is a -ERR line and no answer",
    "no-match": "a job waits; with on_no_match = reject it is refused as failed-precondition",
}

#: errors that say how a job ended
_OF_JOBS: Final = ("job-failed", "job-timed-out", "job-cancelled", "job-expired", "job-rejected")


class Code(NamedTuple):
    """A code: of an error, of why a job waits, of why an attempt ended, a state of a job, or what a bare caller of a
    service hears. `fault` says whose fault an error is, and is "" for the others."""

    code: str
    fault: str
    means: str
    of: Literal["error", "waiting", "end", "state", "call"] = "error"

    @property
    def exit_code(self) -> int | None:
        """The exit code of a command that ends with this error; None if this is why a job waits or ended.

        None, too, for the end of a job: run, logs and wait end with the job's own code.
        """
        return EXIT_OF_CODE.get(self.code, EXIT_FAILED) if self.fault and self.code not in _OF_JOBS else None


def error_codes() -> dict[str, Code]:
    """Return every code of an error that a user can meet, by its name."""
    from moorage.bus.errors import BUS_CODES
    from moorage.client.errors import CLIENT_CODES
    from moorage.schemas.errors import CODES

    known = {**CODES, **BUS_CODES, **CLIENT_CODES}
    return {code: Code(code, fault, means) for code, (fault, means) in known.items()}


def reasons() -> dict[str, Code]:
    """Return every reason for which a job waits, by its name."""
    return {name: Code(name, "", reason.means, "waiting") for name, reason in REASONS.items()}


def ends() -> dict[str, Code]:
    """Return every code of why an attempt ended, but for a command that ended by itself."""
    from moorage.schemas.errors import ENDS

    return {code: Code(code, "", means, "end") for code, means in ENDS.items()}


def of_calls() -> dict[str, Code]:
    """Return every error that only callers without the SDK hear of a service, in `Nats-Service-Error`."""
    from moorage.schemas.service import CALL_ERRORS

    others = {**error_codes(), **reasons()}
    return {code: Code(code, "", means, "call") for code, (*_, means) in CALL_ERRORS.items() if code not in others}


def states() -> dict[str, Code]:
    """Return every state of a job, by its name."""
    from moorage.schemas.job import STATE_TABLE

    return {row.name: Code(row.name, "", row.means, "state") for row in STATE_TABLE}


#: where a program was killed, and neither moorage nor the kernel's count of memory says why
LOOK_KILLED: Final = "moorage show {job} says what is known of its memory, in case the kernel killed it"
#: what helps where a host lacks a program, by words of its `why`; the first that is found holds
_NOT_HERE: Final = (
    ("it is one word", "write its words apart; run a line for the shell as sh -c 'LINE'"),
    ("has no first line", "run it as sh NAME, or begin it with a first line as #!/bin/sh"),
    (
        "(secrets_dir) is missing",
        "name a folder that its worker's user alone may write: secrets_dir below [worker] in moorage.toml, or "
        "moorage worker --secrets FOLDER; then moorage again {job}",
    ),
    (
        "no such file in the worker's folder of secrets",
        "put a file of that name there, readable by its owner alone; then moorage again {job}",
    ),
    (" no program ", "give its full path, or bring it with --with and write ./NAME"),
)


def code_of(word: str) -> Code | None:
    """Return the error, reason for waiting or state that has this name; None for an end or any other word."""
    return error_codes().get(word) or reasons().get(word) or states().get(word)


def fix_of(code: str) -> str:
    """Return what helps against an error, a reason or an end, with {job} and {asks} not filled in; "" if unknown."""
    return REASONS[code].fix if code in REASONS else FIXES.get(code, "")


def fix_of_end(why: str) -> str:
    """Return what helps against an end with this `why`, with {job} not filled in; "" if that is not known."""
    if why.startswith("not-here:"):
        for words, fix in _NOT_HERE:
            if words in why:
                return fix
    return fix_of(why.partition(":")[0])


def frame(code: Code) -> dict[str, Any]:
    """Return what `--json` prints about a code."""
    return {"kind": "code", **code._asdict(), "exit_code": code.exit_code, "fix": fix_of(code.code)}
