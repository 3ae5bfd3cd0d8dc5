"""Carries out a plan: one engine, honest workers that may refuse, operators, and virtual time.

After every record `Driving` validates state, fleet and queue, and the soft tables are compared with their bounds; in
rest `reference` confirms what waits. A broken promise is an AssertionError, with the step at which it was seen.
"""

from __future__ import annotations

import random
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import msgspec

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.lifecycle.timers import BACKOFF
from moorage.schemas.attempt import AttemptName, name_in
from moorage.schemas.capabilities import Capabilities
from moorage.schemas.codec import decode_request
from moorage.schemas.frames import Device, Goodbye, Hello, Join, Place, Renew, ReportFrame, Unwell, Wanted
from tests.release.workloads import behind, frozen, new_leader, placed, ranges, reference, told, victims
from tests.release.workloads.plan import MEMORY_OF, PROFILES, VENDOR_OF, Plan, address
from tests.release.workloads.ran import Ran
from tests.release.workloads.record import Record
from tests.release.workloads.tables import Tables, small_bounds
from tests.unit.scheduler.honest_worker import Worker

RENEW_MS: Final = 2_000
LEASE_MS: Final = 20_000
#: a tick of rest, in ms, and how many in a row must bring nothing new
REST_MS: Final = 2_000
QUIET_TICKS: Final = 6
#: ticks after which a world must have come to rest
REST_TICKS_MAX: Final = 150
#: records after which the soft tables are looked for anew; how long those are is looked at after each
TABLES_EVERY: Final = 32
#: how a case's end ends its jobs
END: Final = "the case is over"


#: of a worker's spec: what is no field of its hello
_OF_DEVICES: Final = ("models", "numa", "memory_known", "profiles", "computes", "slot_modes", "slot_labels")


def _device(worker: str, spec: dict[str, Any], slot: int, model: str) -> Device:
    """One device of a worker; a slice in an odd slot is of the GPU of the slice before it."""
    numa, none = spec.get("numa", 0), [""] * len(spec["models"])
    computes, profiles = spec.get("computes", none), spec.get("profiles", none)
    memory_mib = MEMORY_OF.get(model, 0) if spec.get("memory_known", True) else 0
    one = Device(
        slot, VENDOR_OF.get(model, "nvidia"), model, f"GPU-of-the-worker-{worker}-{slot}", memory_mib,
        address(worker, slot), slot // numa if numa else -1, computes[slot],
        modes=spec.get("slot_modes", [[]] * len(spec["models"]))[slot],
        labels=spec.get("slot_labels", [{}] * len(spec["models"]))[slot],
    )  # fmt: skip
    profile = profiles[slot]
    if not profile:
        return one
    index = slot - 1 if slot % 2 and profiles[slot - 1] else slot
    return msgspec.structs.replace(
        one, index=index, name=f"{model} MIG {profile}", uuid=f"MIG-of-the-worker-{worker}-{slot}",
        memory_mib=PROFILES[profile], mig=True, profile=profile, pci=address(worker, index),
    )  # fmt: skip


class Refusing(Worker):
    """An honest worker that refuses some of what it is sent, for reasons of its own."""

    percent = 0
    salt = 0
    why = ""
    _said = ""
    lingers = 0  # of a hundred that exit, so many leave memory on their devices until the next rest
    slow = 0  # of a hundred that are asked to end, so many do not do so at once
    breaks = False  # the next attempt that is to be frozen or resumed can neither run nor be frozen
    left: tuple[AttemptName, ...] = ()

    def obey(self, frame: Wanted) -> None:
        if frame.well and frame.session == self.session:  # an operator says that these devices are free
            self.come_free(set(frame.well))
        if self.breaks and frame.freeze and frame.session == self.session:
            self.breaks, name = False, frame.freeze[0]
            key = name_in(name)
            if key in self.held and self.held[key].phase in ("running", "frozen"):
                self.finish(key, -9, "lost")
        super().obey(frame)

    def finish(self, key: AttemptName, code: int = 0, detail: str = "exit", *, freed: bool = True) -> None:
        draw = random.Random(f"{key} {self.no} {self.renewals}")
        if detail == "end" and draw.randrange(100) < self.slow:
            return  # it is asked again
        stays = freed and draw.randrange(100) < self.lingers
        super().finish(key, code, detail, freed=freed and not stays)
        if stays and key in self.held:
            self.left += (key,)
            if draw.random() < 0.5:
                place = self.held[key].place
                self.say("quarantined", place, 0, ",".join(map(str, place.slots)))

    def come_free(self, slots: set[int] | None = None) -> None:
        """The memory of all that has exited is seen free, or of what had none but these slots."""
        self.left = tuple(key for key in self.left if key in self.held)
        seen = [key for key in self.left if slots is None or slots.issuperset(self.held[key].place.slots)]
        for key in seen:
            self.free(key)
        self.left = tuple(key for key in self.left if key not in seen)

    def blocked(self, place: Place) -> bool:
        self._said = ""
        name = f"{self.salt} {self.id} {place.tenant} {place.job} {place.replica}"
        if not self.why.startswith(("not-permitted:", "not-here:")):
            name += f" {place.attempt} {place.fence}"  # another time it may go well
        if self.percent and random.Random(name).randrange(100) < self.percent:
            self._said = self.why or "refused"
            return True
        return super().blocked(place)

    def say(self, kind: Any, place: Place, code: int = 0, detail: str = "") -> None:
        super().say(kind, place, code, self._said if kind == "refused" and self._said else detail)


class World:
    """One case. `log` takes a line for each thing that happens."""

    def __init__(self, plan: Plan, log: list[str] | None = None) -> None:
        self.plan = plan
        self.log = log
        with self._bounds():
            self.drive = Record(Config(**plan.settings))
        self.silent: dict[str, int] = {}  # worker -> ms until which nothing of it comes through
        self.renewed: dict[str, int] = {}  # worker -> when its last answered renewal was sent
        self.sent: dict[str, tuple[Worker, Any]] = {}  # reply -> whose frame waits for it
        self.ill: dict[str, dict[str, str]] = {}  # worker -> what its load frames say
        self.resting = False  # nothing is on its way
        self.found: Counter[str] = Counter()  # reasons that were confirmed
        self._tables: Tables | None = None
        self._told = 0
        self.ran = Ran(forgets=plan.small)
        self.records = 0
        #: by tenant what its jobs have held of GPUs so far, in ms of a thousandth of a GPU
        self.granted: Counter[str] = Counter()

    # ------------------------------------------------------------------------------------------------- the frame

    def run(self) -> None:
        with self._bounds():
            for number, step in enumerate(self.plan.steps):
                self.say(f"{number:4} {self.drive.now / 1000 - 1000:9.3f} s  {step}")
                # a step is a method of this class, which nothing else calls
                getattr(self, step.verb.replace(" ", "_"))(**step.given)

    def _bounds(self) -> AbstractContextManager[None]:
        return small_bounds() if self.plan.small else nullcontext()

    def say(self, line: str) -> None:
        if self.log is not None:
            self.log.append(line)

    # ------------------------------------------------------------------------------------------------- time

    def tick(self, ms: int) -> None:
        """Workers send what they have, then one record; what it says reaches them at once."""
        drive = self.drive
        for name, worker in drive.workers.items():
            if self._is_away(name, worker):
                continue
            if not worker.session:
                if not any(who is worker and isinstance(frame, Join) for who, frame in self.sent.values()):
                    self._send(worker, worker.join_frame())
                continue
            if drive.now - self.renewed.get(name, -RENEW_MS) >= RENEW_MS:
                self._send(worker, worker.renew_frame())
                if name in self.ill:
                    drive.load(name, **self.ill[name])
            reports = worker.report_frame()
            if reports is not None:
                self._send(worker, reports)
        holding, before_ms = self._holding(), drive.state.time_ms
        drive.tick(ms)
        for tenant, milli in holding.items():
            self.granted[tenant] += milli * (drive.state.time_ms - before_ms)
        self._answers()
        self._events()
        self.records += 1
        placed.confirm(self)
        victims.confirm(self)
        ranges.confirm(self)
        frozen.confirm(self)
        self._look_at_tables()

    def _holding(self) -> Counter[str]:
        """How many thousandths of a GPU each tenant's attempts hold."""
        found: Counter[str] = Counter()
        for job in self.drive.state.jobs.values():
            held = [replica.attempt for replica in job.replicas if replica.attempt is not None]
            gpus = sum(attempt.mask.bit_count() for attempt in held)
            if gpus:
                found[job.tenant] += gpus * reference.milli_of(reference.request_of(job))
        return found

    def _confirm_usage(self) -> None:
        """Once all jobs have ended, the sums of GPU time are those of what was held, to the ms a row."""
        told = self.drive.usage.answer(None, {"by": ["tenant", "model"], "since_s": 86_400})
        assert isinstance(told, dict), told
        sums, rows = Counter[str](), Counter[str]()
        for row in told["rows"]:
            sums[row["tenant"]] += round(row["gpu_s"] * 1000)
            rows[row["tenant"]] += 1
        for tenant in self.granted.keys() | sums.keys():
            most = self.granted[tenant] / 1000
            less = most - sums[tenant]
            assert 0 <= less <= self.records, f"{tenant} held {most} ms of GPUs, and {sums[tenant]} ms are counted"

    def _look_at_tables(self) -> None:
        if not self.plan.small:
            return
        if self._tables is None or self._tables.engine is not self.drive.engine or self.records % TABLES_EVERY == 0:
            self._tables = Tables(self.drive.engine)
        self._tables.confirm(self.drive.state)

    def _is_away(self, name: str, worker: Worker) -> bool:
        """Whether nothing of a worker comes through now; it ends its jobs itself once its lease has run out."""
        until = self.silent.get(name)
        if until is None:
            return False
        if worker.session and self.drive.now - self.renewed.get(name, 0) >= LEASE_MS:
            worker.fence()
        if self.drive.now < until:
            return True
        del self.silent[name]
        worker.auto = True
        return False

    def _send(self, worker: Worker, frame: Join | Renew | ReportFrame | Goodbye) -> None:
        if isinstance(frame, Renew):
            self.renewed[worker.id] = self.drive.now
        self.sent[self.drive.send(worker.id, frame)] = (worker, frame)

    def _answers(self) -> None:
        for reply in [reply for reply in self.sent if reply in self.drive.answers]:
            worker, frame = self.sent.pop(reply)
            answer = self.drive.answers.pop(reply)
            if isinstance(frame, Join):
                if answer["kind"] == "joined":
                    worker.joined(answer["session"], len(frame.reports))
                    self.renewed[worker.id] = self.drive.now - RENEW_MS
                else:
                    self.say(f"                    {worker.id} may not join: {answer['message']}")
            elif getattr(frame, "session", "") != worker.session:
                continue
            elif answer["kind"] == "error" and answer["code"] == "session-over":
                worker.fence()
            elif isinstance(frame, ReportFrame) and answer["kind"] == "recorded":
                worker.report_answered(answer["no"])

    def _events(self) -> None:
        for event in self.drive.events[self._told :]:
            job = self.drive.state.job(event["tenant"], event["job"])
            gpus = reference.as_waiting(job).gpus if job is not None else 0
            for change in event.get("changes", ()):  # of a job that is not listed there are counts
                name = (event["tenant"], event["job"], change["replica"])
                self.ran.see(name, change["state"], gpus, self.drive.now)
                if self.log is not None:
                    where = f" on {change['worker']}" if "worker" in change else ""
                    why = f": {change['why']}" if change.get("why") else ""
                    self.say(f"                    {'/'.join(map(str, name))} {change['state']}{where}{why}")
        self._told = len(self.drive.events)

    def rest(self) -> None:
        """Nothing new happens, pauses end: then what waits is confirmed."""
        self.refuse(0, 0, "")
        self._obey()
        engine, quiet = self.drive.engine, 0
        for _ in range(REST_TICKS_MAX):
            self.tick(REST_MS)
            pauses = any(kind == BACKOFF for _, kind, _ in engine.timers.rows)
            done = not (self.drive.acts or self.drive.steps or self.sent or self.silent or pauses)
            quiet = quiet + 1 if done and not any(w.gathered or w.flying for w in self.drive.workers.values()) else 0
            if quiet >= QUIET_TICKS:
                break
        else:
            raise AssertionError(f"no rest after {REST_TICKS_MAX * REST_MS // 1000} s: {self._restless()}")
        self.resting = True
        wrong, found = reference.confirm(self)
        wrong += frozen.restless(self) + behind.confirm(self) + ranges.restless(self)
        wrong += victims.hidden(self, found.get("no room", [])) + told.confirm(self, found)
        wrong += new_leader.confirm(self)
        for reason, waiting in found.items():
            self.found[reason] += len(waiting)
            self.say(f"                    waits, {reason}: {' '.join(who.name for who in waiting)}")
        self.resting = False
        assert not wrong, "; ".join(wrong)

    def _restless(self) -> str:
        waits = [f"{kind} at {at}" for at, kind, _ in sorted(self.drive.engine.timers.rows)[:3]]
        return f"timers {waits}, unanswered {len(self.sent)}, silent {list(self.silent)}, last acts {self.drive.acts}"

    def end_all(self) -> None:
        """All jobs are cancelled: nothing stays behind, and one job more starts if it may."""
        self._obey()
        for job in list(self.drive.state.jobs.values()):
            if not job.over:
                self.drive.offer_cancel(job.name, tenant=job.tenant, why=END)
        for _ in range(REST_TICKS_MAX):
            self.tick(REST_MS)
            if not any(not job.over for job in self.drive.state.jobs.values()):
                break
        left = [f"{job.tenant}/{job.name} {job.state}" for job in self.drive.state.jobs.values() if not job.over]
        assert not left, f"cancelled, and not over: {left}"
        self._confirm_usage()
        frozen.confirm_over(self)
        self.submit("last", "the-last", {"gpu": {"vendor": ""}, "run": {"driver": "noop"}})
        self.submit("last", "the-very-last", {"run": {"driver": "noop"}})
        self.rest()

    # ------------------------------------------------------------------------------------------------- workers

    def join(self, name: str, spec: dict[str, Any]) -> None:
        models = spec["models"]
        pool = [_device(name, spec, slot, model) for slot, model in enumerate(models)]
        fields: dict[str, Any] = {"drivers": ["noop", "process"], "modes": ["exclusive", "mps", "time-slice"]}
        fields |= {key: value for key, value in spec.items() if key not in _OF_DEVICES}
        if "capabilities" in fields:
            fields["capabilities"] = msgspec.convert(fields["capabilities"], dict[str, Capabilities])
        hello = Hello(name, "boot-1", gpu_pool=pool, **fields)
        worker = Refusing(name, hello, f"machine-{name}")
        self.drive.workers[name] = worker
        self.tick(1)

    def _worker(self, number: int) -> Worker | None:
        """One that has a session, by a number taken modulo how many have."""
        up = [worker for worker in self.drive.workers.values() if worker.session and worker.id not in self.silent]
        return up[number % len(up)] if up else None

    def refuse(self, salt: int, percent: int, why: str) -> None:
        """From now on workers refuse so many in a hundred of what they are sent."""
        for worker in self.drive.workers.values():
            if isinstance(worker, Refusing):
                worker.salt, worker.percent, worker.why = salt, percent, why

    def work(self, salt: int, percent: int, code: int, but: str = "") -> None:
        """So many in a hundred of what runs exits; nothing of the tenant `but`."""
        draw = random.Random(salt)
        for worker in self.drive.workers.values():
            for key in [key for key, held in worker.held.items() if held.phase == "running"]:
                if key[0] != but and draw.randrange(100) < percent:
                    worker.finish(key, code)

    def _refusing(self) -> list[Refusing]:
        return [worker for worker in self.drive.workers.values() if isinstance(worker, Refusing)]

    def _obey(self) -> None:
        """From now on workers do all that they are asked."""
        self.lingers(0)
        self.slow(0)
        for worker in self._refusing():
            worker.freezes, worker.breaks = True, False
            worker.come_free()

    def idle(self, salt: int, percent: int) -> None:
        """So many in a hundred of what runs alone on its devices are not used, and are due to be frozen."""
        draw = random.Random(salt)
        for worker in self.drive.workers.values():
            for held in worker.held.values():
                alone = held.phase == "running" and held.place.slots and held.place.mode == "exclusive"
                if alone and draw.randrange(100) < percent and decode_request(held.place.body).qos != "critical":
                    worker.say("freeze-due", held.place, 300)

    def use(self, salt: int, percent: int) -> None:
        """So many in a hundred of what is frozen are used again."""
        draw = random.Random(salt)
        for worker in self.drive.workers.values():
            for held in worker.held.values():
                if held.phase == "frozen" and draw.randrange(100) < percent:
                    worker.say("resume-due", held.place)

    def will_not(self, worker: int) -> None:
        """A worker's driver freezes nothing any more, or does so again."""
        found = self._worker(worker)
        if found is not None:
            found.freezes = not found.freezes

    def breaks(self, worker: int) -> None:
        """The next job that a worker is to freeze or to resume is lost."""
        found = self._worker(worker)
        if isinstance(found, Refusing):
            found.breaks = True

    def lingers(self, percent: int) -> None:
        for worker in self._refusing():
            worker.lingers = percent

    def slow(self, percent: int) -> None:
        for worker in self._refusing():
            worker.slow = percent

    def busy(self, worker: int, slot: int) -> None:
        """A process of the worker's own host claims a device that is free, or gives it back."""
        found = self._worker(worker)
        if found is None or not found.hello.gpu_pool:
            return
        at = slot % len(found.hello.gpu_pool)
        if at in found.local:
            found.local.discard(at)
        elif not any(at in held.place.slots for held in found.held.values()):
            found.local.add(at)

    def claimer(self, worker: int) -> None:
        """A process of the worker's own host begins to wait for a device, or ends to."""
        found = self._worker(worker)
        if found is not None:
            found.waiting = not found.waiting

    def sick(self, worker: int, slot: int) -> None:
        found = self._worker(worker)
        if found is None or not found.hello.gpu_pool:
            return
        at = slot % len(found.hello.gpu_pool)
        sick = self.ill.setdefault(found.id, {})
        if sick.pop(f"s{at}", None) is None:
            sick[f"s{at}"] = "ecc"

    def unwell(self, worker: int, slot: int) -> None:
        """A worker says of a device that it fails, and what runs there has to leave; or that it is well again."""
        found = self._worker(worker)
        if found is None or not found.hello.gpu_pool:
            return
        at = slot % len(found.hello.gpu_pool)
        if any(each.slot == at for each in found.unwell):
            found.unwell = [each for each in found.unwell if each.slot != at]
        else:
            found.unwell = [*found.unwell, Unwell(at, "xid", "Xid 79", slot % 2 == 0)]

    def restart(self, worker: int) -> None:
        """An agent is started anew; its jobs live on."""
        found = self._worker(worker)
        if found is not None:
            found.session = ""

    def die(self, worker: int) -> None:
        """A machine restarts."""
        found = self._worker(worker)
        if found is not None:
            found.die()

    def silence(self, worker: int, s: int) -> None:
        """Nothing of a worker comes through for so many seconds."""
        found = self._worker(worker)
        if found is not None:
            self.silent[found.id] = self.drive.now + 1000 * s
            found.auto = False

    def goodbye(self, worker: int) -> None:
        """A worker says goodbye, and joins anew with the next record."""
        found = self._worker(worker)
        if found is not None and not found.held:
            self._send(found, Goodbye(found.session))
            found.session = ""

    def lead(self) -> None:
        """Another scheduler leads."""
        self.sent.clear()
        self.drive.lead()
        self.ran.forget(self.drive.state)
        self.renewed.clear()
        for worker in self.drive.workers.values():
            worker.flying, worker.gathered = (
                None,
                [*(worker.flying.reports if worker.flying is not None else ()), *worker.gathered],
            )

    # ------------------------------------------------------------------------------------------------- callers

    def submit(self, tenant: str, job: str, fields: dict[str, Any]) -> None:
        self.drive.offer_submit(job, tenant=tenant, **fields)

    def again(self, job: int, failed: bool) -> None:
        """A job is run again, or what of it did not succeed, as the leader says."""
        every = list(self.drive.state.jobs.values())
        if every:
            ranges.again(self, every[job % len(every)], failed=failed)

    def cancel(self, job: int) -> None:
        found = self._job(job)
        if found is not None:
            self.drive.offer_cancel(found[1], tenant=found[0])

    def cancel_all(self) -> None:
        for job in self.drive.state.jobs.values():
            if not job.over:
                self.drive.offer_cancel(job.name, tenant=job.tenant)

    def _job(self, number: int) -> tuple[str, str] | None:
        live = [(job.tenant, job.name) for job in self.drive.state.jobs.values() if not job.over]
        return live[number % len(live)] if live else None

    def order(self, verb: str, tenant: str, job: int = -1, **asked: Any) -> None:
        if job >= 0:
            found = self._job(job)
            if found is None:
                return
            tenant, asked["job"] = found
        self.drive.offer_order(verb, tenant=tenant, **asked)

    def operate(self, verb: str, worker: int, drain: dict[str, Any] | None = None) -> None:
        names = list(self.drive.workers)
        if names:
            self.drive.offer_operate(verb, names[worker % len(names)], **(drain or {}))
