"""The fenced blocks of a page of the docs, and what each asks of the test that runs it.

- `sh` is typed into a terminal of the page's own; `title="terminal 1"` names another one, whose command stays.
- `text` below it is what must then stand on that terminal, in this order; `…` stands for anything, and numbers that
  differ from run to run (ages, pids, ports, made-up ids) match any other of their kind.
- `python` is run; with a title, as `js` and `go`, it is the file of that name.
- `json` with the title `request` or the name of a frame is decoded, `toml` is read as settings.
- `<!-- not run: reason -->` above a block says why it stays unrun; the test counts them.
- `<!-- needs: node npm -->` anywhere names commands without which the page's test is skipped (in CI it then fails).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import msgspec

DOCS: Final = Path(__file__).resolve().parents[3] / "docs"
_BLOCK: Final = re.compile(
    r"(?:^ *<!-- not run: (?P<why>[^\n]+?) -->\n+)?"
    r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
_TITLE: Final = re.compile(r'title="([^"]+)"')
_NEEDS: Final = re.compile(r"^<!-- needs: ([\w. -]+) -->$", re.MULTILINE)


class Block(msgspec.Struct, frozen=True):
    """A fenced block. `kind` stands behind the fence; a title alone may follow it, or the site shows no block."""

    kind: str
    title: str
    body: str
    line: int
    not_run: str = ""


class Page(msgspec.Struct, frozen=True):
    name: str
    blocks: list[Block]
    needs: list[str]


def page(path: Path, text: str | None = None) -> Page:
    """Read a page of Markdown; with `text`, one that says so."""
    text = path.read_text() if text is None else text
    blocks = []
    for found in _BLOCK.finditer(text):
        info, indent = found["info"], found["indent"]
        title = _TITLE.search(info)
        kind = _TITLE.sub("", info).strip()
        body = "".join(line.removeprefix(indent) for line in found["body"].splitlines(keepends=True))
        line = text.count("\n", 0, found.start("info")) + 1
        blocks.append(Block(kind, title[1] if title else "", body, line, found["why"] or ""))
    needs = [word for words in _NEEDS.findall(text) for word in words.split()]
    return Page(str(path.relative_to(DOCS.parent)), blocks, needs)


def pages(folder: str) -> list[Path]:
    """The pages below a folder of the docs."""
    found = sorted((DOCS / folder).glob("*.md"))
    assert found, folder
    return found


# --------------------------------------------------------------------------------------------- output and expectation

_ESCAPE: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")
#: what differs from run to run: one alternative a kind, and what it may be instead
_VARYING: Final = {
    "age": (r"\b\d+(?:\.\d+)?(?:ms|s|m|h|d)(?:\d+[smh])?\b", r"\d+(?:\.\d+)?(?:ms|s|m|h|d)(?:\d+[smh])?"),
    "job": (r"\bj[0-9a-z]{14}\b", r"j[0-9a-z]{14}"),
    "uuid": (r"\bSIM-[0-9a-f-]+", r"SIM-[0-9a-f-]+"),
    "host": (r"(?<=\bon )sim-\d{4}\b", r"sim-\d{4}"),  # who joined first, of hosts that start at once
    "url": (r"nats://127\.0\.0\.1:\d+", r"nats://127\.0\.0\.1:\d+"),
    "number": (r"(?<=\bpid )\d+|(?<=\bledger )\d+|(?<=\brecord )\d+|(?<=\bepoch )\d+", r"\d+"),
    "json": (r'(?<="ledger":)\d+|(?<="time_ms":)\d+|(?<="fence":)\d+', r"\d+"),
    "any": (r"…", r".*"),
}
_VARIES: Final = re.compile("|".join(f"(?P<{name}>{pattern})" for name, (pattern, _) in _VARYING.items()))


def lines_of(output: str) -> list[str]:
    """What stood on the terminal, line by line, each state of a rewritten line for itself, blanks made one."""
    plain = _ESCAPE.sub("\n", output)
    return [text for line in re.split(r"[\r\n]+", plain) if (text := " ".join(line.split()))]


def _pattern(line: str) -> re.Pattern[str]:
    parts, at = [], 0
    for found in _VARIES.finditer(line):
        assert found.lastgroup is not None
        parts += [re.escape(line[at : found.start()]), _VARYING[found.lastgroup][1]]
        at = found.end()
    return re.compile("".join([*parts, re.escape(line[at:])]))


def first_missing(expected: str, output: str) -> str:
    """The first line of `expected` that does not stand in `output` below the one before it; "" where all do."""
    found = iter(lines_of(output))
    for line in lines_of(expected):
        wanted = _pattern(line)
        if line != "…" and not any(wanted.fullmatch(each) for each in found):
            return line
    return ""
