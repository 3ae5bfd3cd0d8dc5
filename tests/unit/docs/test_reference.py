"""The reference is whole: every verb, code, role and public name has its entry, every page its place on the site."""

from __future__ import annotations

import re
from typing import Final

import msgspec
import pytest

import moorage.client
from moorage.cli.framework import exit_codes
from moorage.cli.framework.codes import ends, error_codes, reasons
from moorage.cli.verbs import VERBS
from moorage.client.errors import ClientError
from moorage.client.fields import FIELDS
from moorage.client.steps import Step
from moorage.schemas import frames
from moorage.schemas.job import STATES
from moorage.schemas.roles import ROLES, names
from moorage.schemas.subjects import MAY_EXEC, Subjects
from moorage.worker.settings import WorkerSettings
from tests.unit.docs.markdown import DOCS
from tools import python_page, reference_pages

PAGES: Final = [path for path in DOCS.rglob("*.md") if not path.name.endswith(".head.md")]
SITE: Final = (DOCS.parent / "mkdocs.yml").read_text()


def reference(name: str) -> str:
    return (DOCS / "reference" / f"{name}.md").read_text()


@pytest.mark.parametrize("verb", [verb.name for verbs in VERBS.values() for verb in verbs])
def test_every_verb_has_its_help_with_an_example(verb: str) -> None:
    text = reference("cli").partition(f"\n### moorage {verb}\n")[2].partition("\n### ")[0]
    assert "sage: moorage" in text
    assert f"moorage {verb}" in text.partition("xamples:")[2] or verb in ("demo",)


def test_every_code_and_reason_has_a_row() -> None:
    rows = set(re.findall(r"^\| `([\w-]+)` \|", reference("errors"), re.MULTILINE))
    assert rows == set(error_codes()) | set(reasons()) | set(ends())


def test_every_state_has_a_meaning() -> None:
    assert list(reference_pages.STATES) == list(STATES)


def test_every_exit_code_is_explained() -> None:
    codes = {code for name, code in vars(exit_codes).items() if name.startswith("EXIT_") and isinstance(code, int)}
    assert codes | {0} == set(exit_codes.EXIT_CODES)
    assert all(f"| {code} | {text} |\n" in reference("cli") for code, text in exit_codes.EXIT_CODES.items())


def test_every_subject_is_somebodys_to_write_and_to_hear() -> None:
    text = reference("permissions")
    known = {word for _, words in ROLES.values() for word in words} | {MAY_EXEC}
    for row in Subjects().table():
        assert f"| publishes | `{row.subject}` |" in text, row.subject
        assert f"| subscribes | `{row.subject}` |" in text, row.subject
        assert names(row.writes) | names(row.reads) <= known, row


def test_every_frame_is_on_the_protocol_page() -> None:
    page = (DOCS / "protocol.md").read_text()
    for name, kind in vars(frames).items():
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__struct_config__.tag is not None:
            assert f"\n### {name}\n" in page, name


def _entry(name: str) -> str:
    """What the Python page says below this name, up to the next one."""
    return reference("python").partition(f"\n### {name}\n")[2].partition("\n### ")[0].partition("\n## ")[0]


def test_every_public_name_of_the_sdk_is_on_its_page_with_its_words_and_fields() -> None:
    text = reference("python")
    assert ":::" not in text, "what is only filled in when the site is built is missing on every other"
    for name in moorage.client.__all__:
        public, entry = getattr(moorage.client, name), _entry(name)
        words = (getattr(public, "__doc__", "") or "").split("\n")[0]
        if isinstance(public, type) and issubclass(public, Step | ClientError) and public not in (Step, ClientError):
            assert re.search(rf"^\| `{name}` \| .*{re.escape(words)}", text, re.MULTILINE), f"{name} has no row"
            assert getattr(public, "__struct_fields__", ()) in ((), Step.__struct_fields__), name
            continue
        assert entry.strip(), name
        if isinstance(public, type) and issubclass(public, msgspec.Struct):
            told = entry.partition("| property |")[0]
            rows = re.findall(r"^\| `(\w+)` \| [`\[]", told, re.MULTILINE)
            listed = re.findall(r"`(\w+)`\s\(", told.partition("Fields: ")[2])
            assert {*rows, *listed} == {field.name for field in msgspec.structs.fields(public)}, name
        assert words in entry or name in python_page.TWINS, name


def test_what_drivers_and_rankers_are_made_of_is_on_a_page_of_its_own() -> None:
    page = reference("extending")
    for module, members in python_page.EXTENDING_API.items():
        for name in members:
            assert f"\n## {name}\n\n`from {module} import {name}`\n" in page
    assert "\n### Driver.start\n" in page


def test_what_submit_takes_by_name_is_a_table() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", _entry(python_page.SUBMIT_TAKES), re.MULTILINE)
    assert set(rows) == FIELDS
    assert "| `retries` | `int` | `0` | " in _entry(python_page.SUBMIT_TAKES)


def test_what_only_moorage_calls_is_not_on_the_python_page() -> None:
    text = reference("python")
    for name, members in python_page.INTERNAL.items():
        public = getattr(moorage.client, name, WorkerSettings)
        for member in members:
            assert hasattr(public, member), f"{name}.{member} is gone"
            assert f"#### {name}.{member}\n" not in text
            assert f"| `{member}` |" not in _entry(name).partition("| property |")[2], f"{name}.{member}"


def test_every_page_has_its_place_on_the_site_and_every_place_a_page() -> None:
    listed = re.findall(r"([\w./-]+\.md)$", SITE.partition("\nnav:\n")[2], re.MULTILINE)
    pages = {str(path.relative_to(DOCS)) for path in PAGES}
    assert pages - set(listed) == set(), "name these below `nav` in mkdocs.yml"
    assert sorted(listed) == sorted(pages)


def test_the_first_page_names_every_how_to_in_the_order_of_the_site() -> None:
    listed = re.findall(r"how-to/[\w-]+\.md", SITE)
    named = re.findall(r"^- \[.+\]\((how-to/[\w-]+\.md)\)$", (DOCS / "index.md").read_text(), re.MULTILINE)
    assert named == listed, "name it in docs/index.md, too"


def test_every_link_between_pages_leads_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!http|#)([^)#\s]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
