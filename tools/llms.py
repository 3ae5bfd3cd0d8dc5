"""Makes `docs/llms.txt` from the pages: what a program that reads the docs for somebody begins with (llmstxt.org).

Each page of the site but the records of decisions is in it, in the site's order, with its first sentence.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).resolve().parents[1]
#: comments, and blocks of code
_ASIDES: Final = re.compile(r"<!--.*?-->|^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
_LINK: Final = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_SENTENCE: Final = re.compile(r".+?\.(?=\s|$)", re.DOTALL)
#: the decisions' index is enough
_DECISION: Final = re.compile(r"decisions/\d")
#: how paragraphs begin that do not say what a page is about
_ASIDE: Final = ("#", "|", "-", "`" * 3, "!", "1.", "<", "To try it here", "Status")


def llms() -> str:
    """Return the file."""
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    title, about = _read(ROOT / "docs" / "index.md")
    lines = [f"# {title}", "", f"> {about}", ""]
    for entry in site["nav"]:
        ((name, below),) = entry.items()
        if not isinstance(below, str):
            lines += [f"## {name}", "", *_listed(below), ""]
    return "\n".join(lines)


def _listed(entries: list[Any]) -> list[str]:
    found = []
    for entry in entries:
        if isinstance(entry, str) and not _DECISION.match(entry):
            title, about = _read(ROOT / "docs" / entry)
            found.append(f"- [{title}]({entry})" + (f": {about}" if about else ""))
        elif not isinstance(entry, str):
            ((_, below),) = entry.items()
            found += _listed([below] if isinstance(below, str) else below)
    return found


def _read(path: Path) -> tuple[str, str]:
    """Return a page's title and the first sentence of its text, or ""."""
    text = _ASIDES.sub("", path.read_text())
    title = re.search(r"^# (.+)$", text, re.MULTILINE)
    if title is None:
        raise ValueError(f"{path.name} has no title")
    for paragraph in re.split(r"\n{2,}", text[title.end() :]):
        words = " ".join(_LINK.sub(r"\1", paragraph).replace("**", "").split())
        sentence = _SENTENCE.match(words)
        if sentence is not None and not words.startswith(_ASIDE):
            return title[1], sentence[0]
    return title[1], ""
