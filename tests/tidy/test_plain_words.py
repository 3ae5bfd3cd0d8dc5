"""Docstrings of the rooms that were rewritten in plain words keep them: constructions that were removed stay out."""

from __future__ import annotations

import ast
import re
import tokenize
from typing import Final

from tests.tidy.test_tidy import ROOT, nodes, sources

#: the rooms that were rewritten; add the next one once it has none of these
ROOMS_DONE: Final = ("schemas", "system", "bus", "client", "cli", "worker")
#: words for actors without a name: a docstring names the tenant, the operator, the client, the process
BANNED: Final = re.compile(r"\b(nobody|no one|somebody|someone|whoever|whomever|whom|in vain|let be)\b", re.IGNORECASE)
#: how a function's docstring does not begin: it says `Return whether …`
BEGINS: Final = "Whether "
#: files with a help text that has such a word still. Take away from it; add nothing to it
KEPT: Final = {"fleet/audit.py", "fleet/dlq.py", "study/api.py"}


def test_docstrings_keep_to_plain_words() -> None:
    found, read, kept = [], 0, set()
    for file in (file for room in ROOMS_DONE for file in sources(room)):
        for node in nodes(file):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            text = ast.get_docstring(node, clean=False) or ""
            read += bool(text)
            words = [match[0] for match in BANNED.finditer(text)]
            acts = not isinstance(node, ast.Module | ast.ClassDef) and "property" not in "".join(
                map(ast.dump, node.decorator_list)
            )
            if acts and text.startswith(BEGINS):
                words.append(BEGINS)
            where = "/".join(file.parts[-2:])
            if words and where in KEPT:
                kept.add(where)
            elif words:
                found.append(f"{file.relative_to(ROOT)}:{node.body[0].lineno}: {words}")
    assert found == []
    assert kept == KEPT
    assert read > 1000, "no docstrings were read"


#: rooms whose comments, and docstrings of fields, were read as well
STRICT: Final = ("worker",)
#: constructions that were found again and again there: a pronoun or a verb in place of the noun that is meant
DIALECT: Final = re.compile(
    r"\b(so many|kin|in place of (that|these|those|it)|agent before (this|that)|has it no more|goes? round"
    r"|what is (said|told)|(is|are|was) told|tells? (of|whether|what)|says? of itself|of before"
    r"|(one|that|those) that is none"
    r"|(made|read|written|opened|joining|sent|begins) anew|whose it is|who it is|look again|let go of)\b"
    r"|^(As `|Who |Whom |Those |The same\b)|\bPure\."
)


def test_comments_keep_to_plain_words() -> None:
    found, read = [], 0
    for file in (file for room in STRICT for file in sources(room)):
        with tokenize.open(file) as lines:
            comments = [
                (each.start[0], each.string.lstrip("#: "))
                for each in tokenize.generate_tokens(lines.readline)
                if each.type == tokenize.COMMENT
            ]
        texts = [
            (node.lineno, node.value.value)
            for node in nodes(file)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        ]
        for line, text in comments + texts:
            read += 1
            words = [match[0] for pattern in (BANNED, DIALECT) for match in pattern.finditer(text)]
            if words:
                found.append(f"{file.relative_to(ROOT)}:{line}: {words}")
    assert found == []
    assert read > 2000, "no comments were read"
