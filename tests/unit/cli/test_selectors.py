"""Which jobs a word means, against the real scheduler in this process."""

from __future__ import annotations

import contextlib
import io

import pytest

from moorage.cli import main
from moorage.cli.framework.exit_codes import EXIT_USAGE
from moorage.cli.jobs.job_flags import JobFlags, request_of
from moorage.cli.jobs.newest import with_any, with_newest
from moorage.cli.jobs.selectors import PAGE, Chosen, ask_each, ids_of, ids_to_cancel, one_id, replica_in, words_of
from moorage.client import AsyncClient, ClientError, NotFound, Rejected
from moorage.client.job_ids import fresh_job_id
from moorage.schemas.job import After
from moorage.testing import SimFleet
from tests.scenes import in_virtual_time

HANG = {"run": {"driver": "noop", "argv": ["hang"]}}


async def some_jobs(client: AsyncClient) -> None:
    await client.submit_many([{**HANG, "job": name} for name in ("train-4", "train-42", "train-43", "eval-1")])


@in_virtual_time
async def test_ids_beginnings_last_and_all() -> None:
    async with AsyncClient(transport=SimFleet("8xH100")) as client:
        await some_jobs(client)
        over = await client.submit(["x"], job="over")
        await over.result()
        for words, names in (
            (["train-42"], ["train-42"]),
            (["ev"], ["eval-1"]),
            (["train-4"], ["train-4"]),  # an id whole is no beginning
            (["last"], ["over"]),
            (["all"], ["eval-1", "train-43", "train-42", "train-4"]),
            (["eval-1,over", "eval-1"], ["eval-1", "over"]),
            (["last,all"], ["over", "eval-1", "train-43", "train-42", "train-4"]),
            (["=over"], ["over"]),
            (["train-4*"], ["train-43", "train-42", "train-4"]),
            (["o*,train-43*"], ["over", "train-43"]),
        ):
            assert await ids_of(client, words) == names, words
        assert await one_id(client, "ev", "logs") == "eval-1"


@in_virtual_time
async def test_the_newest_job_is_one_of_several_that_a_job_waits_for() -> None:
    async with AsyncClient(transport=SimFleet("8xH100")) as client:
        await some_jobs(client)
        await client.submit(["x"], job="newest")
        flags = JobFlags(job="b", after=["train-4,last:any", "eval-1"])
        request = request_of(with_any(flags), ["true"])
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            _, asked = await with_newest(client, flags, ["true"], request, None)
        assert asked.after == [After("train-4"), After("newest", "any"), After("eval-1")]
        assert said.getvalue() == "--after last is job newest\n"


@in_virtual_time
async def test_a_beginning_stands_for_another_job_only_where_nothing_is_changed() -> None:
    """`again expt` ran `expt-v2` once more, without a word."""
    async with AsyncClient(transport=SimFleet("8xH100")) as client:
        await some_jobs(client)
        made_up = (await client.submit(["x"])).job
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            assert await one_id(client, "ev", "show") == "eval-1"
        assert said.getvalue() == "ev is job eval-1, the only one whose id begins so\n"
        with pytest.raises(NotFound) as refused:
            await one_id(client, "ev", "exec", acts=True)
        assert refused.value.why == "no job ev of tenant default, but a job whose id begins so"
        assert refused.value.fixes == ("write the id in full: eval-1",)
        assert await ids_of(client, [made_up[:10], "eval-1"], acts=True) == [made_up, "eval-1"]
        assert await ids_of(client, ["ev*"], acts=True) == ["eval-1"], "a pattern is asked for on purpose"


def test_one_replica_is_named_by_the_job_where_a_verb_has_replicas() -> None:
    assert replica_in(["live/1"], None) == (["live"], "1")
    assert replica_in(["live", "b"], "0-3") == (["live", "b"], "0-3")
    for words, replica, why in (
        (["live/1"], "2", "live/1 and --replica 2 both name replicas"),
        (["live/x"], None, "'x' is no replica"),
    ):
        with pytest.raises(Rejected, match=why):
            replica_in(words, replica)
    for words in (["live/1", "b"], ["live/1,b"]):
        assert replica_in(words, None) == (words, None)
        with pytest.raises(Rejected, match="live/1 names a replica, and here a job is named as a whole") as refused:
            words_of(words)
        assert refused.value.fixes[0].startswith("write live; verbs with --replica take live/1")


@in_virtual_time
async def test_what_is_not_one_job_is_told_with_the_candidates() -> None:
    async with AsyncClient(transport=SimFleet("8xH100")) as client:
        await some_jobs(client)
        with pytest.raises(Rejected) as ambiguous:
            await ids_of(client, ["tr"])
        assert ambiguous.value.why == "3 jobs have ids that begin with tr: train-43, train-42, train-4"
        assert ambiguous.value.fixes
        for word in ("nobody", "=trai", "nobody*"):
            with pytest.raises(NotFound):
                await ids_of(client, [word])
        with pytest.raises(Rejected, match="takes one job"):
            await one_id(client, "all", "logs")
        with pytest.raises(Rejected, match="not a valid job id"):
            await ids_of(client, ["a.b"])
        with pytest.raises(Rejected, match="no job is named"):
            words_of([",", ""])


@in_virtual_time
async def test_a_tenant_without_jobs_has_no_last_one() -> None:
    async with AsyncClient(transport=SimFleet("8xH100"), tenant="nobody") as client:
        assert await ids_of(client, ["all"]) == []
        with pytest.raises(NotFound) as none:
            await ids_of(client, ["last"])
        assert none.value.fixes


@in_virtual_time
async def test_a_cancel_takes_names_as_they_stand_and_beginnings_only_of_ids_that_were_made_up() -> None:
    async with AsyncClient(transport=SimFleet("8xH100")) as client:
        await some_jobs(client)
        made_up = fresh_job_id()
        await client.submit({**HANG, "job": made_up})
        assert await ids_to_cancel(client, [made_up[:9]]) == [made_up]
        assert await ids_to_cancel(client, [made_up]) == [made_up]
        assert await ids_to_cancel(client, ["=" + made_up[:9]]) == [made_up[:9]]
        assert await ids_to_cancel(client, ["train"]) == ["train"]  # of a job to come
        assert await ids_to_cancel(client, ["j7"]) == ["j7"]  # of a job to come, too
        assert await ids_to_cancel(client, ["j1"]) == [made_up]
        chosen = await client.submit({**HANG, "job": "j1"})
        assert await ids_to_cancel(client, ["j1"]) == ["j1"], "every id that was made up begins so"
        await chosen.cancel()
        await client.wait([chosen])
        assert await ids_to_cancel(client, ["j1"]) == ["j1"], "nor does a second cancel end another job"
        assert await ids_to_cancel(client, ["last,train-4"]) == ["j1", "train-4"]
        await (await client.submit(["x"], job="train-over")).result()
        assert await ids_to_cancel(client, ["train-*"]) == ["train-43", "train-42", "train-4"]  # not what is over
        other = made_up[:-1] + ("0" if made_up[-1] != "0" else "1")
        await client.submit({**HANG, "job": other})
        with pytest.raises(ClientError, match="2 jobs have ids that begin"):
            await ids_to_cancel(client, [made_up[:-1]])


@in_virtual_time
async def test_all_and_patterns_mean_every_job_however_many() -> None:
    """`cancel 'train-*'` once ended the newest 1,000 of 3,000."""
    async with AsyncClient(transport=SimFleet("8xH100")) as client:
        waits = {**HANG, "gpu": {"count": 64}, "on_no_match": "wait"}
        await client.submit_many([{**waits, "job": f"train-{n}"} for n in range(PAGE + 5)])
        assert len(await ids_of(client, ["all"])) == PAGE + 5
        assert len(await ids_to_cancel(client, ["train-*"])) == PAGE + 5
        assert await ids_to_cancel(client, ["*-1004"]) == ["train-1004"]


@in_virtual_time
async def test_labels_and_states_choose_jobs_in_place_of_ids_or_among_a_pattern() -> None:
    async with AsyncClient(transport=SimFleet("2xH100")) as client:
        for number, sweep in enumerate(("lr", "lr", "wd", "lr")):
            await client.submit({**HANG, "job": f"run-{number}", "labels": {"sweep": sweep, "ann": ""}})
        over = await client.submit(["x"], job="over", labels={"sweep": "lr"})
        await client.job("run-0").cancel()
        await client.wait([client.job("run-0"), over])
        lr = Chosen(label=["sweep=lr"])
        assert await ids_of(client, [], lr) == ["over", "run-3", "run-1", "run-0"]
        assert await ids_of(client, ["run-*"], lr) == ["run-3", "run-1", "run-0"]
        assert await ids_of(client, ["all"], lr) == ["run-3", "run-1"]
        assert await ids_to_cancel(client, [], lr) == ["run-3", "run-1"], "not those that have ended"
        assert await ids_of(client, [], Chosen(label=["sweep=lr"], state=["succeeded"])) == ["over"]
        assert await ids_of(client, [], Chosen(label=["ann"])) == ["run-3", "run-2", "run-1", "run-0"]
        assert await ids_to_cancel(client, [], Chosen(state=["running"])) == ["run-3", "run-2", "run-1"]
        for wrong, says in (
            (["=lr"], "no label"),
            ([""], "no label"),
            (["sweep=lr", "sweep=wd"], "sweep with two values"),
        ):
            with pytest.raises(Rejected, match=says):
                await ids_to_cancel(client, [], Chosen(label=wrong))
        with pytest.raises(NotFound, match="no job of tenant default that has not ended has the label sweep=none"):
            await ids_to_cancel(client, [], Chosen(label=["sweep=none"]))
        with pytest.raises(NotFound):
            await ids_to_cancel(client, [], Chosen(state=["succeeded"]))
        with pytest.raises(Rejected, match="choose among jobs, and run-1 names one"):
            await ids_of(client, ["run-1"], lr)
        with pytest.raises(Rejected, match="states must be of"):
            await ids_to_cancel(client, [], Chosen(state=["runing"]))


@in_virtual_time
async def test_each_answer_is_asked_for_once() -> None:
    async with AsyncClient(transport=SimFleet("8xH100")) as client:
        await some_jobs(client)
        asked: list[str] = []

        async def ask(name: str) -> str:
            asked.append(name)
            return str((await client.job(name).show()).job)

        assert await ask_each(client, ["eval-1", "last"], ask) == ["eval-1", "eval-1"]
        assert asked == ["eval-1", "eval-1"]
        assert await ask_each(client, ["ev"], ask) == ["eval-1"]
        assert asked[2:] == ["ev", "eval-1"]


def test_a_word_that_is_said_twice_is_one_job() -> None:
    assert words_of(["a,b", "", "b,,a", "c"]) == ["a", "b", "c"]


@pytest.mark.parametrize("verb", ["wait", "logs", "show", "explain", "cancel", "again"])
def test_a_line_without_a_job_is_refused_before_anything_is_asked(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run([verb, "--nats", "nats://127.0.0.1:9"]) == EXIT_USAGE
    assert "no job is named" in capsys.readouterr().err
