"""Reads a verb's command line with argparse, as the signature of the verb's function says, so that an option is
described once.

`Annotated[int, Parameter(help="…")]` is an option if the parameter is keyword-only, and a word if it is positional-only
or starred. A dataclass of such fields is a group of options. The types are bool (a switch), str, int, float, Path,
`Literal` (choices), and lists of these (may be repeated).
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from moorage.schemas.nearest import nearest

GROUP_TITLE: Final = "__group__"
#: what stands for a length of time in the help
DURATION: Final = "DURATION"
_KINDS: Final[dict[Any, str]] = {str: "TEXT", int: "NUMBER", float: "NUMBER", Path: "PATH"}
#: what lists the jobs and the workers that a word may name
JOBS_LISTED: Final = "ls --format {job}"
WORKERS_LISTED: Final = "fleet --format {worker}"


class Again(str):
    """The last value of an option that was given more than once; `all` has each, in order."""

    all: tuple[str, ...]

    def __new__(cls, all_: tuple[str, ...]) -> Again:
        made = super().__new__(cls, all_[-1])
        made.all = all_
        return made


class _Collect(argparse.Action):
    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        before = getattr(namespace, self.dest, None)
        if before is not None:
            values = Again((*(before.all if isinstance(before, Again) else (before,)), values))
        setattr(namespace, self.dest, values)


@dataclasses.dataclass(frozen=True)
class Parameter:
    """How a word or an option of a verb is written and explained.

    `names` are the option's names, by default `--` and the field's name. `value` stands for its value in the help.
    `alone` is the value of an option that is given without one. `command` says that the word is everything after `--`.
    `lists` is the command of moorage whose answer Tab offers here. `timed` says that the value may be a duration, which
    wants a unit, as each value that is called DURATION. `one_at_least` says that words of which several may be given
    may not all be left out. `again` says that a text which is given more than once is an `Again`.
    """

    help: str
    names: tuple[str, ...] = ()
    value: str = ""
    alone: str | None = None
    command: bool = False
    lists: str = ""
    timed: bool = False
    one_at_least: bool = False
    again: bool = False


@dataclasses.dataclass(frozen=True)
class Argument:
    """One word or option of a verb, read from its signature. `choices` are the values of a `Literal`; `group` is the
    title of the dataclass that has it."""

    field: str
    names: tuple[str, ...]
    kind: Any
    many: bool
    required: bool
    default: Any
    choices: tuple[Any, ...]
    parameter: Parameter
    group: str = ""
    holder: str = ""

    @property
    def is_option(self) -> bool:
        return bool(self.names)

    @property
    def is_switch(self) -> bool:
        return self.kind is bool

    @property
    def wants_unit(self) -> bool:
        """Whether a bare number is refused, because 60 may be meant as minutes. `--lease-s` names its unit."""
        is_duration = self.parameter.value == DURATION and not any(name.endswith("-s") for name in self.names)
        return is_duration or self.parameter.timed

    @property
    def value(self) -> str:
        """What stands for its value in the help; "" for a switch."""
        if self.is_switch:
            return ""
        if self.choices:
            return "|".join(map(str, self.choices))
        return self.parameter.value or (_KINDS[self.kind] if self.is_option else self.field.upper())


#: what some verbs call --why, and others --reason
_REASONS: Final = {"--why": "--reason", "--reason": "--why"}
#: how much of a word has to be that of a known one (difflib's ratio, of words without their dashes) to be told as meant
NEAR: Final = 0.8


class CannotRead(Exception):
    """The command line does not fit the verb. `fixes` are lines that may help, to be pasted."""

    def __init__(self, why: str, *fixes: str) -> None:
        super().__init__(why)
        self.fixes = fixes


class Missing(CannotRead):
    """The command line lacks a word or an option that the verb needs."""


def arguments_of(act: Callable[..., Any]) -> list[Argument]:
    """Return all words and options of a verb's function, in the order of its signature. A dataclass is replaced by its
    fields."""
    found: list[Argument] = []
    hints = get_type_hints(act, include_extras=True)
    for parameter in inspect.signature(act).parameters.values():
        hint = hints[parameter.name]
        if dataclasses.is_dataclass(hint):
            found += _fields(hint, parameter.name)
            continue
        is_word = parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY)
        default = None if parameter.default is parameter.empty else parameter.default
        argument = _argument(parameter.name, hint, default, is_word=is_word)
        if parameter.kind is parameter.VAR_POSITIONAL:
            required = argument.parameter.one_at_least
            argument = dataclasses.replace(argument, many=True, default=(), required=required)
        else:
            argument = dataclasses.replace(argument, required=parameter.default is parameter.empty)
        found.append(argument)
    return found


def _fields(group: Any, holder: str) -> Iterator[Argument]:
    hints = get_type_hints(group, include_extras=True)
    for field in dataclasses.fields(group):
        argument = _argument(field.name, hints[field.name], field.default, is_word=False)
        yield dataclasses.replace(argument, group=getattr(group, GROUP_TITLE), holder=holder)


def _argument(name: str, hint: Any, default: Any, *, is_word: bool) -> Argument:
    kind, parameter = get_args(hint)[:2]
    if get_origin(kind) in (UnionType, Union):  # `… | None`
        (kind,) = (part for part in get_args(kind) if part is not NoneType)
    many = get_origin(kind) is list
    if many:
        (kind,) = get_args(kind)
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    names = () if is_word else parameter.names or ("--" + name.replace("_", "-"),)
    return Argument(name, names, type(choices[0]) if choices else kind, many, False, default, choices, parameter)


#: what is a value and no option though it begins with a dash: -1, and a time as -30m
_BELOW_ZERO: Final = re.compile(r"-\.?[0-9][0-9.]*[a-z]*([0-9.]+[a-z]+)*")


#: argparse's words for --hold=false
_VALUE_OF_A_SWITCH: Final = "ignored explicit argument "


class _Reader(argparse.ArgumentParser):
    #: by the word that stands for it in the help: the verb that lists what may be there
    lists: dict[str, str]
    #: by the option's name: what its value may be, as the help says
    helps: dict[str, str]
    #: words that argparse names beside the one that is missing, though they may be left out
    may_lack: frozenset[str]

    def error(self, message: str) -> NoReturn:
        what, required, missing = message.partition("the following arguments are required: ")
        if required and not what:
            from moorage.cli.examples import EXAMPLES

            missing = ", ".join(each for each in missing.split(", ") if each not in self.may_lack) or missing
            listing = [f"moorage {self.lists[name]}" for name in missing.split(", ") if self.lists.get(name)]
            verb = self.prog.removeprefix("moorage ")
            samples = EXAMPLES.get(verb, ())[:1] if missing.startswith("--") or not listing else ()
            raise Missing(f"{missing} is missing", *listing, *samples, f"{self.prog} --help")
        said = message.removeprefix("argument ")
        option = said.partition(": ")[0]
        told = [f"{option} takes: {self.helps[option]}"] if option in self.helps else []
        if (found := said.removeprefix(f"{option}: {_VALUE_OF_A_SWITCH}")) != said:
            said, told = f"{option} takes no value, found {found}", [f"{option}, true in a file; or leave it out"]
        raise CannotRead(said, *told, f"{self.prog} --help")


def read(verb: str, act: Callable[..., Any], words: Sequence[str]) -> Callable[[], int | None]:
    """Return the verb's function with what the words say, ready to be called. Raises `CannotRead`."""
    arguments = arguments_of(act)
    takes_command = next((one for one in arguments if one.parameter.command), None)
    before, behind = list(words), []
    if takes_command is not None and "--" in before:
        at = before.index("--")
        before, behind = before[:at], before[at + 1 :]
    reader = _Reader(prog=f"moorage {verb}", add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    reader._negative_number_matcher = _BELOW_ZERO
    reader.lists = {one.value: one.parameter.lists.partition(" --")[0] for one in arguments if one.value}
    reader.helps = {"/".join(one.names): one.parameter.help for one in arguments if one.names}
    reader.may_lack = frozenset(one.value for one in arguments if one.value and not one.required)
    for one in arguments:
        reader.add_argument(*(one.names or (one.field,)), **_for_argparse(one))
    try:
        read_words, unknown = reader.parse_known_intermixed_args(before)
    except Missing:  # a mistyped option comes first: with it, what is missing may be there
        if (word := _first_unknown(before, arguments)) is not None:
            raise _unknown(verb, words, word, arguments) from None
        raise
    given = vars(read_words)
    if takes_command is not None and unknown and _is_before(unknown[0], given.get(takes_command.field), before):
        raise _unknown(verb, words, unknown[0], arguments)  # first: its value looks like a command
    if takes_command is not None:
        _check_command(verb, list(words), given.get(takes_command.field) or [], behind, unknown)
        if behind:
            given[takes_command.field] = behind
    if unknown:
        raise _unknown(verb, words, unknown[0], arguments)
    return _bound(act, arguments, given)


def _for_argparse(one: Argument) -> dict[str, Any]:
    said: dict[str, Any] = {}
    if one.is_switch:
        return {"action": "store_true", "dest": one.field}
    if one.is_option:
        said["dest"] = one.field
        said["action"] = _Collect if one.parameter.again else "append" if one.many else "store"
        said["required"] = one.required
        if one.parameter.alone is not None:
            said |= {"nargs": "?", "const": one.parameter.alone}
    elif one.many or not one.required:
        said["nargs"] = "?" if not one.many else "+" if one.required else "*"
        if not one.many:
            said["default"] = one.default  # intermixed, argparse would give the word for none that it was told
    kind = _with_unit if one.wants_unit else _KIND_READERS.get(one.kind, one.kind)
    return {**said, "type": kind, "choices": one.choices or None, "metavar": one.value}


def _is_before(option: str, command: list[str] | None, words: list[str]) -> bool:
    """Return whether an unknown option is before the job's command; after it, it belongs to that command."""
    return not command or option not in words or words.index(option) < words.index(command[0])


def _with_unit(text: str) -> str:
    if lacks_unit(text):
        raise argparse.ArgumentTypeError(f"a duration without a unit: {text!r}; write {text}s, {text}m or {text}h")
    return text


def lacks_unit(text: str) -> bool:
    """Return whether a text is a bare number other than 0."""
    return bool(_BARE.fullmatch(text.strip())) and float(text) != 0


def _whole(text: str) -> int:
    try:
        return int(_in_digits(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"not a whole number: {text!r}") from None


def _number(text: str) -> float:
    try:
        return float(_in_digits(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"not a number: {text!r}") from None


def _in_digits(text: str) -> str:
    """Return the text of a number. Raises ValueError for what Python alone takes for one, as 1_0 for 10."""
    if not text.isascii() or "_" in text:
        raise ValueError(text)
    return text


def _path(text: str) -> Path:
    if not text:  # Python takes it for this folder
        raise argparse.ArgumentTypeError("an empty path; this folder is .")
    return Path(text)


_BARE: Final = re.compile(r"[0-9]*\.?[0-9]+")
#: an option of the `nats` tool, and ours for it
NATS_OPTIONS: Final = {"--context": "--nats", "--server": "--nats", "-s": "--nats"}
#: argparse names a reader by its Python name where it raises anything but `ArgumentTypeError`
_KIND_READERS: Final[dict[Any, Callable[[str], Any]]] = {int: _whole, float: _number, Path: _path}


def _check_command(verb: str, words: list[str], bare: list[str], behind: list[str], unknown: list[str]) -> None:
    """Raise `CannotRead` unless the job's command is the end of the line. With words before and after `--`, it is not
    clear which are the command."""
    if behind and not bare:
        return
    if bare and not behind and words[-len(bare) :] == bare:
        return
    if bare and behind:
        raise CannotRead(
            f"{bare[0]!r} stands before --, and is neither an option nor an option's value",
            "leave it out; put a value with blanks in quotes; the whole command stands after --",
        )
    if bare:
        import shlex

        start = words.index(bare[0])
        command = [word for word in words[start:] if word != "--"]
        fix = shlex.join(["moorage", *verb.split(), *words[:start], "--", *command])
        raise CannotRead("the command to run stands behind --", fix)


def _first_unknown(words: Sequence[str], arguments: Sequence[Argument]) -> str | None:
    known = {name for one in arguments for name in one.names}
    return next((word for word in words if word.startswith("--") and word.partition("=")[0] not in known), None)


def _unknown(verb: str, words: Sequence[str], word: str, arguments: Sequence[Argument]) -> CannotRead:
    option, equals, value = word.partition("=")
    if not option.startswith("-"):
        fix = f"moorage {verb} --help"
        takes_tenant = any("--tenant" in one.names for one in arguments) and "--tenant" not in words
        if takes_tenant and all(one.is_option for one in arguments):
            import shlex

            meant = [each for one in words for each in (("--tenant", one) if one == word else (one,))]
            return CannotRead(
                f"{word!r} is an unexpected argument", shlex.join(["moorage", *verb.split(), *meant]), fix
            )
        return CannotRead(f"{word!r} is an unexpected argument", fix)
    if verb == "run" and option in ("-f", "--file"):
        return CannotRead(f"no option {option}: run takes no file of requests", "moorage submit -f FILE")
    if verb == "schedule add" and option in ("--every", "--interval"):
        return CannotRead(
            f"no option {option}: the cron says it", "moorage schedule add NAME --cron '@every 3s' -- COMMAND"
        )
    if verb == "cordon" and option in ("--for", "--within", "--from"):
        why = f"no option {option}: cordon lasts until uncordon, and its jobs go on"
        return CannotRead(why, f"moorage drain WORKER {option} 2h")
    import shlex

    known = [name for one in arguments for name in one.names]
    names = {name.lstrip("-"): name for name in known}  # else the dashes are half of what a short one has in common
    key = option.lstrip("-").replace("-", "_")  # a setting's key, whose flag may have another name
    of_key = next((one.names[0].lstrip("-") for one in arguments if one.is_option and one.field == key), "")
    near = NATS_OPTIONS.get(option, _REASONS.get(option, "")).lstrip("-") or of_key
    near = near or nearest(option.lstrip("-"), names, NEAR)
    if "--gpu" in known and not (near and option.startswith(f"--{near}")):
        from moorage.cli.habits import as_elsewhere

        if said := as_elsewhere(option):
            more = "moorage help slurm" if " of sbatch: " in said else f"moorage {verb} --help"
            return CannotRead(f"no option {option}", said, more)
    if near not in names:
        return CannotRead(f"no option {option}", f"moorage {verb} --help")
    end = list(words).index("--") if "--" in words else len(words)  # behind it is the job's command, as it is
    meant = [names[near] + equals + value if one == word and at < end else one for at, one in enumerate(words)]
    return CannotRead(f"no option {option}", shlex.join(["moorage", *verb.split(), *meant]), f"moorage {verb} --help")


def _bound(act: Callable[..., Any], arguments: Sequence[Argument], given: dict[str, Any]) -> Callable[[], int | None]:
    words: list[Any] = []
    named: dict[str, Any] = {}
    groups: dict[str, dict[str, Any]] = {one.holder: {} for one in arguments if one.holder}
    for one in arguments:
        value = given.get(one.field, one.default)
        if one.holder:
            groups[one.holder][one.field] = value
        elif one.is_option:
            named[one.field] = value
        elif one.many:
            words += value
        else:
            words.append(value)
    hints = get_type_hints(act)
    for holder, fields in groups.items():
        named[holder] = hints[holder](**fields)
    return lambda: act(*words, **named)
