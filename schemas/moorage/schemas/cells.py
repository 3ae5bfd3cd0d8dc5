"""One character for each GPU of a worker, as `fleet` frames and answers hold them; a digit is how many share it."""

from __future__ import annotations

from typing import Final

FREE: Final = "·"
LEASED: Final = "#"
#: free, and a frozen job waits for it: preemptible jobs alone get it
FROZEN: Final = "f"
#: sick or quarantined
SICK: Final = "!"
#: used by somebody else than moorage
FOREIGN: Final = "x"
NOT_LENT: Final = "-"
#: its worker is not there
LOST: Final = "?"
SHARERS_MAX: Final = 9

STATES: Final = {
    FREE: "free",
    LEASED: "leased",
    FROZEN: "frozen",
    SICK: "sick",
    FOREIGN: "foreign",
    NOT_LENT: "not-lent",
    LOST: "lost",
}
