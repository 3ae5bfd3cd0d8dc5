"""What a job reads and does not change (`run.data`): fetched once a host, and shared by the jobs of a tenant.

Each source is fetched as a setup is, as the job's user, into a folder that is read-only then and stays while it is
used. The folders count apart from those of setups, within `data_bytes`. A path on this host is not fetched: it must lie
below one of `data_dirs`, whatever links say.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
from pathlib import Path
from typing import Final

import msgspec

from moorage.schemas.held_data import DIGITS, HELD_MAX, held_key
from moorage.schemas.job import DATA_JOB, DATA_OBJECT, Run, Secret
from moorage.schemas.kept_source import read_source
from moorage.worker.attempt.attempt_folders import AttemptFolders
from moorage.worker.attempt.environment import LacksHere
from moorage.worker.driver import Assignment, Driver
from moorage.worker.drivers.data_dirs import Listing
from moorage.worker.drivers.kit import Kit
from moorage.worker.drivers.setups import Setups

#: below the folder of the attempts' folders
DATA: Final = ".data"
_SCRIPT: Final = Path(__file__).with_name("data_fetch.py").read_text()


class Data:
    """The data of one driver's attempts. `is_mounted`: they are containers, which have the folders by a mount."""

    def __init__(self, driver: Driver, kit: Kit, folders: AttemptFolders, *, is_mounted: bool = False) -> None:
        settings = kit.settings
        self._driver = driver
        self._policy = kit.policy
        self._is_mounted = is_mounted
        self._dirs = settings.data_dirs
        self._listing = Listing(driver.name, () if is_mounted else settings.data_dirs)
        self.setups = Setups(driver, kit, folders, is_mounted=is_mounted, below=DATA, bytes_max=settings.data_bytes)

    def placed(self, assignment: Assignment) -> Assignment:
        """Return the assignment with the path of each of its data on this host, which need not be there yet.

        Raises LacksHere for a path that this host has not below `data_dirs`.
        """
        run = assignment.run
        if not run.data:
            return assignment
        return msgspec.structs.replace(assignment, data={name: self._at(assignment, name) for name in run.data})

    async def ready(self, assignment: Assignment) -> Assignment:
        """Wait until all data of an assignment are here, and return it with the time that is left. Raises as
        `Setups.ready`."""
        for name, folder in assignment.data.items():
            if not folder.startswith(f"{self.setups.root}/"):
                continue
            run = _fetching(assignment.run, name, is_here=not self._is_mounted)
            request = msgspec.structs.replace(assignment.request, run=run)
            of = msgspec.structs.replace(assignment, request=request, setup=folder, data={})
            ready = await self.setups.ready(of)
            assignment = msgspec.structs.replace(assignment, ends_in_s=ready.ends_in_s)
        return assignment

    def held(self) -> list[str]:
        """Return what is here, as a load frame tells it, at most `HELD_MAX`: paths, then what was fetched."""
        folders = self.setups.complete()
        fetched = (folder.rpartition(".")[2][:DIGITS] for folder in folders)
        return list(dict.fromkeys((*self._listing.keys(), *fetched)))[:HELD_MAX]

    # -- inside

    def _at(self, assignment: Assignment, name: str) -> str:
        run, tenant = assignment.run, assignment.name[0]
        source = run.data[name]
        if source.startswith("/"):
            return self._path(source)
        user = self._policy.user_of(tenant) or run.user or ""
        secrets = sorted(f"{key}={each.secret}" for key, each in run.env.items() if isinstance(each, Secret))
        words = user, *([] if source.startswith((DATA_OBJECT, DATA_JOB)) else secrets)
        whose = hashlib.sha256("\0".join(words).encode(errors="surrogatepass")).hexdigest()[:DIGITS]
        return f"{self.setups.root}/{tenant}.{held_key(tenant, self._driver.name, source)}{whose}"

    def _path(self, source: str) -> str:
        if self._is_mounted:
            raise LacksHere("a container has no path of data_dirs: its operator mounts it (mounts)", found=source)
        real = os.path.realpath(source)
        if not any(Path(real).is_relative_to(os.path.realpath(each)) for each in self._dirs):
            raise LacksHere(f"data: not below data_dirs of this worker: {source}", found=source)
        if not os.path.exists(real):
            raise LacksHere(f"data: there is no {source} on this host", found=source)
        return real


def _fetching(run: Run, name: str, *, is_here: bool) -> Run:
    """Return what fetches one source: a setup whose first line says what it does."""
    source = run.data[name]
    told = f"# data {name} of {source}\n"
    if source.startswith(DATA_JOB):
        files, path = read_source(source)
        at = shlex.quote(path)
        absent = f"data {name}: job {files.job} has kept no {path.partition('/')[2]}"
        command = (
            f'{told}if [ -d {at} ]; then exec cp -a {at}/. "$MOORAGE_SETUP"/; fi\n'
            f"[ -e {at} ] || {{ echo {shlex.quote(absent)} >&2; exit 1; }}\n"
            f'exec cp -a {at} "$MOORAGE_SETUP"/'
        )
        return msgspec.structs.replace(run, setup=command, files=None, files_of=[files], data={}, cwd=None, items=None)
    if source.startswith(DATA_OBJECT):
        address = source.removeprefix(DATA_OBJECT)
        only = 'set -- * .[!.]*; [ "$#" = 2 ] && [ -d "$1" ] && [ "$2" = ".[!.]*" ] && cd "$1"\n'
        command = f'{told}{only}exec cp -a . "$MOORAGE_SETUP"/'
        return msgspec.structs.replace(run, setup=command, files=address, files_of=[], data={}, cwd=None, items=None)
    python = shlex.quote(sys.executable if is_here else "python3")
    own = f'python={python}; [ -x "$python" ] || python=python3\n'  # that of the worker, if the job's user reaches it
    command = f'{told}{own}exec "$python" -c {shlex.quote(_SCRIPT)} {name} {shlex.quote(source)} "$MOORAGE_SETUP"'
    return msgspec.structs.replace(run, setup=command, files=None, files_of=[], data={}, cwd=None, items=None)
