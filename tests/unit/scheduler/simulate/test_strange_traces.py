"""Traces as they come: whatever is in a file, its readers give jobs, or say in one error where and what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moorage.schemas.errors import Problem, Refused
from moorage.schemas.gpu import GpuSpec
from moorage.testing.simulate import openb_jobs, philly, trace
from moorage.testing.simulate.rows import LINE_MAX
from moorage.testing.simulate.trace import TraceJob

READERS: Final[dict[str, Callable[[Path], Iterator[TraceJob]]]] = {
    "own": trace.read_own,
    "csv": trace.read_csv,
    "philly": lambda path: philly.read_philly(path, "x"),
    "openb": openb_jobs.openb_jobs,
}
HEADS: Final = {
    "own": b"",
    "csv": b"at_s,runs_s,tenant,job,gpu,replicas,gang,priority,cpu_milli,memory_mib,workload,timeout_s\n",
    "philly": b"vc,job,arrival_s,duration_s,num_gpu\n",
    "openb": b"name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,creation_time,deletion_time\n",
}
GOOD: Final = {
    "own": b'{"at_s": 1, "runs_s": 2, "tenant": "t", "request": {"job": "a", "gpu": {"count": 1}}}\n',
    "csv": b'1,2,t,a,2x1xH100@mps=50%,,1,5,100,10,"w,x",9\n',
    "philly": b"x,a,0,10,1\n",
    "openb": b"a,1,2,1,460,V100|T4,0,10\n",
}
OWN: Final = b'{"at_s": %b, "runs_s": 2}\n'
LONG: Final = b"9" * 200_000


def jobs_in(path: Path, kind: str, text: bytes) -> list[TraceJob]:
    path.write_bytes(text)
    return trace.in_order(path, READERS[kind](path))


def refused(path: Path, kind: str, text: bytes) -> Problem:
    with pytest.raises(Refused) as caught:
        jobs_in(path, kind, text)
    told = caught.value.problem
    assert (told.code, bool(told.next)) == ("invalid-argument", True)
    told.message.encode(), told.found.encode()  # both can be printed
    return told


@pytest.mark.parametrize(
    ("kind", "row", "says", "found", "allowed"),
    [
        ("philly", b"x,a,0,10,0", "num_gpu is '0'", "0", "a whole number 1..8192"),
        ("philly", b"x,a,0,10,-1", "num_gpu is '-1'", "-1", "a whole number 1..8192"),
        ("philly", b"x,a,0,10,999999999", "num_gpu is '999999999'", "999999999", "a whole number 1..8192"),
        ("philly", b"x,a,0,10," + b"9" * 5000, "num_gpu is '999", "999", "a whole number 1..8192"),
        ("philly", b"x,a,0,10,1.5", "num_gpu is '1.5'", "1.5", "a whole number 1..8192"),
        ("philly", b"x,,0,10,1", "job is ''", "", "[A-Za-z0-9_-]{1,64}"),
        ("philly", b"x,a,nan,10,1", "arrival_s is 'nan'", "nan", "seconds, 0..316224000"),
        ("philly", b"x,a,0,inf,1", "duration_s is 'inf'", "inf", "seconds, 0..316224000"),
        ("philly", b"x,a\xe9,0,10,1", r"job is b'a\xe9', which is not UTF-8", r"b'a\xe9'", "UTF-8"),
        ("philly", b"x\xe9,a,0,10,1", r"vc is b'x\xe9', which is not UTF-8", r"b'x\xe9'", "UTF-8"),
        ("philly", b"x,a", "arrival_s is ''", "", "seconds"),
        ("philly", b"x,a,0,10,1,,7", "cell 6 is '', in no column", "7 cells", "at most 5 cells"),
        ("openb", b"a b,1,2,0,0,,0,10", "name is 'a b'", "a b", "[A-Za-z0-9_-]{1,64}"),
        ("openb", b"a\xe9,1,2,0,0,,0,10", r"name is b'a\xe9', which is not UTF-8", r"b'a\xe9'", "UTF-8"),
        ("openb", b"a,9999999999,2,0,0,,0,10", "cpu_milli must be 0..1000000000, found 9999999999", "", ""),
        ("openb", b"a,1,2,1,460,%b,0,10" % (b"T" * 70), "model must have patterns of 1..64", "", ""),
        ("openb", b"a,1,2,1,460,,0,1e11", "deletion_time after creation_time is 100000000000.0", "1000", "seconds"),
        ("openb", b"a,1,2,1,460,,0,10,9", "cell 9 is '9', in no column", "9 cells", "at most 8 cells"),
        ("csv", b"nan,2", "at_s is 'nan'", "nan", "seconds, 0..316224000"),
        ("csv", b"1,inf", "runs_s is 'inf'", "inf", "seconds, 0..316224000"),
        ("csv", b"1,-inf", "runs_s is '-inf'", "-inf", "seconds, 0..316224000"),
        ("csv", b"1", "runs_s is ''", "", "seconds"),
        ("csv", b"1,2,t,,,,,,,,,nan", "timeout_s is 'nan'", "nan", "seconds, 0..31622400"),
        ("csv", b"1,2,A b", "tenant is 'A b'", "A b", "[a-z0-9-]{1,32}"),
        ("csv", b"1,2,t,a.b", "job is 'a.b'", "a.b", "[A-Za-z0-9_-]{1,64}"),
        ("csv", b"1,2,t,caf\xe9", r"job is b'caf\xe9', which is not UTF-8", r"b'caf\xe9'", "UTF-8"),
        ("csv", b"1,2,t,a,0xH100", "gpu is '0xH100': count must be 1..64, found 0", "0xH100", ""),
        ("csv", b"1,2,t,a,1xH100,1,yes", "gang is 'yes'", "yes", "0, 1, true or false"),
        ("csv", b"1,2,t,a,1xH100,1,2", "gang is '2'", "2", "0, 1, true or false"),
        ("csv", b"1,2,t,a,1xH100,0", "replicas is '0'", "0", "a whole number 1..1000000"),
        ("csv", b"1,2,t,a,,,,101", "priority is '101'", "101", "a whole number 0..100"),
        ("csv", b"1,2,t,a,,,,,-4000", "cpu_milli is '-4000'", "-4000", "a whole number 0..1000000000"),
        ("csv", b"1,2,t,a,1xH100,,,,,,,,9,9", "cell 13 is '9', in no column", "14 cells", "at most 12 cells"),
        ("csv", LONG, "the line is too long", f"more than {LINE_MAX} characters", f"at most {LINE_MAX}"),
        ("csv", b'1,2,t,"' + (b"9" * 60_000 + b"\n") * 3, "not CSV: field larger than field", "", "quotes closed"),
        ("csv", b'1,2,t,"abc', "not CSV: unexpected end of data", "", "quotes closed"),
        ("own", OWN % b"-1", "at_s is -1.0", "-1.0", "seconds, 0..316224000"),
        ("own", OWN % b"1e308", "at_s is 1e+308", "1e+308", "seconds, 0..316224000"),
        ("own", OWN % b"NaN", "not JSON: ", '{"at_s": NaN', "a JSON object a line"),
        ("own", b'{"at_s": 0}', "Object missing required field `runs_s`", "", ""),
        ("own", b'{"at_s": 0, "runs_s": 1, "tenant": "A b"}', "a tenant must match", "A b", ""),
        ("own", b'{"at_s": 0, "runs_s": 1, "request": {"replicas": 0}}', "replicas must be 1..", "", ""),
        ("own", OWN % b"[1]", "Expected `float`, got `array`", "", ""),
        ("own", b"\xff\xfe{\x00", "not JSON: ", "�", "a JSON object a line"),
        ("own", b'{"request": {"a": ' + b"[" * 9000, "not JSON: ", "[[", "a JSON object a line"),
        ("own", LONG, "the line is too long", f"more than {LINE_MAX} bytes", f"at most {LINE_MAX}"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_what_is_wrong_with_a_row_is_said_with_file_line_and_what_was_found(
    tmp_path: Path, kind: str, row: bytes, says: str, found: str, allowed: str
) -> None:
    told = refused(tmp_path / "jobs.txt", kind, HEADS[kind] + GOOD[kind] + row + b"\n")
    line = 2 if kind == "own" else 3
    assert told.message.startswith(f"jobs.txt line {line}: {says}")
    assert found in told.found
    assert allowed in told.allowed


@pytest.mark.parametrize(
    ("kind", "text", "says", "found"),
    [
        ("csv", b"at_s,tenant\n1,t\n", "line 1: the first line must name at_s, runs_s; it lacks runs_s", "tenant"),
        ("csv", b"at_s,runs_s,hue\n1,2,red\n", "line 1: column 3, 'hue', is not a column of a trace", "runs_s, hue"),
        ("csv", b"at_s,runs_s,at_s\n1,2,3\n", "column 3 has the name 'at_s', which", "at_s, runs_s, at_s"),
        ("csv", b"at_s,runs_s,caf\xe9\n1,2,3\n", "line 1: column 3, 'caf�', is not a column of a trace", "caf�"),
        ("csv", b"", "line 1: the first line must name at_s, runs_s; it lacks at_s", "an empty file"),
        ("csv", HEADS["csv"], "there are no jobs in it", "0"),
        ("philly", b"vc,job,num_gpu,vc\n", "column 4 has the name 'vc', which", "vc, job, num_gpu, vc"),
        ("philly", b"vc,job\nx,a\n", "line 1: the first line must name vc, job, arrival_s", "vc, job"),
        ("philly", HEADS["philly"] + b"y,a,0,1,1\n\nz\n", "no virtual cluster 'x'", "x"),
        ("openb", b"name,name\n", "column 2 has the name 'name', which", "name, name"),
        ("openb", HEADS["openb"], "no rows below the first line", ""),
        ("own", b"\n \n", "there are no jobs in it", "0"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_what_is_wrong_with_the_columns_is_said_with_those_that_are_there(
    tmp_path: Path, kind: str, text: bytes, says: str, found: str
) -> None:
    told = refused(tmp_path / "jobs.txt", kind, text)
    assert says in told.message
    assert found in told.found


@pytest.mark.parametrize("kind", READERS)
def test_a_name_that_stands_there_twice_is_told_with_both_lines(tmp_path: Path, kind: str) -> None:
    again = refused(tmp_path / "jobs.txt", kind, HEADS[kind] + GOOD[kind] + b"\n" + GOOD[kind])
    first = 1 if kind == "own" else 2
    tenant = {"philly": "x", "openb": "openb"}.get(kind, "t")
    assert again.message == f"jobs.txt line {first + 2}: job a of tenant {tenant} is already on line {first}"


@pytest.mark.parametrize("kind", READERS)
def test_a_byte_order_mark_ends_of_lines_and_empty_ones_are_read_over(tmp_path: Path, kind: str) -> None:
    plain = jobs_in(tmp_path / "a", kind, HEADS[kind] + GOOD[kind])
    strange = (b"\xef\xbb\xbf" + HEADS[kind] + b"\n" + GOOD[kind] + b" \n").replace(b"\n", b"\r\n")
    numbered = jobs_in(tmp_path / "b", kind, strange)
    assert plain == numbered


def test_a_gang_is_said_in_one_of_four_words(tmp_path: Path) -> None:
    rows = b"".join(b"1,2,1xH100,%b\n" % word for word in (b"1", b"true", b"True", b"0", b"false", b""))
    jobs = jobs_in(tmp_path / "a", "csv", b"at_s,runs_s,gpu,gang\n" + rows)
    specs = [job.request.gpu for job in jobs]
    assert [spec.scheduling for spec in specs if spec is not None] == ["gang"] * 3 + [None] * 3
    assert specs[-1] == GpuSpec(count=1, model="H100")


def test_what_nobody_reads_may_be_in_any_encoding(tmp_path: Path) -> None:
    head, row = HEADS["openb"].strip(), GOOD["openb"].strip()
    (job,) = jobs_in(tmp_path / "a", "openb", head + b",caf\xe9\n" + row + b",caf\xe9\n")
    assert job.request.job == "a"


def test_a_host_of_a_name_that_is_taken_is_told_with_both_lines(tmp_path: Path) -> None:
    path = tmp_path / "nodes.csv"
    path.write_text("sn,cpu_milli,memory_mib,gpu,model\nn,1,1,1,T4\n\nn,1,1,1,T4\n")
    with pytest.raises(Refused, match="line 4: sn is 'n', allowed: a name of its own: that is the host of line 2"):
        openb_jobs.openb_hosts(path)


STRANGE: Final = (
    b"", b"-1", b"0", b"nan", b"1e308", b"9" * 5000, b"\xff", b"\xed\xa0\x80", b"\x00", b'"', b",", b"\n", b"\r", b"[",
    b"\xef\xbb\xbf", b"null", b'"\\ud800"', b"a b", b"|", b"=", b"\xd9\xa3", b"1_0", b"true", b"65", b"3x", b"@mps=",
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(sorted(READERS)),
    st.lists(st.tuples(st.integers(0, 120), st.integers(0, 8), st.sampled_from(STRANGE)), min_size=1, max_size=3),
)
def test_whatever_is_in_a_file_it_is_jobs_or_one_error(
    tmp_path_factory: pytest.TempPathFactory, kind: str, cuts: list[tuple[int, int, bytes]]
) -> None:
    text = HEADS[kind] + GOOD[kind]
    for at, length, strange in cuts:
        text = text[:at] + strange + text[at + length :]
    path = tmp_path_factory.getbasetemp() / "jobs.txt"
    try:
        assert jobs_in(path, kind, text)
    except Refused:
        refused(path, kind, text)
