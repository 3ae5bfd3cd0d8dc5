"""The templates of the pages: a file of `templates` a page, a macro of it a part. They escape whatever they are given,
and fail on a name that nobody gave them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from moorage.cli.framework.render import utc
from moorage.client.durations import age
from moorage.schemas.units import many


class Part(NamedTuple):
    """A piece of a page with an id of its own, which a browser gets again when its `key` has changed.

    `inside` says that another part contains it.
    """

    id: str
    html: Markup
    key: str
    inside: bool = False


def link(*path: str, **query: str) -> str:
    """Return the address of a page of this server."""
    asked = urlencode({name: value for name, value in query.items() if value})
    return "/" + "/".join(quote(each, safe="") for each in path) + (f"?{asked}" if asked else "")


#: classes of tenants' colours in the style sheet, t0 to t7
COLOURS: Final = 8


def colours(tenants: Iterable[str]) -> dict[str, str]:
    """Return the class of each tenant's colour: no two have one while there are enough. A tenant that shares none with
    others has its own in every browser."""
    found: dict[str, str] = {}
    for tenant in sorted(set(tenants)):
        own = sum(tenant.encode()) % COLOURS
        free = (each for at in range(COLOURS) if (each := f"t{(own + at) % COLOURS}") not in found.values())
        found[tenant] = next(free, f"t{own}")
    return found


_TEMPLATES: Final = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.globals |= {"link": link, "many": many}
_TEMPLATES.filters |= {"age": age, "utc": utc}


def drawn(of: str, part: str, /, **given: Any) -> Markup:
    """Return what the macro `part` of the page's template makes of what it is given."""
    return Markup(getattr(_TEMPLATES.get_template(f"{of}.html").module, part)(**given).strip())


def part(of: str, name: str, /, **given: Any) -> Part:
    """Return a part of a page, which is sent again when anything in it has changed."""
    html = drawn(of, name, **given)
    return Part(name, html, html)


def document(**given: Any) -> Markup:
    """Return a whole page."""
    return Markup(_TEMPLATES.get_template("page.html").render(**given))
