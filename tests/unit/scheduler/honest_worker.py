"""An honest worker for tests of the pure core: it does as a real one would, and knows what it holds and has told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from moorage.schemas.attempt import AttemptName, name_in
from moorage.schemas.codec import decode_request
from moorage.schemas.frames import (
    AttemptUse,
    Device,
    DriverDown,
    Freeze,
    Held,
    Hello,
    Join,
    Load,
    Place,
    Renew,
    Report,
    Reported,
    ReportFrame,
    ReportKind,
    Resized,
    SlotLoad,
    Stopped,
    Unwell,
    Wanted,
)


@dataclass
class HeldAttempt:
    """An attempt as its worker really holds it."""

    place: Place
    phase: str  # claimed, running, frozen, exited
    keep: bool
    leased: bool = True  # it has its devices; what is frozen has none
    ready: bool = False  # what its worker saw last

    @property
    def name(self) -> AttemptName:
        return name_in(self.place)


@dataclass
class Worker:
    """An honest worker: its pool decides, its reports are numbered, kept until answered, and repeated at a join."""

    id: str
    hello: Hello
    machine: str
    auto: bool = True  # obeys wanted frames; else the test speaks for it
    n: int = 0
    boot: str = "boot-1"
    session: str = ""
    epoch: int = 0
    no: int = 0
    renewals: int = 0
    loads: int = 0
    data: list[str] = field(default_factory=list)
    held: dict[AttemptName, HeldAttempt] = field(default_factory=dict)
    dead: dict[AttemptName, str] = field(default_factory=dict)
    gathered: list[Report] = field(default_factory=list)
    joining: int = 0  # how many of them are in the join that is not answered yet
    flying: ReportFrame | None = None
    local: set[int] = field(default_factory=set)  # slots that somebody in the worker's own process claimed
    waiting: bool = False
    told: Counter[str] = field(default_factory=Counter)
    unwell: list[Unwell] = field(default_factory=list)
    down: list[DriverDown] = field(default_factory=list)
    well_n: int = 0
    use: list[AttemptUse] = field(default_factory=list)
    stopped: list[Stopped] = field(default_factory=list)
    reported: list[Reported] = field(default_factory=list)
    leaving_s: int | None = None
    freezes: bool = True  # else it is refused what it is asked to freeze, though it said that it can
    stays_awake: set[str] = field(default_factory=set)  # jobs whose attempts it is refused to freeze, besides
    not_frozen: str = "CUDA error 801"  # what it says then
    hears_freezes: bool = True  # else it does nothing of that yet: the order is lost, or takes its time
    #: whether the memory of an attempt has left the GPUs by now, or is back
    has_swapped: Callable[[HeldAttempt, Freeze], bool] = lambda held, order: True

    # -------------------------------------------------------------------------------------------- the pool

    def blocked(self, place: Place) -> bool:
        """Whether the pool must refuse: a slot is taken, or shared in another mode or by too many."""
        for slot in place.slots:
            users = [held for held in self.held.values() if slot in held.place.slots and held.leased]
            if slot in self.local:
                return True
            if place.mode == "exclusive" and users:
                return True
            if place.mode in ("mps", "time-slice") and (
                any(held.place.mode != place.mode for held in users)
                or len(users) >= {"mps": 8, "time-slice": 4}[place.mode]
            ):
                return True
        return False

    def validate(self) -> None:
        """A device has one exclusive holder; a frozen attempt holds none."""
        here: dict[int, list[HeldAttempt]] = {}
        for held in self.held.values():
            for slot in held.place.slots if held.place.mode == "exclusive" and held.leased else ():
                here.setdefault(slot, []).append(held)
        for slot, users in here.items():
            assert len(users) <= 1, f"{self.id}: slot {slot} is held by {users}"

    def freeze(self, held: HeldAttempt, freeze: Freeze) -> None:
        """As ordered; what is frozen gives its devices up, and the pool decides whether it gets them again."""
        if not self.hears_freezes:
            return
        if held.phase == "running" and freeze.on:
            if not self.freezes or held.place.job in self.stays_awake:
                self.say("not-frozen", held.place, 0, self.not_frozen)
            elif self.has_swapped(held, freeze):
                held.phase, held.leased = "frozen", False
                self.say("frozen", held.place)
        elif held.phase == "frozen" and not freeze.n:
            self.say("frozen", held.place)
        elif held.phase == "frozen" and self.blocked(held.place):
            self.say("not-resumed", held.place, freeze.n, "leased")
        elif held.phase == "running" or (held.phase == "frozen" and self.has_swapped(held, freeze)):
            held.phase, held.leased = "running", True
            self.say("resumed", held.place, freeze.n)

    def say(self, kind: ReportKind, place: Place, code: int = 0, detail: str = "") -> None:
        self.told[kind] += 1
        name = name_in(place)
        begun = [
            report
            for report in self.gathered[self.joining :]
            if report.kind in ("claimed", "started") and name_in(report) == name
        ]
        if kind == "exited" and any(report.kind == "started" for report in begun):
            self.gathered[self.joining :] = [report for report in self.gathered[self.joining :] if report not in begun]
            self.gathered.append(Report("ran", *name, code, detail, 7 * place.fence % 5000))
        else:
            self.gathered.append(Report(kind, *name, code, detail))

    # --------------------------------------------------------------------------------------------- frames

    def obey(self, frame: Wanted) -> None:
        if frame.session != self.session or frame.epoch < self.epoch:
            return
        self.epoch = frame.epoch
        if frame.well:
            self.unwell = [each for each in self.unwell if each.slot not in frame.well]
            self.well_n = frame.well_n
        for place in frame.resize:
            held = self.held.get(name_in(place))
            if held is not None and held.phase != "exited" and place.resized > held.place.resized:
                held.place = place
        for place in frame.place:
            name = name_in(place)
            if name in self.held or name in self.dead:
                continue
            if self.blocked(place):
                self.dead[name] = "refused"
                self.say("refused", place, 0, "device-busy")
                continue
            request = decode_request(place.body)
            keep = request.on_partition == "keep" and not place.hold
            first = request.group_of(place.replica)[1] if request.groups else 0
            self.held[name] = HeldAttempt(place, "claimed", keep)
            self.say("claimed", place, 0, f"{self.id}.local:29500" if place.hold and place.replica == first else "")
            if not place.hold:
                self._start(self.held[name])
        for start in frame.start:
            name = name_in(start)
            held = self.held.get(name)
            if held is None:
                if name not in self.dead:
                    self.dead[name] = "not-held"
                    self.say("not-held", Place(*name, [], "", True, b""))
            elif held.phase == "claimed":
                assert start.master_port == 29500, start
                self._start(held)
        for end in frame.end:
            name = name_in(end)
            held = self.held.get(name)
            if held is None:
                if self.dead.get(name, "released") == "released":
                    self.dead[name] = "withdrawn"
                    self.say("withdrawn", Place(*name, [], "", False, b""))
            elif held.phase == "claimed":
                del self.held[name]
                self.dead[name] = "withdrawn"
                self.say("withdrawn", held.place)
            elif held.phase in ("running", "frozen"):
                self.finish(name, -15, "end")
        for freeze in frame.freeze:
            held = self.held.get(name_in(freeze))
            if held is not None:
                self.freeze(held, freeze)

    def _start(self, held: HeldAttempt) -> None:
        held.phase = "running"
        ports = decode_request(held.place.body).workload.ports
        self.say("started", held.place, 0, f"{self.id}.local:{20000 + held.place.fence % 999}" if ports else "")

    def look(self, held: HeldAttempt, *, ready: bool) -> None:
        """See whether a running attempt is ready, and say what has changed."""
        if held.ready != ready:
            held.ready = ready
            self.say("ready" if ready else "not-ready", held.place, 0, "" if ready else "nothing listens")

    def finish(self, name: AttemptName, code: int = 0, detail: str = "exit", *, freed: bool = True) -> None:
        held = self.held[name]
        if held.phase == "frozen" and detail in ("end", "fence") and not self.blocked(held.place):
            held.phase, held.leased = "running", True  # it is resumed, to save its work
        if held.phase == "frozen" and detail == "end":
            detail = "ended while frozen"
        if code == 0 and detail == "exit":  # some are functions that name their result, or say that there is none
            detail = ("exit", "result:0", f"result:{name[4]}")[name[4] % 3]
        held.phase = "exited"
        self.dead[name] = "exited"
        self.say("exited", held.place, code, detail)
        if freed or not held.leased:
            self.free(name)

    def free(self, name: AttemptName) -> None:
        self.say("freed", self.held.pop(name).place)

    def fence(self) -> None:
        """The lease ran out: everything that does not keep through a partition is ended here and now."""
        for name, held in list(self.held.items()):
            if held.phase in ("running", "frozen") and not held.keep:
                self.finish(name, -9, "fence")
            elif held.phase == "claimed":
                del self.held[name]
                self.dead[name] = "released"
        self.session = ""

    def die(self) -> None:
        """The machine restarts: nothing runs, the journal's reports are kept."""
        for name, held in list(self.held.items()):
            if held.phase in ("running", "frozen"):
                self.finish(name, -9, "lost")
            elif held.phase == "claimed":
                self.dead[name] = "released"
        self.held.clear()
        self.boot = f"boot-{self.n + 2}"
        self.session = ""

    def join_frame(self) -> Join:
        self.n += 1
        if self.flying is not None:
            self.gathered = [*self.flying.reports, *self.gathered]
            self.flying = None
        self.joining = len(self.gathered)
        return Join(self.machine, self.boot, self.n, self.hello, reports=list(self.gathered), holding=self.holding())

    def joined(self, session: str, reports: int) -> None:
        self.session = session
        self.no = 0
        self.renewals = 0
        self.flying = None
        self.joining = 0
        del self.gathered[:reports]

    def holding(self) -> list[Held]:
        return [Held(*name, held.phase) for name, held in self.held.items()]

    def renew_frame(self) -> Renew:
        self.renewals += 1
        return Renew(
            self.session,
            self.renewals,
            self.no,
            held=self.holding(),
            busy=sorted(self.local),
            waiting=self.waiting,
            unwell=self.unwell,
            down=self.down,
            well_n=self.well_n,
            resized=[
                Resized(p.tenant, p.job, p.replica, p.attempt, p.fence, p.resized)
                for p in (held.place for held in self.held.values())
                if p.resized
            ],
            use=self.use,
            stopped=self.stopped,
            reported=self.reported,
            leaving_s=self.leaving_s,
        )

    def report_frame(self) -> ReportFrame | None:
        if self.flying is None and self.gathered:
            self.flying = ReportFrame(self.session, self.no + 1, self.gathered)
            self.gathered = []
        return self.flying

    def report_answered(self, no: int) -> None:
        if self.flying is not None and no >= self.flying.no:
            self.no, self.flying = self.flying.no, None

    def load_frame(self, **sick: str) -> Load:
        """`s0="ecc"` makes slot 0 sick; `f0="pid 7"` says that a foreign process holds it; `w0="cdi: …"` warns."""
        self.loads += 1
        slots = [
            SlotLoad(
                device.index,
                health=sick.get(f"s{slot}", "ok"),
                foreign=sick.get(f"f{slot}", ""),
                warning=sick.get(f"w{slot}", ""),
            )
            for slot, device in enumerate(self.hello.gpu_pool)
        ]
        return Load(self.id, self.boot, self.loads, self.loads, gpu_pool=slots, data=self.data)


def devices(worker: str, models: Iterable[str], vendor: str = "nvidia", memory_mib: int = 81_559) -> list[Device]:
    return [Device(i, vendor, model, f"GPU-{worker}-{i}", memory_mib) for i, model in enumerate(models)]
