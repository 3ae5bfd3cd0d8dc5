"""Makes what `--help` and `moorage help` print, from the table of verbs and from each verb's signature."""

from __future__ import annotations

import inspect
import shutil
import sys
import textwrap
from collections.abc import Iterable
from typing import Annotated, Final

from moorage.cli.examples import EXAMPLES
from moorage.cli.framework.arguments import Argument, Parameter, arguments_of
from moorage.cli.framework.console import paint, print_out
from moorage.cli.topics import TOPICS
from moorage.cli.verbs import LOOKUP, VERBS, Verb, all_verbs, below, find
from moorage.client.errors import not_found
from moorage.schemas.nearest import nearest

WIDTH_MAX: Final = 100
LEFT_MAX: Final = 26

FIRST_EXAMPLES: Final = (
    "moorage up --simulate 4x8xH100",
    "moorage run --gpu 2xH100 -- nvidia-smi -L",
    "moorage explain last",
)

#: of verbs of two words, so many stand in the line of the first help
FOLDED_SHOWN_MAX: Final = 6


def help(
    word: Annotated[str | None, Parameter(help="A verb, or a topic; without it, all verbs and topics.")] = None,
    of: Annotated[str | None, Parameter(help="The second word of a verb that has two.")] = None,
    /,
) -> int:
    """Show every verb, or the help of one verb, or a topic."""
    if word is None:
        print_out(whole_help())
        return 0
    verb, _ = find([word, *([of] if of else [])])
    if verb is not None:
        print_out(verb_help(verb))
    elif below(word):
        print_out(help_below(word))
    elif word in TOPICS:
        print_out(TOPICS[word].text())
    else:
        from moorage.cli.framework.console import fail
        from moorage.cli.habits import OURS

        near = OURS.get(word) or nearest(word, [*all_verbs(), *TOPICS])
        fix = f"moorage help {near}" if near else "moorage help"
        return fail(not_found(f"no verb and no topic {word!r}", found=word, next=fix))
    return 0


def first_help() -> str:
    """Return the help that a new user sees: at most `FIRST_HELP_MAX` verbs in three groups."""
    lines = ["GPUs for services that talk NATS.", "", _usage_line("moorage VERB …")]
    lines += ["", *_examples(FIRST_EXAMPLES)]
    for title, verbs in VERBS.items():
        if title != LOOKUP:
            lines += ["", *_section(title, [(name, text) for name, text in _folded(verbs)])]
    lines += ["", "moorage VERB --help has its options and examples; moorage help has the rest."]
    return "\n".join(lines)


def whole_help() -> str:
    """Return every verb and every topic."""
    lines = ["GPUs for services that talk NATS."]
    for title, verbs in VERBS.items():
        lines += ["", *_section(title, [(verb.name, verb.help) for verb in verbs])]
    lines += ["", *_section("Topics (moorage help TOPIC)", [(name, topic.about) for name, topic in TOPICS.items()])]
    return "\n".join(lines)


def help_below(word: str) -> str:
    """Return the help of the verbs that begin with this word."""
    rows = [(verb.name, verb.help) for verb in below(word)]
    return "\n".join([_usage_line(f"moorage {word} VERB …"), "", *_section("Verbs", rows)])


def _folded(verbs: Iterable[Verb]) -> Iterable[tuple[str, str]]:
    """Yield the verbs with their descriptions; verbs of two words share a line if their first word is the same."""
    seen: set[str] = set()
    for verb in verbs:
        first, _, second = verb.name.partition(" ")
        if not second:
            yield verb.name, verb.help
        elif first not in seen:
            seen.add(first)
            names = [one.name.partition(" ")[2] for one in below(first)]
            more = len(names) - FOLDED_SHOWN_MAX
            yield first, ", ".join(names[:FOLDED_SHOWN_MAX]) + (f", {more} more." if more > 0 else ".")


def verb_help(verb: Verb) -> str:
    """Return a verb's whole help: what it does, how it is written, examples, options."""
    act = verb.load()
    arguments = arguments_of(act)
    first, _, more = (inspect.getdoc(act) or verb.help).partition("\n\n")
    lines = [*_wrapped(first), "", _usage_line(f"moorage {verb.name}{_shape(arguments)}")]
    for paragraph in more.split("\n\n"):
        if paragraph:
            lines += ["", *_wrapped(paragraph)]
    if verb.name in EXAMPLES:
        lines += ["", *_examples(EXAMPLES[verb.name])]
    words = [(one.value, one.parameter.help) for one in arguments if not one.is_option]
    sections = [("Words", words)] if words else []
    groups = dict.fromkeys(one.group for one in arguments if one.is_option)
    for group in sorted(groups, key=lambda name: (name == "Common", list(groups).index(name))):
        rows = [(_left(one), _right(one)) for one in arguments if one.is_option and one.group == group]
        sections.append((group or "Options", rows))
    for title, rows in sections:
        lines += ["", *_section(title, rows)]
    return "\n".join(lines)


def _shape(arguments: Iterable[Argument]) -> str:
    text = " [options]" if any(one.is_option for one in arguments) else ""
    for one in arguments:
        if one.parameter.command:
            text += " -- COMMAND…"
        elif not one.is_option:
            word = one.value + ("…" if one.many else "")
            text += f" {word}" if one.required or one.many else f" [{word}]"
    return text


def _left(one: Argument) -> str:
    names = ", ".join(sorted(one.names, key=len))
    if one.is_switch:
        return names
    return f"{names} [{one.value}]" if one.parameter.alone is not None else f"{names} {one.value}"


def _right(one: Argument) -> str:
    text = one.parameter.help
    if one.many:
        text += " Repeatable."
    if one.default not in (None, False, ""):
        text += f" Default: {one.default}."
    return text


def _usage_line(text: str) -> str:
    return f"{paint('usage:', 'dim', sys.stdout)} {text}"


def _examples(lines: Iterable[str]) -> list[str]:
    return [paint("Examples:", "bold", sys.stdout), *(f"  {line}" for line in lines)]


def _section(title: str, rows: Iterable[tuple[str, str]]) -> list[str]:
    rows = list(rows)
    width = min(max(len(left) for left, _ in rows), LEFT_MAX)
    lines = [paint(f"{title}:", "bold", sys.stdout)]
    for left, right in rows:
        first, *rest = textwrap.wrap(right, max(_columns() - width - 4, 20)) or [""]
        if len(left) > width:
            lines.append(f"  {left}")
            left = ""
        lines.append(f"  {left.ljust(width)}  {first}".rstrip())
        lines += [" " * (width + 4) + line for line in rest]
    return lines


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), _columns())


def _columns() -> int:
    return min(shutil.get_terminal_size().columns, WIDTH_MAX)
