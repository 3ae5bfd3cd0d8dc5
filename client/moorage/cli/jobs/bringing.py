"""Send the files that a job brings: those of --with, and the file of its items."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from moorage.cli.framework.console import is_live, print_err
from moorage.cli.jobs.flag_values import pairs
from moorage.cli.jobs.from_shell import warn_of_sbatch
from moorage.client.errors import rejected
from moorage.client.sources import is_here, is_kept
from moorage.schemas.job import DATA_JOB, DATA_OBJECT
from moorage.schemas.units import many

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient
    from moorage.client.sweeps import Sweep
    from moorage.schemas.job import FilesOf, Request


async def with_files(
    client: AsyncClient,
    with_: Sequence[str] | None,
    request: Request,
    sweep: Sweep | None = None,
    *,
    data: Sequence[str] | None = None,
    of_schedule: bool = False,
) -> Request:
    """Send the files, and those of `data`, and return the request that brings them. Say what may be meant otherwise.

    Those `of_schedule` stay until the schedule is removed. Raises `Rejected`."""
    warn_of_sbatch(request)
    sent = {
        name: _object(await send_files(client, [os.path.expanduser(path)], request.job or "", of_schedule=of_schedule))
        for name, path in _data_here(data)
    }
    from moorage.client.files_of import divided, files_of

    kept = await kept_data(client, request, data)
    request = with_data(request, sent | kept)
    plain, jobs = divided(with_ or ())
    if jobs and of_schedule:
        await client.schedules.send_files(list(with_ or ()))  # which refuses them
    if jobs:
        request = _with_files_of(request, await files_of(client._wire, jobs))
    with _paths(list(map(str, plain)), sweep) as paths:
        if word := not_brought(paths, request):
            folder, name = os.path.split(os.path.normpath(word))
            fix = f"add --with {folder}, and write {name} in the command" if folder else f"add --with {name}"
            here = f"{word} is a file on this machine, but not in the folder in which the job starts"
            if word == request.workload.argv[0] and "/" not in word:
                here, fix = (
                    f"{word} is a file on this machine, and is looked for in the worker's PATH",
                    (f"add --with {name}, and write ./{name} in the command"),
                )
            print_err(f"warning[files]: {here}: {fix}")
        elif file := not_startable(paths, request):
            why = f"{file} is no program, as its x bit is not set, so each attempt fails with code 126"
            print_err(f"warning[files]: {why}: chmod +x {file}, or name what reads it first, as in sh {file}")
        if not paths:
            return request
        address = await send_files(client, paths, request.job or "", of_schedule=of_schedule)
        return _bringing(request, address, sweep)


def _data_here(data: Sequence[str] | None) -> list[tuple[str, str]]:
    return [(name, path) for name, path in pairs("data", data or (), "SOURCE") if is_here(path)]


def _data_kept(data: Sequence[str] | None) -> list[tuple[str, str]]:
    return [(name, source) for name, source in pairs("data", data or (), "SOURCE") if is_kept(source)]


def _object(address: str) -> str:
    return f"{DATA_OBJECT}{address}"


def packed_data(data: Sequence[str] | None) -> dict[str, str]:
    """Return the sources that files of --data here will have once they are sent, by name. Raises `Rejected`."""
    return {name: _object(packed_address([os.path.expanduser(at)])) for name, at in _data_here(data)}


async def kept_data(client: AsyncClient, request: Request, data: Sequence[str] | None) -> dict[str, str]:
    """Return the sources of --data that jobs have kept as a request has them, by name. Raises `Rejected`."""
    from moorage.client.files_of import source_of

    after = [each if isinstance(each, str) else each.job for each in request.after]
    return {name: await source_of(client._wire, path, after) for name, path in _data_kept(data)}


def with_data(request: Request, sources: Mapping[str, str]) -> Request:
    """Return a request that reads these sources, by name, beside or instead of its own."""
    from moorage.client.request_builder import build_request

    return build_request(request, fields={"data": {**request.workload.data, **sources}}) if sources else request


def with_packed(
    with_: Sequence[str] | None,
    request: Request,
    sweep: Sweep | None = None,
    *,
    data: Sequence[str] | None = None,
) -> Request:
    """Return the same request as `with_files`, and send nothing. Raises `Rejected`."""
    refuse_jobs([source.removeprefix(DATA_JOB) for _, source in _data_kept(data)])
    request = with_data(request, packed_data(data))
    from moorage.client.files_of import divided

    plain, jobs = divided(with_ or ())
    refuse_jobs(jobs)
    with _paths(list(map(str, plain)), sweep) as paths:
        return _bringing(request, packed_address(paths), sweep) if paths else request


def refuse_jobs(jobs: Sequence[str]) -> None:
    """Raise `Rejected` if a request brings files of jobs where nobody is asked: which replicas these have, the
    scheduler knows."""
    if jobs:
        raise rejected(
            "invalid-argument", f"which files job {jobs[0]} keeps, the scheduler knows, and --dry-run asks nobody",
            found=f"job:{jobs[0]}", next="leave out --dry-run, or this --with",
        )  # fmt: skip


def packed_address(paths: Sequence[str]) -> str:
    """Return the address that files will have once they are sent. Raises `Rejected`."""
    from moorage.client.packing import pack

    packed = pack(paths)
    packed.file.close()
    return packed.address


@contextlib.contextmanager
def _paths(with_: Sequence[str] | None, sweep: Sweep | None) -> Iterator[list[str]]:
    with contextlib.ExitStack() as until_sent:
        own = [] if sweep is None else until_sent.enter_context(sweep.to_send())
        yield [*(with_ or ()), *own]


def _with_files_of(request: Request, jobs: Sequence[FilesOf]) -> Request:
    from moorage.client.request_builder import build_request

    return build_request(request, fields={"files_of": jobs})


def _bringing(request: Request, address: str, sweep: Sweep | None) -> Request:
    from moorage.client.request_builder import build_request

    items = {} if sweep is None or sweep.file is None else {"items": sweep.file}
    return build_request(request, fields={"files": address, **items})


async def send_files(client: AsyncClient, paths: Sequence[str], job: str, *, of_schedule: bool = False) -> str:
    """Send files, with their progress on a terminal, and return their address. Raises `Rejected`."""
    from moorage.cli.jobs.progress import Progress
    from moorage.client.sending import send

    progress = Progress(job, quiet=not is_live(sys.stderr))
    sent = await send(
        client._wire,
        paths,
        lambda packed, size: progress.show_often(
            f"sending {many(packed.files, 'file')}, {packed.size >> 20} MiB: {size >> 20} MiB compressed so far",
            time.monotonic(),
        ),
        of_schedule=of_schedule,
    )
    progress.erase()
    for warning in sent.warnings:
        print_err(f"warning[files]: {warning}")
    return sent.address


def not_brought(paths: Sequence[str], request: Request) -> str:
    """Return the word of a request's command that is a file here and that --with `paths` do not bring to the folder in
    which the job starts; "" for none."""
    run = request.workload
    if not _starts_among_files(request):
        return ""
    for at, word in enumerate(run.argv):
        name = os.path.normpath(os.path.join(run.cwd or "", word))
        # the first word alone is looked for in the worker's PATH; a program that is here, too, is meant so
        is_path = "/" in word or at > 0 or shutil.which(word) is None
        if not is_path or os.path.isabs(word) or name.startswith("..") or not os.path.isfile(word):
            continue
        folders = [path for path in paths if os.path.isdir(path)]
        names = set() if at == 0 and "/" not in word else {os.path.basename(path) for path in paths}
        if name not in names and not any(os.path.exists(os.path.join(folder, name)) for folder in folders):
            return word
    return ""


def not_startable(paths: Sequence[str], request: Request) -> str:
    """Return the file that a request's command starts, that --with `paths` bring, and that is not executable; ""
    for none."""
    word = request.workload.argv[0] if request.workload.argv else ""
    if not _starts_among_files(request) or "/" not in word or os.path.isabs(word):
        return ""
    name = os.path.normpath(os.path.join(request.workload.cwd or "", word))
    for path in paths:
        file = os.path.join(path, name) if os.path.isdir(path) else path
        if (os.path.isdir(path) or os.path.basename(path) == name) and os.path.isfile(file):
            return "" if os.stat(file).st_mode & stat.S_IXUSR else os.path.normpath(file)
    return ""


def _starts_among_files(request: Request) -> bool:
    """Return whether what the default driver starts, or an image runs, begins in a folder with files sent now."""
    from moorage.schemas.capabilities import DRIVER_DEFAULT

    run = request.workload
    return bool((run.driver == DRIVER_DEFAULT or run.image) and not run.files and not os.path.isabs(run.cwd or ""))
