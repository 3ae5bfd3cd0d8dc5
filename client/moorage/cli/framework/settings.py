"""The settings file as the command sees it: all of its sections, flags made from them, and the values in use."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_origin

import msgspec

from moorage.cli.framework.arguments import GROUP_TITLE, Parameter
from moorage.schemas.settings import (
    DEFAULT,
    NO_FILE,
    Found,
    Setting,
    SettingsFile,
    declared,
    example,
    read_file,
    setting,
    settle,
    shown,
)
from moorage.schemas.settings_file import FILE_VARIABLE, file_here, find_file

CLIENT: Final = "client"
UP: Final = "up"
FILE_HELP: Final = "Settings file; else $MOORAGE_SETTINGS, or moorage.toml in ~/.config/moorage or /etc/moorage."
UP_FILE_HELP: Final = "Settings file; else $MOORAGE_SETTINGS, or moorage.toml in this folder or ~/.config/moorage."


class ClientSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The defaults of the command. Services that use the SDK do not read them."""

    nats: Annotated[
        str | None, setting("URL or nats context of the server; NATS_CONTEXT and NATS_URL override it.")
    ] = None
    tenant: Annotated[str | None, setting("The tenant; `default` by default.", env="MOORAGE_TENANT")] = None
    timeout: Annotated[
        float,
        setting(
            "How long to wait for an answer; if unset, `run`, `submit` and `cancel` wait longer.",
            unit="s", ge=0, le=366 * 86400,
        ),
    ] = 10.0  # fmt: skip
    color: Annotated[Literal["auto", "always", "never"], setting("Colour on a terminal.")] = "auto"


class UpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of `moorage up`. The scheduler and the worker that it starts read their own sections."""

    simulate: Annotated[
        str | None, setting("Simulated hosts instead of this machine: 4x8xH100, 2x4xL40S+8xH100, or a file.")
    ] = None
    play_freezing: Annotated[
        bool, setting("With simulate: services that sleep take turns on a simulated GPU, as where a driver freezes.")
    ] = False
    data: Annotated[Path | None, setting("Folder of its state; ./.moorage by default.", env="MOORAGE_HOME")] = None
    port: (
        Annotated[int, setting("Port of the server on 127.0.0.1; 4222 or a free one by default.", ge=0, le=65535)]
        | None
    ) = None
    open: Annotated[
        bool, setting("Ask nobody on this machine for a password: everyone on it may run jobs as this user.")
    ] = False


#: keys whose flags are the common options of every command
COMMON: Final = frozenset({"nats"})


def sections() -> dict[str, type[msgspec.Struct]]:
    """Return every section of the file with the struct that declares its keys."""
    from moorage.scheduler.settings import SchedulerSettings
    from moorage.worker.settings import WorkerSettings

    return {"scheduler": SchedulerSettings, "worker": WorkerSettings, UP: UpSettings, CLIENT: ClientSettings}


def the_file(given: str | Path | None = None, env: Mapping[str, str] | None = None) -> SettingsFile:
    """Return the settings file in use, with every section checked; `NO_FILE` if there is none. Raises Refused with
    bad-settings."""
    path = find_file(given, env)
    if path is None:
        return NO_FILE
    file = read_file(path)
    for name, struct in (known := sections()).items():
        if name in file.tables:
            settle(name, struct, env={}, file=file, others=known)
    return file


def unread_here(read: SettingsFile) -> str:
    """Return that a `moorage.toml` in the current folder was not read, and how to read it; "" if there is none."""
    here = file_here()
    if here is None or (read is not NO_FILE and here.samefile(read.path)):
        return ""
    return f"{here} is not read; to read this file: --settings {here.name}, or {FILE_VARIABLE}={here}"


def client_settings(env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return what the section [client] and its variables set. Raises Refused with bad-settings."""
    env = os.environ if env is None else env
    path = find_file(env=env)
    found = settle(CLIENT, ClientSettings, env=env, file=read_file(path))
    return {
        key: one.value
        for key, one in found.items()
        if one.source != DEFAULT
        and not (key == "nats" and one.source == str(path) and (env.get("NATS_CONTEXT") or env.get("NATS_URL")))
    }


def flags_of(section: str, struct: type[msgspec.Struct]) -> type:
    """Return a dataclass with an option for each key of a section, for `arguments`. An option that is not given is
    None.

    Values stay text here; `settle` checks them, as it does those of the environment.
    """
    fields: list[tuple[str, Any, Any]] = []
    for key, one in declared(section, struct).items():
        if key in COMMON:
            continue
        kind = list[str] | None if get_origin(one.type) in (tuple, list, dict) else str | None
        default = f" Default: {shown(one, one.default)}." if one.default not in (None, "", (), {}) else ""
        alone = "true" if one.type is bool else None
        note = Parameter(help=one.help + default, names=(one.flag,), value=_value_word(one), alone=alone)
        fields.append((key, Annotated[kind, note], dataclasses.field(default=None)))
    here = {"__module__": __name__, GROUP_TITLE: "Settings"}
    return dataclasses.make_dataclass(f"{section.capitalize()}Flags", fields, frozen=True, namespace=here)


def _value_word(one: Setting) -> str:
    """Return what stands for a setting's value in the help."""
    if one.unit:
        return "DURATION" if one.unit == "s" else "SIZE"
    if get_origin(one.type) is Literal:
        return "|".join(map(str, get_args(one.type)))
    return {bool: "true|false", int: "NUMBER", Path: "PATH", dict: "NAME=VALUE"}.get(
        get_origin(one.type) or one.type, one.flag.removeprefix("--").upper()
    )


def effective(file: SettingsFile) -> Iterator[Found]:
    """Yield every key of every section with its value in use here. Flags are not known."""
    for name, struct in sections().items():
        yield from settle(name, struct, file=file).values()


def example_file() -> str:
    """Return a settings file with every key in it, each commented out at its default."""
    lines = [
        "# Every key of moorage.toml, commented out at its default. Durations and sizes are numbers, or text with a",
        "# unit. A flag overrides an environment variable (MOORAGE_<SECTION>_<KEY>), which overrides this file.",
        "# Put no password or token here: name a file that holds it.",
    ]
    for name, struct in sections().items():
        lines += ["", f"[{name}]"]
        for one in declared(name, struct).values():
            lines += [f"# {one.help}", f"#{example(one)}"]
    return "\n".join(lines) + "\n"
