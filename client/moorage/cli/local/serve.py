"""`moorage serve`: answer the calls of a service, with a Python function or with any program."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import print_err
from moorage.cli.framework.options import OF_LEDGER, LedgerOptions, guarded
from moorage.cli.local.mps_ends import announce_end
from moorage.client.durations import seconds
from moorage.client.errors import rejected
from moorage.schemas.subjects import PREFIX_DEFAULT

if TYPE_CHECKING:
    from moorage.calls.messenger import Messenger, Name
    from moorage.calls.serve import Serving
    from moorage.schemas.http_service import HttpSpec


def serve(
    function: Annotated[str, Parameter(help="A function or class of Python: package.module:name.", value="NAME")] = "",
    /,
    *command: Annotated[str, Parameter(help="Or a program that speaks the protocol, after --.", command=True)],
    name: Annotated[str | None, Parameter(help="The service. A job has it from its request.", value="NAME")] = None,
    concurrency: Annotated[
        int | None, Parameter(help="Calls that run at the same time. A job has it from its request. Default: 1.")
    ] = None,
    batch: Annotated[
        str | None,
        Parameter(
            help="The function gets a list of at most N calls, which wait at most this time for others. A job has it "
            "from its request.",
            value="N[,DURATION]",
        ),
    ] = None,
    http: Annotated[
        str | None,
        Parameter(
            help="The program is an HTTP server on 127.0.0.1:{port}, and is ready once this path of it answers 200 to "
            "399. A job may have it from its request.",
            value="HEALTH",
        ),
    ] = None,
    path: Annotated[
        str | None,
        Parameter(help="With --http: where calls go that name no path. Default: /v1/chat/completions.", value="PATH"),
    ] = None,
    paths: Annotated[
        list[str] | None,
        Parameter(
            help="With --http: a path that callers reach, or with a final * the beginning of some; may be repeated. "
            "Default: /v1/*.",
            value="PATH",
        ),
    ] = None,
    warm: Annotated[
        str | None,
        Parameter(
            help="With --http: a request that has to be answered before calls are taken: a path, and behind a space "
            "the JSON of its body.",
            value="PATH[ JSON]",
        ),
    ] = None,
    idle: Annotated[
        str | None,
        Parameter(
            help="With --http: a server that fails its health and has calls is not ready once it has sent nothing of "
            "an answer for this long. Default: 10m.",
            value="DURATION",
        ),
    ] = None,
    metrics: Annotated[
        str | None,
        Parameter(
            help="With --http: whose metrics the server has at /metrics, vllm, sglang or llama.cpp. Calls that wait in "
            "it then ask for more members.",
            value="ENGINE",
        ),
    ] = None,
    queue: Annotated[
        str | None,
        Parameter(
            help="Calls that wait for a place, and how long those whose callers say no time. A job has it from its "
            "request. Default: twice as many as run, 30s.",
            value="N[,DURATION]",
        ),
    ] = None,
    grace: Annotated[
        str | None,
        Parameter(help="How long calls may take once this is to end. Default: as long as they need.", value="DURATION"),
    ] = None,
    tenant: Annotated[
        str | None, Parameter(help="The tenant. Default: $MOORAGE_TENANT, or the tenant called default.", value="NAME")
    ] = None,
    prefix: Annotated[str, Parameter(help="Beginning of every subject.", value="WORD")] = PREFIX_DEFAULT,
    options: LedgerOptions = OF_LEDGER,
) -> int:
    """Answer the calls of a service until SIGTERM: with a Python function, or with a program in any language.

    A call is a NATS request on moorage.call.TENANT.NAME. Run any number of members, as the replicas of a job with
    --service: each call runs at one of them, at most once, and full members hand waiting calls to idle ones. In such a
    job the command finds server, key and service by itself. The function gets the data of a call and returns the
    answer; with --batch, a list and a list. A class is made once, its load is called if it has one, and its call
    answers. A generator answers in parts.
    With --http the program is an HTTP server, as vLLM, and each call is a request of it: {port} in its words and
    variables is the port on which it is to listen.
    SIGTERM lets the calls that are here finish; other members take the next ones.
    """

    def act() -> int:
        from moorage.calls.serve import serve as serve_calls
        from moorage.system.logged import begin_log
        from moorage.system.loops import loop_factory

        made = serving_of(
            os.environ, function, command, name=name, concurrency=concurrency, batch=batch, queue=queue, grace=grace,
            tenant=tenant, prefix=prefix, nats=options.settled().nats, http=http, path=path, paths=paths, warm=warm,
            idle=idle, metrics=metrics,
        )  # fmt: skip
        begin_log("INFO", "text")

        def on_ready(messenger: Messenger) -> None:
            print_err(f"serves {messenger.name.subject}: {messenger.member.places} at a time, member {messenger.id}")

        async def before_kill(pid: int, within_s: float) -> None:
            await announce_end(pid, os.environ, within_s)

        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            try:
                return runner.run(serve_calls(made, on_ready=on_ready, before_kill=before_kill))
            except OSError as error:
                said = f"{made.argv[0]} cannot be started: {error.strerror or error}"
                raise rejected("failed-precondition", said, next="give a program of this machine after --") from None

    return guarded(options, act)


def serving_of(
    environment: Mapping[str, str],
    function: str,
    command: Sequence[str],
    *,
    name: str | None = None,
    concurrency: int | None = None,
    batch: str | None = None,
    queue: str | None = None,
    grace: str | None = None,
    tenant: str | None = None,
    prefix: str = PREFIX_DEFAULT,
    nats: str | None = None,
    http: str | None = None,
    path: str | None = None,
    paths: Sequence[str] | None = None,
    warm: str | None = None,
    idle: str | None = None,
    metrics: str | None = None,
) -> Serving:
    """Return what is to be served: what the options say, else what the variables of a job do. Raises `Rejected`,
    BadContext."""
    from moorage.bus.call_key import CREDS_VARIABLE, URL_VARIABLE, context_of_key
    from moorage.bus.target import find_context
    from moorage.calls.serve import Serving, function_argv
    from moorage.cli.framework.batches import batch as batch_said
    from moorage.cli.framework.batches import queue as queue_said
    from moorage.schemas.http_service import SLEEP_BY_VARIABLE, sleep_by_of
    from moorage.schemas.service import (
        BATCH_VARIABLE,
        CONCURRENCY_VARIABLE,
        GRACE_VARIABLE,
        INPUT_BYTES_DEFAULT,
        INPUT_VARIABLE,
        OUTPUT_BYTES_DEFAULT,
        OUTPUT_VARIABLE,
        QUEUE_VARIABLE,
        BatchSpec,
        QueueSpec,
        batch_of,
        queue_of,
    )

    if bool(function) == bool(command):
        raise rejected(
            "invalid-argument",
            "serve needs a function or a program, and not both",
            next="moorage serve embedder:embed --name embed",
        )
    served = _name_of(environment, name, tenant, prefix)
    inbox_prefix = served.subjects.member_inbox(served.tenant)
    if nats is None and (url := environment.get(URL_VARIABLE)):
        key = environment.get(CREDS_VARIABLE)
        context = context_of_key(Path(key) if key else None, url, inbox_prefix)
    else:
        context = find_context(nats)
    said = grace or environment.get(GRACE_VARIABLE)
    try:
        batches = batch_of(environment.get(BATCH_VARIABLE, "")) if batch is None else BatchSpec(**batch_said(batch))
        return Serving(
            context=context,
            name=served,
            argv=function_argv(function, batches) if function else list(command),
            batch=batches,
            concurrency=int(environment.get(CONCURRENCY_VARIABLE, "1")) if concurrency is None else concurrency,
            grace_s=None if said is None else seconds(said),
            input_bytes=int(environment.get(INPUT_VARIABLE, INPUT_BYTES_DEFAULT)),
            output_bytes=int(environment.get(OUTPUT_VARIABLE, OUTPUT_BYTES_DEFAULT)),
            queue=queue_of(environment.get(QUEUE_VARIABLE, "")) if queue is None else QueueSpec(**queue_said(queue)),
            sleep_by=sleep_by_of(environment.get(SLEEP_BY_VARIABLE, "")),
            http=None if function else _http_of(environment, http, path, paths, warm, idle, metrics),
        )
    except ValueError as error:
        raise rejected("invalid-argument", str(error), next="moorage serve --help") from None


def _http_of(
    environment: Mapping[str, str],
    http: str | None,
    path: str | None,
    paths: Sequence[str] | None,
    warm: str | None,
    idle: str | None,
    metrics: str | None,
) -> HttpSpec | None:
    """Return how the program speaks HTTP: what the options say, else the request. Raises ValueError."""
    from moorage.schemas.http_service import HTTP_VARIABLE, HttpRequest, HttpSpec, http_of

    of_request = http_of(environment.get(HTTP_VARIABLE, ""))
    if http is None and of_request is None:
        if path is not None or paths or any(each is not None for each in (warm, idle, metrics)):
            options = "--path, --paths, --warm, --idle and --metrics"
            raise ValueError(f"{options} are of an HTTP server: name its health with --http /health")
        return None
    spec = of_request or HttpSpec(http or "")
    said: dict[str, Any] = {}
    if http is not None:
        said["health"] = http
    if path is not None:
        said["path"] = path
    if paths:
        said["paths"] = tuple(paths)
    if warm is not None:
        at, _, body = warm.partition(" ")
        msgspec.json.decode(body or "null")
        said["warm"] = HttpRequest(at, body)
    if idle is not None:
        said["idle_s"] = seconds(idle)
    if metrics is not None:
        said["metrics"] = metrics
    return msgspec.structs.replace(spec, **said)


def _name_of(environment: Mapping[str, str], name: str | None, tenant: str | None, prefix: str) -> Name:
    from moorage.bus.call_key import SUBJECT_VARIABLE
    from moorage.calls.messenger import Name
    from moorage.client.tenant import find_tenant
    from moorage.schemas.names import SERVICE, TENANT, is_service, is_tenant
    from moorage.schemas.subjects import is_prefix

    if name is None and (subject := environment.get(SUBJECT_VARIABLE)) and not subject.endswith("*"):
        before, _, behind = subject.partition(".call.")
        of_tenant, _, service = behind.partition(".")
        return Name(before, of_tenant, service)
    if name is None or not is_service(name):
        raise rejected(
            "invalid-argument",
            "serve needs the name of the service" if name is None else f"{name[:80]!r} is not the name of a service",
            allowed=SERVICE.pattern,
            next="name it: --name embed; or run this in a job with --service embed",
        )
    found = find_tenant(tenant)
    if not is_tenant(found) or not is_prefix(prefix):
        wrong, allowed = (found, TENANT.pattern) if not is_tenant(found) else (prefix, "words with dots between them")
        raise rejected("invalid-argument", f"{wrong[:80]!r} is no tenant and no prefix", allowed=allowed)
    return Name(prefix, found, name)
