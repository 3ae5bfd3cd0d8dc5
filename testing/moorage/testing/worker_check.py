"""Check that a worker, in any language, keeps to the protocol: a leader of this check has it join, and goes away."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from moorage.schemas.attempt import AttemptName, name_in
from moorage.schemas.codec import encode
from moorage.schemas.errors import Refused, problem
from moorage.schemas.frames import End as EndOrder
from moorage.schemas.frames import Hello, Place, Report, ReportFrame, Start
from moorage.schemas.subjects import PREFIX_DEFAULT
from moorage.testing.conformance.leader import (
    NeverHappened,
    ScriptedLeader,
    decode_join,
    decode_renew,
    decode_reports,
    until,
)

TENANT: Final = "check"
#: the numbers of a session, in seconds: short, so that a lease is soon over
RENEW_S: Final = 0.3
LEASE_S: Final = 8.0
GRACE_S: Final = 1.0
#: how long no scheduler leads: most of the lease is left, for a worker on a busy machine
AWAY_S: Final = 2.0
#: how many renewals show that a worker did not do what it must not do
QUIET_RENEWALS: Final = 3
#: questions of one kind within one `renew_s`, of a worker that leaves time between two tries
ASKED_MAX: Final = 12
#: how often one frame of reports must be seen that nobody answers
COPIES: Final = 2
#: how long each step may take on a busy machine, in seconds
SLACK_S: Final = 20.0
#: the code with which the short job ends
CODE: Final = 7
SHORT: Final = ("sh", "-c", f"exit {CODE}")
#: what a worker reports of an attempt that it ended because its lease was over
OF_FENCE: Final = ("fence", "lost")

Verdict = Literal["ok", "fail", "skip"]
_decoders: Final[dict[str, Callable[[bytes], Any]]] = {
    "join": decode_join,
    "renew": decode_renew,
    "fact": decode_reports,
}


class RuleChecked(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="rule"):
    """One rule of the protocol, and whether the worker kept it. `fail`: `found`, `allowed` and `next` say more."""

    name: str
    rule: str
    verdict: Verdict
    found: str = ""
    allowed: str = ""
    next: str = ""


class Broken(Exception):
    """A rule was broken: what was found, what is allowed, and what to do next."""

    def __init__(self, found: str, allowed: str, next_step: str = "") -> None:
        super().__init__(found)
        self.found, self.allowed, self.next_step = found, allowed, next_step


class WorkerCheck:
    """One run over a worker that is not started yet, on a server that no other worker and no scheduler uses.

    `short` is the argv of a job that ends at once with the code `CODE`, `long` that of one that runs for an hour; by
    default `sh` and `sleep`. The default one is also looked for among the processes of this host.
    """

    def __init__(
        self, url: str, worker: str, short: Sequence[str] = (), long: Sequence[str] = (), slack_s: float = SLACK_S
    ) -> None:
        self.worker = worker
        self._token = "" if long else f"3600.{secrets.randbelow(10**12):012}"
        self._short, self._long = list(short or SHORT), list(long or ("sleep", self._token))
        self._slack_s = slack_s
        self._leader = ScriptedLeader(url, PREFIX_DEFAULT, renew_s=RENEW_S, lease_s=LEASE_S, grace_s=GRACE_S)
        self._leader.on_asked = self._on_asked
        self._seat = self._leader.seat(worker)
        self._asked: list[tuple[str, bytes]] = []
        self._unreadable: list[str] = []
        self._fence = 1000

    async def __aenter__(self) -> WorkerCheck:
        await self._leader.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._leader.__aexit__()

    async def run(self, within_s: float) -> AsyncIterator[RuleChecked]:
        """Wait `within_s` for the worker to join, then yield each rule. Without a join, or once the worker is away,
        the rest is skipped."""
        is_away = False
        for name, rule, check in self._rules():
            if is_away:
                yield RuleChecked(name, rule, "skip")
                continue
            try:
                if check == self._join:
                    await self._join(within_s)
                else:
                    await self._rested()
                    await check()
                yield RuleChecked(name, rule, "ok")
            except Broken as broken:
                is_away = isinstance(broken, _Away) or check == self._join
                yield RuleChecked(name, rule, "fail", broken.found, broken.allowed, broken.next_step)
            finally:
                self._leader.mute.clear()
                self._leader.refuse.clear()

    def _rules(self) -> list[tuple[str, str, Callable[..., Awaitable[None]]]]:
        return [
            ("join", "It joins under its name, with its devices, and renews its session.", self._join),
            ("place", "It runs what is placed, once, and reports how that ended.", self._place),
            ("cancel", "It ends a job that the leader asks to end.", self._cancel),
            (
                "withdraw",
                "It answers the end of an attempt that it does not have, and never starts that one.",
                self._late,
            ),
            ("gang", "It starts an attempt with `hold` only after START, or refuses it.", self._gang),
            ("session", "It takes no orders of another session, or of a leader before the last one.", self._foreign),
            ("reports", "It sends unanswered reports again, the same, under the same number.", self._unanswered),
            ("pace", "It leaves time between two tries while no leader answers.", self._pace),
            ("leader", "Its jobs and its session go on while no scheduler leads.", self._no_leader),
            ("lease", "It ends its jobs with its lease, and joins anew once nothing of them runs.", self._cut),
            ("session-over", "It ends its jobs once its session is over, and joins anew.", self._session_over),
            ("frames", "All its frames can be read, and are numbered one by one.", self._frames),
        ]

    # -- the rules

    async def _join(self, within_s: float) -> None:
        await self._until(
            lambda: self._seat.joins,
            lambda: f"no join on moorage.worker.{self.worker}.join within {within_s:g} s",
            f"a join of {self.worker}",
            "start the worker with this address and this name",
            within_s,
        )
        hello = self._hello
        if hello.worker != self.worker:
            raise Broken(f"hello.worker is {hello.worker!r}", f"{self.worker!r}, as in the subject")
        if not hello.gpu_pool or not hello.drivers:
            raise Broken(f"hello has gpu_pool {hello.gpu_pool} and drivers {hello.drivers}", "at least one of each")
        await self._renews(2)

    async def _place(self) -> None:
        order = self._new(self._short)
        for _ in range(3):  # it is sent until it is done
            await self._leader.want(self.worker, order)
        name = name_in(order)
        await self._kind("freed", name)
        await self._renews(QUIET_RENEWALS)
        await self._leader.want(self.worker, order)  # as a frame that was under way
        await self._renews(QUIET_RENEWALS)
        self._is_whole(name)
        exited = self._seat.report("exited", name)
        if exited is None or exited.code != CODE:
            raise Broken(f"exited with {exited and exited.code}", f"{CODE}, the code of the program")

    async def _cancel(self) -> None:
        name = await self._running()
        await self._end(name)
        self._is_whole(name)

    async def _late(self) -> None:
        order = self._new(self._short)
        name = name_in(order)
        await self._leader.want(self.worker, EndOrder(*name, "cancel", GRACE_S, 0.0))
        await self._kind("withdrawn", name)
        await self._leader.want(self.worker, order)
        await self._renews(QUIET_RENEWALS)
        self._only(name, ["withdrawn"], "remember an end as well as a placement")

    async def _gang(self) -> None:
        order = self._new(self._short, hold=True)
        name = name_in(order)
        await self._leader.want(self.worker, order)
        await self._until(
            lambda: self._kinds(name), lambda: "no report of it", "`claimed` with an address, or `refused`"
        )
        await self._renews(QUIET_RENEWALS)
        if self._kinds(name) == ["refused"]:
            return
        self._only(name, ["claimed"], "wait for the frame's `start`")
        claimed = self._seat.report("claimed", name)
        assert claimed is not None
        if ":" not in claimed.detail:
            raise Broken(f"`claimed` with the detail {claimed.detail!r}", "address:port, of rank 0")
        host, _, port = claimed.detail.rpartition(":")
        await self._leader.want(self.worker, Start(*name, host, int(port) if port.isdecimal() else 0, 1))
        await self._kind("freed", name)
        self._is_whole(name)

    async def _foreign(self) -> None:
        order = self._new(self._short)
        await self._leader.want(self.worker, order, session="of-another-one")
        await self._renews(QUIET_RENEWALS)
        self._only(name_in(order), [], "compare the frame's session with yours")
        self._leader.epoch += 1
        await self._renews(QUIET_RENEWALS)  # it has the number of the new one
        self._leader.epoch -= 1
        try:
            order = self._new(self._short)
            await self._leader.want(self.worker, order)
        finally:
            self._leader.epoch += 1
        await self._renews(QUIET_RENEWALS)
        self._only(name_in(order), [], "keep the highest `reign`, and drop frames of a lower one")

    async def _unanswered(self) -> None:
        order = self._new(self._short)
        name = name_in(order)
        at = len(self._asked)
        self._leader.mute.add("fact")
        await self._leader.want(self.worker, order)

        def copies() -> list[bytes]:
            return [data for verb, data in self._asked[at:] if verb == "fact"]

        await self._until(
            lambda: len(copies()) > COPIES,
            lambda: f"{len(copies())} frames of reports",
            f"the same frame again and again, at least {COPIES + 1} times here",
            "keep a frame until it is answered",
        )
        frames = [self._read(data) for data in copies()]
        if any(frame != frames[0] for frame in frames):
            told = sorted({(frame.no, len(frame.reports)) for frame in frames if frame is not None})
            raise Broken(
                f"frames with other numbers or reports (number, reports): {told}",
                "the same number and the same reports until the frame is answered",
                "collect what comes meanwhile in the next frame",
            )
        self._leader.mute.clear()
        await self._kind("freed", name)
        self._is_whole(name)

    async def _pace(self) -> None:
        name = await self._running()
        for verb in _decoders:
            self._leader.refuse[verb] = problem("not-leading", "this check does not lead at present")
        at = len(self._asked)
        await self._leader.want(self.worker, EndOrder(*name, "cancel", GRACE_S, 0.0))
        asked_s = 4 * RENEW_S
        await asyncio.sleep(asked_s)
        for verb in _decoders:
            count = sum(one == verb for one, _ in self._asked[at:])
            if count > ASKED_MAX * asked_s / RENEW_S:
                raise Broken(
                    f"{count} times `{verb}` in {asked_s:g} s, each answered with not-leading",
                    f"about two in `renew_s` ({RENEW_S:g} s here)",
                    "wait before the same frame is sent again, whatever the answer was",
                )
        self._leader.refuse.clear()
        await self._kind("freed", name)

    async def _no_leader(self) -> None:
        name = await self._running()
        session = self._seat.session
        await self._leader.stop_leading()  # the server tells the worker that nobody is there
        try:
            await asyncio.sleep(AWAY_S)
        finally:
            self._leader.epoch += 1
            await self._leader.lead()
        await self._renews(2)
        held = [name_in(each) for each in self._seat.renewals[-1].held]
        if self._seat.session != session or name not in held:
            raise Broken(
                f"after {AWAY_S:g} s without a leader: "
                + ("it joined anew" if self._seat.session != session else f"it holds {held}, and not {name}"),
                f"the session and its jobs go on until the lease of {LEASE_S:g} s is over",
            )
        await self._end(name)

    async def _cut(self) -> None:
        name = await self._running()
        joins = len(self._seat.joins)
        self._leader.mute |= {"renew", "fact"}
        await self._anew(name, joins, LEASE_S)

    async def _session_over(self) -> None:
        name = await self._running()
        joins = len(self._seat.joins)
        self._seat.session = ""  # so each renewal is answered with session-over
        await self._anew(name, joins, 0)

    async def _frames(self) -> None:
        if self._unreadable:
            raise Broken(self._unreadable[0], "the frames of docs/protocol.md", "moorage schema NAME has each frame")
        for before, after in pairwise(self._seat.joins):
            if after.n <= before.n:
                raise Broken(f"n of a join is {after.n} behind {before.n}", "a number that only grows")
        for one, two in pairwise(self._seat.renewals):
            if one.session == two.session and two.n <= one.n:
                raise Broken(f"n of a renewal is {two.n} behind {one.n}", "counted up in each session")

    # -- within

    @property
    def _hello(self) -> Hello:
        return self._seat.joins[-1].hello

    def _on_asked(self, worker: str, verb: str, data: bytes) -> None:
        if worker != self.worker:
            return
        self._asked.append((verb, data))
        try:
            frame = _decoders[verb](data)
        except Refused as refused:
            self._unreadable.append(f"a frame on .{verb} cannot be read: {refused.problem.message}")
            return
        if isinstance(frame, ReportFrame) and frame.session == self._seat.session and frame.no > self._seat.no + 1:
            self._unreadable.append(f"reports number {frame.no} came behind number {self._seat.no}")

    def _read(self, data: bytes) -> ReportFrame | None:
        with contextlib.suppress(Refused):
            return decode_reports(data)
        return None

    def _new(self, argv: list[str], *, hold: bool = False) -> Place:
        """Return an order to run this on the worker's first device."""
        self._fence += 1
        drivers = self._hello.drivers
        driver = "process" if "process" in drivers else drivers[0]
        job = f"check-{self._fence}"
        body = encode({"job": job, "gpu": {}, "run": {"driver": driver, "argv": argv}})
        return Place(TENANT, job, 0, 1, self._fence, [0], "exclusive", hold, body)

    async def _running(self) -> AttemptName:
        """Place the long job, and return its name once it runs."""
        order = self._new(self._long)
        await self._leader.want(self.worker, order)
        await self._kind("started", name_in(order))
        return name_in(order)

    async def _end(self, name: AttemptName) -> None:
        await self._leader.want(self.worker, EndOrder(*name, "cancel", GRACE_S, 0.0))
        await self._kind("freed", name)
        self._nothing_runs("after `freed`")

    async def _anew(self, name: AttemptName, joins: int, after_s: float) -> None:
        """Wait until the worker has joined anew, with nothing left of this attempt."""
        await self._until(
            lambda: len(self._seat.joins) > joins,
            lambda: "no new join",
            f"a join once its {'lease' if after_s else 'session'} is over",
            "count the lease from when the last answered renewal was sent",
            after_s + GRACE_S + self._slack_s,
        )
        self._nothing_runs("at the new join")
        self._leader.mute.clear()
        join = self._seat.joins[-1]
        if name in map(name_in, join.holding):
            raise Broken(f"the join holds {name}", "nothing: its lease was over", "end it before the join")
        await self._renews(2)
        exited = self._seat.report("exited", name)
        if exited is not None and exited.detail not in OF_FENCE:
            raise Broken(
                f"`exited` with the detail {exited.detail!r}",
                "`fence`: the scheduler then tries the job elsewhere",
                "report what the end of the lease has ended as `fence`",
            )

    async def _rested(self) -> None:
        """Wait until the worker renews and holds nothing: whatever an earlier rule has left is asked to end."""
        await self._renews(1)
        for held in self._seat.renewals[-1].held:
            await self._leader.want(self.worker, EndOrder(*name_in(held), "cancel", GRACE_S, 0.0))

    async def _renews(self, times: int) -> None:
        """Wait for so many more renewals of the present session."""

        def count() -> int:
            return sum(each.session == self._seat.session for each in self._seat.renewals)

        enough = count() + times
        try:
            await until(lambda: count() >= enough, self._slack_s)
        except NeverHappened:
            raise _Away(
                f"{count() + times - enough} of {times} renewals within {self._slack_s:g} s",
                f"one each renew_s, {RENEW_S:g} s here",
                "renew in a task of its own, with the session of the last join",
            ) from None

    async def _kind(self, kind: str, name: AttemptName) -> Report:
        def found() -> str:
            return f"no `{kind}` of {name[1]}, but {self._reports_of(name)}"

        report = await self._until(lambda: self._seat.report(kind, name), found, f"`{kind}` within {self._slack_s:g} s")
        assert isinstance(report, Report)
        return report

    async def _until(
        self,
        condition: Callable[[], Any],
        found: Callable[[], str],
        allowed: str,
        next_step: str = "",
        within_s: float | None = None,
    ) -> Any:
        try:
            return await until(condition, self._slack_s if within_s is None else within_s)
        except NeverHappened:
            raise Broken(found(), allowed, next_step) from None

    def _kinds(self, name: AttemptName) -> list[str]:
        return self._seat.kinds(name)

    def _reports_of(self, name: AttemptName) -> str:
        words = [f"{report.kind} {report.detail}".strip() for report in self._seat.reports if name_in(report) == name]
        return ", ".join(words) or "nothing"

    def _only(self, name: AttemptName, kinds: list[str], next_step: str) -> None:
        if self._kinds(name) != kinds:
            raise Broken(f"reports: {self._reports_of(name)}", f"reports: {', '.join(kinds) or 'none'}", next_step)

    def _is_whole(self, name: AttemptName) -> None:
        if self._kinds(name) != ["claimed", "started", "exited", "freed"]:
            raise Broken(
                f"reports: {self._reports_of(name)}",
                "claimed, started, exited, freed, each once",
                "remember each placement: the same one comes until its reports are answered",
            )

    def _nothing_runs(self, when: str) -> None:
        """Check that the long job is no process of this host, if it is our own `sleep`. A worker elsewhere passes."""
        if not self._token:
            return
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if self._token.encode() in path.read_bytes().split(b"\0")[1:2]:
                    raise Broken(
                        f"{when} its process {path.parent.name} still runs",
                        "none: nothing of the attempt may be left",
                        "kill its whole process group and wait for it first",
                    )


class _Away(Broken):
    """The worker does not renew, so that no other rule can be checked."""
