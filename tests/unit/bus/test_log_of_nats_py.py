"""What nats-py logs by itself: one line where a socket was gone, the traceback where anything else was wrong."""

from __future__ import annotations

import logging

import pytest

from moorage.bus import dialing
from moorage.system.logged import LOG_FORMAT, PrintableFormatter

assert dialing.DEAD_CLIENT, "imported for what it sets up"


@pytest.mark.parametrize(
    ("raised", "is_short"),
    [
        (RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed"), True),
        (ConnectionResetError("Connection lost"), True),
        (ValueError("not a size"), False),
    ],
)
def test_a_reader_whose_socket_was_gone_has_one_line(
    raised: Exception, is_short: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A leader that had been stopped for 30 s wrote one traceback for each of its connections as it went on."""
    try:
        raise raised
    except Exception as error:
        logging.getLogger("nats.aio.client").error("nats: encountered error", exc_info=error)
    written = PrintableFormatter(LOG_FORMAT).format(caplog.records[0])
    assert str(raised) in written
    assert (len(written.splitlines()) == 1) == is_short, written
