"""Docstrings of the rooms that were rewritten in plain words keep them: constructions that were removed stay out."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.tidy.test_tidy import ROOT, nodes, sources

#: the rooms that were rewritten; add the next one once it has none of these
ROOMS_DONE: Final = ("schemas", "system", "bus", "client", "cli", "scheduler", "worker")
#: words for actors without a name: a docstring names the tenant, the operator, the client, the process
BANNED: Final = re.compile(r"\b(nobody|no one|somebody|someone|whoever|whomever|whom|in vain|let be)\b", re.IGNORECASE)
#: how a function's docstring does not begin: it says `Return whether …`
BEGINS: Final = "Whether "
#: rooms whose comments are read too, and that keep to `FIELD_WORDS` and `DIALECT` as well
ROOMS_WITH_COMMENTS: Final = ("scheduler", "worker", "client")
#: constructions that were found again and again there. The words of the field take their place: a *term* of a leader,
#: *reserved* or *excluded* hosts, to *scan* or *check*, an *effective priority*, *backfill*, *overdue*. A name in
#: backticks is not meant
FIELD_WORDS: Final = re.compile(
    r"(?<![`\w./])reigns?(?![`\w])|\b(held back|closed to|looked at|looks? (at|anew)|barred|out of patience|by and by"
    r"|as ever|in hand|of late|counts as by|filled in|fills? in|set apart|be it|so to speak|goes by itself"
    r"|what is left of|who (is|are|waits?|goes|asks?|comes?|runs?)|those who)\b",
    re.IGNORECASE,
)
#: constructions that were found again and again there: a pronoun or a verb in place of the noun that is meant
DIALECT: Final = re.compile(
    r"\b(so many|kin|in place of (that|these|those|it)|agent before (this|that)|has it no more|goes? round"
    r"|what is (said|told)|(is|are|was) told|tells? (of|whether|what)|says? of itself|of before"
    r"|(one|that|those) that is none"
    r"|whose it is|who it is|look again|let go of)\b"
    r"|(?<![-\w])anew\b|\bRaises [^.]*\bfor what\b|^(As `|Who |Whom |Those |The same\b)|\bPure\."
)
#: how a function's docstring does not begin: a verb says what it does or returns
SAYS_WHAT_IT_DOES: Final = re.compile(r"(What|How|Who|Whom|Those|Whether|Why|When|As|Of|It|Its|That|None|Nothing)\b")


def texts(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the docstrings and comments of a file, each with its line."""
    for node in nodes(file):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield getattr(node, "lineno", 1), ast.get_docstring(node, clean=False) or ""
    for token in tokenize.generate_tokens(io.StringIO(file.read_text()).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def is_property(node: ast.AST) -> bool:
    return "property" in "".join(map(ast.dump, getattr(node, "decorator_list", ())))


def test_comments_keep_to_plain_words() -> None:
    found, read = [], 0
    for file in (file for room in ROOMS_WITH_COMMENTS for file in sources(room)):
        for line, text in texts(file):
            read += bool(text)
            words = [match[0] for banned in (BANNED, FIELD_WORDS, DIALECT) for match in banned.finditer(text)]
            if words:
                found.append(f"{file.relative_to(ROOT)}:{line}: {words}")
    assert found == []
    assert read > 2000, "no comments were read"


def test_docstrings_of_functions_begin_with_what_they_do() -> None:
    found, read = [], 0
    for file in (file for room in ROOMS_DONE for file in sources(room)):
        for node in nodes(file):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_property(node):
                continue
            text = ast.get_docstring(node, clean=False) or ""
            read += bool(text)
            if SAYS_WHAT_IT_DOES.match(text):
                found.append(f"{file.relative_to(ROOT)}:{node.lineno}: {text.splitlines()[0]}")
    assert found == []
    assert read > 2000, "no docstrings were read"


def test_docstrings_keep_to_plain_words() -> None:
    found, read = [], 0
    for file in (file for room in ROOMS_DONE for file in sources(room)):
        for node in nodes(file):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            text = ast.get_docstring(node, clean=False) or ""
            read += bool(text)
            words = [match[0] for match in BANNED.finditer(text)]
            acts = not isinstance(node, ast.Module | ast.ClassDef) and not is_property(node)
            if acts and text.startswith(BEGINS):
                words.append(BEGINS)
            if words:
                found.append(f"{file.relative_to(ROOT)}:{node.body[0].lineno}: {words}")
    assert found == []
    assert read > 1000, "no docstrings were read"
