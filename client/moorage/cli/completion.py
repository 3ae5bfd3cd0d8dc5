"""`moorage completion`: a shell's script, made from the table of verbs.

Verbs and options stand in the script; only where a job or a worker is due does a Tab ask for those that there are.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Annotated, Final, Literal

from moorage.cli.framework.arguments import Argument, Parameter, arguments_of
from moorage.cli.framework.console import print_out
from moorage.cli.verbs import Verb, all_verbs, below

_BASH: Final = """\
_moorage() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[*]:1:COMP_CWORD-1}}"
  local words="" options="" asks="" found
  COMPREPLY=()
  [[ " $before " != *" -- "* ]] || return  # the job's command
  case "$before " in
{choices}
    " ") words={verbs} ;;
{options}
  esac
  if [[ $current == -* ]]; then words=$options; elif [[ -n $asks ]]; then words+=" $(moorage $asks 2>/dev/null)"; fi
  while IFS= read -r found; do COMPREPLY+=("$found"); done < <(compgen -W "$words" -- "$current")
}}
complete -o default -F _moorage moorage"""

#: how long a Tab waits for the scheduler
ASKS_FOR: Final = "1s"

_ZSH: Final = """\
#compdef moorage
_moorage() {{
  local -a found options
  local before="${{words[2,CURRENT-1]}}" asks=""
  [[ " $before " != *" -- "* ]] || {{ _files; return }}  # the job's command
  case "$before " in
{choices}
    " ") found=({verbs}) ;;
{options}
  esac
  if [[ $words[CURRENT] == -* ]]; then found=($options)
  elif [[ -n $asks ]]; then found+=(${{(f)"$(moorage ${{=asks}} 2>/dev/null)"}}); fi
  _describe moorage found || _files
}}
compdef _moorage moorage"""


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], Parameter(help="Which shell reads it.")],
    /,
) -> int:
    """Print a script that completes verbs, options, jobs and workers in your shell; it asks the scheduler for jobs and
    workers when you press Tab."""
    print_out({"bash": _bash, "zsh": _zsh, "fish": _fish}[shell]())
    return 0


def _firsts() -> dict[str, str]:
    """Return the first words of all verbs, each with the description of the last verb that begins with it."""
    return {name.partition(" ")[0]: verb.help for name, verb in all_verbs().items()}


def _options(verb: Verb) -> Iterator[tuple[str, Argument]]:
    for one in arguments_of(verb.load()):
        for name in one.names:
            yield name, one


def _asks(verb: Verb) -> str:
    """Return the arguments of `moorage` that list what the verb's words may be; "" if no verb lists them."""
    of_words = (one.parameter.lists for one in arguments_of(verb.load()) if not one.is_option)
    return _timed(next(filter(None, of_words), ""))


def _timed(lists: str) -> str:
    return f"{lists} --timeout {ASKS_FOR}" if lists else ""


def _asked_of_options(verb: Verb) -> Iterator[tuple[str, str]]:
    """Yield each option whose value is listed by a verb, with the arguments of `moorage` that list it."""
    for name, one in _options(verb):
        if one.parameter.lists:
            yield name, _timed(one.parameter.lists)


def _choices(verb: Verb) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each option of the verb with its few possible values; "" stands for the verb's own words."""
    for one in arguments_of(verb.load()):
        if one.choices:
            for name in one.names or ("",):
                yield name, tuple(map(str, one.choices))
    if " " not in verb.name and below(verb.name):
        yield "", tuple(other.name.partition(" ")[2] for other in below(verb.name))


def _cases(quoted: bool) -> tuple[str, str]:
    """Return the branches of the shell's `case`: the values of options that have few, and the options of each verb."""
    choices, options = [], []
    for verb in all_verbs().values():
        for option, values in _choices(verb):
            pattern = f'"{verb.name} "*"{option} "' if option else f'"{verb.name} "'
            choices.append(f"    {pattern}) {_words([(value, '') for value in values], quoted)} ;;")
        choices += [
            f'    "{verb.name} "*"{option} ") asks={shlex.quote(lists)} ;;' for option, lists in _asked_of_options(verb)
        ]
        rows = [(name, one.parameter.help) for name, one in _options(verb)]
        asks = f" asks={shlex.quote(_asks(verb))}" if _asks(verb) else ""
        options.append(f'    "{verb.name} "*) {_words(rows, quoted, "options")}{asks} ;;')
    for first in _firsts():
        if first not in all_verbs():
            rows = [(verb.name.partition(" ")[2], verb.help) for verb in below(first)]
            choices.append(f'    "{first} ") {_words(rows, quoted)} ;;')
    return "\n".join(choices), "\n".join(options)


def _words(rows: list[tuple[str, str]], quoted: bool, into: str = "") -> str:
    if quoted:
        return f"{into or 'found'}=({_described(rows)})"
    return f"{into or 'words'}={shlex.quote(' '.join(name for name, _ in rows))}"


def _described(rows: list[tuple[str, str]]) -> str:
    return " ".join(shlex.quote(name + (":" + about.replace(":", r"\:") if about else "")) for name, about in rows)


def _bash() -> str:
    choices, options = _cases(quoted=False)
    return _BASH.format(choices=choices, options=options, verbs=shlex.quote(" ".join(_firsts())))


def _zsh() -> str:
    choices, options = _cases(quoted=True)
    return _ZSH.format(choices=choices, options=options, verbs=_described(list(_firsts().items())))


def _fish() -> str:
    lines = [
        f"complete -c moorage -n __fish_use_subcommand -f -a {first} -d {shlex.quote(about)}"
        for first, about in _firsts().items()
    ]
    for verb in all_verbs().values():
        seen = " ".join(f"; and __fish_seen_subcommand_from {word}" for word in verb.name.split())[6:]
        seen += "; and not contains -- -- (commandline -opc)"  # behind it stands the job's command
        for name, one in _options(verb):
            spelled = f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
            asked = f"(moorage {shlex.join(_timed(one.parameter.lists).split())} 2>/dev/null)"
            value = (
                f" -xa {shlex.quote(asked)}"
                if one.parameter.lists
                else ""
                if one.is_switch
                else f" -xa {shlex.quote(' '.join(map(str, one.choices)))}"
                if one.choices
                else " -r"
            )
            about = shlex.quote(one.parameter.help)
            lines.append(f"complete -c moorage -n {shlex.quote(seen)} {spelled}{value} -d {about}")
        if _asks(verb):
            asked = f"(moorage {shlex.join(_asks(verb).split())} 2>/dev/null)"
            lines.append(f"complete -c moorage -n {shlex.quote(seen)} -f -a {shlex.quote(asked)}")
        for option, values in _choices(verb):
            if not option:
                lines.append(f"complete -c moorage -n {shlex.quote(seen)} -f -a {shlex.quote(' '.join(values))}")
    for first in _firsts():
        if first not in all_verbs():
            words = " ".join(verb.name.partition(" ")[2] for verb in below(first))
            seen = f"__fish_seen_subcommand_from {first}"
            lines.append(f"complete -c moorage -n {shlex.quote(seen)} -f -a {shlex.quote(words)}")
    return "\n".join(lines)
