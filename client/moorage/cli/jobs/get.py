"""`moorage get`: the files that a job kept."""

from __future__ import annotations

import csv
import errno
import io
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import emit, print_err, print_out
from moorage.cli.framework.files import cannot_write
from moorage.cli.framework.options import DEFAULTS, Options, with_client
from moorage.cli.framework.render import table as table_of_rows
from moorage.cli.jobs.selectors import HELP_ONE, LISTED, SomeReplicas, one_id, replica_in
from moorage.client.errors import rejected
from moorage.schemas.units import many

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient
    from moorage.schemas.ranges import Ranges


def get(
    job: Annotated[str, Parameter(help=HELP_ONE, lists=LISTED)],
    path: Annotated[
        str, Parameter(help="A file or folder of the job's folder. By default everything that the job kept.")
    ] = "",
    /,
    *,
    out: Annotated[
        Path | None,
        Parameter(help="The folder to create and write to. By default it is in this folder, and named like the job."),
    ] = None,
    replica: SomeReplicas = None,
    merge: Annotated[
        bool,
        Parameter(help="Into the folder of an earlier run of the same replicas: those of this job are replaced there."),
    ] = False,
    rescue: Annotated[
        bool,
        Parameter(help="What the job's last attempts left in their folders, kept or not, soon after their end."),
    ] = False,
    table: Annotated[
        str | None,
        Parameter(
            help="Write a row for each replica in place of files: its item, state, code and what it kept as JSON, over "
            "its reruns. A .csv, a .jsonl, or - for stdout. PATH names the JSON file with the values.",
            value="FILE",
        ),
    ] = None,
    list_: Annotated[
        bool, Parameter(help="Print the size and the path of each file, and write none.", names=("--list",))
    ] = False,
    options: Options = DEFAULTS,
) -> int:
    """Fetch the files that a job kept, and print where they are.

    A job keeps what its request lists with --keep. The files are kept for some days once the job has SUCCEEDED, and
    usually also if it failed or was cancelled. If the job has several replicas, each has a folder, named by its number.

    Without --keep, --rescue has all that the job left: its workers have that for ten minutes after its end
    (folder_keep).
    """

    async def work(client: AsyncClient) -> int | None:
        [word], numbers = replica_in([job], replica)
        if list_ and table is not None:
            raise rejected("invalid-argument", "--table writes rows, and --list none", next="leave out one of them")
        if table is not None:
            _check_table(table)
        name = await one_id(client, word, "get")
        if table is not None:
            if out is not None or merge or rescue or numbers is not None:
                next_step = f"moorage get {name} --table {table}"
                raise rejected("invalid-argument", "--table writes no files, and has all replicas", next=next_step)
            await _write_table(client, name, path, table, options)
            return None
        from moorage.client.kept_files import fetch
        from moorage.client.replicas import replicas_of

        if list_:
            if out is not None or merge:
                next_step = "leave out --out and --merge, or --list"
                raise rejected("invalid-argument", "--list writes no files", next=next_step)
            await _list(client, name, path, replicas_of(numbers), options, rescue=rescue)
            return None
        into = Path(name) if out is None else out
        try:
            only = replicas_of(numbers)
            found, left_out = await fetch(client._wire, name, into, only, path, merge=merge, rescue=rescue)
        except OSError as error:
            raise cannot_write(into, error.strerror, _fix_of(error)) from None
        for line in left_out:
            print_err(f"warning[files]: {line}")
        if options.json:
            emit({"kind": "files", "job": name, "files": [str(each) for each in found]})
        else:
            for each in found:
                print_out(str(each))
            print_err(f"{many(len(found), 'file')} of job {name}")
        return None

    return with_client(options, work)


async def _list(
    client: AsyncClient, job: str, path: str, only: Ranges | None, options: Options, *, rescue: bool
) -> None:
    """Print what a job kept. The archives have no list of their own, so all of them is read."""
    from moorage.client.kept_files import fetch

    with tempfile.TemporaryDirectory() as folder:
        found, left_out = await fetch(client._wire, job, Path(folder, job), only, path, rescue=rescue)
        base = Path(folder, job)
        rows = [(0, f"{each.relative_to(base)}/") if _is_folder(each) else _sized(each, base) for each in found]
    for line in left_out:
        print_err(f"warning[files]: {line}")
    if options.json:
        emit({"kind": "kept", "job": job, "files": [{"path": name, "bytes": size} for size, name in rows]})
        return
    print_out(table_of_rows(["BYTES", "PATH"], rows, numbers=("BYTES",)))
    print_err(f"{many(len(rows), 'file')} of job {job}, {many(sum(size for size, _ in rows), 'byte')}")


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _sized(path: Path, base: Path) -> tuple[int, str]:
    return path.lstat().st_size, str(path.relative_to(base))


def _check_table(file: str) -> None:
    """Raise Rejected for a file whose name says another format than what is written, before anything is fetched."""
    if file != "-" and not file.startswith("/dev/") and not file.endswith((".csv", ".jsonl")):
        raise rejected(
            "invalid-argument", "--table writes CSV or lines of JSON", found=file, allowed="FILE.csv, FILE.jsonl, -",
            next=f"--table {Path(file).stem or 'results'}.csv; pandas.DataFrame(m.table(JOB)) has other formats",
        )  # fmt: skip


async def _write_table(client: AsyncClient, job: str, path: str, file: str, options: Options) -> None:
    from moorage.client.tabled import said
    from moorage.client.tabled import table as table_of

    rows, notes = await table_of(client._wire, job, path)
    for note in said(notes):
        print_err(f"warning[table]: {note}")
    text = io.StringIO(newline="")
    if file.endswith(".jsonl") or options.json:
        text.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    else:
        writer = csv.DictWriter(text, list(rows[0]) if rows else ["replica"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    if file == "-":
        print_out(text.getvalue().removesuffix("\n"))
        return
    try:
        Path(file).write_text(text.getvalue())
    except OSError as error:
        raise cannot_write(Path(file), error.strerror, "name another file with --table") from None
    print_err(f"{file}: {many(len(rows), 'row')} of job {job}")


def _fix_of(error: OSError) -> str:
    fix = "name another folder with --out"
    if error.errno != errno.ENOSPC:
        return fix
    from tempfile import gettempdir

    # files are inflated there before they are written, and the error does not say which of the two is full
    return f"{fix}; the temporary folder ({gettempdir()}; TMPDIR names another) needs room for the files, too"
