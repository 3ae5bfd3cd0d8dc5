"""What others wrote is shown and not obeyed: in answers, reasons and logs as at the command."""

from __future__ import annotations

import io
import logging

import pytest

from moorage.schemas.errors import Refused, problem, refuse
from moorage.schemas.exit_words import exit_words
from moorage.schemas.printable import in_one_line, shortened, shown
from moorage.system.logged import LOG_FORMAT, PrintableFormatter

EVIL = "\x1b[2J\x9b1A\u202eH100\r\n2026-11-21 00:00:00,000 ERROR   moorage.ledger the ledger is lost"
CONTROLS = set("\x1b\x9b\u202e\r")


@pytest.mark.parametrize("text", ["", "plain", "Größe · 東京", "two\n\tlines"])
def test_what_does_no_harm_stays_as_it_is(text: str) -> None:
    assert shown(text) == text


def test_a_line_stays_one() -> None:
    assert in_one_line("a\tb\nc\x85d\u2028e") == "a\\tb\\nc\\x85d\\u2028e"
    assert not CONTROLS & set(shown(EVIL))
    assert shown(EVIL).count("\n") == 1


def test_an_answer_quotes_nothing_that_a_terminal_obeys() -> None:
    told = problem("invalid-argument", f"no verb {EVIL}", found=EVIL, field=f"$.labels.{EVIL}")
    for text in (told.message, told.found, told.field):
        assert "\\x1b[2J" in text
        assert not CONTROLS & set(text)
    assert "\n" not in told.found + told.field
    assert not CONTROLS & set(str(refuse("unknown-verb", EVIL)))


def test_an_entry_of_a_log_is_one_line() -> None:
    stream = io.StringIO()
    handler, log = logging.StreamHandler(stream), logging.Logger("moorage.test")
    handler.setFormatter(PrintableFormatter(LOG_FORMAT))
    log.addHandler(handler)
    log.warning("%s wants its answer on %s", EVIL, "x")
    assert stream.getvalue().count("\n") == 1
    assert "\\n2026-11-21" in stream.getvalue()
    try:
        raise Refused(problem("internal", "x")) from ValueError(EVIL)
    except Refused:
        log.exception("a frame on %s could not be handled", EVIL)
    assert not CONTROLS & set(stream.getvalue())
    assert "Traceback" in stream.getvalue()


@pytest.mark.parametrize("most", [1, 2, 10, 200])
def test_a_long_text_keeps_its_beginning_and_its_end(most: int) -> None:
    text = "no program python in PATH " + "/opt/bin:" * 40 + "; use sh -c"
    cut = shortened(text, most)
    assert len(cut) == most
    head, mark, tail = cut.partition("…")
    assert (mark, text.startswith(head), text.endswith(tail)) == ("…", True, True)
    assert shortened(text, len(text)) == text


@pytest.mark.parametrize(
    ("code", "words"),
    [(0, "with code 0"), (139, "with code 139"), (-11, "by signal 11 (SIGSEGV)"), (-33, "by signal 33")],
)
def test_an_end_by_a_signal_reads_unlike_a_code_of_the_same_number(code: int, words: str) -> None:
    assert exit_words(code) == words
