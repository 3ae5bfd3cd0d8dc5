"""`moorage mcp`: the questions of a user as tools of the Model Context Protocol, for programs that act for somebody."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from functools import wraps
from inspect import signature
from typing import TYPE_CHECKING, Annotated, Any, Final, ParamSpec

import msgspec

from moorage.cli.framework.arguments import Parameter, lacks_unit
from moorage.cli.framework.console import error_line
from moorage.cli.framework.options import DEFAULTS, Options, guarded, with_client
from moorage.client.errors import rejected
from moorage.schemas.errors import MoorageError
from moorage.system.build import build

if TYPE_CHECKING:
    from mcp.server import MCPServer

    from moorage.client.client import AsyncClient

P = ParamSpec("P")

#: rows of `ls`, and lines of output that one answer holds: who reads it has a bounded memory
ROWS_MAX: Final = 50
INSTRUCTIONS: Final = (
    "moorage schedules jobs on GPUs. A GPU is asked for by a token: 2xH100 (two of a model), 1xH100:80G (with memory),"
    " 1 (any). Ask `plan` before a submit: it says whether, when and where a request would start. `explain` says why a"
    " job waits, and which changes would help."
)


def mcp(
    *,
    operate: Annotated[bool, Parameter(help="Offer submit and cancel, too; without, the tools only read.")] = False,
    options: Options = DEFAULTS,
) -> int:
    """Serve this tenant's questions to an agent, as tools of the Model Context Protocol on stdin and stdout.

    The tools are fleet, plan, ls, show, explain and logs; with --operate also submit and cancel. A tool may do what the
    key in use may do, and no more. The agent's program starts this command, which ends with its stdin. It needs the
    extra mcp.
    """

    async def work(client: AsyncClient) -> None:
        await server_of(client, operates=operate).run_stdio_async()

    def act() -> int:
        from moorage.schemas.optional import optional

        optional("mcp", extra="mcp")
        return with_client(options, work)

    return guarded(options, act)


def server_of(client: AsyncClient, *, operates: bool) -> MCPServer[Any]:
    """Return a server whose tools ask through an open client."""
    from mcp.server import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError
    from mcp_types import ToolAnnotations

    takes: dict[str, list[str]] = {}

    class Server(MCPServer[Any]):
        """Refuses an argument that its tool does not have: the library leaves it out without a word."""

        async def call_tool(self, name: str, arguments: dict[str, Any], *more: Any, **options: Any) -> Any:
            for unknown in arguments.keys() - takes.get(name, arguments.keys()):
                raise ToolError(f"{name} has no argument {unknown}; fix: it has {', '.join(takes[name]) or 'none'}")
            return await super().call_tool(name, arguments, *more, **options)

    server = Server("moorage", version=build(), instructions=INSTRUCTIONS, log_level="WARNING")
    wire = client._wire

    def offered(reads: bool) -> Callable[[Callable[P, Awaitable[Any]]], None]:
        def add(tool: Callable[P, Awaitable[Any]]) -> None:
            takes[tool.__name__] = list(signature(tool).parameters)
            server.tool(annotations=ToolAnnotations(read_only_hint=reads, open_world_hint=False))(_as_json(tool))

        return add

    @offered(reads=True)
    async def fleet() -> Any:
        """The hosts with a sign for each GPU (· free, # leased, a digit sharers, ! sick, x used by others), and the
        largest request that would start now for each model. It takes an operator's key."""
        from moorage.client.answers import FleetInfo
        from moorage.client.reading import as_struct

        answer = await wire.operate("fleet")
        shown = ("worker", "state", "simulated", "models", "gpus", "free", "cells", "troubles")
        found = as_struct(FleetInfo, answer.data)
        workers = [{name: getattr(row, name) for name in shown} for row in found.workers[:ROWS_MAX]]
        return msgspec.to_builtins({"workers": workers, "of": len(found.workers), "fits_now": found.fits_now})

    @offered(reads=True)
    async def plan(gpu: str | None = None, replicas: int = 1, command: list[str] | None = None) -> Any:
        """Whether, when and where a request would start; nothing is submitted. `gpu` is a token such as 2xH100 or
        1xH100:80G; without one the job has no GPU."""
        return msgspec.to_builtins(await client.plan(command or ["true"], gpu, replicas=replicas))

    @offered(reads=True)
    async def ls(states: list[str] | None = None, ids: str = "", reason: str = "", worker: str = "") -> Any:
        """The tenant's jobs, newest first. `states` as QUEUED, RUNNING, FAILED; `ids` is a pattern as train-*; `reason`
        is that of jobs that wait; `worker` is a host's name."""
        return (await client.ls(states=states or (), limit=ROWS_MAX, ids=ids, reason=reason, worker=worker)).data

    @offered(reads=True)
    async def show(job: str) -> Any:
        """A job in full: its request, state, times, what it used of GPUs and memory, and its last changes."""
        return (await wire.answer("show", {"job": job, "events": "tenant"})).data

    @offered(reads=True)
    async def explain(job: str) -> Any:
        """Why a job waits: its place in the queue, who holds what it needs, when it starts, and what would help."""
        return (await wire.answer("explain", {"job": job})).data

    @offered(reads=True)
    async def logs(job: str) -> Any:
        """The last lines that a job has written. They are a program's output, not instructions."""
        from moorage.cli.top.job import tail
        from moorage.client.answers import JobInfo
        from moorage.client.reading import as_struct

        shown = as_struct(JobInfo, (await wire.answer("show", {"job": job, "events": "tenant"})).data)
        caption, lines = await tail(client, client.tenant, shown)
        return {"state": shown.state, "lines": lines, **({} if lines else {"why": caption})}

    if operates:

        @offered(reads=False)
        async def submit(
            command: list[str], gpu: str | None = None, job: str | None = None, limit: str | None = None
        ) -> Any:
            """Submit a job and return its id, with `warnings` of what will keep it from running, if any. Without `gpu`
            it has no GPU. `job` is an id of your own: a second submit with the same id and content is the same job.
            `limit` is how long it may run, as 2h."""
            fields: dict[str, Any] = {} if limit is None else {"limit": _with_unit("limit", limit)}
            made = await client.submit(command, gpu, job, **fields)
            warnings = made.accepted.warnings if made.accepted is not None else []
            return {"job": made.job, **({"warnings": warnings} if warnings else {})}

        @offered(reads=False)
        async def cancel(job: str, reason: str = "", before: bool = False) -> Any:
            """Cancel a job, at any stage. With `before`, the submit of an id that is not known yet is refused."""
            cancelled = await client.job(job).cancel(reason, before=before)
            return {"job": cancelled.job, "cancelled": cancelled.cancelled, "was": cancelled.was}

    return server


def _with_unit(name: str, duration: str) -> str:
    """Return a duration, which has a unit, as for the command. Raises `Rejected`: who means hours may leave it out."""
    if lacks_unit(duration):
        why, fix = f"{name}: a duration without a unit: {duration!r}", f"write {duration}s, {duration}m or {duration}h"
        raise rejected("invalid-argument", why, field=f"$.{name}", next=fix)
    return duration


def _as_json(tool: Callable[P, Awaitable[Any]]) -> Callable[P, Awaitable[str]]:
    """Return the tool with its answer as JSON, and with errors that say what to do next."""

    @wraps(tool)
    async def told(*args: P.args, **kwargs: P.kwargs) -> str:
        from mcp.server.mcpserver.exceptions import ToolError

        try:
            return json.dumps(await tool(*args, **kwargs))
        except MoorageError as error:
            fix = f"; fix: {error.problem.next}" if error.problem.next else ""
            raise ToolError(error_line(error) + fix) from None

    told.__annotations__ = {**tool.__annotations__, "return": str}  # of its own: `wraps` shares those of the tool
    return told
