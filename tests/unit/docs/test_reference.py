"""The reference agrees with the code where no generator holds it to that, and every page has its place on the site."""

from __future__ import annotations

import re
from typing import Final

import moorage.client
from moorage.cli.framework import exit_codes
from moorage.schemas.roles import ROLES, names
from moorage.schemas.subjects import MAY_EXEC, MAY_STORE, OF_POOLS, Subjects
from moorage.worker.settings import WorkerSettings
from tests.unit.docs.markdown import DOCS
from tools import python_page

PAGES: Final = [path for path in DOCS.rglob("*.md") if not path.name.endswith(".head.md")]
SITE: Final = (DOCS.parent / "mkdocs.yml").read_text()


def test_every_exit_code_is_explained() -> None:
    codes = {code for name, code in vars(exit_codes).items() if name.startswith("EXIT_") and isinstance(code, int)}
    assert codes | {0} == set(exit_codes.EXIT_CODES)


def test_every_subject_is_some_roles_to_write_and_to_hear() -> None:
    known = {word for _, words in ROLES.values() for word in words} | {MAY_EXEC, MAY_STORE, *OF_POOLS}
    for row in Subjects().table():
        assert names(row.writes) | names(row.reads) <= known, row


def test_names_that_the_python_page_leaves_out_exist() -> None:
    for name, members in python_page.INTERNAL.items():
        public = getattr(moorage.client, name, WorkerSettings)
        for member in members:
            assert hasattr(public, member), f"{name}.{member} is gone"


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
