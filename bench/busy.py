"""A process that takes part of a processor and hears nothing: `busy.py SHARE`, from 0 to 1.

What any process beside a scheduler costs that, by its caches and its turns: what is measured beside one that follows
jobs is compared with it. Says `ready` once it runs, and runs until it is killed.
"""

from __future__ import annotations

import sys
import time

PERIOD_S = 0.003


def main() -> None:
    share = min(1.0, max(0.0, float(sys.argv[1])))
    print("ready", flush=True)
    while True:
        began_s = time.monotonic()
        while time.monotonic() - began_s < share * PERIOD_S:
            pass
        time.sleep((1 - share) * PERIOD_S)


if __name__ == "__main__":
    main()
