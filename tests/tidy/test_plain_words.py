"""Docstrings of the rooms that were rewritten in plain words keep them: constructions that were removed stay out."""

from __future__ import annotations

import ast
import re
from typing import Final

from tests.tidy.test_tidy import ROOT, nodes, sources

#: the rooms that were rewritten; add the next one once it has none of these
ROOMS_DONE: Final = ("schemas", "system", "bus", "client", "cli")
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
