"""All settings of a scheduler: its numbers, and how it runs as a process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from moorage.bus.errors import BadContext
from moorage.scheduler.core.config import CLUSTER_DEFAULTS, RANKER_DEFAULT, Config
from moorage.scheduler.core.rank.ranker import Pack
from moorage.scheduler.core.rank.rankers import PLACES, ranker_class, why_missing
from moorage.schemas.own_class import is_own
from moorage.schemas.settings import NO_FILE, Found, SettingsFile, made, setting, settle
from moorage.schemas.subjects import PREFIX_DEFAULT, is_prefix

SECTION: Final = "scheduler"
LEDGER_URL_VARIABLE: Final = "MOORAGE_LEDGER_URL"
RECORD_VARIABLE: Final = "MOORAGE_RECORD"
LEDGER_URL_FILE_VARIABLE: Final = "MOORAGE_LEDGER_URL_FILE"
NATS_VARIABLE: Final = "MOORAGE_SCHEDULER_NATS"
RECORDS_BETWEEN: Final = 50_000
NAME_CHARS_MAX: Final = 128


class SchedulerSettings(Config, frozen=True, kw_only=True):
    """The settings of one scheduler process.

    Raises ValueError for an invalid name, prefix or ranker, and for times that contradict each other. Ranges and
    choices of single values are checked where settings are read (`scheduler_settings`).
    """

    nats: Annotated[
        str | None,
        setting(
            "URL or nats context of the users' account; else the one that the nats command would use.", of_site="always"
        ),
    ] = None
    ledger_url_file: Annotated[
        Path | None,
        setting("File with the URL of the ledger's account, password in it.", env=LEDGER_URL_FILE_VARIABLE),
    ] = None
    replicas: Annotated[
        Literal[1, 3, 5],
        setting(
            "Copies of the ledger, each on a server of its own; on several servers the number has to be said to make"
            " one. Above 1, other settings have other defaults.",
            of_site="always",
        ),
    ] = 1
    snapshot_records: Annotated[
        int,
        setting(
            "Ledger records between two snapshots; two snapshots are kept, and older records deleted.", ge=100, le=10**9
        ),
    ] = RECORDS_BETWEEN
    prefix: Annotated[str, setting("Beginning of every subject, one word or several, as gpu.eu.", of_site="always")] = (
        PREFIX_DEFAULT
    )
    name: Annotated[str, setting("Shown as the leader's name; host and pid by default.")] = ""
    record: Annotated[
        Path | None,
        setting("Record in this file what decisions are based on, for moorage replay.", env=RECORD_VARIABLE),
    ] = None
    log_level: Annotated[
        Literal["DEBUG", "INFO", "WARNING", "ERROR"], setting("Least severity that is logged, to stderr.")
    ] = "INFO"
    log_format: Annotated[
        Literal["text", "json"], setting("How an entry of the log is written; json: one object a line.")
    ] = "text"

    def __post_init__(self) -> None:
        Config.__post_init__(self)
        try:
            ranker_class(self.ranker)
        except ValueError as error:
            named = self.ranker in PLACES or is_own(self.ranker)
            raise ValueError(f"ranker: {error}" if named else str(error)) from None
        if len(self.name) > NAME_CHARS_MAX or not self.name.isprintable():
            raise ValueError(f"name must be at most {NAME_CHARS_MAX} printable characters, found {self.name[:80]!r}")
        if not is_prefix(self.prefix):
            raise ValueError(
                f"prefix must be words of letters, digits, - and _, with dots between them, found {self.prefix!r}"
            )


def ledger_url(file: Path | None = None) -> str | None:
    """Return the URL of the ledger's account, or None if none is set.

    It is in `file`, else in the file named by MOORAGE_LEDGER_URL_FILE, else in MOORAGE_LEDGER_URL. Raises BadContext
    for a file that cannot be read, and for an empty one: it must not mean the users' account.
    """
    named = file or os.environ.get(LEDGER_URL_FILE_VARIABLE)
    if not named:
        return os.environ.get(LEDGER_URL_VARIABLE) or None
    try:
        if found := Path(named).read_text(encoding="utf-8-sig").strip():
            return found
        why = "is empty"
    except UnicodeDecodeError:
        why = "is not text"
    except OSError as error:
        why = f"cannot be read: {error.strerror or error}"
    raise BadContext(
        f"the file with the ledger's URL {why}",
        file=Path(named),
        next_step="write nats://USER:PASSWORD@HOST:4222 or the name of a nats context into that file, or name another"
        f" file with --ledger-url-file or {LEDGER_URL_FILE_VARIABLE}",
    )


def scheduler_settings(
    flags: Mapping[str, Any],
    env: Mapping[str, str] | None = None,
    file: SettingsFile = NO_FILE,
    flags_named: Mapping[str, str] | None = None,
) -> tuple[SchedulerSettings, dict[str, Found]]:
    """Return the settings, and the source of each; `flags_named` as in `settle`. Raises Refused with bad-settings.

    `pack` ranks where the default ranker is not installed.
    """
    settled = partial(settle, SECTION, SchedulerSettings, flags=flags, env=env, file=file, flags_named=flags_named)
    ranking = {"ranker": Pack.name} if why_missing(RANKER_DEFAULT) else {}
    found = settled(defaults=ranking)
    if found["replicas"].value > 1:
        found = settled(defaults=CLUSTER_DEFAULTS | ranking)
    file_of_url = found["ledger_url_file"]
    if file_of_url.source == str(file.path) and (os.environ if env is None else env).get(LEDGER_URL_VARIABLE):
        found["ledger_url_file"] = file_of_url._replace(value=None)  # the environment takes precedence over the file
    return made(SchedulerSettings, found), found
