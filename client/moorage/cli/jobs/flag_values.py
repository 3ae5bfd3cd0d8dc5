"""What the texts of a request's flags mean: numbers, sizes, moments, checks, labels."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, Final

from moorage.cli.framework.arguments import lacks_unit
from moorage.cli.framework.console import print_err
from moorage.client.durations import seconds
from moorage.client.errors import Rejected, rejected
from moorage.client.sources import is_here
from moorage.schemas.units import size_bytes
from moorage.schemas.where import HOST_NAME, is_condition

_MIB: Final = 1024 * 1024
_DECIMAL: Final = re.compile(r"([\d.]+ ?G)B?", re.IGNORECASE)
#: each STEP-th number, as arrays of Slurm and PBS have it
_STEPS: Final = re.compile(r"(\d{1,7})-(\d{1,7}):(\d{1,7})", re.ASCII)
#: what --ready takes
_CHECKS: Final = "tcp:PORT, http:PORT/PATH, file:PATH or call, and behind it ,within=2m ,every=5s ,for=10s"


#: in advice for both, the SDK's way to write what an option says, which follows
_OF_THE_SDK: Final = re.compile(r"(service=)?\{[^}]*\}(, | or )(?=--)")


def of_option(option: str, refused: Rejected, way_on: str = "") -> Rejected:
    """Return the refusal of a value with the name of its option, and another way on if there is one."""
    import msgspec

    told = refused.problem
    next_step = way_on or _OF_THE_SDK.sub("", told.next)
    return Rejected(msgspec.structs.replace(told, message=f"{option}: {told.message}", next=next_step))


def replicas(text: str) -> int | dict[str, int]:
    """Return the number of replicas, or the bounds between which it may be. Raises `Rejected`."""
    first, dash, last = text.partition("-")
    if not all(
        part.isascii() and part.isdecimal() and len(part) <= 8 for part in ((first, last) if dash else (first,))
    ):
        raise rejected(
            "invalid-argument", "--replicas must be a number, or two with - between them", field="$.replicas",
            found=text, allowed="NUMBER, or MIN-MAX with --service or --gang", next="for example --replicas 4, or 1-8",
        )  # fmt: skip
    return {"min": int(first), "max": int(last)} if dash else int(first)


def array(text: str) -> dict[str, Any]:
    """Return the fields of a request that --array says: `0-99%4` is 100 replicas, of which 4 run at once, and `0-99:10`
    ten, each tenth number.

    Raises `Rejected`.
    """
    indices, percent, most = text.partition("%")
    indices = _without_steps(indices)
    if not percent:
        return {"indices": indices}
    if not (most.isdecimal() and most.isascii() and indices.strip()):
        raise rejected(
            "invalid-argument", "--array: how many replicas run at once must follow the percent sign",
            field="$.max_running", found=text, allowed="NUMBERS or NUMBERS%N", next="for example --array 0-99%4",
        )  # fmt: skip
    return {"indices": indices, "max_running": int(most[:8])}


def _without_steps(text: str) -> str:
    """Return the numbers of --array with each `FIRST-LAST:STEP` written out, as a request has no steps. What is no such
    range stays as it is. Raises `Rejected` for more than `RANGES_MAX` numbers of one."""
    from moorage.schemas.ranges import RANGES_MAX

    parts = []
    for part in text.split(","):
        found = _STEPS.fullmatch(part.strip())
        if found is None:
            parts.append(part)
            continue
        first, last, step = map(int, found.groups())
        numbers = range(first, last + 1, max(step, 1))
        if step == 0 or not numbers or len(numbers) > RANGES_MAX:
            raise rejected(
                "invalid-argument", f"--array {part} must go up, by steps from 1 on, to at most {RANGES_MAX} numbers",
                field="$.indices", found=part, allowed="FIRST-LAST:STEP", next="for example --array 0-99:10",
            )  # fmt: skip
        parts.append(",".join(map(str, numbers)))
    return ",".join(parts)


def max_failed(text: str) -> int | None:
    """Return the number of failed replicas that cancels the others; None for `all`. Raises `Rejected`."""
    if text == "all":
        return None
    if not text.isdecimal() or not text.isascii() or int(text[:8]) < 1:
        raise rejected(
            "invalid-argument", "--max-failed must be a number from 1 on, or all", field="$.max_failed", found=text,
            next="leave it out for 20, or 5 % of the replicas if that is more",
        )  # fmt: skip
    return int(text[:8])


#: sizes that --service names, with their fields
_SIZES: Final = {"input": "input_bytes", "answer": "output_bytes"}


def service(text: str) -> dict[str, Any]:
    """Return the service of --service. Raises `Rejected`."""
    head, *sizes = text.split(",")
    name, colon, places = head.partition(":")
    said = dict(each.partition("=")[::2] for each in sizes)
    is_number = places.isascii() and places.isdigit()
    if (colon and not is_number) or len(said) < len(sizes) or not said.keys() <= _SIZES.keys():
        raise rejected(
            "invalid-argument",
            "--service: a number of calls must follow the colon, and the size of their data or answers a comma",
            found=text,
            allowed="NAME, NAME:N or NAME:N,input=SIZE,answer=SIZE",
            next="for example --service embed:8, or embed:8,input=256MiB",
        )
    made: dict[str, Any] = {"name": name}
    if colon:
        made["concurrency"] = int(places[:8])
    for word, size in said.items():
        try:
            made[_SIZES[word]] = size_bytes(size)
        except ValueError as error:
            raise rejected(
                "invalid-argument", f"--service: {error}", found=text, next="for example --service embed:8,input=256MiB"
            ) from None
    return made


def ready(text: str) -> dict[str, Any]:
    """Return the check of --ready. Raises `Rejected`."""
    check, *more = text.split(",")
    way, colon, what = check.partition(":")
    found: dict[str, Any] = {}
    if way == "call" and not colon:
        found["call"] = True
    elif way in ("tcp", "http", "file") and what:
        found[way] = what
    for word in more:
        name, _, duration = word.partition("=")
        if name in ("within", "every", "for"):
            if lacks_unit(duration):
                raise rejected(
                    "invalid-argument", f"--ready: a duration without a unit: {word!r}", found=text,
                    next=f"write {word}s, or {word}m",
                )  # fmt: skip
            try:
                found[f"{name}_s"] = seconds(duration)
            except Rejected as refused:
                raise of_option("--ready", refused) from None
        else:
            found.clear()
    if not found.keys() - {"within_s", "every_s", "for_s"}:
        raise rejected(
            "invalid-argument", "--ready: not a check", found=text, allowed=_CHECKS,
            next="for example --ports 1 --ready http:PORT/health,within=10m",
        )  # fmt: skip
    return found


def retry(texts: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of --retry. Raises `Rejected`."""
    rows: list[dict[str, Any]] = []
    for text in texts:
        said, comma, pause = text.partition(",pause=")
        causes, colon, times = said.rpartition(":")
        if not colon or not causes or not (times.isascii() and times.isdecimal()) or causes == "exit":
            raise rejected(
                "invalid-argument", "--retry: causes must stand before a colon, and behind it how many times",
                field="$.retry", found=text, allowed="CAUSE[,CAUSE…]:TIMES[,pause=DURATION]",
                next="for example --retry oom:2 --retry exit:137,lost:5,pause=30s; --retries 3 for any failure",
            )  # fmt: skip
        row: dict[str, Any] = {"on": causes.split(","), "times": int(times[:8])}
        if comma:
            row["pause_s"] = _pause(pause)
        rows.append(row)
    return rows


def groups(texts: Sequence[str]) -> list[dict[str, Any]]:
    """Return the groups of --group. Raises `Rejected`."""
    import shlex

    from moorage.client.gpus import gpu_spec

    rows = []
    for text in texts:
        said, colon, command = text.partition(": ")
        name, equals, asked = said.partition("=")
        token, *more = asked.split(",")
        pairs = [each.partition("=")[::2] for each in more]
        if not equals or not token or any(key not in ("cpu", "memory") or not value for key, value in pairs):
            raise rejected(
                "invalid-argument", "--group: a name must stand before the equals sign, and behind it the GPUs",
                field="$.groups", found=text, allowed="NAME=GPUS[,cpu=N][,memory=SIZE][: COMMAND]",
                next="for example --group trainer=2x8xH100 --group 'head=-,cpu=4: python head.py'",
            )  # fmt: skip
        row: dict[str, Any] = {"name": name}
        count, dash, _ = token.rpartition("x-")
        if token == "-" or (dash and count.isdecimal()):
            row["replicas"] = int(count[:8] or 1)
        else:
            try:
                row["replicas"], row["gpu"] = gpu_spec(token)
            except Rejected as refused:
                raise of_option("--group", refused) from None
        if pairs:
            row["resources"] = _resources(dict(pairs))
        if colon:
            row["argv"] = shlex.split(command)
        rows.append(row)
    return rows


def _resources(said: dict[str, str]) -> dict[str, int]:
    try:
        cores = {"cpu_milli": milli_cores(float(said["cpu"]))} if "cpu" in said else {}
    except ValueError:
        raise rejected(
            "invalid-argument", "--group: cpu must be a number of cores", field="$.groups", found=said["cpu"],
            allowed="as 4 or 0.5", next="for example --group head=-,cpu=4",
        ) from None  # fmt: skip
    return cores | ({"memory_mib": mebibytes(said["memory"])} if "memory" in said else {})


def _pause(text: str) -> float:
    try:
        if lacks_unit(text):
            raise rejected("invalid-argument", f"a duration without a unit: {text}", next=f"write {text}s")
        return seconds(text)
    except Rejected as refused:
        raise of_option("--retry", refused) from None


def no_retry(texts: Sequence[str]) -> dict[str, Any]:
    """Return the row of `retry` of --no-retry-on, whose numbers are exit codes."""
    causes = [word for text in texts for word in text.split(",")]
    return {"on": [f"exit:{word}" if word.isdecimal() else word for word in causes], "times": 0}


def seconds_to(moment: str) -> float:
    """Return the seconds from now until the moment of --at. Raises `Rejected`."""
    from datetime import datetime

    from moorage.client.moments import seconds_until

    try:
        return round(seconds_until(moment, datetime.now()), 3)
    except Rejected as refused:
        raise of_option("--at", refused) from None


def _end_of(text: str) -> str | dict[str, str]:
    """Return the job of --after, and which end of it counts. Raises `Rejected`."""
    from moorage.schemas.job import WHENS
    from moorage.schemas.names import ALL, EXACTLY, LAST

    name, colon, when = text.partition(":")
    if name in (LAST, ALL) or "*" in name:
        raise rejected(
            "invalid-argument", f"--after: {name} names no job for good, and a job waits for one", field="$.after",
            found=text, allowed="an id in full", next=f"moorage ls shows ids; --after ={name} if a job is called that",
        )  # fmt: skip
    name = name.removeprefix(EXACTLY)
    if colon and when not in WHENS:
        raise rejected(
            "invalid-argument",
            "--after: behind the colon stands which end of the job counts",
            field="$.after",
            found=text,
            allowed="JOB, JOB:any or JOB:failed",
            next=f"for example --after {name or 'train-42'}:any",
        )
    return {"job": name, "when": when} if colon else name


def after(texts: Sequence[str]) -> list[str | dict[str, str]]:
    """Return the jobs of --after, and which end of each counts. Raises `Rejected`."""
    return [_end_of(word) for text in texts for word in text.split(",")]


def labels(texts: Sequence[str]) -> dict[str, str]:
    """Return the labels of --label. Raises `Rejected`."""
    return dict(pairs("label", texts))


def data_sources(texts: Sequence[str]) -> dict[str, str]:
    """Return the sources of --data, by name; of files here an address that stands for theirs. Raises `Rejected`."""
    found = {}
    for name, source in pairs("data", texts, "SOURCE"):
        if source and source[0] not in "/." and ":" not in source:
            raise rejected(
                "invalid-argument", "--data: data must name a source", field=f"$.run.data.{name}", found=source,
                allowed="./path here, /path on the worker, https://…, s3://…, hf:org/name@revision, job:ID/path",
                next=f"of a file or folder here: --data {name}=./{source}",
            )  # fmt: skip
        found[name] = f"object:{'0' * 64}" if is_here(source) else source
    return found


def places(texts: Sequence[str], on: Sequence[str], not_on: Sequence[str]) -> dict[str, Any]:
    """Return the fields of --requires, --on and --not-on: labels with their values, and conditions. Raises
    `Rejected`."""
    if "" in (*on, *not_on):
        raise rejected(
            "invalid-argument", f"--{'on' if '' in on else 'not-on'} names no worker", field="$.where",
            next="name a worker as moorage fleet does, or leave it out",
        )  # fmt: skip
    requires = {name: text.split(",") for name, text in pairs("requires", [t for t in texts if not is_condition(t)])}
    where = [text for text in texts if is_condition(text)] + [f"{HOST_NAME}!={worker}" for worker in not_on]
    if on:
        requires[HOST_NAME] = list(on)
    return ({"requires": requires} if requires else {}) | ({"where": where} if where else {})


def fair_key(text: str) -> str:
    """Return the key of --fair-key. Raises `Rejected` for none, as of a variable that is not set."""
    if not text.strip():
        raise rejected(
            "invalid-argument", "--fair-key is empty", field="$.fair_key", found=text,
            next="name a user or a customer, or leave it out",
        )  # fmt: skip
    return text


def uses(texts: Sequence[str]) -> dict[str, int]:
    """Return the counters of --uses, each with how many of it. Raises `Rejected`."""
    found = {}
    for name, number in pairs("uses", texts, "NUMBER"):
        if not (number.isascii() and number.isdecimal()):
            raise rejected(
                "invalid-argument", f"--uses {name} must be followed by a number", field="$.uses", found=number,
                next=f"for example --uses {name}=1",
            )  # fmt: skip
        found[name] = int(number[:8])
    return found


def milli_cores(cores: float) -> int:
    """Return cores as thousandths of a core, rounded up, so that a small number never becomes 0.

    Raises `Rejected` for infinity, NaN and a number whose thousandths no float holds.
    """
    if not math.isfinite(cores * 1000):
        raise rejected(
            "invalid-argument",
            f"--cpu is not a number of cores: {cores}",
            found=str(cores),
            next="--cpu 4, or --cpu 0.5",
        )
    return math.ceil(round(cores * 1000, 6))


def mebibytes(size: str) -> int:
    """Return a size as MiB, rounded up, from `16G` (16e9 bytes), `16Gi` or `512M`. A number without a unit is refused
    unless it is 0, because 16 may be meant as GiB. Raises `Rejected`."""
    try:
        found = size_bytes(size)
    except ValueError:
        raise rejected(
            "invalid-argument",
            f"--memory: not a size: {size!r}",
            found=size,
            next="write it as 16Gi or 512Mi; 16G is 16e9 bytes",
        ) from None
    if found and size.strip()[-1].isdigit():
        raise rejected(
            "invalid-argument",
            f"--memory: a size without a unit: {size!r}",
            found=size,
            next=f"write {size}G, or {size}Mi",
        )
    return math.ceil(found / _MIB)


def warn_of_decimal(size: str, mib: int) -> None:
    """Say how many MiB a size such as `16G` was read as, and what `16Gi` would be, which most tools mean by it."""
    if found := _DECIMAL.fullmatch(size.strip()):
        binary = f"{found[1]}i"
        print_err(
            f"warning[memory]: {found[0]} is {mib:,} MiB, as G is 1e9 bytes; {binary} is {mebibytes(binary):,} MiB"
        )


def pairs(option: str, texts: Sequence[str], value_is: str = "value") -> list[tuple[str, str]]:
    """Return the `NAME=value` texts of an option, split. Raises `Rejected`, also for a name with two values. It shows
    no value, as one may be secret; a text without = may be one alone."""
    found: list[tuple[str, str]] = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise rejected(
                "invalid-argument",
                f"--{option} needs NAME={value_is}",
                next=f"--{option} NAME={value_is}",
            )
        if (name, value) not in found and name in dict(found):
            raise rejected(
                "invalid-argument", f"--{option} has {name} twice, with other values", found=name,
                next="leave one out" + ("; zone=a,b is either" if option == "requires" else ""),
            )  # fmt: skip
        found.append((name, value))
    return found
