"""Makes HTML in which every text is escaped, unless it is `Html` already; and the parts of a page, sent again alone."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import NamedTuple


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def text(value: object) -> Html:
    """Return a value as HTML."""
    return value if isinstance(value, Html) else Html(escape(str(value)))


def join(pieces: Iterable[object]) -> Html:
    """Return pieces behind one another."""
    return Html("".join(map(text, pieces)))


def tag(name: str, /, *inner: object, **attributes: object) -> Html:
    """Return an element. `class_` is written `class`, `data_x` `data-x`.

    An attribute that is None or False is left out, one that is True has no value.
    """
    said = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{escape(str(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return Html(f"<{name}{said}>{join(inner)}</{name}>")


class Part(NamedTuple):
    """A piece of a page with an id of its own, which a browser gets again when its `key` has changed.

    `inside` says that another part contains it.
    """

    id: str
    html: Html
    key: str
    inside: bool = False


def part(id: str, html: Html) -> Part:
    """Return a part that is sent again when anything in it has changed."""
    return Part(id, html, html)
