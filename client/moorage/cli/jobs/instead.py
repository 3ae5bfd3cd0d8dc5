"""`moorage submit --instead-of JOB`: submits the request of a waiting job with changes, and cancels that job.

Of a service that runs, the new job replaces the old one: the leader ends that as far as the new one is ready.

Fixes of `explain` name this command. The new job has an id of its own. The leader is asked first whether it accepts the
changed request, so that the old job is not cancelled for a request that is refused.
"""

from __future__ import annotations

import shlex
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from moorage.cli.framework.console import word_here
from moorage.cli.jobs.bringing import with_files
from moorage.cli.jobs.job_flags import NO_FLAGS, JobFlags, fields_of, scheduling_of
from moorage.cli.jobs.selectors import one_id
from moorage.client.errors import Rejected, rejected
from moorage.client.gpus import gpu_spec
from moorage.client.request_builder import build_request, merged
from moorage.schemas.gpu import GpuSpec, with_token
from moorage.schemas.job import QUEUED, TERMINAL
from moorage.schemas.plan import Plan

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient
    from moorage.schemas.answers.jobs import Fix
    from moorage.schemas.job import Request

#: asks the leader; the id of the job to cancel ("" if the new job replaces it by itself), and what is to be handed in
Change = Callable[["AsyncClient"], Awaitable[tuple[str, "Request"]]]


def instead(job: str, flags: JobFlags, command: Sequence[str], but: str | None) -> Change:
    """Return the step that changes the request of a waiting job and asks the leader about it; of a service that runs,
    the new request says that it replaces it.

    Raises `Rejected` if the flags change nothing, or if one of them is only for new jobs.
    """
    if but is None and not command and flags == NO_FLAGS:
        raise rejected(
            "invalid-argument", "nothing to change", found=job, next=f"for example: --instead-of {job} --gpu 1xL40S"
        )
    if flags.gpu_device or flags.or_gpu or flags.each or flags.each_line or "," in (flags.driver or ""):
        raise rejected(
            "invalid-argument",
            "--gpu-device, --each, --each-line, --or-gpu and several drivers are for new jobs",
            found=job,
            next='--but \'{"driver_config": {"process": {"gpu_device_ids": ["0"]}}}\'',
        )
    fields, together, fresh = fields_of(flags), scheduling_of(flags), fields_in(but)

    async def change(client: AsyncClient) -> tuple[str, Request]:
        name = await one_id(client, job, "submit --instead-of", acts=True)
        shown = await client._wire.show(name)
        states = {row.state for row in shown.replica_states} or {shown.state}
        replaces = states != {QUEUED} and shown.asked.get("service") is not None
        if replaces and shown.state not in TERMINAL:
            own = {**fresh, "instead_of": name}
            request = changed(shown.asked, flags, command, dict(fields), together, own)
            return "", await with_files(
                client, flags.with_, request, data=flags.data
            ) if flags.with_ or flags.data else request
        if states != {QUEUED}:
            raise rejected(
                "failed-precondition",
                f"job {name} is {shown.state}: only a waiting job can be changed, or a service that runs",
                found=name,
                next=f"moorage again {word_here(name)}, with the same options"
                if shown.state in TERMINAL
                else "submit another job, or cancel this job first",
            )
        request = changed(shown.asked, flags, command, dict(fields), together, fresh)
        if flags.with_ or flags.data:
            request = await with_files(client, flags.with_, request, data=flags.data)
        planned = await client.plan(request)
        if planned.problem is not None:  # it may be the limit of jobs, in which the old one still counts
            body = msgspec.json.decode(msgspec.json.encode(request))
            data = await client._wire.read("plan", {"request": body, "cancel": name})
            planned = msgspec.convert(data, Plan)
        if planned.problem is not None:
            raise Rejected(planned.problem)
        return name, request

    return change


def changed(
    asked: dict[str, Any],
    flags: JobFlags,
    command: Sequence[str],
    fields: dict[str, Any],
    together: dict[str, Any],
    fresh: dict[str, Any],
) -> Request:
    """Return a job's request with the given flags, command and fields in place of its own. Raises `Rejected`."""
    body = {name: value for name, value in asked.items() if name not in ("job", "if_seq", "instead_of")}
    body["run"] = dict(body.get("run") or {})
    if command:
        body["run"]["argv"] = list(command)
    if "indices" in fields:  # it says how many
        body.pop("replicas", None)
    fields = merged(body, fields)
    if "requires" in fields:
        fields["requires"] = {label: values for label, values in fields["requires"].items() if values != [""]}
    wanted = (body.get("resource_requirements") or {}).get("gpu") or {}
    if flags.gpu is not None and (wanted.get("device_ids") or wanted.get("device_id")):
        raise rejected(
            "invalid-argument",
            "the job asks for exact devices, so --gpu cannot replace its GPUs",
            found=flags.gpu,
            next="--but '{\"resource_requirements\": …}'",
        )
    if flags.gpu is not None:
        replicas, said = gpu_spec(flags.gpu)
        before = msgspec.convert(body["gpu"], GpuSpec) if body.get("gpu") is not None else None
        spec = said if before is None else with_token(before, flags.gpu)
        if spec is None:
            raise rejected(
                "invalid-argument",
                "the job asks for a device by its index, so --gpu cannot replace its GPUs",
                found=flags.gpu,
                next="--but '{\"gpu\": …}'",
            )
        body["gpu"] = msgspec.to_builtins(spec)
        body.pop("resource_requirements", None)
        if replicas != 1:
            body["replicas"] = replicas
    if together:
        body["gpu"] = {**(body.get("gpu") or {}), **together}
    body |= fresh
    return build_request({name: value for name, value in body.items() if value is not None}, None, flags.job, fields)


def fields_in(but: str | None) -> dict[str, Any]:
    """Return the fields of a request in the JSON of --but, none for None. Raises `Rejected`."""
    if but is None:
        return {}
    try:
        found = msgspec.json.decode(but)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise rejected("invalid-argument", f"--but is not JSON: {error}", next="--but '{\"requires\": {}}'") from None
    if not isinstance(found, dict) or {"job", "if_seq"} & found.keys():
        raise rejected(
            "invalid-argument",
            "--but must be an object with fields of the request, without job and if_seq",
            next="--but '{\"requires\": {}}'",
        )
    return found


def as_words(fix: Fix) -> str:
    """Return the flags that stand for a change which `explain` proposes (see `relax` of the scheduler's core)."""
    words, rest = _words_of(fix)
    return shlex.join([*words, *(["--but", msgspec.json.encode(rest).decode()] if rest else [])])


def as_words_of_new(fix: Fix, *, apart: bool) -> str:
    """Return what to change of a job that is not submitted yet: flags, and fields of the request that have none.

    Of one whose replicas are `apart`, --hosts says how many there are.
    """
    words, rest = _words_of(fix)
    flags = shlex.join(["--hosts" if apart and word == "--replicas" else word for word in words])
    if apart and fix.gang:
        flags += ", without --hosts"
    return " and ".join(filter(None, (flags, f"{msgspec.json.encode(rest).decode()} in its request" if rest else "")))


def _words_of(fix: Fix) -> tuple[list[str], dict[str, Any]]:
    """Return the flags of a change, and the fields that no flag sets."""
    words: list[str] = []
    rest: dict[str, Any] = {}
    for field, value in fix.request.items():
        if field == "run" and value and value.get("timeout_s") is not None:
            words += ["--time-limit", f"{value['timeout_s']:g}s"]
        elif field == "replicas" and fix.gang:
            continue  # the token says it
        elif field == "replicas":
            words += ["--replicas", str(value if value is not None else 1)]
        elif field == "resources" and value:
            words += ["--cpu", f"{value['cpu_milli'] / 1000:g}"] if value.get("cpu_milli") else []
            words += ["--memory", f"{value['memory_mib']}Mi"] if value.get("memory_mib") else []
        elif field == "gpu" and fix.gpu:
            words += ["--gpu", fix.gpu, *["--gang"] * fix.gang]
        else:
            rest[field] = value
    return words, rest
