"""The core alone: fold of a million transitions, and `--finished`: memory of the table of finished jobs."""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path

from moorage.scheduler.core.ledger.acts import AnyAct, Epoch, Known
from moorage.scheduler.core.ledger.finished import ROWS_MAX, FinishedTable, job_key
from moorage.scheduler.core.ledger.fold import fold
from moorage.scheduler.core.ledger.record import Record, decode_record, encode_record
from moorage.scheduler.core.ledger.records import FORMAT, Op, packed
from moorage.scheduler.core.ledger.state import SUCCEEDED, State

PER_RECORD = 200
WORKERS = 64
BODY = (
    b'{"job":"%s","gpu":{"count":1,"model":["H100"],"min_memory_mib":70000},"resources":{"cpu_milli":4000},'
    b'"run":{"driver":"process","argv":["python","train.py","--steps","100"],"env":{"SEED":"7","BATCH":"8"},'
    b'"cwd":"/srv","timeout_s":3600},"retries":2,"labels":{"team":"a"}}'
)


def records(transitions: int) -> list[bytes]:
    """Records as a leader writes them: jobs accepted and placed, and claimed, started, exited and freed in the next."""
    state, made, number = State(), [], 0
    acts: list[AnyAct] = [Epoch("bench", "bench", 0.0)]
    for worker in range(WORKERS):
        acts.append(Known(worker, f"w{worker}", "m"))
    before: list[tuple[int, int]] = []
    jobs = transitions // 6
    seq = 0
    while number < jobs or before:
        count = min(PER_RECORD, jobs - number)
        flat: list[object] = []
        steps: list[int] = []
        for num, _ in before:
            for op, a in ((Op.CLAIM, 0), (Op.START, 0), (Op.EXIT, SUCCEEDED), (Op.FREE, packed(seq))):
                steps += (op, num, 0, a, 0, 0)
        before = []
        for _ in range(count):
            number += 1
            worker = number % WORKERS
            flat += (f"j{number:07d}", BODY % b"j%07d" % number, 1, "")
            steps += (Op.PLACE, number, 0, worker, 1 << (number // WORKERS % 8), 1)
            before.append((number, worker))
        record = Record(FORMAT, 1, 7, seq + 1, seq, state.digest, [("t0", flat)] if flat else [], steps, acts=acts)
        acts = []
        seq += 1
        made.append(encode_record(record))
        fold(state, record, seq)
    return made


def fold_million(transitions: int) -> dict[str, float]:
    made = records(transitions)
    gc.collect()
    gc.freeze()
    gc.disable()
    state, began = State(), time.perf_counter()
    for seq, record in enumerate(made, 1):
        fold(state, decode_record(record), seq)
    return {"s": time.perf_counter() - began, "transitions": state.transitions + len(state.jobs), "records": len(made)}


def finished_table(rows: int) -> dict[str, float]:
    """Memory of the table of finished jobs, full."""
    before, table = rss_mib(), FinishedTable()
    for number in range(rows):
        table.add(job_key("t0", f"j{number:015d}"), b"8 bytes.", number, SUCCEEDED)
    return {"mib": rss_mib() - before, "rows": len(table)}


def rss_mib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("no VmRSS")


if __name__ == "__main__":
    if sys.argv[1:] == ["--finished"]:
        print(json.dumps(finished_table(ROWS_MAX)))
        sys.exit()
    print(json.dumps(fold_million(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)))
