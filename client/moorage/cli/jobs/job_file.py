"""Files of jobs: requests as on the wire, in JSON; and for people, in YAML or TOML, the options of `submit` by name."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Annotated, Any, Final, NamedTuple, TypeVar

import msgspec

from moorage.cli.framework.arguments import CannotRead, Parameter, read
from moorage.cli.framework.files import cannot_read, read_within
from moorage.cli.habits import as_elsewhere
from moorage.cli.jobs.job_flags import NO_FLAGS, JobFlags
from moorage.client.errors import Rejected, rejected
from moorage.schemas.nearest import nearest
from moorage.schemas.printable import shown

FILE_BYTES_MAX: Final = 64 * 1024 * 1024
#: the key of the command, which has no option
COMMAND: Final = "command"
_YAML: Final = (".yaml", ".yml")
_TOML: Final = (".toml",)
#: options without a value
_SWITCHES: Final = frozenset(field.name.rstrip("_") for field in fields(JobFlags) if field.default is False)
#: the key with which YAML merges another mapping into one
_MERGES: Final = "<<"
#: stands for standard input among paths
STDIN: Final = "-"
#: what shlex says of a backslash at the end
_ESCAPES_NOTHING: Final = "No escaped character"
#: words of a command that were meant for a shell
_OF_A_SHELL: Final = frozenset(("|", "||", "&", "&&", ";", "<", ">", ">>", "2>&1"))
#: what a shell does not look into, or only for variables: a backslash with a character, and quotes
_QUOTED: Final = re.compile(r"""\\.|'[^']*'|"(?:\\.|[^"\\])*"?""", re.DOTALL)
#: a variable, or a command, in whose place a shell puts a text
_VARIABLE: Final = re.compile(r"(?<!\\)(\$[A-Za-z_{(]\w*|`)")
#: a home folder or names of files, likewise
_NAMES: Final = re.compile(r"(?<!\S)~\S*|\S*\*\S*")
_SETS: Final = re.compile(r"[A-Za-z_]\w*=")
_EXAMPLE: Final = (
    "command: python3 train.py --lr {lr}; and the options of submit, as  gpu: 1xH100  and  each: sweep.csv"
)


class Said(NamedTuple):
    """What a file for people says: the flags and the command of `submit`."""

    flags: JobFlags
    command: tuple[str, ...]

    def under(self, flags: JobFlags, command: Sequence[str]) -> Said:
        """Return what the command line says over what the file says; of options that repeat, both."""
        own = {field.name: getattr(flags, field.name) for field in fields(flags)}
        given = {name: value for name, value in own.items() if value != getattr(NO_FLAGS, name)}
        for name, value in given.items():
            if isinstance(value, list):
                given[name] = [*(getattr(self.flags, name) or ()), *value]
        return Said(replace(self.flags, **given), tuple(command) or self.command)


def is_for_people(file: str) -> bool:
    """Return whether a file may have options and a command, by its name."""
    return file.lower().endswith((*_YAML, *_TOML))


def read_job_file(file: str) -> Said | dict[str, Any] | list[dict[str, Any]]:
    """Return what a file or stdin has: options and a command, a request, or several requests. Raises `Rejected`."""
    where = "stdin" if file == "-" else file
    try:
        text = read_within(file, FILE_BYTES_MAX)
    except OSError as error:
        raise cannot_read(where, error.strerror, "name a file of jobs, or - for stdin") from None
    if len(text) > FILE_BYTES_MAX:
        raise rejected("too-large", f"{where} has more than {FILE_BYTES_MAX} bytes", next="split the file")
    if file.lower().endswith(_YAML):
        return _beside(file, _job_in(where, text, *_yaml_of(text, where)))
    if file.lower().endswith(_TOML):
        content = _toml_of(text, where)
        return _beside(file, _job_in(where, text, content, content))
    return _requests_in(_json_of(text, where), where)


@contextlib.contextmanager
def naming(file: str | None, given: JobFlags = NO_FLAGS) -> Iterator[None]:
    """Have a refusal of what a file says name the file, and the line of the option or field where that is found.

    `given` are the flags of the command line, which are refused as they are.
    """
    try:
        yield
    except Rejected as refused:
        told = refused.problem
        options = _OPTION.findall(told.message)[:1]
        own = [name for name in options if getattr(given, name.replace("-", "_"), None) not in (None, False)]
        if file is None or own:
            raise
        where = "stdin" if file == STDIN else file
        keys = [*options, *reversed(_STEP.findall(told.field))]
        text = b"" if file == STDIN else read_within(file, FILE_BYTES_MAX)
        message = f"{_at(where, text, keys)}: {told.message}"
        raise type(refused)(msgspec.structs.replace(told, message=message)) from None


#: an option in a message, and a name in the path of a field
_OPTION: Final = re.compile(r"--([a-z][a-z-]*)")
_STEP: Final = re.compile(r"[A-Za-z_][^.\[\]]*")


def _at(where: str, text: bytes, keys: Iterable[str]) -> str:
    """Return a file's name with the line that has the first of these keys that it has; the name alone without one."""
    for key in keys:
        name = re.escape(key.replace("_", "-").strip("-")).replace("\\-", "[-_]")
        if found := re.search(rf"""(?m)(?:^|[{{,\s])["']?{name}["']?\s*[:=]""", text.decode(errors="replace")):
            return f"{where}, line {text.decode(errors='replace').count(chr(10), 0, found.end()) + 1}"
    return where


_Found = TypeVar("_Found", bound=object)


def _beside(file: str, found: _Found) -> _Found | Said:
    """Return what a file says, with its paths from the file's own folder on. Raises `Rejected` for a path that only the
    shell's folder has: it may be another file than the one that is meant."""
    folder = os.path.dirname(file)
    if not isinstance(found, Said) or not folder:
        return found
    flags = found.flags

    def from_folder(path: str) -> str:
        beside = os.path.join(folder, path)  # of an absolute path, the path
        if path != STDIN and not os.path.lexists(beside) and os.path.lexists(path):
            raise rejected(
                "invalid-argument", f"{file}: paths begin at the folder of the file, and {beside} does not exist",
                found=f"{os.path.abspath(path)}, in the shell's folder",
                allowed=f"a path from {os.path.abspath(folder)} on",
                next=f"write {os.path.relpath(path, folder)} in the file, or give the path on the command line",
            )  # fmt: skip
        return path if path == STDIN else beside

    return found._replace(
        flags=replace(
            flags,
            each=flags.each and from_folder(flags.each),
            each_line=flags.each_line and from_folder(flags.each_line),
            env_file=flags.env_file and [from_folder(path) for path in flags.env_file],
            with_=flags.with_ and [path if path.startswith("job:") else from_folder(path) for path in flags.with_],
        )
    )


def _job_in(where: str, text: bytes, typed: Any, plain: Any) -> Said | dict[str, Any] | list[dict[str, Any]]:
    """Return the job of a file for people, or its requests if it has those. `plain` has scalars as they are written."""
    if typed is None:  # an empty file
        typed, plain = {}, {}
    if not isinstance(typed, dict) or "run" in typed:
        return _requests_in(typed, where)
    spelt: dict[str, str] = {}
    for name in plain:
        if (other := spelt.setdefault(name.replace("_", "-"), name)) != name:
            why = f"{where}: {other} and {name} are one option"
            raise rejected("invalid-argument", why, field=f"$.{name}", next="put both into one")
    command = plain.get(COMMAND)
    if isinstance(command, str):
        command = _split(where, command)
    if not isinstance(command, list):
        raise rejected(
            "invalid-argument", f"{where} has no command", field=f"$.{COMMAND}", found=", ".join(map(str, plain)),
            next=_EXAMPLE,
        )  # fmt: skip
    words = [word for name, value in plain.items() if name != COMMAND for word in _words(where, name, value, typed)]
    said: list[Said] = []

    def take(
        *command: Annotated[str, Parameter(help="What to run.", command=True)], flags: JobFlags = NO_FLAGS
    ) -> None:
        said.append(Said(flags, command))

    try:
        read("submit", take, [*words, "--", *(_text(where, COMMAND, word) for word in command)])()
    except CannotRead as error:
        fix = _meant(str(error), plain) or next(iter(error.fixes[:-1]), "moorage submit --help")
        at = _at(where, text, _OPTION.findall(str(error))[:1])
        raise rejected("invalid-argument", f"{at}: {error}", next=fix) from None
    return said[0]


def _meant(why: str, plain: Iterable[str]) -> str:
    """Return which option a misspelt key most likely means, as a fix; "" if `why` is another error, or none is near."""
    options = [field.name.strip("_").replace("_", "-") for field in fields(JobFlags)]
    wrong = next((key for key in plain if why == f"no option --{key}"), "")
    elsewhere = as_elsewhere(f"--{wrong}").partition(" ")[0].removeprefix("--") if wrong else ""
    near = elsewhere if elsewhere in options else nearest(wrong, options) if wrong else ""
    return f"write {near} in place of {wrong}" if near else ""


def _split(where: str, command: str) -> list[str]:
    """Return the words of a command. Raises `Rejected` for an open quote, and for what is meant for a shell."""
    lines, begun = list[list[str]](), ""
    for line in command.splitlines():
        begun += line
        try:
            lines += filter(None, [shlex.split(begun)])
        except ValueError as error:  # an open quote, or a backslash at the end: the next line goes on with it
            begun, wrong = (begun[:-1] if str(error) == _ESCAPES_NOTHING else f"{begun}\n"), error
        else:
            begun = ""
    if begun:
        raise rejected(
            "invalid-argument", f"{where}: command cannot be divided into words: {wrong}", field=f"$.{COMMAND}",
            next="close each quote, or write it as a list of words",
        ) from None  # fmt: skip
    if len(lines) > 1:
        raise rejected(
            "invalid-argument", f"{where}: command has {len(lines)} lines, and no shell reads them",
            field=f"$.{COMMAND}", found=command[:80],
            next=f"{COMMAND}: [sh, -c, '…'] for a script; one command goes on behind a \\ at the end of a line",
        )  # fmt: skip
    words = lines[0] if lines else []
    if word := _of_a_shell(command, words):
        raise rejected(
            "invalid-argument", f"{where}: no shell reads the command, and {word} is a shell's", found=command,
            field=f"$.{COMMAND}",
            next=f"{COMMAND}: [sh, -c, '…']; or in single quotes or as a list, if it is a plain word",
        )  # fmt: skip
    return words


def _of_a_shell(command: str, words: Sequence[str]) -> str:
    """Return what of a command in one text only a shell would take as it is most likely meant; "" for nothing."""
    if len(words) > 1 and _SETS.match(words[0]):
        return words[0]
    bare = _QUOTED.sub(lambda found: "".join(_VARIABLE.findall(found[0])) if found[0][0] == '"' else "_", command)
    found = _VARIABLE.search(bare) or _NAMES.search(bare)
    return found[0] if found else next((word for word in words if word in _OF_A_SHELL), "")


def _words(where: str, name: str, value: Any, typed: Mapping[str, Any]) -> Iterator[str]:
    """Yield an option with its value, or each of its values, as on a command line."""
    option = "--" + name.replace("_", "-")
    if option in ("--driver-config", "--driver-config-json"):
        yield f"{option}={msgspec.json.encode(typed[name]).decode()}"
    elif isinstance(value, Mapping):
        yield from (f"{option}={key}={_text(where, name, each, key)}" for key, each in value.items())
    elif isinstance(value, list):
        yield from (f"{option}={_text(where, name, each)}" for each in value)
    else:
        if option[2:] in _SWITCHES and isinstance(typed[name], bool):  # `yes` and `on` are true in YAML
            value = typed[name]
        if value in (None, "", True, "true"):
            yield option
        elif value not in (False, "false"):
            yield f"{option}={_text(where, name, value)}"


def _text(where: str, name: str, value: Any, key: str = "") -> str:
    """Return a value of an option, or of its `key`, as a command line has it. Raises `Rejected` if it is several."""
    if isinstance(value, Mapping | list):
        which = f", and {key} is none" if key else ""
        raise rejected(
            "invalid-argument", f"{where}: each value of {name} must be one text{which}",
            field=f"$.{name}", found=type(value).__name__,
            next=f"{_MERGES} is not read: write what it stands for" if key == _MERGES
            else f"write it in one text, as --{name.replace('_', '-')} has it; moorage submit --help"
            if isinstance(value, Mapping) and not key and name != COMMAND
            else "write braces and brackets in quotes, as '{item}'",
        )  # fmt: skip
    return {True: "true", False: "false"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def _yaml_of(text: bytes, where: str) -> tuple[Any, Any]:
    """Return what YAML says, and the same with each scalar as it is written, so that `no` is no false."""
    from moorage.schemas.optional import optional

    yaml = optional("yaml", distribution="pyyaml")
    try:
        _name_each_once(yaml.compose(text, yaml.SafeLoader), where)
        return yaml.safe_load(text), yaml.load(text, yaml.BaseLoader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise _is_not("YAML", where, " ".join(str(error).split())) from None


def _name_each_once(node: Any, where: str) -> None:
    """Raise `Rejected` for a key that a mapping has twice: YAML would forget the first."""
    pairs = node.value if node is not None and node.id == "mapping" else []
    for at, (key, value) in enumerate(pairs):
        if any(other.value == key.value for other, _ in pairs[:at]):
            line = key.start_mark.line + 1
            why = f"{where}: line {line} has {key.value} for the second time"
            raise rejected("invalid-argument", why, field=f"$.{key.value}", next="put both into one")
        _name_each_once(value, where)


def _toml_of(text: bytes, where: str) -> Any:
    import tomllib

    try:
        return tomllib.loads(text.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _is_not("TOML", where, str(error)) from None


def _is_not(what: str, where: str, why: str) -> Rejected:
    return rejected("invalid-argument", f"{where} is not {what}: {why}", next=_EXAMPLE)


def _requests_in(content: Any, where: str) -> dict[str, Any] | list[dict[str, Any]]:
    bodies = content if isinstance(content, list) else [content]
    if not bodies or not all(isinstance(body, dict) for body in bodies):
        raise rejected(
            "invalid-argument",
            f"{where} must hold requests alone, and at least one",
            next='a request is an object as {"run": {"argv": ["nvidia-smi"]}}, or an array of them, or one a line',
        )
    requests: dict[str, Any] | list[dict[str, Any]] = content
    return requests


def _pairs_once(where: str, pairs: list[tuple[str, Any]]) -> None:
    """Raise `Rejected` for a key that an object has twice: JSON's readers take the last."""
    seen = set[str]()
    for key, _ in pairs:
        if key in seen:
            why = f"{where} has {shown(key[:80])} twice in one object"
            raise rejected("invalid-argument", why, field=f"$.{key[:80]}", next="put both into one")
        seen.add(key)


def _json_of(text: bytes, where: str) -> Any:
    """Return one JSON value, or a list of values if there is one in each line. Raises `Rejected`."""
    import json

    def read(text: bytes, at: str) -> Any:
        value = msgspec.json.decode(text)
        with contextlib.suppress(ValueError, RecursionError):  # where the two differ, msgspec has the word
            json.loads(text, object_pairs_hook=partial(_pairs_once, f"{at}{where}"))
        return value

    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    try:
        return read(text, "")
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        wrong: Exception = error
    at, values = "", []
    for number, line in lines if len(lines) > 1 else ():
        try:
            values.append(read(line, f"line {number} of "))
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            if not values:  # its first line is no value: it was not meant to be one a line
                break
            wrong, at = error, f"line {number} of "
            break
    else:
        if values:
            return values
    raise rejected(
        "invalid-argument",
        f"{at}{where} is not JSON: {wrong}",
        next='a request is an object like {"run": {"argv": ["nvidia-smi"]}}; a file for people is a .yaml or a .toml',
    )
