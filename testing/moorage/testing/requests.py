"""Requests for tests: each field of a request with each kind of its values, as each door takes it.

A value stands here as it is on the wire, and as the text that the command's option, and a job file, take for it. From
this table tests make requests of one field and, drawn by a seed, requests in which as many fields are set as go
together. `FIELDS` names every field of `Request` and of its `run`: a test compares the two.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from moorage.schemas.codec import decode_request, encode
from moorage.schemas.errors import Refused
from moorage.schemas.job import DURATION_S_MAX, Request

#: the command of a request whose values say none
ARGV: Final = ("true",)
#: stands for a value that only a text can say, as a duration without a unit
TEXT_ALONE: Final = msgspec.UNSET
ADDRESS: Final = "0f" * 32
_LONG: Final = "x" * 64


class Value(NamedTuple):
    """One value of a field: on the wire, and as the texts of its option, which may be repeated."""

    wire: Any
    texts: tuple[str, ...] | None = None  # None: no option says it; a switch has no text: ()
    #: on the wire it is taken from old clients, though no door of this release sends it
    taken_on_the_wire: bool = False


class Field(NamedTuple):
    """A field of a request, by its path, with values that are accepted and values that are refused.

    `needs` are the paths of other fields, and values of theirs, without which this one is refused.
    """

    path: str
    option: str  # "" if the command has none
    good: tuple[Value, ...]
    bad: tuple[Value, ...] = ()
    needs: Mapping[str, Any] = {}

    @property
    def keyword(self) -> str:
        """The keyword of `submit` that sets it, alone or with others."""
        first, _, rest = self.path.partition(".")
        name = rest.partition(".")[0] if first == "run" else first
        return "limit" if name == "timeout_s" else name


def one(wire: Any, *texts: str) -> Value:
    return Value(wire, texts)


def unsaid(*wires: Any) -> tuple[Value, ...]:
    return tuple(map(Value, wires))


#: durations, each unit once, with the least and the most
_TIMES: Final = (
    one(90.0, "90s"),
    one(5432.0, "1h30m32s"),
    one(0.5, "500ms"),
    one(172800.0, "2d"),
    one(DURATION_S_MAX, "366d"),
    one(1800.0, "0.5h"),
)
_NO_TIMES: Final = (
    one(-1.0, "-1s"),
    one(DURATION_S_MAX + 86400, "367d"),
    one("soon", "soon"),
    one(math.nan, "nan"),
    one(math.inf, "inf"),
    Value(TEXT_ALONE, ("90",)),
    Value(TEXT_ALONE, ("",)),
    one([90.0], "90s,90s"),
)
_NO_COUNTS: Final = (
    one(-1, "-1"),
    one(1.5, "1.5"),
    one("many", "many"),
    *unsaid("3", True, math.nan, [3], 2**70),
    Value(TEXT_ALONE, ("",)),
)
_WORDS: Final = ("a b", "x=y:z", "#no comment", "two\nlines", "'\"", "ü€", "yes", "007", "null", "[1]", "1e3")
_GPU: Final[Mapping[str, Any]] = {"gpu": {}}
_SERVICE: Final = {"service": {"name": "embed"}}

FIELDS: Final = (
    Field(
        "job",
        "job",
        (one("a", "a"), one("A_b-9", "A_b-9"), one(_LONG, _LONG), one("yes", "yes"), one("007", "007")),
        (one("", ""), one("a b", "a b"), one("a/b", "a/b"), one(_LONG + "x", _LONG + "x"), one("ü", "ü"), *unsaid(7)),
    ),
    Field(
        "replicas",
        "replicas",
        (one(2, "2"), one(1_000_000, "1000000")),
        (one(0, "0"), one(1_000_001, "1000001"), *_NO_COUNTS),
    ),
    Field(
        "indices",
        "array",
        (one("5", "5"), one("0-9", "0-9"), one("0-3,7", "0-3,7")),
        (one("", ""), one("9-1", "9-1"), one("a", "a"), one("0,0", "0,0"), one("-1", "-1"), *unsaid(5, ["0-9"])),
    ),
    Field("max_running", "max-running", (one(1, "1"), one(1_000_000, "1000000")), (one(0, "0"), *_NO_COUNTS)),
    Field(
        "max_failed",
        "max-failed",
        (one(1, "1"), one(None, "all"), one(1_000_000, "1000000")),
        (Value(0, ("0",), taken_on_the_wire=True), *_NO_COUNTS),
    ),
    Field("priority", "priority", (one(0, "0"), one(51, "51"), one(100, "100")), (one(101, "101"), *_NO_COUNTS)),
    Field(
        "gpu",
        "gpu",
        (
            one({}, "1"),
            one({"count": 2, "model": "H100"}, "2xH100"),
            one({"model": ["L40S", "A100"]}, "1xL40S|A100"),
            one({"model": "L40S", "sharing": "mps", "share": {"compute_percent": 50}}, "1xL40S@mps=50%"),
            one({"model": "H100", "min_memory_mib": 70000}, "1xH100:70000M"),
        ),
        (
            one({"count": 0}, "0xH100"),
            one({"count": 65}, "65xH100"),
            one(TEXT_ALONE, "H100@none"),
            *unsaid({"counts": 1}),
        ),
    ),
    Field("gpu.vendor", "", unsaid("amd", ""), unsaid(7), _GPU),
    Field("gpu.min_compute_capability", "", unsaid("8.0"), unsaid("eight", 8.0), _GPU),
    Field("gpu.prefer", "", unsaid("pack", "spread"), unsaid("any"), {"gpu": {"sharing": "mps", "share": {}}}),
    Field(
        "gpu.enforce",
        "",
        unsaid({"memory": "hard", "compute": "guarded"}),
        unsaid({"memory": "soft"}),
        {"gpu": {"sharing": "mps", "share": {"compute_percent": 50, "memory_mib": 4096}}},
    ),
    Field("gpu.topology", "", unsaid("nvlink"), unsaid("pcie", True), {"gpu": {"count": 2}}),
    Field("gpu.scheduling", "", unsaid("spread"), unsaid("some"), {"gpu": {}, "replicas": 2}),
    Field("gpu.distributed", "", unsaid({"backend": "gloo", "master_port": 29501}), unsaid({"master_port": 0}), _GPU),
    Field(
        "resources.cpu_milli",
        "cpu",
        (one(1, "0.001"), one(500, "0.5"), one(4000, "4"), one(10**9, "1000000")),
        (one(-1, "-0.001"), one(10**9 + 1000, "1000001"), one("four", "four"), one(math.nan, "nan"), one(1.5, "inf")),
    ),
    Field(
        "resources.memory_mib",
        "memory",
        (one(1, "1Mi"), one(1024, "1Gi"), one(1536, "1.5Gi"), one(2**31, "2048Ti")),
        (one(-1, "-1Gi"), one(2**31 + 1, "2147483649Mi"), one("16", "16"), one(1.5, "much"), *unsaid(math.nan, True)),
    ),
    Field("resources.enforce", "", unsaid("hard"), unsaid("soft"), {"resources.memory_mib": 1024}),
    Field(
        "requires",
        "requires",
        (
            one({"zone": ["a"]}, "zone=a"),
            one({"zone": ["a", "b"]}, "zone=a,b"),
            one({"z/o.n_e-1": ["x=y"]}, "z/o.n_e-1=x=y"),
            *(one({"zone": [word]}, f"zone={word}") for word in _WORDS),
        ),
        (
            one({"a b": ["c"]}, "a b=c"),
            one({"": ["c"]}, "=c"),
            one({"zone": "a"}, "zone"),
            *unsaid({"zone": []}, ["zone=a"]),
        ),
    ),
    Field(
        "prefers",
        "prefers",
        (
            one(["gpu.model=H100"], "gpu.model=H100"),
            one(["zone!=b", "gpu.cuda<13.1", "a="], "zone!=b", "gpu.cuda<13.1", "a="),
        ),
        (
            one(["gpu.driver>=new"], "gpu.driver>=new"),
            one(["a b=c"], "a b=c"),
            one([f"zone={'x' * 257}"], f"zone={'x' * 257}"),
            *unsaid(["zone"], "zone=b", [""], ["zone=b"] * 9),
        ),
    ),
    Field(
        "same",
        "",
        unsaid(["rack"], ["rack", "site"], []),
        unsaid(["a b"], "rack", [""], ["a", "b", "c", "d", "e"]),
        {"gpu": {"scheduling": "gang"}, "replicas": 2},
    ),
    Field("spread_over", "spread-over", (one("zone", "zone"),), (one("a b", "a b"), one("", ""), *unsaid(["zone"]))),
    Field(
        "each_worker",
        "each-worker",
        (Value(True, ()), *unsaid("once")),
        (one("twice", "twice"), *unsaid(1, "true", None)),
    ),
    Field(
        "where",
        "requires",
        (
            one(["gpu.driver>=570"], "gpu.driver>=570"),
            one(["zone!=b", "gpu.cuda<13.1", "a>0"], "zone!=b", "gpu.cuda<13.1", "a>0"),
            *(one([f"zone!={word}"], f"zone!={word}") for word in ("", *_WORDS)),
        ),
        (
            one(["gpu.driver>=new"], "gpu.driver>=new"),
            one(["a b!=c"], "a b!=c"),
            one([f"zone!={'x' * 257}"], f"zone!={'x' * 257}"),
            *unsaid(["zone"], "zone!=b", [""], ["zone!=b"] * 65),
        ),
    ),
    Field(
        "driver_config",
        "driver-config",
        (one({"own": {"a": [1, "x"]}}, '{"own": {"a": [1, "x"]}}'),),
        (one([1], "[1]"), one("{", "{")),
    ),
    Field("deadline_s", "deadline", _TIMES, (one(0.0, "0s"), *_NO_TIMES)),
    Field("start_within_s", "start-within", (one(0.0, "0s"), *_TIMES), _NO_TIMES),
    Field(
        "or_refuse", "or-refuse", (one(0.5, "0.5"), one(0.9, "0.9")), (one(0.8, "0.8"), one(1.0, "1"), one("x", "x"))
    ),
    Field("retries", "retries", (one(1, "1"), one(1000, "1000")), (one(1001, "1001"), *_NO_COUNTS)),
    Field("retries_on_lost", "", unsaid(0, 1000), unsaid(-1, 1001, 1.5, "3")),
    Field(
        "uses",
        "uses",
        (one({"matlab": 1}, "matlab=1"), one({"a": 1_000_000, "b.c": 2}, "a=1000000", "b.c=2")),
        (one({"a": 0}, "a=0"), one({"a b": 1}, "a b=1"), one({"a": 1_000_001}, "a=1000001"), one({"a": "x"}, "a=x")),
    ),
    Field(
        "fair_key",
        "fair-key",
        (one("ana", "ana"), one("customer 7/é", "customer 7/é"), one("k" * 64, "k" * 64)),
        (one("k" * 65, "k" * 65), *unsaid("a\tb", 7), Value(TEXT_ALONE, ("",)), Value(TEXT_ALONE, (" ",))),
    ),
    Field(
        "fair_weight",
        "fair-weight",
        (one(1, "1"), one(100, "100")),
        (one(101, "101"), one(-1, "-1"), *unsaid(1.5, "3")),
        {"fair_key": "ana"},
    ),
    Field(
        "repair_s",
        "repair",
        (one(600.0, "10m"), one(86400.0, "1d")),
        (one(-1.0, "-1s"), one(90000.0, "25h"), *unsaid("soon", [1])),
        {"groups": [{"name": "a", "gpu": {}}]},
    ),
    Field(
        "groups",
        "group",
        (
            one([{"name": "a", "gpu": {}}], "a=1"),
            one(
                [
                    {"name": "trainer", "replicas": 2, "gpu": {"count": 8, "model": "H100"}, "argv": ["train", "a b"]},
                    {"name": "head", "resources": {"cpu_milli": 2000, "memory_mib": 1024}},
                ],
                "trainer=2x8xH100: train 'a b'",
                "head=-,cpu=2,memory=1Gi",
            ),
            *unsaid([{"name": "a", "gpu": {"model": "H100"}, "env": {"MODE": "fast"}}]),
        ),
        (
            one([{"name": "a"}], "a=-"),
            one([{"name": "A", "gpu": {}}], "A=1"),
            one([{"name": "a", "gpu": {"model": "H100", "sharing": "mps"}}], "a=1xH100@mps"),
            Value(TEXT_ALONE, ("a",)),
            Value(TEXT_ALONE, ("a=1,cores=2",)),
            *unsaid([{"gpu": {}}], {"a": 1}, [{"name": "a", "gpu": {}, "replicas": 0}]),
        ),
    ),
    Field(
        "retry",
        "retry",
        (
            one([{"on": ["oom"], "times": 2}], "oom:2"),
            one([{"on": ["exit:137", "lost"], "times": 5, "pause_s": 90.0}], "exit:137,lost:5,pause=90s"),
            one([{"on": ["exit:2"], "times": 0}, {"on": ["failure"], "times": 3}], "exit:2:0", "failure:3"),
            *unsaid([{"on": "signal", "times": 1000}]),
        ),
        (
            one([{"on": ["oom"], "times": 1001}], "oom:1001"),
            one([{"on": ["exit:0"], "times": 1}], "exit:0:1"),
            one([{"on": ["never"], "times": 1}], "never:1"),
            one([{"on": ["oom"], "times": 1, "pause_s": -1.0}], "oom:1,pause=-1s"),
            Value(TEXT_ALONE, ("3",)),
            Value(TEXT_ALONE, ("oom",)),
            one([{"on": ["oom"], "times": 2}, {"on": ["lost", "oom"], "times": 1}], "oom:2", "lost,oom:1"),
            *unsaid([{"on": [], "times": 1}], [{"on": ["oom"]}], {"oom": 2}, [{"on": ["oom"], "times": 1}] * 17),
        ),
    ),
    Field("on_partition", "on-partition", (one("keep", "keep"),), (one("live", "live"), one("", ""), *unsaid(True))),
    Field("on_no_match", "on-no-match", (one("wait", "wait"), one("reject", "reject")), (one("maybe", "maybe"),)),
    Field("events", "", unsaid("tenant"), unsaid("all")),
    Field(
        "labels",
        "label",
        (
            one({"team": "vision"}, "team=vision"),
            one({"a": "1", "b": ""}, "a=1", "b="),
            *(one({"note": word}, f"note={word}") for word in _WORDS),
        ),
        (one({"a b": "c"}, "a b=c"), one({"": "c"}, "=c"), one({"a": 1}, "a"), *unsaid({"a": None}, ["a=1"])),
    ),
    Field("if_seq", "if-seq", (one(0, "0"), one(2**63 - 1, str(2**63 - 1))), (one(2**63, str(2**63)), *_NO_COUNTS[:3])),
    Field(
        "resource_requirements",
        "",
        unsaid({"gpu": {"count": 2}}, {"cpu": "500m", "memory": "2Gi"}),
        unsaid({"cpu": "x"}),
    ),
    Field("template", "", unsaid({"labels": {"of": "a sandbox"}, "environment": {"T": "1"}}), unsaid({"label": {}})),
    Field("hold", "hold", (Value(True, ()),), (one("maybe", "maybe"), *unsaid(1))),
    Field("preemptible", "preemptible", (Value(True, ()),), (one("maybe", "maybe"), *unsaid(1))),
    Field(
        "service",
        "service",
        (
            one({"name": "embed"}, "embed"),
            one({"name": "text-to-speech", "concurrency": 4096}, "text-to-speech:4096"),
            one(
                {"name": "embed", "concurrency": 8, "input_bytes": 1 << 28, "output_bytes": 1},
                "embed:8,input=256MiB,answer=1",
            ),
        ),
        (
            one({"name": "a b"}, "a b"),
            one({"name": ""}, ""),
            one({"name": "embed", "concurrency": 0}, "embed:0"),
            one({"name": "embed", "concurrency": "8"}, "embed:many"),
            one({"name": "embed", "input_bytes": -1}, "embed:1,input=x"),
        ),
    ),
    Field(
        "service.models",
        "models",
        (one(["m"], "m"), one(["org/m-1.5", "m2"], "org/m-1.5,m2")),
        (one([""], ""),),
        _SERVICE,
    ),
    Field(
        "service.batch",
        "batch",
        (one({"most": 1}, "1"), one({"most": 32, "wait_ms": 5}, "32,5ms")),
        (one({"most": 0}, "0"), one({"most": 1025}, "1025"), one({"most": 2, "wait_ms": -1}, "2,-1ms"), one(2, "two")),
        _SERVICE,
    ),
    Field(
        "service.queue",
        "queue",
        (one({"most": 0}, "0"), one({"most": 200, "wait_s": 10.0}, "200,10s")),
        (one({"most": -1}, "-1"), one({"most": 10_001}, "10001"), one({"most": 2, "wait_s": 1e9}, "2,3000d")),
        _SERVICE,
    ),
    Field(
        "service.sleep_after_s",
        "sleep-after",
        (one(90, "90s"), one(2_592_000, "30d")),
        (one(-1, "-1s"), one(2_592_001, "31d"), one("soon", "soon")),
        {"service": {"name": "embed"}, "gpu": {}},
    ),
    Field(
        "service.wake_within_s",
        "wake-within",
        (one(9, "9s"), one(5400, "90m")),
        (one(-1, "-1s"), one(86_401, "25h")),
        {"service": {"name": "embed"}, "gpu": {}, "service.sleep_after_s": 90},
    ),
    Field(
        "service.sleep_by",
        "sleep-by",
        (
            one({"sleep": {"path": "/sleep?level=1"}, "wake": {"path": "/wake_up"}}, "vllm"),
            one({"sleep": {"path": "/s", "body": "{}"}, "wake": {"path": "/w", "body": "[1]"}}, "/s {},/w [1]"),
        ),
        (
            one({"sleep": {"path": "/sleep?level=2"}, "wake": {"path": "/wake_up"}}, "/sleep?level=2,/wake_up"),
            one({"sleep": {"path": "/sleep"}}, "/sleep"),
            one({"sleep": {"path": "//s"}, "wake": {"path": "/w"}}, "//s,/w"),
        ),
        {"service": {"name": "embed"}, "gpu": {}, "service.sleep_after_s": 90},
    ),
    Field(
        "service.awake_s",
        "awake-at-least",
        (one(9, "9s"), one(0, "0s"), one(5400, "90m")),
        (one(-1, "-1s"), one(86_401, "25h")),
        {"service": {"name": "embed"}, "gpu": {}, "service.sleep_after_s": 90},
    ),
    Field("service.pack", "pack", (Value(True, ()),), (one("maybe", "maybe"),), _SERVICE),
    Field("service.http", "", unsaid({"health": "/health", "path": "/v1"}), unsaid({"port": 1}, True), _SERVICE),
    Field(
        "instead_of", "", unsaid("old"), unsaid("a b", ""), {"service": {"name": "embed"}, "run.ready": {"call": True}}
    ),
    Field(
        "qos",
        "qos",
        (one("low", "low"), one("high", "high"), one("critical", "critical")),
        (one("best", "best"), *unsaid(1)),
    ),
    Field(
        "after",
        "after",
        (
            one(["prep"], "prep"),
            one([{"job": "a", "when": "any"}, {"job": "b", "when": "failed"}], "a:any", "b:failed"),
            one(["007"], "007"),
        ),
        (one(["a b"], "a b"), one([{"job": "a", "when": "ever"}], "a:ever"), one([""], ""), one(["a", "a"], "a", "a")),
    ),
    Field(
        "start_after_s",
        "at",
        (one(7200.0, "2h"),),
        (one(-1.0, "yesterday noon"), one("soon", "soon"), *unsaid(math.nan)),
    ),
    Field("again_of", "", unsaid("first"), unsaid("a b")),
    Field("person", "", unsaid("lena"), unsaid("a b")),
    Field(
        "run.driver",
        "driver",
        (one("noop", "noop"), one("own", "own")),
        (one("", ""), one("x" * 257, "x" * 257), *unsaid(7)),
    ),
    Field(
        "run.argv",
        "",
        tuple(Value([word, *_WORDS]) for word in ("python3", "a b", "/opt/my tool/x")),
        unsaid([], [""], ["a\0"]),
    ),
    Field(
        "run.env",
        "env",
        (
            one({"A": "1"}, "A=1"),
            one({"A": "", "_b9": "x"}, "A=", "_b9=x"),
            *(one({"A": word}, f"A={word}") for word in _WORDS),
        ),
        (
            one({"1A": "x"}, "1A=x"),
            one({"A b": "x"}, "A b=x"),
            one({"": "x"}, "=x"),
            one({"A": "\0"}, "A=\0"),
            *unsaid({"A": 1}),
        ),
    ),
    Field(
        "run.env", "secret", (one({"TOK": {"secret": "hf"}}, "TOK=hf"),), (one({"TOK": {"secret": "a b"}}, "TOK=a b"),)
    ),
    Field(
        "run.image",
        "image",
        (one("a:1", "a:1"), one("reg:5000/x/y@sha256:" + ADDRESS, "reg:5000/x/y@sha256:" + ADDRESS)),
        (one("", ""), one(" ", " "), one("x" * 257, "x" * 257), *unsaid(1)),
        {"run.driver": "docker"},
    ),
    Field(
        "run.cwd",
        "cwd",
        (one("/srv/a b", "/srv/a b"), one("sub", "sub"), one("./sub/", "./sub/"), one(".", "."), one("/", "/")),
        (one("", ""), one("../x", "../x"), one("a/../b", "a/../b"), one("/x\0", "/x\0"), *unsaid(1)),
    ),
    Field("run.files", "", unsaid(ADDRESS), unsaid("0f" * 31)),
    Field("run.files_of", "", unsaid([{"job": "prep"}, {"job": "sweep", "replicas": "0-9"}]), unsaid([{"job": "a b"}])),
    Field("run.items", "", unsaid(["a", "b c"], [{"lr": 0.1, "seed": 3}, {"lr": 1}]), unsaid([], "a", [math.nan])),
    Field(
        "run.keep",
        "keep",
        (
            one(["out/**"], "out/**"),
            one(["*.log", "!debug.log"], "*.log", "!debug.log"),
            one(["./out/", "a b"], "./out/", "a b"),
        ),
        (
            one([""], ""),
            one(["../x"], "../x"),
            one(["~/x"], "~/x"),
            one(["a/**/b/**/c/**"], "a/**/b/**/c/**"),
            *unsaid("out"),
        ),
    ),
    Field(
        "run.checkpoint",
        "checkpoint",
        (
            one("ck", "ck"),
            one("ck/", "ck/"),
            one("./ck", "./ck"),
            one("a/b.d/c-1", "a/b.d/c-1"),
            one("a//b/", "a//b/"),
            one("model.pt", "model.pt"),
        ),
        (
            one("", ""),
            one("/ck", "/ck"),
            one("../ck", "../ck"),
            one("a/../b", "a/../b"),
            one(".", "."),
            one("a b", "a b"),
            *unsaid(1),
        ),
    ),
    Field(
        "run.checkpoint_every_s",
        "checkpoint-every",
        (one(0.0, "0s"), *(each for each in _TIMES if each.wire >= 1)),
        (one(0.5, "500ms"), *_NO_TIMES),
        {"run.checkpoint": "ck"},
    ),
    Field(
        "run.checkpoint_step",
        "checkpoint-step",
        (one(r"step-(\d+)", r"step-(\d+)"), one(r"a, b=(\d+)\.pt", r"a, b=(\d+)\.pt")),
        (one("", ""), one("step-", "step-"), one(r"(a|b)(\d+)", r"(a|b)(\d+)"), *unsaid(1)),
        {"run.checkpoint": "ck"},
    ),
    Field(
        "run.data",
        "data",
        (
            one({"set": "/data/set"}, "set=/data/set"),
            one({"A_1": "https://x.org/a?b=c#sha256=" + ADDRESS}, "A_1=https://x.org/a?b=c#sha256=" + ADDRESS),
            one({"m": "hf:org/name@v1", "s": "s3://b/k"}, "m=hf:org/name@v1", "s=s3://b/k"),
            one({"o": "object:" + ADDRESS}, "o=object:" + ADDRESS),
            Value({"k": "job:sweep:0-9@1764543600000/out", "p": "job:prep@1"}),
        ),
        (
            one({"a b": "/x"}, "a b=/x"),
            one({"set": "/x/../y"}, "set=/x/../y"),
            one({"set": "https://u:p@x.org/"}, "set=https://u:p@x.org/"),
            one({"set": "nothing"}, "set=nothing"),
            one({"set": "/a b"}, "set=/a b"),
            one({"set": ""}, "set="),
            *unsaid({"a": "/x", "A": "/y"}, {"set": 1}, ["set=/x"]),
        ),
    ),
    Field(
        "run.setup",
        "setup",
        (one("make", "make"), one("a\nb 'c'", "a\nb 'c'")),
        (one("", ""), one("  ", "  "), *unsaid(["make"])),
    ),
    Field("run.setup_s", "setup-limit", _TIMES, _NO_TIMES, {"run.setup": "make"}),
    Field(
        "run.user",
        "user",
        (one("ana", "ana"), one("1000", "1000")),
        (one("", ""), one("a b", "a b"), one("-x", "-x"), *unsaid(1000)),
    ),
    Field("run.timeout_s", "time-limit", _TIMES, (one(0.0, "0s"), *_NO_TIMES)),
    Field("run.grace_s", "grace", (one(0.0, "0s"), *_TIMES), _NO_TIMES),
    Field(
        "run.checkpoint_signal",
        "checkpoint-signal",
        (one("SIGUSR1", "SIGUSR1"), one("SIGTERM", "SIGTERM")),
        (one("USR1", "USR1"), one("SIGKILL", "SIGKILL"), one("", ""), *unsaid(10)),
    ),
    Field("run.checkpoint_before_s", "checkpoint-before", _TIMES, _NO_TIMES, {"run.checkpoint_signal": "SIGUSR1"}),
    Field(
        "run.stall_s",
        "stall",
        (one(1.0, "1s"), *(each for each in _TIMES if each.wire >= 1)),
        (one(0.5, "500ms"), *_NO_TIMES),
        _GPU,
    ),
    Field("run.on_stall", "on-stall", (one("end", "end"),), (one("kill", "kill"),), {"run.stall_s": 90.0, "gpu": {}}),
    Field(
        "run.restart",
        "restart",
        (one("on-failure", "on-failure"), one("always", "always")),
        (one("maybe", "maybe"), *unsaid(True)),
    ),
    Field("run.max_restarts", "max-restarts", (one(1, "1"),), (one(0, "0"), *_NO_COUNTS), {"run.restart": "always"}),
    Field(
        "run.restart_unready_s",
        "restart-unready",
        (one(1.0, "1s"), *(each for each in _TIMES if each.wire >= 1)),
        (one(0.5, "500ms"), *_NO_TIMES),
        {"run.restart": "always", "run.ready": {"tcp": "8000"}, "run.ports": 1},
    ),
    Field(
        "run.ready",
        "ready",
        (
            one({"tcp": "8000"}, "tcp:8000"),
            one({"http": "8000/health"}, "http:8000/health"),
            one({"file": "out/ready", "within_s": 5400.0, "every_s": 30.0}, "file:out/ready,within=90m,every=30s"),
            one({"tcp": "8000", "for_s": 90.0}, "tcp:8000,for=90s"),
        ),
        (
            one({"tcp": "0"}, "tcp:0"),
            one({"http": "PORT/x"}, "http:PORT/x"),
            one({"file": "/x"}, "file:/x"),
            one({}, ""),
            one({"file": "x", "within_s": 0.0}, "file:x,within=0s"),
            one({"tcp": "8000", "for_s": 3601.0}, "tcp:8000,for=3601s"),
            one({"tcp": "1", "every_s": 0.5}, "tcp:1,every=500ms"),
        ),
    ),
    Field("run.ports", "ports", (one(1, "1"), one(16, "16")), (one(17, "17"), *_NO_COUNTS)),
    Field("run.stdin", "", unsaid("stream"), unsaid("file")),
    Field("run.calls", "calls", (Value(True, ()),), (one("maybe", "maybe"), *unsaid(1))),
)

#: fields that decide neither where a job runs nor how long, and how often a world's request has each of them
BESIDE: Final = ("labels", "run.env", "events")
BESIDE_PART: Final = 0.2
#: a job that no world has
NOBODYS: Final = "nobodys"

_OPTIONS: Final = {field.path: field for field in reversed(FIELDS) if field.option}


def with_value(body: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return the body of a request with a value at this path; mappings there are joined."""
    first, _, rest = path.partition(".")
    held = body.get(first)
    if rest:
        return {**body, first: with_value(held or {}, rest, value)}
    if isinstance(held, Mapping) and isinstance(value, Mapping):
        value = {**held, **value}
    return {**body, first: value}


class Drawn(NamedTuple):
    """A request as values of fields, which each door says in its own way."""

    said: tuple[tuple[Field, Value], ...]

    @property
    def body(self) -> dict[str, Any]:
        """The request as on the wire, not checked."""
        body: dict[str, Any] = {"run": {"argv": list(ARGV)}}
        for field, value in self.said:
            body = with_value(body, field.path, value.wire)
        return body

    @property
    def options(self) -> list[tuple[str, str | None]] | None:
        """The options of a command and their values, None of a switch; None if no option says one of the values."""
        found: list[tuple[str, str | None]] = []
        for field, value in self.said:
            if value.texts is None or not field.option:
                return None
            found += [(field.option, text) for text in value.texts] or [(field.option, None)]
        return found

    def of_options(self) -> Drawn:
        """Return what of it the options of a command can say."""
        kept: tuple[tuple[Field, Value], ...] = ()
        for field, value in self.said:
            if field.option and value.texts is not None and trouble_of(Drawn((*kept, (field, value))).body) is None:
                kept = (*kept, (field, value))
        return Drawn(kept)


def alone(field: Field, value: Value) -> Drawn:
    """Return the request with this value, and with what the field needs."""
    return Drawn((*_needed(field), (field, value)))


def _needed(field: Field) -> Iterator[tuple[Field, Value]]:
    for path, wire in field.needs.items():
        needed = _OPTIONS[path]
        said = Value(wire, (wire,) if isinstance(wire, str) else None)
        yield needed, next((value for value in needed.good if value.wire == wire), said)


def drawn(seed: int) -> Drawn:
    """Return a valid request with as many fields as go together, and with values that the seed picks."""
    rng = random.Random(seed)
    said: list[tuple[Field, Value]] = []
    names: set[str] = set()
    for field in rng.sample(FIELDS, len(FIELDS)):
        if field.path in names:
            continue
        tried = [
            *said,
            *(each for each in _needed(field) if each[0].path not in names),
            (field, rng.choice(field.good)),
        ]
        if trouble_of(Drawn(tuple(tried)).body) is None:
            said = tried
            names = {each.path for each, _ in said}
    return Drawn(tuple(said))


def some_of(whole: Drawn, rng: random.Random, but: Collection[str] = ()) -> Drawn:
    """Return some of the fields of a request, which go together by themselves, none of them in `but`."""
    kept = Drawn(())
    part = rng.choice((0.1, 0.3, 0.7))
    for said in whole.said:
        tried = Drawn((*kept.said, said))
        if said[0].path.split(".")[0] not in but and rng.random() < part and trouble_of(tried.body) is None:
            kept = tried
    return kept


def beside(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request of a world with some of the fields that decide neither where nor how long it runs.

    They are drawn by the request itself, so that the draws of its world stay as they are.
    """
    made, rng = dict(body), random.Random(repr(sorted(body.items())))
    for field in FIELDS:
        is_plain = field.option != "secret"  # of which not every host knows
        if field.path in BESIDE and is_plain and rng.random() < BESIDE_PART:
            tried = with_value(made, field.path, rng.choice(field.good).wire)
            made = tried if trouble_of(tried) is None else made
    return made


def after_of(rng: random.Random, newest: list[str], unknown: float = 0.0) -> list[dict[str, str]]:
    """Return for which of these jobs a request waits, one to three, and in `unknown` of all cases for `NOBODYS`."""
    names = rng.sample(newest, min(len(newest), rng.choice((1, 1, 2, 3))))
    if unknown and rng.random() < unknown:
        names.append(NOBODYS)
    return [{"job": name, "when": rng.choice(("succeeded", "succeeded", "any", "failed"))} for name in names]


def trouble_of(body: Mapping[str, Any]) -> str | None:
    """Return why a scheduler refuses a request at its door, with the path of the field; None if it takes it."""
    try:
        request = decode_request(encode(body))
    except Refused as refused:
        return f"{refused.problem.field}: {refused.problem.message}"
    trouble = request.trouble
    return None if trouble is None else f"$.{trouble.field}: {trouble.message}"


def paths_of_requests() -> set[str]:
    """Return the paths of all fields of a request and of its `run`."""
    names = {each.name for each in msgspec.structs.fields(Request)} - {"run"}
    from moorage.schemas.job import Run

    return names | {f"run.{each.name}" for each in msgspec.structs.fields(Run)}


def values_of(fields: Sequence[Field] = FIELDS) -> Iterator[tuple[Field, Value, bool]]:
    """Yield each value of each field, and whether it is accepted."""
    for field in fields:
        yield from ((field, value, True) for value in field.good)
        yield from ((field, value, False) for value in field.bad)
