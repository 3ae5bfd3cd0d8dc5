"""`python bench/steps.py`: the scheduler's CPU µs a job by step, on one core and without a socket.

The production intake, engine and outgoing frames; between them the workers of a simulated fleet, whose reports of one
record come before the next, as the agents send them. Only what the scheduler does is timed, and every round is scaled
by a measuring stick beside it, so that a busy machine shows about the same figures as a quiet one.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.callers import BODY, TENANTS  # noqa: E402
from moorage.bus.transport import Delivery  # noqa: E402
from moorage.scheduler.core import engine as engine_module  # noqa: E402
from moorage.scheduler.core.config import Config  # noqa: E402
from moorage.scheduler.core.engine import Engine  # noqa: E402
from moorage.scheduler.core.ledger import acts  # noqa: E402
from moorage.scheduler.core.ledger.fold import fold  # noqa: E402
from moorage.scheduler.core.ledger.record import Record  # noqa: E402
from moorage.scheduler.core.ledger.records import FORMAT  # noqa: E402
from moorage.scheduler.core.ledger.state import State  # noqa: E402
from moorage.scheduler.core.outputs.outputs import WantedFrames  # noqa: E402
from moorage.scheduler.leader import outgoing  # noqa: E402
from moorage.scheduler.leader.gc_schedule import GcSchedule  # noqa: E402
from moorage.scheduler.leader.intake import Intake  # noqa: E402
from moorage.schemas.codec import Decoder, encode  # noqa: E402
from moorage.schemas.frames import Device, Hello, Join, Joined, Renew, Report, ReportFrame, ReportKind, Wanted  # noqa: E402
from moorage.schemas.subjects import Subjects  # noqa: E402

SUBJECTS = Subjects()
LEADER = 7
IN_FLIGHT = 500
MANY = 10_000
BURST = 1_000
#: as an agent with the driver noop reports of its attempts
REPORTS: tuple[ReportKind, ...] = ("ran", "freed")
#: jobs a round
JOBS = {"endpoint": 4_000, "many": MANY}
#: what a stick takes on the quiet machine; every round is scaled by the sticks beside it
STICK_S = 0.0021
#: as the SDK's `submit_many` says it
BODY_MANY = b'{"job":"%s","gpu":{"model":"H100"},"run":{"driver":"noop"}}'

_decode_wanted = Decoder[Wanted](Wanted)


class Steps:
    """Time by step, each without those that it calls."""

    def __init__(self) -> None:
        self.ns: dict[str, int] = {}
        self._inner = [0]

    def timed(self, step: str, work: Callable[..., Any]) -> Callable[..., Any]:
        ns, inner = self.ns, self._inner
        ns.setdefault(step, 0)
        clock = time.thread_time_ns  # costs a microsecond: never around the work of one job

        def run(*arguments: Any, **named: Any) -> Any:
            inner.append(0)
            began = clock()
            try:
                return work(*arguments, **named)
            finally:
                took = clock() - began
                ns[step] += took - inner.pop()
                inner[-1] += took

        return run

    def wrap(self, owner: Any, name: str, step: str) -> None:
        setattr(owner, name, self.timed(step, getattr(owner, name)))


class Pauses:
    """How long the loop was busy without a turn for anybody else, at most; a collection counts wherever it comes."""

    def __init__(self) -> None:
        self.longest_s = self._began_s = self._collecting_s = 0.0
        gc.callbacks.append(self._on_collection)

    def __enter__(self) -> None:
        self._began_s = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self.longest_s = max(self.longest_s, time.thread_time() - self._began_s)

    def _on_collection(self, phase: str, _: dict[str, int]) -> None:
        now_s = time.thread_time()
        if phase == "start":
            self._collecting_s = now_s
        else:
            self.longest_s = max(self.longest_s, now_s - self._collecting_s)


class Bench:
    """A leader, and a fleet that says what its agents would."""

    def __init__(self, workers: int, gpus: int) -> None:
        self.state = State()
        self.now = 1_000_000
        epoch = Record(FORMAT, 1, LEADER, 0, self.now, 0, acts=[acts.Epoch("bench", "bench", 0.0)])
        fold(self.state, epoch, 1)
        self.engine = Engine(self.state, Config(), SUBJECTS, LEADER, self.now)
        self.intake = Intake(self.engine, SUBJECTS, self._refused, self._refused, self._refused, self._refused)
        self.sessions: dict[str, str] = {}
        self.numbers: dict[str, int] = {}
        self.ended = self.records = self.record_bytes = self.body_bytes = self.frames = 0
        self.gc_schedule = GcSchedule()
        self.pauses = Pauses()
        self.made = 0
        self.body = BODY
        self.steps = Steps()
        self._reports: list[Delivery] = []
        self._send = self._outgoing
        for number in range(workers):
            self._join(f"w{number}", gpus)
        self.turn([])
        for worker in self.sessions:
            self._say(worker, "renew", Renew(self.sessions[worker], 1))
        self.turn([])

    @staticmethod
    def _refused(*what: Any) -> None:
        raise RuntimeError(what)

    def _join(self, worker: str, gpus: int) -> None:
        pool = [Device(i, "nvidia", "NVIDIA H100 80GB HBM3", f"GPU-{worker}-{i}", 81_559) for i in range(gpus)]
        hello = Hello(
            worker, "b1", drivers=["noop"], cpu_milli=256_000, memory_mib=2**20, gpu_pool=pool, simulated=True
        )
        self._say(worker, "join", Join(f"m-{worker}", "b1", 1, hello))

    def _say(self, worker: str, verb: str, frame: Any) -> None:
        reply = f"_INBOX.fleet.{worker}.{verb}"
        self._reports.append(Delivery(SUBJECTS.worker(worker, verb), reply, encode(frame, json=False)))

    def _outgoing(self, outputs: Any, seq: int) -> list[Any]:
        return outgoing.messages_of(outputs, SUBJECTS, seq, lambda reply, answer: False, 1 << 20)

    def measure(self) -> None:
        """From here on every step is timed."""
        steps, engine = self.steps, self.engine
        steps.wrap(self.intake, "_from_worker", "reports: decode")
        steps.wrap(self.intake, "drain", "requests: decode, check, shape")
        steps.wrap(engine, "_from_worker", "reports: policy and draft")
        steps.wrap(engine, "_take_submits", "admission, accept, queue")
        steps.wrap(engine.planner, "plan", "rank and place")
        steps.wrap(engine.retention, "compact", "compaction: digest")
        steps.wrap(engine, "build", "build: rest")
        steps.wrap(engine.output_writer, "answer_submits", "answers to callers")
        steps.wrap(engine.output_writer, "add_events", "events")
        steps.wrap(engine, "commit", "commit: rest")
        steps.wrap(self, "_send", "frames out")
        for module, name, step in (
            (engine_module, "encode_record", "record: encode"),
            (engine_module, "fold", "fold"),
        ):
            setattr(module, name, steps.timed(step, getattr(_plain(module), name)))
        messages = steps.timed("wanted: encode", _MESSAGES)
        WantedFrames.messages = lambda frames: messages(frames)  # type: ignore[assignment, method-assign]

    def turn(self, requests: list[Delivery]) -> None:
        """What came, one record, what leaves; then the workers do what they are told."""
        self.now += 3
        for delivery in (*self._reports, *requests):
            self.intake.put(delivery)
        self._reports = []
        drained = False
        while not drained:
            with self.pauses:
                drained = self.intake.drain(self.now)
        with self.pauses:
            payload = self.engine.build(self.now, self.now)
        with self.pauses:
            messages = self._committed()
        self._take(messages, len(payload))

    def _committed(self) -> list[Any]:
        outputs = self.engine.commit(self.engine.seq_in_flight, self.now)
        self.ended += sum(1 for event in outputs.events if b'"state":"SUCCEEDED","ledger"' in event[2])
        messages: list[Any] = self._send(outputs, self.state.seq)
        self.gc_schedule.count_events(len(outputs.events))
        return messages

    def _take(self, messages: list[Any], record_bytes: int) -> None:
        """What leaves, where it goes."""
        self.records += 1
        self.record_bytes += record_bytes
        self.frames += len(messages)
        for subject, payload, _ in messages:
            if subject.startswith("_INBOX.fleet") and subject.endswith(".join"):
                worker = subject.split(".")[2]
                self.sessions[worker] = _joined(payload).session
            elif subject.endswith(".wanted"):
                self._obey(_decode_wanted(payload))

    def _obey(self, frame: Wanted) -> None:
        reports: list[Report] = []
        for place in frame.place:
            name = place.tenant, place.job, place.replica, place.attempt, place.fence
            reports += [Report(kind, *name, 0, "exit" if kind == "ran" else "") for kind in REPORTS]
        number = self.numbers[frame.worker] = self.numbers.get(frame.worker, 0) + 1
        self._say(frame.worker, "fact", ReportFrame(frame.session, number, reports))

    def endpoint(self, jobs: int) -> None:
        """`IN_FLIGHT` callers, each sending its next request once the one before is answered."""
        goal, left = self.ended + jobs, jobs
        while self.ended < goal:
            left -= self.endpoint_once(min(IN_FLIGHT, left))

    def endpoint_once(self, count: int) -> int:
        requests = [self._request() for _ in range(count)]
        self.body_bytes += sum(len(request.data) for request in requests)
        self.turn(requests)
        return count

    def _request(self) -> Delivery:
        self.made += 1
        name = b"b%07d-%d" % (self.made, 10**12 + self.made)
        subject = SUBJECTS.api(f"t{self.made % TENANTS}", "submit")
        return Delivery(subject, f"_INBOX.callers.mux.{self.made}", self.body % name)

    def many(self, jobs: int) -> None:
        """Arrays of `MANY` requests of one tenant, each once the one before is over."""
        for _ in range(max(1, jobs // MANY)):
            goal = self.ended + MANY
            bodies = []
            for _ in range(MANY):
                self.made += 1
                bodies.append(BODY_MANY % (b"j0123abc%07d" % self.made))
            array = b"[" + b",".join(bodies) + b"]"
            self.body_bytes += sum(map(len, bodies))
            self.turn([Delivery(SUBJECTS.api("t0", "submit"), "_INBOX.sdk.mux.1", array)])
            while self.ended < goal:
                self.turn([])

    def burst(self, jobs: int) -> None:
        """So many requests for 1, 2, 4 and 8 GPUs at once: each is a choice of its own."""
        goal, body, requests = self.ended + jobs, self.body, []
        for number in range(jobs):
            self.body = body.replace(b'"count":1', b'"count":%d' % (1 << number % 4))
            requests.append(self._request())
        self.body = body
        self.turn(requests)
        while self.ended < goal:
            self.turn([])


_MESSAGES = WantedFrames.messages
_MODULE = {name: getattr(engine_module, name) for name in ("encode_record", "fold")}
_joined = Decoder[Joined](Joined)


class _plain:
    """The engine's own functions, whatever an earlier round put in their place."""

    def __init__(self, module: Any) -> None:
        self.__dict__.update(_MODULE)


def measure(question: str, rounds: int, workers: int) -> dict[str, float]:
    """µs a job by step: the median of the rounds. The first 12,000 jobs fill what is kept of ended ones."""
    bench = Bench(workers, 8)
    ask = getattr(bench, question)
    ask(12_000)
    bench.gc_schedule.begin()
    bench.measure()
    rounds_of: dict[str, list[float]] = {}
    sticks: list[float] = []
    records, frames, done = bench.records, bench.frames, bench.ended
    size, bodies = bench.record_bytes, bench.body_bytes
    for _ in range(rounds):
        before, ended, stick = dict(bench.steps.ns), bench.ended, a_stick_s()
        ask(JOBS[question])
        stick = (stick + a_stick_s()) / 2
        found = {step: (ns - before[step]) / (bench.ended - ended) / 1000 for step, ns in bench.steps.ns.items()}
        found["all"] = sum(found.values())
        for step, us in found.items():
            rounds_of.setdefault(step, []).append(us * STICK_S / stick)
        sticks.append(stick)
    done = bench.ended - done
    result = {step: statistics.median(values) for step, values in rounds_of.items()}
    result["ledger bytes a job"] = (bench.record_bytes - size) / done
    result["ledger bytes a job over its body"] = (bench.record_bytes - size - bench.body_bytes + bodies) / done
    result["jobs a record"] = done / (bench.records - records)
    result["messages a job"] = (bench.frames - frames) / done
    result["the stick took, ms"] = statistics.median(sticks) * 1000
    gc.unfreeze()
    return result


def pause(queued: int, rounds: int, workers: int) -> dict[str, float]:
    """The loop's longest pauses, in ms: while so many jobs come that wait for a model that nobody has, then while they
    wait and others come and go, at last while such come that ask for different numbers of GPUs, in bursts."""
    bench = Bench(workers, 8)
    bench.gc_schedule.begin()
    found: dict[str, float] = {}

    def longest(name: str, work: Callable[[], object], times: int = 1) -> None:
        longest = []
        for _ in range(times):
            bench.pauses.longest_s = 0.0
            stick = a_stick_s()
            work()
            longest.append(bench.pauses.longest_s * 1000 * STICK_S / ((stick + a_stick_s()) / 2))
        found[f"longest pause{name}, ms"] = max(longest)
        found[f"median of the rounds' longest{name}, ms"] = statistics.median(longest)

    bench.body = BODY.replace(b'"H100"', b'"B300"')
    longest(" while they come", lambda: [bench.endpoint_once(IN_FLIGHT) for _ in range(0, queued, IN_FLIGHT)])
    bench.body = BODY
    bench.endpoint(12_000)
    longest("", lambda: bench.endpoint(JOBS["endpoint"]), rounds)
    longest(" beside arrays", lambda: bench.many(MANY), max(1, rounds // 4))
    longest(" beside a burst", lambda: bench.burst(BURST), rounds)
    gc.unfreeze()
    return found


def a_stick_s() -> float:
    """A fixed piece of work of the same kind (tuples, hashes, dictionaries): how fast the machine is just now."""
    began, table = time.thread_time(), dict.fromkeys(range(64), 0)
    for number in range(20_000):
        table[number & 63] += hash((number, 2, 3, 4)) & 7
    return time.thread_time() - began


STEPS_HEAD = """# The scheduler's CPU a job, by step

Written by `bench/steps.py --before <revision>`: the endpoint's question without a socket, on one core, both trees in
turns, scaled by the stick beside each round (see `bench/steps.py`). The cost of NATS in the scheduler's process comes
on top: `make bench` has the whole of it.

"""
#: before and after are measured in turns, so that both meet the same machine
TURNS = 4
ROOMS = ("schemas", "system", "bus", "scheduler", "ranking", "worker", "client", "testing")


def compare(revision: str, rounds: int, workers: int) -> list[str]:
    """The endpoint's steps at another revision of this repository and in this tree, as a table: medians of `TURNS`."""
    found: dict[Path, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="moorage-bench-") as folder:
        before = Path(folder) / "before"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", before, revision], cwd=ROOT, check=True)
        try:
            for turn in range(TURNS):
                for tree in (before, ROOT) if turn % 2 == 0 else (ROOT, before):
                    found.setdefault(tree, []).append(_measured_in(tree, rounds, workers))
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", before], cwd=ROOT, check=True)
    first, second = ({step: statistics.median(run[step] for run in found[tree]) for step in found[tree][0]}
                     for tree in (before, ROOT))  # fmt: skip
    rows = [
        f"| {step} | {first[step]:.2f} | {second[step]:.2f} |"
        if step in first
        else f"| {step} | | {second[step]:.2f} |"
        for step in second
    ]
    named = subprocess.run(["git", "rev-parse", "--short", revision], cwd=ROOT, capture_output=True, text=True)
    return [f"| step, CPU µs a job | before ({named.stdout.strip()}) | now |", "| --- | ---: | ---: |", *rows]


def path_to(tree: Path) -> str:
    """PYTHONPATH for that tree's sources, whatever is installed."""
    return os.pathsep.join([str(tree), *(str(tree / room) for room in ROOMS)])


def _measured_in(tree: Path, rounds: int, workers: int) -> dict[str, float]:
    words = ["bench/steps.py", "--json", "--only", "endpoint", "--rounds", str(rounds), "--workers", str(workers)]
    run = subprocess.run(
        [sys.executable, *words],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": path_to(tree)},
        stdout=subprocess.PIPE,
        check=True,
    )
    steps: dict[str, float] = json.loads(run.stdout)["endpoint"]
    return steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--workers", type=int, default=256, help="hosts of eight GPUs")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", choices=("endpoint", "many"))
    parser.add_argument("--pause", type=int, metavar="QUEUED", help="the loop's longest pause, with so many queued")
    parser.add_argument("--before", metavar="REVISION", help="the steps at another revision and now, into STEPS.md")
    arguments = parser.parse_args()
    if arguments.before:
        table = "\n".join(compare(arguments.before, arguments.rounds, arguments.workers)) + "\n"
        (ROOT / "bench" / "STEPS.md").write_text(STEPS_HEAD + table)
        print(table)
        return 0
    if arguments.pause is not None:
        print(json.dumps(pause(arguments.pause, arguments.rounds, arguments.workers)))
        return 0
    questions = [arguments.only] if arguments.only else ["endpoint", "many"]
    best = {question: measure(question, arguments.rounds, arguments.workers) for question in questions}
    if arguments.json:
        print(json.dumps(best))
        return 0
    print("| step, CPU µs a job (median) | " + " | ".join(questions) + " |")
    print("| --- |" + " ---: |" * len(questions))
    for step in best[questions[0]]:
        print(f"| {step} | " + " | ".join(f"{best[question][step]:.2f}" for question in questions) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
