"""Settings: how a key is declared, and how its value is found: from a flag, the environment, the file or the default,
in this order.

A section of the settings file is a msgspec struct whose fields are annotated with `setting(...)`; nothing else lists
keys. From the declaration come the keys of the TOML file, the environment's names (`MOORAGE_<SECTION>_<KEY>`), the
flags, the checks and the reference page. A worker's driver may declare a section of its own: `[driver.<its name>]`.

Durations and sizes are numbers in the unit that the key declares, or text with a unit: `20`, `"20s"`, `"1h30m"`,
`10737418240`, `"10GiB"`.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar, Unpack, get_args, get_origin, get_type_hints

import msgspec

from moorage.schemas.errors import Details, Refused, refuse
from moorage.schemas.nearest import nearest
from moorage.schemas.settings_file import OWN_FLEET_VARIABLE
from moorage.schemas.units import DURATION_S, duration_s, size_bytes

#: the tables of a settings file, one a service
SECTIONS: Final = ("scheduler", "worker", "up", "client")
#: the table that holds the sections of drivers, one each
OF_DRIVERS: Final = "driver"
FILE_BYTES_MAX: Final = 256 * 1024
DEFAULT: Final = "default"

#: who one is, in a URL: up to its last @, since a password may hold a slash
_WHO: Final = re.compile(r"([a-z]+://)(?:(?![a-z]+://)\S)+@")

S = TypeVar("S", bound=msgspec.Struct)


def setting(
    help: str,
    *,
    unit: Literal["", "s", "bytes"] = "",
    ge: float | None = None,
    le: float | None = None,
    flag: str = "",
    env: str = "",
    of_site: Literal["", "always", "unprivileged"] = "",
) -> msgspec.Meta:
    """Return the note that declares a key within `Annotated`: its help, unit and bounds.

    `flag` (without dashes) and `env` are only given if their names do not follow from the key. `of_site`: the value is
    for one site alone, and a `moorage up` takes it from no file and no variable; `unprivileged`: unless it is root's.
    """
    extra = {"unit": unit, "flag": flag, "env": env, "of_site": of_site}
    return msgspec.Meta(description=help, ge=ge, le=le, extra=extra)


class Setting(NamedTuple):
    """A declared key. `kind` is its annotation, bounds included; `field` is its name in the struct."""

    section: str
    key: str
    field: str
    kind: Any
    help: str
    unit: str
    ge: float | None
    le: float | None
    default: Any
    flag: str
    env: str
    of_site: str = ""

    @property
    def is_left_out(self) -> bool:
        """Whether a `moorage up` of this user leaves the key to the site that it is for."""
        return self.of_site == "always" or (self.of_site == "unprivileged" and os.geteuid() != 0)

    @property
    def type(self) -> Any:
        """The type without notes and without None."""
        return _bare(self.kind)

    @property
    def allowed(self) -> str:
        """What the value may be, in words for errors and the reference."""
        bare = self.type
        if get_origin(bare) is Literal:
            return ", ".join(map(str, get_args(bare)))
        if self.unit:
            what = "a duration" if self.unit == "s" else "a size"
        else:
            what = _WORDS.get(get_origin(bare) or bare, "text")
        low, high = (shown(self, bound) if bound is not None else "" for bound in (self.ge, self.le))
        return f"{what}, {low}..{high}" if low or high else what


_WORDS: Final[dict[Any, str]] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    tuple: "a list",
    list: "a list",
    dict: "a table",
}


class Found(NamedTuple):
    """A key's value and where it was found: a flag, a variable, a file, or `default`."""

    setting: Setting
    value: Any
    source: str


class SettingsFile(NamedTuple):
    """A settings file as it was read."""

    path: Path
    tables: Mapping[str, Any]

    def table(self, section: str) -> Mapping[str, Any]:
        """Return the keys of a section with their values as in the file; empty if the file has no such section."""
        whole, _, driver = section.partition(".")
        table: Mapping[str, Any] = self.tables.get(whole, {})
        return table.get(driver, {}) if driver else table


NO_FILE: Final = SettingsFile(Path(), {})


def declared(section: str, struct: type[msgspec.Struct]) -> dict[str, Setting]:
    """Return the keys of a section, in the order of its struct. Raises TypeError for a key without a help text."""
    found: dict[str, Setting] = {}
    hints = get_type_hints(struct, include_extras=True)
    for field in msgspec.structs.fields(struct):
        kind = hints[field.name]
        meta = _meta_of(kind)
        if meta is None or not meta.description:
            raise TypeError(f"{struct.__name__}.{field.name} is a setting without a description")
        extra, key = meta.extra or {}, field.encode_name
        default = field.default if field.default is not msgspec.NODEFAULT else None
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        found[key] = Setting(
            section,
            key,
            field.name,
            kind,
            meta.description,
            extra.get("unit", ""),
            meta.ge,
            meta.le,
            default,
            "" if section.startswith(f"{OF_DRIVERS}.") else "--" + (extra.get("flag") or key.replace("_", "-")),
            extra.get("env") or f"{variables_of(section)}{key.upper()}",
            extra.get("of_site", ""),
        )
    return found


def variables_of(section: str) -> str:
    """Return the prefix of the environment variables of a section."""
    return f"MOORAGE_{re.sub(r'[^A-Z0-9]', '_', section.upper())}_"


# ------------------------------------------------------------------------------------------------------------ file


def read_file(path: Path | None) -> SettingsFile:
    """Return the tables of a settings file; `NO_FILE` for None.

    Raises Refused with bad-settings for a file that cannot be read, is too large, is no TOML or has a table that is no
    section, and if this process is root, for a file that others may write.
    """
    if path is None:
        return NO_FILE
    import tomllib

    try:
        with path.open("rb") as file:
            _check_owner(path, os.fstat(file.fileno()))
            raw = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        fix = "name a file that you may read, with --settings or MOORAGE_SETTINGS"
        raise _refuse(f"the settings file {path} cannot be read: {error.strerror}", found=str(path), next=fix) from None
    if len(raw) > FILE_BYTES_MAX:
        raise _refuse(f"{path} is too large for a settings file", allowed=f"{FILE_BYTES_MAX} bytes")
    try:
        tables = tomllib.loads(raw.decode("utf-8-sig"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise _refuse(f"{path} is not valid TOML: {error}", next="mend that line") from None
    for name, table in tables.items():
        if name not in (*SECTIONS, OF_DRIVERS):
            raise _refuse(
                f"{path} has no section for {name!r}",
                found=name,
                allowed=", ".join(f"[{section}]" for section in (*SECTIONS, f"{OF_DRIVERS}.NAME")),
                next=_nearest(name, SECTIONS) or "put the key under the section of its service",
            )
        if not isinstance(table, dict):
            raise _refuse(f"{name} in {path} must be a table", found=repr(table), next=f"write [{name}]")
    for name, table in tables.get(OF_DRIVERS, {}).items():
        if not isinstance(table, dict):
            raise _refuse(
                f"{OF_DRIVERS}.{name} in {path} must be a table",
                found=repr(table),
                next=f"name the driver: [{OF_DRIVERS}.NAME]",
            )
    return SettingsFile(path, tables)


def _check_owner(path: Path, about: os.stat_result) -> None:
    """Raise Refused for what is no plain file; and if this process is root, for a file that others may write, since it
    says what to run."""
    if not stat.S_ISREG(about.st_mode):
        raise _refuse(f"{path} is not a file", next="name a plain file")
    if os.geteuid() != 0:
        return
    if about.st_uid != 0 or about.st_mode & stat.S_IWOTH or (about.st_mode & stat.S_IWGRP and about.st_gid != 0):
        raise _refuse(
            f"root reads no settings that others may write: {path}",
            found=f"owner {about.st_uid}, mode {stat.S_IMODE(about.st_mode):o}",
            allowed="owner root, writable by nobody else",
            next=f"chown root: {path} && chmod go-w {path}",
        )


# ---------------------------------------------------------------------------------------------------------- values


def settle(
    section: str,
    struct: type[msgspec.Struct],
    *,
    flags: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    file: SettingsFile = NO_FILE,
    defaults: Mapping[str, Any] | None = None,
    flags_named: Mapping[str, str] | None = None,
    others: Mapping[str, type[msgspec.Struct]] | None = None,
) -> dict[str, Found]:
    """Return every key of a section with its value: from a flag, else the environment, else the file, else the default.

    `flags` and `defaults` are by key; a flag that is None was not given, and an empty variable is ignored. `defaults`
    replace the declared ones.
    `flags_named` says by key how errors name a flag that is not the service's own, as `--set jobs_max`. `others` are
    the other sections: an unknown key may be one of theirs. In a process of a `moorage up` (`OWN_FLEET_VARIABLE`) a key
    of a site is that of a flag or the default. Raises Refused with bad-settings, which names the key,
    what was found and what is allowed.
    """
    env = os.environ if env is None else env
    keys = declared(section, struct)
    for key, flag in (flags_named or {}).items():
        keys[key] = keys[key]._replace(flag=flag)
    table = file.table(section)
    for name in table:
        if name not in keys:
            listed = section in SECTIONS  # in what the command can list
            raise _refuse(
                f"[{section}] has no key {name!r}, in {file.path}",
                found=name,
                allowed="" if listed else ", ".join(keys) or "no key",
                next=_section_of(name, others or {})
                or _nearest(name, keys)
                or (f"moorage doctor --example lists the keys of [{section}]" if listed else "take it out"),
            )
    found: dict[str, Found] = {}
    for key, one in keys.items():
        if flags and flags.get(key) is not None:
            found[key] = Found(one, converted(one, flags[key], one.flag, from_text=True), one.flag)
        elif one.is_left_out and env.get(OWN_FLEET_VARIABLE):
            found[key] = Found(one, (defaults or {}).get(key, one.default), DEFAULT)
        elif env.get(one.env):
            found[key] = Found(one, converted(one, env[one.env], one.env, from_text=True), one.env)
        elif key in table:
            found[key] = _in_file(one, table[key], str(file.path))
        else:
            found[key] = Found(one, (defaults or {}).get(key, one.default), DEFAULT)
    return found


def _in_file(one: Setting, value: Any, path: str) -> Found:
    """Return a value of a settings file. Raises Refused with bad-settings for a password or token, and for a wrong
    value."""
    if isinstance(value, str) and _without_who(one, value) != value:
        raise _refuse(
            f"{one.key} in {path} holds a password or token",
            field=f"[{one.section}] {one.key}",
            next="keep it in a file of its own: a nats context with creds, or ledger_url_file",
        )
    return Found(one, converted(one, value, path, from_text=False), path)


def made(struct: type[S], found: Mapping[str, Found]) -> S:
    """Return the struct of these values. Raises Refused with bad-settings for those that do not go together."""
    try:
        return struct(**{one.setting.field: one.value for one in found.values()})
    except ValueError as error:
        said = [one for one in found.values() if one.source != DEFAULT]
        named = _named(str(error), found.values())
        blamed = named or said
        where = ", ".join(
            f"{one.setting.key} {'by default' if one.source == DEFAULT else f'from {one.source}'}" for one in blamed
        )
        together = "" if len(blamed) == 1 or not named else "these settings do not go together: "
        ways = [
            one.source if one.source.startswith("--") else f"{one.setting.key} ({one.setting.flag or one.setting.env})"
            for one in blamed
        ]
        fix = f"give {' or '.join(ways)} another value" if named else "moorage doctor --settings shows the values"
        raise _refuse(f"{together}{error}{f' ({where})' if where else ''}", next=fix) from None


def _named(error: str, found: Iterable[Found]) -> list[Found]:
    """Return the settings that an error names, in its order, if its text begins with one of them; else [].

    After the first one, a key without an underscore is one only before ` =`: `mps` is a sharing mode, too.
    """
    places = ((_place_of(one.setting.key, error), one) for one in found)
    named = sorted(((place.start(), one) for place, one in places if place is not None), key=lambda each: each[0])
    return [one for _, one in named] if named and named[0][0] == 0 else []


def _place_of(key: str, error: str) -> re.Match[str] | None:
    behind = r"\b" if "_" in key else " ="
    return re.search(rf"^{re.escape(key)}\b|\b{re.escape(key)}{behind}", error)


def as_words(found: Mapping[str, Found]) -> str:
    """Return the settings that differ from their defaults and where they are from, for a service's first line of
    log."""
    return "; ".join(
        f"{key} = {shown(one.setting, one.value)} ({one.source})" for key, one in found.items() if one.source != DEFAULT
    )


def unknown_variables(section: str, found: Mapping[str, Found], env: Mapping[str, str] | None = None) -> list[str]:
    """Return the variables whose names look like settings of a section but are none.

    They are reported and not refused, because Kubernetes makes such names for a service called moorage-scheduler.
    """
    env = os.environ if env is None else env
    known = {one.setting.env for one in found.values()}
    return sorted(name for name in env if name.startswith(variables_of(section)) and name not in known)


def converted(one: Setting, value: Any, source: str, *, from_text: bool) -> Any:
    """Return a value as the type of its key. Raises Refused with bad-settings."""
    bare = one.type
    raw = value
    try:
        if isinstance(value, str) and one.unit:
            value = duration_s(value) if one.unit == "s" else size_bytes(value)
            if get_origin(bare) is None and bare is int and value == int(value):
                value = int(value)
        elif from_text and get_origin(bare) in (tuple, list, dict) and not isinstance(value, dict):
            words = [value] if isinstance(value, str) else value
            parts = [part.strip() for word in words for part in word.split(",") if part.strip()]
            value = dict(_pair(part) for part in parts) if get_origin(bare) is dict else parts
        if get_origin(bare) is Literal and from_text and isinstance(get_args(bare)[0], int):
            value = int(value)
        if bare is bool and isinstance(value, str) and from_text:
            value = {"yes": "true", "on": "true", "no": "false", "off": "false"}.get(value.lower(), value)
        if isinstance(value, float) and value != value:
            raise ValueError("nan is not a number")
        return msgspec.convert(value, one.kind, strict=not from_text, dec_hook=_decode)
    except (msgspec.ValidationError, ValueError) as error:
        why = "" if isinstance(error, msgspec.ValidationError) else f": {error}"
        raise _refuse(
            f"{one.key} of [{one.section}] must be {one.allowed}{why}",
            field=f"[{one.section}] {one.key}",
            found=f"{raw!r}, from {source}",
            allowed=one.allowed,
            next="for example " + _example_of(one, source),
        ) from None


def shown(one: Setting, value: Any) -> str:
    """Return a value as text for logs and help, a URL without user and password; `none` for None or an empty value."""
    if value is None:
        return "none"
    if one.unit == "s":
        for unit in ("d", "h", "m"):
            if value and value % DURATION_S[unit] == 0:
                return f"{int(value // DURATION_S[unit])}{unit}"
        return f"{value:.15g}s"
    if one.unit == "bytes":
        for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
            if value and value % (1 << power) == 0:
                return f"{int(value) >> power}{unit}"
        return str(int(value))
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return ", ".join(f"{key}={item}" for key, item in value.items()) or "none"
    if isinstance(value, tuple | list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, float):
        return f"{value:g}"
    return _without_who(one, str(value)) or "none"


def _without_who(one: Setting, text: str) -> str:
    """Return the value without user, password or token in it. A server may be named without a scheme, too."""
    if one.key == "nats" and "://" not in text and ":" in text and "@" in text:
        return f"***@{text.rpartition('@')[2]}"
    return _WHO.sub(r"\1***@", text)


def _example_of(one: Setting, source: str) -> str:
    """Return an example that sets a key, in the form of the place where it was set: flag, variable or TOML."""
    if source not in (one.flag, one.env):
        return example(one)
    word = shown(one, one.default)
    if word == "none":
        word = example(one).partition(" = ")[2].strip('"[]{ }').replace(" = ", "=").replace('"', "")
    if source == one.env or " " in one.flag:  # as --set jobs_max
        return f"{source}={word}"
    return f"{source} {word}"


def example(one: Setting) -> str:
    """Return a line of TOML that sets a key to its default, or to an example if the default is empty."""
    value, bare = one.default, one.type
    if value is None or value == "" or value == {} or value == ():
        value = _EXAMPLES.get(one.key) or _EXAMPLES.get(get_origin(bare) or bare, "…")
    elif one.unit:
        value = f'"{shown(one, value)}"'
    elif isinstance(value, bool | int | float):
        value = shown(one, value)
    elif isinstance(value, tuple):
        value = "[" + ", ".join(f'"{item}"' for item in value) + "]"
    else:
        value = f'"{value}"'
    return f"{one.key} = {value}"


_EXAMPLES: Final[dict[Any, str]] = {
    str: '"…"',
    Path: '"/path/to/it"',
    int: "1",
    tuple: "[]",
    dict: '{ … = "…" }',
    "nats": '"nats://127.0.0.1:4222"',
    "simulate": '"4x8xH100"',
    "labels": '{ zone = "a" }',
    "counts": "{ camera = 2 }",
    "sharers_max": "{ mps = 8 }",
    "slot_modes": '{ 0 = "exclusive", 1 = "mps time-slice" }',
    "slot_labels": '{ 0 = "tier=fast wall=a" }',
    "idle_reclaim_s": "{ vision = 7200 }",
    "auto_freeze_s": "{ low = 60, critical = 3600 }",
    "time_slice": '"short"',
    "lent_slots": "[0, 1, 2, 3]",
    "lease_uids": "[1000]",
    "port": "4222",
    "drivers_for": '{ vision = "process" }',
    "programs_for": '{ vision = "/opt/vision/* python3" }',
    "secrets_for": '{ vision = "vision-* hugging-face" }',
    "run_as": '"nobody"',
    "run_as_for": '{ vision = "41001" }',
}


def _pair(part: str) -> tuple[str, str]:
    name, equals, value = part.partition("=")
    if not equals:
        raise ValueError(f"write {part!r} as name=value")
    return name.strip(), value.strip()


def _bare(kind: Any) -> Any:
    while True:
        if get_origin(kind) is Annotated:
            kind = get_args(kind)[0]
        elif get_origin(kind) is not Literal and NoneType in get_args(kind):
            (kind,) = (part for part in get_args(kind) if part is not NoneType)
        else:
            return kind


def _meta_of(kind: Any) -> msgspec.Meta | None:
    """Return the note of a key, which may stand inside an optional type; None if there is none."""
    for part in (kind, *get_args(kind)):
        for note in getattr(part, "__metadata__", ()):
            if isinstance(note, msgspec.Meta):
                return note
    return None


def _decode(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str) and value:
        return Path(value).expanduser().absolute()  # a supervisor, say, has another current folder
    raise ValueError("write a path as text")


def _section_of(key: str, sections: Mapping[str, type[msgspec.Struct]]) -> str:
    """Return which of these sections a key belongs to, "" if to none."""
    having = " or ".join(f"[{name}]" for name, struct in sections.items() if key in declared(name, struct))
    return f"{key} is a setting of {having}" if having else ""


def _nearest(name: str, known: Iterable[str]) -> str:
    near = nearest(name, known, 0.5)
    return f"the nearest is {near}" if near else ""


def _refuse(message: str, **details: Unpack[Details]) -> Refused:
    return refuse("bad-settings", message, **details)
