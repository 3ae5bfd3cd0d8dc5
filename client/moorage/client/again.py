"""Run a job again, or what of it did not succeed: ask the leader for the request, change it, submit it.

The leader names the replicas and an id; the submit is like any other, so it may be repeated.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

from moorage.client.asking import decode_accepted
from moorage.client.errors import Conflict, NotPermitted, read_answer, rejected
from moorage.client.replicas import Which, field_of
from moorage.client.request_builder import body_of, build_request, merged
from moorage.client.sending import BROUGHT, bucket_of, is_fresh, send
from moorage.schemas.frames import Accepted, AgainAnswer
from moorage.schemas.job import DATA_OBJECT
from moorage.schemas.names import is_files
from moorage.system.archive_parts import PARTS_HEADER, decode_parts, part_object

if TYPE_CHECKING:
    from moorage.client.connected import Connected
    from moorage.schemas.gpu import GpuSpec
    from moorage.schemas.job import Request

log = logging.getLogger("moorage.client")

#: callers that run the same job again at once, each with other changes, are given the same id: all but one ask anew
TRIES: Final = 10
_PIECE: Final = 128 * 1024
_Ran = TypeVar("_Ran")


async def ask_again(client: Connected, job: str, *, failed: bool, replica: Which = None) -> AgainAnswer:
    """Return the request with which a job is run again. Raises `Rejected` (request-gone, failed-precondition) and what
    `Connected.read` raises."""
    asked = {"job": job, "failed": failed, **field_of(replica)}
    return read_answer(await client.read("again", asked), AgainAnswer)


async def keep_files(client: Connected, request: Request) -> None:
    """Make sure that the files which a request brings will be there when it starts; old ones are stored anew.

    Raises `Rejected` (request-gone) if they are gone, and what `Connected.again` raises. For a user that may not read
    the tenant's bucket nothing is done: then the worker says it.
    """
    data = request.workload.data.values()
    addresses = [each.removeprefix(DATA_OBJECT) for each in data if each.startswith(DATA_OBJECT)]
    for address in filter(None, (request.workload.files, *addresses)):
        await _keep(client, address)


async def _keep(client: Connected, address: str, *, is_part: bool = False) -> None:
    bucket = bucket_of(client)
    try:
        found = await client.again(lambda: bucket.find(address))
    except NotPermitted:
        return
    if found is None:
        raise rejected(
            "request-gone",
            "the files that the job brought are no longer kept",
            field="$.run.files",
            found=address,
            next="bring them once more, with --with or files=, --data or data=",
        )
    has_parts = PARTS_HEADER in found.headers
    if has_parts:
        for part in decode_parts(b"".join([piece async for piece in bucket.get(found)])):
            await _keep(client, part_object(part.digest), is_part=True)
    if is_fresh(found, has_parts=has_parts or is_part):
        return
    with tempfile.TemporaryFile() as file:
        async for piece in bucket.get(found):
            file.write(piece)

        def pieces() -> Iterator[bytes]:
            file.seek(0)  # of each try
            return iter(lambda: file.read(_PIECE), b"")

        own = {name: found.headers[name] for name in ("Content-Type", BROUGHT, PARTS_HEADER) if found.headers.get(name)}
        headers = {name: values[0] for name, values in own.items()}
        await client.again(lambda: bucket.put(address, pieces(), headers, lambda _: None))


async def run_again(
    client: Connected,
    name: str,
    gpu: GpuSpec | str | int | None,
    job: str | None,
    fields: Mapping[str, Any],
    *,
    failed: bool,
    replica: Which,
) -> tuple[Accepted, Request]:
    """Submit a job's request again, with these changes, as `Job.again` says."""
    changes = dict(fields)
    files = changes.get("files")
    if files is not None and not (isinstance(files, str) and is_files(files)):
        sent = await send(client, files)
        for warning in sent.warnings:
            log.warning("%s", warning)
        changes["files"] = sent.address

    async def submit() -> tuple[Accepted, Request]:
        answer = await ask_again(client, name, failed=failed, replica=replica)
        body = dict(answer.request)
        request = build_request(body, gpu, job or answer.job, merged(body, changes))
        if "files" not in changes:
            await keep_files(client, request)
        return await client._ask("submit", body_of(request), decode_accepted), request

    return await anew(submit, named=job is not None)


async def anew(run: Callable[[], Awaitable[_Ran]], *, named: bool) -> _Ran:
    """Return what `run` returns, which asks for a request and submits it. Its id may be taken by then: it runs anew,
    unless the caller has named the id. Raises what `run` raises."""
    for _ in range(0 if named else TRIES - 1):
        with contextlib.suppress(Conflict):
            return await run()
    return await run()
