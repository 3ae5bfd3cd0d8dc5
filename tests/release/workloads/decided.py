"""What the core decided in each case, as a line of digests: `python -m tests.release.workloads.decided --cases 10000`.

Run it in two trees, and compare: a line has the seed, digests of the records' bytes, of the messages, of the events and
of the answers, and the last state's own. A change that decides nothing else leaves every line as it was.

    diff <(cd ../before && python -m tests.release.workloads.decided) <(python -m tests.release.workloads.decided)
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os

from moorage.scheduler.core.outputs.outputs import Outputs
from tests.release.workloads.__main__ import failure, made, same_hashes, world_of


def line(seed: int) -> str:
    """Run a case; return its line. A case that fails ends with why."""
    plan = made(seed)
    world = world_of(plan)
    drive = world.drive
    records, messages, events, answers = sums = [hashlib.blake2b(digest_size=8) for _ in range(4)]
    store, tick = drive.store, drive.tick

    def stored(payload: bytes) -> int:
        records.update(payload)
        return store(payload)

    def ticked(ms: int = 1, *, obey: bool = True) -> Outputs:
        out = tick(ms, obey=obey)
        for told, what in ((messages, out.messages), (events, out.events), (answers, out.answers)):
            told.update(repr(what).encode())
        return out

    drive.store, drive.tick = stored, ticked  # type: ignore[method-assign]
    wrong = failure(plan, world=world)
    return " ".join([str(seed), *(each.hexdigest() for each in sums), f"{drive.state.digest:x}", wrong]).rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--from", dest="first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    with multiprocessing.Pool(asked.processes, maxtasksperchild=200) as pool:
        for each in pool.imap(line, range(asked.first, asked.first + asked.cases), chunksize=8):
            print(each, flush=True)


if __name__ == "__main__":
    same_hashes("tests.release.workloads.decided")
    main()
