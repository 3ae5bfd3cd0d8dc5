"""A keyword that a verb does not have, or that means nothing beside the others, is told and never passed over."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from moorage.client import AsyncClient, Client, Rejected
from moorage.client.fields import FIELDS, Fields
from moorage.testing import SimFleet

Call = Callable[[AsyncClient], Coroutine[Any, Any, Any]]
#: each verb that takes a request's fields by name
SAID: dict[str, Callable[[AsyncClient, dict[str, Any]], Coroutine[Any, Any, Any]]] = {
    "submit": lambda m, more: m.submit(["true"], **more),
    "map": lambda m, more: m.map(["true"], ["a"], **more),
    "submit_handler": lambda m, more: m.submit_handler("double", **more),
    "run": lambda m, more: m.run(["true"], **more),
    "submit_many": lambda m, more: m.submit_many([["true"]], **more),
    "plan": lambda m, more: m.plan(["true"], **more),
}


@pytest.fixture
def fleet() -> SimFleet:
    return SimFleet("1xH100")


def test_no_verb_that_takes_fields_is_left_out() -> None:
    taking = {
        name
        for name, verb in inspect.getmembers(AsyncClient, inspect.isfunction)
        if not name.startswith("_")
        and name != "call"  # which takes how it is called
        and any(each.kind is each.VAR_KEYWORD for each in inspect.signature(verb).parameters.values())
    }
    assert taking == set(SAID)
    assert set(Fields.__annotations__) == FIELDS


NEAREST: dict[str, str] = {
    "prioritty": "the nearest is 'priority'",
    "retrys": "the nearest is 'retry'",
    "something": "there are ",
    "id": "",
    "argv": "",
}


@pytest.mark.parametrize("verb", SAID)
async def test_an_unknown_keyword_is_told_with_the_nearest(fleet: SimFleet, verb: str) -> None:
    async with AsyncClient(transport=fleet) as moorage:
        for keyword, told in NEAREST.items():
            with pytest.raises(TypeError, match=f"no keyword '{keyword}'.*{told}"):
                await SAID[verb](moorage, {keyword: 1})
        assert (await moorage.ls()).jobs == [], "nothing was submitted"


async def test_what_a_map_does_with_errors_is_told_with_the_method_that_takes_it(fleet: SimFleet) -> None:
    async with AsyncClient(transport=fleet) as moorage:
        with pytest.raises(TypeError, match=r"job\.answers\(errors='return'\)"):
            await moorage.map(["true"], [1], errors="return")  # type: ignore[call-arg]


ELSEWHERE: dict[str, str] = {
    "key": "a job's id is job=",
    "name": "a job's id is job=",
    "gang": "a gang is gpu=GpuSpec",
    "scheduling": "it is part of the GPUs",
    "command": "the first argument",
    "timeout": "limit=",
    "gpus": "gpu=",
}


async def test_what_is_called_otherwise_elsewhere_is_told_by_its_name_here(fleet: SimFleet) -> None:
    async with AsyncClient(transport=fleet) as moorage:
        for keyword, told in ELSEWHERE.items():
            with pytest.raises(TypeError, match=told):
                await SAID["submit"](moorage, {keyword: "x"})
        # the same command again, as it is said now, and each keyword once more: what is alike is not checked twice
        await moorage.submit(["true"], job="first")
        for keyword, told in ELSEWHERE.items():
            with pytest.raises(TypeError, match=told):
                await SAID["submit"](moorage, {keyword: "x"})


def test_the_sync_twin_tells_the_same(fleet: SimFleet) -> None:
    with Client(transport=fleet) as moorage:
        submit: Any = moorage.submit
        with pytest.raises(TypeError, match="a job's id is job="):
            submit(["true"], key="x")
        assert moorage.submit(["true"], job="x").job == "x"


async def test_a_function_has_none_of_what_a_process_has(fleet: SimFleet) -> None:
    async with AsyncClient(transport=fleet) as moorage:
        for keyword in ("driver", "cwd", "user"):
            told = f"no keyword '{keyword}' here, of a function in a service's own process"
            with pytest.raises(TypeError, match=told):
                await SAID["submit_handler"](moorage, {keyword: "x"})


MISPLACED: dict[str, tuple[Call, type[Exception], str]] = {
    "plan a GPU for nothing": (lambda m: m.plan(gpu="1xH100", drain=["sim-0000"]), TypeError, "gpu without a request"),
    "plan fields of nothing": (lambda m: m.plan(priority=1, drain=["sim-0000"]), TypeError, "priority without"),
    "a state that there is not": (lambda m: m.ls(states=["RUNING"]), Rejected, "RUNING"),
    "too long a list": (lambda m: m.ls(limit=5000), Rejected, "limit"),
}


@pytest.mark.parametrize("case", MISPLACED)
async def test_what_means_nothing_beside_the_others_is_told(fleet: SimFleet, case: str) -> None:
    call, kind, told = MISPLACED[case]
    async with AsyncClient(transport=fleet) as moorage:
        with pytest.raises(kind, match=told):
            await call(moorage)


async def test_a_tail_is_of_what_is_kept(fleet: SimFleet) -> None:
    async with AsyncClient(transport=fleet) as moorage:
        with pytest.raises(TypeError, match="past=True"):
            moorage.watch("j", tail=10)


def test_a_target_and_a_transport_exclude_each_other(fleet: SimFleet) -> None:
    for client in (AsyncClient, Client):
        with pytest.raises(TypeError, match="exclude each other"):
            client("nats://127.0.0.1:1", transport=fleet)


def test_a_name_that_a_job_or_a_client_lacks_is_told_with_what_has_it() -> None:
    job = AsyncClient().job("j")
    for of, name, says in (
        (job, "id", "its id is job.job"),
        (job, "wait", "job.result() waits for its end"),
        (job, "status", "job.show().state says how it is"),
        (AsyncClient(), "jobs", "client.ls() lists the jobs"),
        (Client(), "cancel", "with job = client.job('ID'), it is job.cancel(…)"),
        (Client(), "status", "with job = client.job('ID'), job.show().state says how it is"),
        (Client().fleet, "nodes", "'Fleet' object has no attribute 'nodes'"),
    ):
        with pytest.raises(AttributeError) as caught:
            getattr(of, name)
        assert str(caught.value).endswith(says)
        assert not hasattr(of, "_repr_png_")


async def test_a_keyword_that_resembles_none_is_told_as_none(fleet: SimFleet) -> None:
    """array was told as ready."""
    async with AsyncClient(transport=fleet) as client:
        with pytest.raises(TypeError, match="copies are replicas=10"):
            await client.submit(["true"], array="0-9")  # type: ignore[call-arg]
        with pytest.raises(Rejected) as refused:
            await client.submit(len)  # type: ignore[arg-type]
        assert refused.value.fixes[0].startswith("map(function, items)")
