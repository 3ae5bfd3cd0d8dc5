"""Members as real processes on a real server, called by a bare caller: what it gets back, and when."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from nats.micro.service import ServiceInfo, ServicePing, ServiceStats

from moorage.bus.connection import Connection, connect
from moorage.bus.embedded import find_binary
from moorage.bus.errors import NoResponders
from moorage.bus.framing import LINE_BYTES_MAX
from moorage.bus.transport import Delivery
from moorage.calls.program import Program
from moorage.calls.wire import ToProgram
from moorage.client import AsyncClient, CallFailed, Rejected
from tests.ports import free_ports
from tests.raw import publish_raw
from tests.system.services.members import Gate, MemberProcess, body_of, call, error_of, member, member_of, waiting
from tests.waiting import until


class Site:
    """A server for one test, with a prefix of its own."""

    def __init__(self, url: str, prefix: str, folder: Path) -> None:
        self.url = url
        self.prefix = prefix
        self._folder = folder

    def gate(self) -> Gate:
        return Gate(self._folder)

    def subject(self, name: str) -> str:
        return f"{self.prefix}.call.default.{name}"

    @contextlib.asynccontextmanager
    async def serving(self, *members: str) -> AsyncIterator[tuple[Connection, list[MemberProcess]]]:
        """A caller, and these members, each ready: a function of `functions`, which names it, and options."""
        async with contextlib.AsyncExitStack() as opened:
            caller = await opened.enter_async_context(await connect(self.url, "caller"))
            made = []
            for function, *words in map(str.split, members):
                words = [f"functions:{function}", "--name", function, *words]
                made.append(
                    await opened.enter_async_context(member(self.url, self._folder, *words, prefix=self.prefix))
                )
            await asyncio.gather(*(each.ready() for each in made))
            yield caller, made


@pytest.fixture
def site(nats_url: str, unique: str, tmp_path: Path) -> Site:
    return Site(nats_url, unique, tmp_path)


async def test_a_bare_request_gets_the_functions_answer(nats_url: str, unique: str, tmp_path: Path) -> None:
    subject = f"{unique}.call.default.echo"
    async with await connect(nats_url, "caller") as caller:
        with pytest.raises(NoResponders):
            await call(caller, subject, b"too early")
        async with member(nats_url, tmp_path, "functions:echo", "--name", "echo", prefix=unique) as one:
            await one.ready()
            answer = await call(caller, subject, b"hello")
            assert (answer.data, error_of(answer)) == (b"hello", "")
            typed = await call(caller, subject, b'{"a": [1]}', {"Content-Type": "application/json"})
            assert typed.headers is not None
            assert (typed.data, typed.headers["Content-Type"]) == (b'{"a":[1]}', "application/json")
            assert int(typed.headers["Moorage-Ran-Ms"]) >= 0
        with pytest.raises(NoResponders):
            await call(caller, subject, b"too late")


#: two accounts, of which one calls the services of the other
ACCOUNTS = """
listen: "127.0.0.1:%d"
accounts {
  OURS { users: [ { user: ours, password: ours } ], exports: [ { service: "UNIQUE.call.default.>" } ] }
  THEIRS {
    users: [ { user: theirs, password: theirs } ]
    imports: [ { service: { account: OURS, subject: "UNIQUE.call.default.>" } } ]
  }
}
"""


async def test_a_call_from_another_account_is_passed_on_to_an_idle_member(unique: str, tmp_path: Path) -> None:
    """No message of a client may have the reply that the server made for it."""
    [port] = free_ports(1)
    (tmp_path / "nats.conf").write_text(ACCOUNTS.replace("UNIQUE", unique) % port)
    server = await asyncio.create_subprocess_exec(find_binary(), "-c", str(tmp_path / "nats.conf"), stderr=PIPE)
    ours, theirs = (f"nats://{user}:{user}@127.0.0.1:{port}" for user in ("ours", "theirs"))
    words = ("functions:held", "--name", "held")
    try:
        async with (
            await connect(theirs, "caller") as caller,
            member(ours, tmp_path, *words, prefix=unique) as one,
            member(ours, tmp_path, *words, prefix=unique) as two,
        ):
            await asyncio.gather(one.ready(), two.ready())
            subject, gate = f"{unique}.call.default.held", Gate(tmp_path)
            holding = asyncio.create_task(call(caller, subject, gate.data))
            await gate.runs()
            for _ in range(12):  # half of them come to the member that runs the first one
                assert error_of(await call(caller, subject)) == ""
            gate.open()
            assert (await holding).data == gate.data
    finally:
        server.terminate()
        await server.communicate()


async def test_no_call_costs_a_member_its_connection_by_where_it_is_to_be_answered(site: Site) -> None:
    """A server cuts off who names a longer subject than a line holds: all other callers lost their answers."""
    subject = site.subject("echo")
    async with site.serving("echo") as (caller, _):
        await caller.publish(subject, b"", "", {"Moorage-Reply": f"_R_.{'x' * 5000}"})
        assert error_of(await call(caller, subject)) == ""


async def test_a_header_that_cannot_be_sent_costs_no_call_and_no_member_its_connection(site: Site) -> None:
    """Some clients send names that nats-py refuses, as it refuses a dead socket: the member began a new connection."""
    subject, gate, answers = site.subject("held"), site.gate(), asyncio.Queue[Delivery]()
    async with site.serving("held") as (caller, [busy]):
        await caller.subscribe(f"answer.{site.prefix}", answers.put_nowait)
        holding = asyncio.create_task(call(caller, subject, gate.data))
        await gate.runs()
        headers = b"NATS/1.0\r\na/b: x\r\nMoorage-Wait-Ms: 90000\r\n\r\n"
        sizes = b"%d %d" % (len(headers), len(headers))
        line = b" ".join((b"HPUB", subject.encode(), b"answer.%b" % site.prefix.encode(), sizes))
        await publish_raw(site.url, line + b"\r\n" + headers + b"\r\n")
        async with site.serving("held"):  # it fetches what waits at the other one
            assert error_of(await asyncio.wait_for(answers.get(), 60)) == ""
        gate.open()
        assert (await holding).data == gate.data
        assert "disconnected" not in busy.said


async def test_a_call_whose_reply_is_too_long_to_be_passed_on_is_refused_as_busy(site: Site) -> None:
    """Nobody heard of it any more, and its caller waited for its whole time."""
    subject, gate, answers = site.subject("held"), site.gate(), asyncio.Queue[Delivery]()
    async with site.serving("held") as (caller, _):
        await caller.subscribe(f"answer.{site.prefix}.*", answers.put_nowait)
        holding = asyncio.create_task(call(caller, subject, gate.data))
        await gate.runs()
        reply = f"answer.{site.prefix}."
        reply += "x" * (LINE_BYTES_MAX - len(subject) - len(reply))
        await caller.publish(subject, b"", reply, {"Moorage-Wait-Ms": "90000"})
        async with site.serving("held"):  # it fetches what waits at the other one
            answer = await asyncio.wait_for(answers.get(), 60)
        assert error_of(answer) == "busy"
        gate.open()
        await holding


async def test_when_all_are_full_a_bare_caller_hears_busy_and_when_to_come_again(site: Site) -> None:
    subject = site.subject("aheld")
    async with site.serving("aheld") as (caller, _):
        gate, refused = site.gate(), list[Delivery]()
        calls = [asyncio.create_task(call(caller, subject, gate.data)) for _ in range(10)]
        for answering in asyncio.as_completed(calls):
            refused.append(await answering)
            if len(refused) == 7:
                break
        assert set(map(error_of, refused)) == {"busy"}, "nothing ends before the gate is open"
        gate.open()
        answers = await asyncio.gather(*calls)
        errors = Counter(map(error_of, answers))
        assert errors == {"": 3, "busy": 7}, "one runs and two wait"
        busy = next(answer for answer in answers if error_of(answer))
        assert (busy.headers or {})["Nats-Service-Error-Code"] == "503"
        told = body_of(busy)
        assert (told["error"], told["started"]) == ("busy", False)
        assert told["retry_after_ms"] >= 1


async def test_what_a_function_does_wrong_is_its_callers_answer(site: Site) -> None:
    async with site.serving("wrong", "large") as (caller, [one, _]):
        answer = await call(caller, site.subject("wrong"), b"x")
        assert (answer.headers or {})["Nats-Service-Error-Code"] == "500"
        told = body_of(answer)
        assert (told["error"], told["kind"], told["message"]) == ("failed", "ValueError", "no such thing: b'x'")
        assert "no such thing" in one.said
        large = await call(caller, site.subject("large"), b"1000")
        assert len(large.data) == 1000
        beyond = str(caller.max_payload_bytes).encode()
        too_large = await call(caller, site.subject("large"), beyond, {"Moorage-Output": "0"})
        assert error_of(too_large) == "too-large"
        assert error_of(await call(caller, site.subject("large"), b"10")) == ""


async def test_a_function_answers_with_headers_and_with_errors_of_its_own(site: Site) -> None:
    async with site.serving("own") as (caller, [one]):
        answer = await call(caller, site.subject("own"), b"ab")
        assert (answer.data, (answer.headers or {})["X-Model"]) == (b'{"size":2}', "tiny")
        answer = await call(caller, site.subject("own"), b"bad")
        headers = answer.headers or {}
        assert (headers["Nats-Service-Error-Code"], error_of(answer)) == ("422", "no such word: é")
        assert (headers["X-Field"], headers["Content-Type"]) == ("word", "application/json")
        told = {"error": "failed", "message": "no such\nword: é", "started": True, "kind": "NoSuchWord"}
        assert body_of(answer) == told
        for data in (b"code", b"part"):  # a code that is none, a header that is the member's
            answer = await call(caller, site.subject("own"), data)
            assert (error_of(answer), body_of(answer)["kind"]) == ("failed", "ValueError")
        assert "NoSuchWord" not in one.said, "it is no fault of the service: its log has no traceback"
        async with AsyncClient(site.url, tenant="default", prefix=site.prefix) as moorage:
            answered = await moorage.service("own").answer(b"ab")
            assert (answered.value, answered.headers["X-Model"]) == ({"size": 2}, "tiny")
            with pytest.raises(CallFailed, match=r"^422: no such\nword: é") as failed:
                await moorage.call("own", b"bad")
            assert (failed.value.status, failed.value.headers["X-Field"]) == (422, "word")


async def test_a_batch_gives_each_caller_its_own_answer_and_a_cancelled_call_leaves_it(site: Site) -> None:
    """With a wait of ten seconds a batch begins when it is whole, however busy the machine is."""
    whole = "--batch 3,10s"
    async with site.serving(f"batch {whole}", f"steps {whole}") as (caller, _):
        loads: list[Delivery] = []
        await caller.subscribe(f"{site.prefix}.calls.default.batch.load", loads.append)

        async def together(*items: bytes, service: str = "batch") -> list[Delivery]:
            return list(await asyncio.gather(*(call(caller, site.subject(service), item) for item in items)))

        assert [body_of(each) for each in await together(b"a", b"b", b"c")] == [[3, "a"], [3, "b"], [3, "c"]]
        own = await together(b"a", b"error", b"c")
        assert [body_of(each) for each in own][::2] == [[3, "a"], [3, "c"]]
        assert (error_of(own[1]), body_of(own[1])["kind"]) == ("failed", "ValueError")
        raised = await together(b"a", b"raise", b"c")
        assert [(error_of(each), body_of(each)["kind"]) for each in raised] == [("failed", "OSError")] * 3
        short = await together(b"a", b"short", b"c")
        said = "the function got 3 calls, and must return a list of 3: found a list of 2"
        assert [(error_of(each), body_of(each)["message"]) for each in short] == [("bad-batch", said)] * 3

        one = member_of(own[0])

        async def runs(number: int) -> None:
            while body_of(await call(caller, f"$SRV.STATS.batch.{one}"))["endpoints"][0]["data"]["running"] != number:
                pass

        subject, inbox = site.subject("batch"), f"_INBOX.{site.prefix}.gone"
        await caller.send([(subject, b"gone", inbox)])
        await runs(1)
        await caller.send([(f"{subject}.cancel", inbox.encode(), "")])
        await runs(0)
        assert {body_of(each)[0] for each in await together(b"a", b"b", b"c")} == {3}
        made = [
            caller.request_many(site.subject("steps"), b"%d" % n, 60, lambda got: "Moorage-End" in (got.headers or {}))
            for n in (0, 1, 3)
        ]
        assert [[part.data for part in parts] for parts in await asyncio.gather(*made)] == [
            [b""], [b"0", b""], [b"0", b"1", b"2", b""]
        ]  # fmt: skip
        await until(lambda: bool(loads) and body_of(loads[-1])["counts"]["batched"] == 15, what="batches are counted")
        assert body_of(loads[-1])["counts"]["batches"][:3] == [0, 0, 5]


async def test_each_method_that_is_an_endpoint_is_called_by_its_name(site: Site) -> None:
    async with (
        site.serving("text") as (caller, _),
        AsyncClient(site.url, tenant="default", prefix=site.prefix) as moorage,
    ):
        assert (await call(caller, site.subject("text.size"), b"abc")).data == b"3"
        assert await moorage.call("text.turned", "abc") == ["cba", "turned"]
        large = "x" * 2 * caller.max_payload_bytes
        assert await moorage.call("text.size", large) == len(large)
        hidden = await call(caller, site.subject("text.hidden"), b"x")
        assert (hidden.headers or {})["Nats-Service-Error-Code"] == "404"
        assert body_of(hidden)["message"] == "text has no method 'hidden'; its methods: size, turned"
        with pytest.raises(Rejected, match="its methods: size, turned"):
            await moorage.call("text.hidden", "x")
        with pytest.raises(CallFailed, match="404: call one of its methods: size, turned"):
            await moorage.call("text", "x")


async def test_during_a_rollout_each_call_of_a_new_method_comes_to_a_member_that_has_it(site: Site) -> None:
    """Members without the method passed a call on at random, and refused every fifth one as `no-endpoint`."""
    older = "older --name text --queue 100"
    async with site.serving(older, older, older, "text --queue 100") as (caller, _):
        answers = await asyncio.gather(*(call(caller, site.subject("text.turned"), b"%d" % at) for at in range(80)))
        assert {error_of(answer) for answer in answers} == {""}
        assert {body_of(answer)[1] for answer in answers} == {"turned"}
        hidden = await asyncio.gather(*(call(caller, site.subject("text.hidden"), b"x") for _ in range(20)))
        assert {error_of(answer) for answer in hidden} == {"no-endpoint"}


@pytest.mark.parametrize("serving", ["odd", "odd --concurrency 2", "aodd"])
async def test_a_call_is_answered_whatever_its_function_raises(site: Site, serving: str) -> None:
    """Without an answer its caller would wait for nothing, and the call keep its place for ever."""
    subject = site.subject(serving.split()[0])
    async with site.serving(serving) as (caller, _):
        for data, kind, message in (
            (b"exit", "SystemExit", "3"),
            (b"interrupt", "KeyboardInterrupt", ""),
            (b"untold", "Untold", "its message cannot be told: RuntimeError"),
            (b"no text", "OSError", "\\udcff"),
        ):
            told = body_of(await call(caller, subject, data, timeout_s=10))
            assert (told["error"], told["kind"], told["message"]) == ("failed", kind, message)
        assert (await call(caller, subject, b"x")).data == b"x", "it goes on"


@pytest.mark.parametrize("function", ["echo", "nap"])
async def test_a_caller_with_large_headers_ends_no_member(site: Site, function: str) -> None:
    async with site.serving(function) as (caller, _):
        answer = await call(caller, site.subject(function), b"0", {"X-Large": "é" * 200_000})
        assert answer.data == b"0"


async def test_with_one_place_too_a_function_hears_that_its_caller_waits_no_longer(site: Site) -> None:
    async with site.serving("endless", "until_cancelled") as (caller, [streams, _]):
        for name, data in (("endless", b"10"), ("until_cancelled", b"wait")):
            inbox, heard = f"_INBOX.{site.prefix}.{name}", list[Delivery]()
            await caller.subscribe(inbox, heard.append)
            await caller.send([(site.subject(name), data, inbox)])
            if name == "endless":
                await until(lambda heard=heard: len(heard) > 3, what="parts")
            await caller.send([(f"{site.subject(name)}.cancel", inbox.encode(), "")])
        assert (await call(caller, site.subject("until_cancelled"), b"x", timeout_s=10)).data == b"x"
        await until(lambda: "closed" in streams.said, what="its generator is closed")


async def test_an_endless_stream_ends_behind_a_caller_that_says_nothing(site: Site) -> None:
    async with site.serving("endless") as (_, [streams]):
        inbox, heard = f"_INBOX.{site.prefix}.gone", list[Delivery]()
        async with await connect(site.url, "gone") as gone:
            await gone.subscribe(inbox, heard.append)
            await gone.send([(site.subject("endless"), b"10", inbox)])
            await until(lambda: len(heard) > 3, what="parts")
        await until(lambda: "closed" in streams.said, what="its generator is closed")


async def test_a_killed_program_answers_502_at_once_and_its_room_is_fetched(site: Site) -> None:
    subject = site.subject("die")
    async with site.serving("die", "die") as (caller, [one, other]):
        gate = site.gate()
        calls = [asyncio.create_task(call(caller, subject, gate.data)) for _ in range(4)]
        await gate.runs(2)
        os.kill(one.program(), signal.SIGKILL)
        done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        [died] = [task.result() for task in done]  # at once: no other call ends before the gate is open
        assert (error_of(died), body_of(died)["started"]) == ("member-died", True)
        gate.open()
        rest = await asyncio.gather(*calls)
        assert Counter(map(error_of, rest)) == {"": 3, "member-died": 1}, "what waited there ran at the other"
        assert await one.ended() == 137
        assert "by signal 9 (SIGKILL)" in one.said
        left = await call(caller, subject, b"leave")
        assert error_of(left) == "member-died"
        assert await other.ended() == 3


@pytest.mark.parametrize("is_killed", [False, True])
async def test_quick_calls_that_are_ahead_of_a_slow_one_run_at_another_member(site: Site, is_killed: bool) -> None:
    """The program has the next quick calls before they have a place: they are taken back from it, also once it died."""
    subject = site.subject("swift")
    async with site.serving("swift") as (caller, [one]):
        for _ in range(50):
            assert (await call(caller, subject, b"quick")).data == b"quick"
        gate = site.gate()
        # in one write, so that the program has the quick ones by the time that the first one is known to be slow
        calls = [asyncio.create_task(call(caller, subject, data)) for data in (gate.data, b"1", b"2", b"3")]
        await gate.runs(1)
        async with site.serving("swift"):
            if is_killed:
                os.kill(one.program(), signal.SIGKILL)
            answers = await asyncio.gather(*calls[1:])
            assert [answer.data for answer in answers] == [b"1", b"2", b"3"]
            assert is_killed or not calls[0].done()
            gate.open()
            assert error_of(await calls[0]) == ("member-died" if is_killed else "")


async def test_a_member_that_is_asked_to_end_loses_no_call(site: Site) -> None:
    """Four members end in turn under load, each once another has come: every call is answered by its function."""
    subject = site.subject("nap")
    answers: Counter[str] = Counter()
    stop = False

    async def load(caller: Connection) -> None:
        while not stop:
            answers[error_of(await call(caller, subject, b"10"))] += 1

    async with site.serving(*["nap --concurrency 2"] * 4) as (caller, members):
        callers = [asyncio.create_task(load(caller)) for _ in range(6)]
        for each in members[:3]:
            before = answers.total()
            await until(lambda before=before: answers.total() > before + 50)
            each.process.terminate()
            assert await each.ended() == 0
        before = answers.total()
        await until(lambda: answers.total() > before + 50)
        stop = True
        await asyncio.gather(*callers)
        assert set(answers) == {""}, answers


async def test_calls_that_outlast_the_grace_are_answered_before_the_end(site: Site) -> None:
    subject = site.subject("aheld")
    async with site.serving("aheld --grace 2s") as (caller, [one]):
        gate, waits = site.gate(), await waiting(caller, site.prefix, "aheld")
        calls = [asyncio.create_task(call(caller, subject, gate.data))]
        await gate.runs()
        calls.append(asyncio.create_task(call(caller, subject)))
        await asyncio.wait_for(waits.wait(), 60)
        one.process.terminate()
        assert await one.ended() == 0
        assert Counter([error_of(await each) for each in calls]) == {"member-died": 1, "busy": 1}


async def test_an_answer_in_parts(site: Site) -> None:
    async with site.serving("count", "acount") as (caller, _):
        for name in ("count", "acount"):
            subject = f"{site.prefix}.call.default.{name}"
            parts = await caller.request_many(subject, b"3", 60, lambda got: "Moorage-End" in (got.headers or {}))
            assert [part.data for part in parts] == [b"0", b"1", b"2", b""]
            assert [(part.headers or {}).get("Moorage-Part") for part in parts] == ["1", "2", "3", None]
            assert (parts[-1].headers or {})["Moorage-End"] == "3"
            [none] = await caller.request_many(subject, b"0", 60, lambda got: "Moorage-End" in (got.headers or {}))
            assert (none.headers or {})["Moorage-End"] == "0", "none is not one that is empty"


async def test_a_class_is_loaded_once_and_several_calls_run_at_a_time(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    async with (
        await connect(nats_url, "caller") as caller,
        member(nats_url, tmp_path, "functions:Model", "--name", "model", prefix=unique) as one,
        member(nats_url, tmp_path, "functions:held", "--name", "held", "--concurrency", "4", prefix=unique) as two,
        member(nats_url, tmp_path, "functions:told", "--name", "told", prefix=unique) as three,
    ):
        await asyncio.gather(one.ready(), two.ready(), three.ready())
        answer = await call(caller, f"{unique}.call.default.model", b"x")
        assert body_of(answer)[0] is True
        gate = Gate(tmp_path)
        calls = [asyncio.create_task(call(caller, f"{unique}.call.default.held", gate.data)) for _ in range(4)]
        await gate.runs(4)  # one after the other, the second would never run
        gate.open()
        await asyncio.gather(*calls)
        headers = {"Traceparent": "00-1", "Moorage-Wait-Ms": "5000", "Moorage-Hops": "x"}
        told = body_of(await call(caller, f"{unique}.call.default.told", b"", headers))
        assert told["headers"]["Traceparent"] == "00-1"
        assert "Moorage-Hops" not in told["headers"]
        assert 4000 < told["wait_ms"] <= 5000


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("functions:nothing", "functions has no nothing; it has echo, pid, held, "),
        ("functions:Model.nothing", "functions has no Model.nothing; it has "),
        ("functions", "names no function"),
        ("functions.py:echo", "write functions:echo\n"),
        ("./some/functions.py:echo", "write some.functions:echo\n"),
        ("nowhere:f", "there is no module nowhere in "),
        ("functions:NUMBER", "is a int"),
    ],
)
async def test_what_cannot_be_served_ends_with_the_reason(
    nats_url: str, unique: str, tmp_path: Path, target: str, why: str
) -> None:
    async with member(nats_url, tmp_path, target, "--name", "x", prefix=unique) as one:
        assert await one.ended() == 1
        assert why in one.said
        assert "Traceback" not in one.said


async def test_a_program_that_ends_before_it_is_ready_is_told_so_and_no_place_is_too_few(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    async with member(nats_url, tmp_path, "--name", "x", "--", "true", prefix=unique) as one:
        assert await one.ended() == 1
        assert "the program ended with code 0 before it was ready" in one.said
    async with member(nats_url, tmp_path, "functions:echo", "--name", "x", "--concurrency", "0", prefix=unique) as two:
        assert await two.ended() == 2
        assert "concurrency must be 1..4096, found 0" in two.said


#: a member's program without moorage: it answers each call with its data turned round
PLAIN = """
import json, os, socket, sys
link = socket.socket(fileno=int(os.environ["MOORAGE_CALL_FD"]))
reader = link.makefile("rb")
link.sendall(b'{"ready": 1}\\n')
for line in reader:
    head = json.loads(line)
    if head.get("end"):
        break
    if "call" in head:
        body = reader.read(head.get("bytes", 0))[::-1]
        link.sendall(json.dumps({"answer": head["call"], "bytes": len(body)}).encode() + b"\\n" + body)
print("ends in order", flush=True)
"""


async def test_a_program_in_any_language_may_serve(nats_url: str, unique: str, tmp_path: Path) -> None:
    subject = f"{unique}.call.default.turn"
    async with (
        await connect(nats_url, "caller") as caller,
        member(nats_url, tmp_path, "--name", "turn", "--", sys.executable, "-c", PLAIN, prefix=unique) as one,
    ):
        await one.ready()
        assert (await call(caller, subject, b"abc")).data == b"cba"
        assert (await call(caller, subject, b"")).data == b""
        big = os.urandom(500_000)
        assert (await call(caller, subject, big)).data == big[::-1]
        one.process.terminate()
        assert await one.ended() == 0
        assert "ends in order" in one.said


#: one that says which signals come
HEARS = """
import os, signal, socket
for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGWINCH):
    signal.signal(number, lambda number, _: print("came", signal.Signals(number).name, flush=True))
link = socket.socket(fileno=int(os.environ["MOORAGE_CALL_FD"]))
link.sendall(b'{"ready": 1}\\n')
for line in link.makefile("rb"):
    if b'"end"' in line:
        break
"""


async def test_signals_that_end_no_member_reach_its_program(nats_url: str, unique: str, tmp_path: Path) -> None:
    """SIGUSR1 and SIGHUP ended the member, and lost its calls."""
    words = ("--name", "hears", "--", sys.executable, "-c", HEARS)
    async with member(nats_url, tmp_path, *words, prefix=unique) as one:
        await one.ready()
        for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGWINCH):
            one.process.send_signal(number)
            await until(lambda name=number.name: f"came {name}" in one.said, what=f"{number.name} came: {one.said}")
        one.process.terminate()
        assert await one.ended() == 0


#: one that gives each answer headers as they should not be, and then more parts than may wait at once
STRANGE = """
import json, os, socket
link = socket.socket(fileno=int(os.environ["MOORAGE_CALL_FD"]))
reader = link.makefile("rb")
link.sendall(b'{"ready": 0, "error": 99}\\n{"ready": 1}\\n{"answer": 77}\\n')
for line in reader:
    head = json.loads(line)
    if head.get("end"):
        break
    body = reader.read(head.get("bytes", 0))
    for at in range(int(body or 0)):
        link.sendall(json.dumps({"part": head["call"], "bytes": 5}).encode() + b"\\nhello")
    bad = {"": "x", "A B": "x", "C:": "x", "D": "x\\r\\nE: y", "Moorage-Member": "me", "Good": "yes"}
    link.sendall(json.dumps({"answer": head["call"], "headers": bad}).encode() + b"\\n")
"""


async def test_a_program_adds_no_header_that_breaks_its_answer_and_streams_as_fast_as_is_sent(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    subject = f"{unique}.call.default.strange"
    async with (
        await connect(nats_url, "caller") as caller,
        member(nats_url, tmp_path, "--name", "strange", "--", sys.executable, "-c", STRANGE, prefix=unique) as one,
    ):
        await one.ready()
        answer = await call(caller, subject, b"0")
        assert error_of(answer) == ""
        assert answer.headers is not None
        assert answer.headers["Good"] == "yes"
        assert {"", "A B", "C:", "D"}.isdisjoint(answer.headers)
        assert answer.headers["Moorage-Member"] != "me"
        parts = await caller.request_many(subject, b"20000", 60, lambda got: "Moorage-End" in (got.headers or {}))
        assert len(parts) == 20_001
        assert (await call(caller, subject, b"0")).data == b""


async def test_a_program_that_writes_nonsense_is_ended_and_says_so(nats_url: str, unique: str, tmp_path: Path) -> None:
    nonsense = "import os, time; os.write(int(os.environ['MOORAGE_CALL_FD']), b'hello\\n'); time.sleep(60)"
    async with member(nats_url, tmp_path, "--name", "x", "--", sys.executable, "-c", nonsense, prefix=unique) as one:
        assert await one.ended() not in (0, None)
        assert "does not keep to the protocol" in one.said


#: one that may have calls ahead, and says after each answer that it is ready for others, and for fewer
READY_AGAIN = """
import json, os, socket
link = socket.socket(fileno=int(os.environ["MOORAGE_CALL_FD"]))
ahead = int(os.environ["MOORAGE_CALL_AHEAD_FD"])
reader = link.makefile("rb")
link.sendall(b'{"ready": 1, "ahead": 4}\\n')
number = 0
for line in reader:
    head = json.loads(line)
    if head.get("end"):
        break
    reader.read(head.get("bytes", 0))
    if head.get("ahead"):
        try:
            while number < head["call"]:
                number = int.from_bytes(os.read(ahead, 8), "little")
        except BlockingIOError:
            continue
        if number > head["call"]:
            continue
    link.sendall(b'{"ready": 2}\\n{"answer": %d}\\n{"ready": 1, "ahead": 4}\\n' % head["call"])
"""


async def test_a_program_that_says_again_that_it_is_ready_loses_no_call_that_is_ahead(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    subject = f"{unique}.call.default.again"
    async with (
        await connect(nats_url, "caller") as caller,
        member(nats_url, tmp_path, "--name", "again", "--queue", "100", "--concurrency", "2",
               "--", sys.executable, "-c", READY_AGAIN, prefix=unique) as one,
    ):  # fmt: skip
        await one.ready()
        for _ in range(20):
            answers = await asyncio.gather(*(call(caller, subject, b"x") for _ in range(50)))
            assert [error_of(answer) for answer in answers] == [""] * 50


async def test_a_program_that_leaves_the_numbers_of_its_calls_in_the_pipe_is_ended_and_says_why() -> None:
    over = asyncio.get_running_loop().create_future()
    program = Program(lambda head, body: None, over.set_result)
    await program.start(("sleep", "60"), 1, os.environ)
    try:
        for number in range(1, 65536 // 8 + 2):
            program.send(ToProgram(call=number, ahead=True))
        assert "takes no numbers" in await over
    finally:
        await program.finish()
    assert program.code == -signal.SIGKILL


async def test_operators_tools_find_members_and_what_they_do(nats_url: str, unique: str, tmp_path: Path) -> None:
    """Read with nats-py's own types for services (NATS ADR-32)."""
    name = f"echo-{unique[-6:]}"
    async with (
        await connect(nats_url, "operator") as operator,
        member(nats_url, tmp_path, "functions:wrong", "--name", name, prefix=unique) as one,
        member(nats_url, tmp_path, "functions:wrong", "--name", name, prefix=unique) as other,
    ):
        await asyncio.gather(one.ready(), other.ready())
        for _ in range(10):
            await call(operator, f"{unique}.call.default.{name}", b"x")
        seen: list[Delivery] = []

        def two(delivery: Delivery) -> bool:
            seen.append(delivery)
            return len(seen) == 2

        found = await operator.request_many(f"$SRV.PING.{name}", b"", 30, two)
        pings = [ServicePing.from_dict(body_of(each)) for each in found]
        assert {ping.name for ping in pings} == {name}
        assert len({ping.id for ping in pings}) == 2
        info = ServiceInfo.from_dict(body_of(await operator.request(f"$SRV.INFO.{name}.{pings[0].id}", b"", 30)))
        assert info.endpoints[0].subject == f"{unique}.call.default.{name}"
        stats = [
            ServiceStats.from_dict(body_of(await operator.request(f"$SRV.STATS.{name}.{ping.id}", b"", 30)))
            for ping in pings
        ]
        counted = [each.endpoints[0] for each in stats]
        assert sum(each.num_requests for each in counted) == 10
        assert [each.num_errors for each in counted] == [each.num_requests for each in counted]
        assert {each.last_error for each in counted if each.num_errors} == {"500:ValueError: no such thing: b'x'"}


async def test_a_question_that_a_member_takes_with_it_is_asked_again_and_holds_up_no_end(site: Site) -> None:
    """A member that died with calls waiting has said `have`, and never answers the `want` that it was sent."""
    async with site.serving("echo") as (died, [one]):
        wants: list[Delivery] = []
        room = f"{site.prefix}.calls.default.echo"
        await died.subscribe(f"{room}.want", wants.append, "room")
        await died.send([(f"{room}.have", b"", "")])
        await until(lambda: len(wants) >= 3, what="it asks again")
        one.process.terminate()
        assert await one.ended() == 0
