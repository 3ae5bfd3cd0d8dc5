"""What a request says for its driver: facts 8 to 17 of the source systems, and every spelling of the sources."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from moorage.client.errors import Rejected
from moorage.client.request_builder import build_request
from moorage.schemas.capabilities import Capabilities
from moorage.schemas.codec import decode_request, encode
from moorage.schemas.driver_config import BLOCKS, DEVICE_KEYS
from moorage.schemas.errors import Refused
from moorage.schemas.job import Request
from moorage.schemas.trouble import Trouble

NO_GPUS = Capabilities(gpu_enabled=False)
CDI = "nvidia.com/gpu="


def asked(driver: str = "process", block: Any = None, **fields: Any) -> Request:
    body: dict[str, Any] = {"run": {"driver": driver, "argv": ["x"]}, **fields}
    if block is not None:
        body["driver_config"] = {driver: block}
    return decode_request(json.dumps(body).encode())


def trouble(driver: str = "process", block: Any = None, **fields: Any) -> Trouble:
    found = asked(driver, block, **fields).trouble
    assert found is not None
    return found


@pytest.mark.parametrize("driver", sorted(BLOCKS))
@pytest.mark.parametrize("key", DEVICE_KEYS)
def test_fact_08_ids_without_a_gpu_request(driver: str, key: str) -> None:
    found = trouble(driver, {key: ["0"]})
    assert found.field == f"driver_config.{driver}.{key}"
    assert "needs a GPU request" in found.message


def test_fact_09_a_duplicate_is_named_before_the_count_is_compared() -> None:
    found = trouble(block={"gpu_device_ids": ["GPU-a", "1", "GPU-a"]}, gpu={"count": 2})
    assert (found.message, found.found) == ("the device GPU-a is named twice", "GPU-a")
    assert "twice" in trouble(block={"gpu_device_ids": ["1", "1"]}).message, "and before the missing GPU"


@pytest.mark.parametrize(
    ("ids", "gpu", "right"),
    [
        (["0"], {}, True),
        (["0", "1"], {}, False),
        (["0", "1"], {"count": 2}, True),
        (["0"], {"count": 2}, False),
    ],
)
def test_fact_10_as_many_ids_as_gpus(ids: list[str], gpu: dict[str, int], right: bool) -> None:
    found = asked(block={"gpu_device_ids": ids}, resource_requirements={"gpu": gpu}).trouble
    assert (found is None) is right
    assert right or (found is not None and str(len(ids)) in found.message and str(gpu.get("count", 1)) in found.message)


@pytest.mark.parametrize("ids", [[], [""], [" "], ["0", "\t"], ["x" * 257], [0], [None], "0", 0, {}, ["0"] * 65])
def test_fact_11_an_empty_list_or_a_blank_id(ids: Any) -> None:
    found = trouble(block={"gpu_device_ids": ids}, gpu={})
    assert found.field.startswith("driver_config.process.gpu_device_ids")
    assert found.allowed


@pytest.mark.parametrize("block", [5, "x", [], None, True])
def test_fact_12_the_active_block_is_an_object_and_others_are_not_looked_at(block: Any) -> None:
    body = {"run": {"argv": ["x"]}, "driver_config": {"process": block}}
    found = decode_request(json.dumps(body).encode()).trouble
    assert found is not None
    assert (found.field, found.allowed) == ("driver_config.process", "an object")
    others = {"docker": 5, "noop": {"typo": 1}, "own": []}
    assert asked(driver_config=others).trouble is None
    mine = asked(driver_config={**others, "process": {"gpu_device_ids": ["0"]}}, gpu={})
    assert mine.trouble is None
    assert mine.active_alone.driver_config == {"process": {"gpu_device_ids": ["0"]}}
    assert asked(driver_config=others).active_alone.driver_config == {}


@pytest.mark.parametrize("driver", sorted(BLOCKS))
@pytest.mark.parametrize("key", ["gpu_device_id", "cdi_device", "typo"])
def test_fact_13_an_unknown_key_of_the_active_block(driver: str, key: str) -> None:
    found = trouble(driver, {key: ["0"]}, gpu={})
    assert (found.field, found.found) == (f"driver_config.{driver}.{key}", key)
    assert set(found.allowed.split(", ")) == set(BLOCKS[driver].__struct_fields__)


def test_fact_13_says_which_key_is_near() -> None:
    assert "the nearest is gpu_device_ids" in trouble("docker", {"gpu_device_id": ["0"]}, gpu={}).message


def test_fact_14_shape_and_support_are_two_classes() -> None:
    right = asked("docker", {"cdi_devices": [CDI + "0"]}, gpu={})
    assert right.driver_fault(None) is None
    fault = right.driver_fault(NO_GPUS)
    assert fault is not None
    assert (fault.code, fault.trouble.field) == ("failed-precondition", "gpu")
    assert asked("docker", {"image": "x"}).driver_fault(NO_GPUS) is None, "it asks for no GPU"
    wrong = asked("docker", {"cdi_devices": []}, gpu={}).driver_fault(NO_GPUS)
    assert wrong is not None
    assert wrong.code == "invalid-argument"


@pytest.mark.parametrize(
    "fields",
    [
        {"block": {"gpu_device_ids": ["0", "0"]}, "gpu": {}},
        {"block": {"gpu_device_ids": ["0", "1"]}, "gpu": {}},
        {"block": {"gpu_device_ids": ["no device"]}, "gpu": {}},
        {"gpu": {"count": 2}},
    ],
)
def test_fact_15_a_driver_without_gpus_is_told_before_the_shape_of_ids(fields: dict[str, Any]) -> None:
    request = asked("vm", **fields)
    codes = [fault.code for fault in (request.driver_fault(NO_GPUS), request.driver_fault(None)) if fault is not None]
    assert codes == ["failed-precondition", "invalid-argument"]


@pytest.mark.parametrize("one", ["", "0", "12", 3, "0000:17:00.0", "0000:AF:00.1"])
def test_fact_16_a_virtual_machine_takes_an_index_or_an_address(one: Any) -> None:
    request = asked("vm", {"gpu_device_ids": [one]}, gpu={})
    assert request.trouble is None
    assert request.device_ids == ((str(one).lower(),) if one != "" else ())


@pytest.mark.parametrize("one", ["-1", "x", "17:00.0", "00000000:17:00.0", -1, True, 1.5, " ", CDI + "0", "GPU-a"])
def test_fact_16_a_virtual_machine_takes_nothing_else(one: Any) -> None:
    assert trouble("vm", {"gpu_device_ids": [one]}, gpu={}).field.startswith("driver_config.vm.gpu_device_ids")


def test_fact_16_a_virtual_machine_has_one_gpu() -> None:
    assert trouble("vm", gpu={"count": 2}).field == "gpu.count"
    assert asked("vm", gpu={}).trouble is None


@pytest.mark.parametrize("key", [*DEVICE_KEYS, "interim"])
def test_fact_17_kubernetes_takes_counts_and_supports_no_ids(key: str) -> None:
    """Ids of the right shape are no malformed request: no worker supports them, as with a driver without GPUs."""
    assert asked("kubernetes", {"image": "x"}, gpu={"count": 8}).driver_fault(Capabilities()) is None

    def of(*ids: Any) -> Request:
        run = {"driver": "kubernetes", "argv": ["x"], "image": "a:1"}
        if key == "interim":
            return asked("kubernetes", resource_requirements={"gpu": {"count": 1, "device_ids": list(ids)}}, run=run)
        return asked("kubernetes", {key: list(ids)}, gpu={}, run=run)

    right = of("0")
    assert right.trouble is None
    assert right.device_ids == ("0",)
    fault = right.driver_fault(Capabilities())
    assert fault is not None
    place = "resource_requirements.gpu.device_ids" if key == "interim" else f"driver_config.kubernetes.{key}"
    assert (fault.code, fault.trouble.field, fault.trouble.found) == ("failed-precondition", place, "0")
    assert fault.trouble.allowed == "a count of GPUs, without ids"
    wrong = of("0", "1").driver_fault(Capabilities())
    assert wrong is not None
    assert wrong.code == "invalid-argument", "a fault of shape goes before what is not supported"
    if key != "interim":  # there the shape is a fault of the decoder's
        for ids in ([], [" "], [5], ["0", "0"]):
            assert trouble("kubernetes", {key: ids}, gpu={}).field.startswith(place)


def test_a_process_knows_devices_by_uuid_or_index() -> None:
    assert trouble(block={"gpu_device_ids": [CDI + "0"]}, gpu={}).allowed == "a uuid or an index"
    for good in ("GPU-8a7d", "0", "MIG-GPU-1/7/0", "0000:03:00.0"):  # the last is the uuid of a card that tells none
        assert asked(block={"gpu_device_ids": [good]}, gpu={}).trouble is None


def test_a_driver_of_ones_own_stays_unread() -> None:
    blocks: list[Any] = [5, {"gpu_device_ids": []}, {"any": 1}]
    for block in blocks:
        request = asked("own", block)
        assert (request.trouble, request.device_ids) == (None, ())
    interim = asked("own", {"any": 1}, resource_requirements={"gpu": {"device_ids": ["x:y"]}})
    assert (interim.trouble, interim.device_ids) == (None, ("x:y",))


# ------------------------------------------------------------------------------------------------ the spellings


@pytest.mark.parametrize("key", DEVICE_KEYS)
def test_the_keys_of_the_sources_mean_the_same(key: str) -> None:
    assert asked("docker", {key: [CDI + "0"]}, gpu={}).device_ids == (CDI + "0",)
    other = next(name for name in DEVICE_KEYS if name != key)
    assert "say the same" in trouble("docker", {key: ["0"], other: ["0"]}, gpu={}).message


def test_driver_config_may_stand_in_the_template() -> None:
    said = {"docker": {"cdi_devices": [CDI + "1"], "image": "a:1"}}
    request = asked("docker", template={"driver_config": said}, gpu={})
    assert (request.device_ids, request.image, request.trouble) == ((CDI + "1",), "a:1", None)
    assert request.active_alone.driver_config == said
    with pytest.raises(Refused, match="unknown field `resources`"):
        asked("docker", template={"resources": {}})
    with pytest.raises(Refused, match="say the same"):
        asked("docker", {"image": "a:1"}, template={"driver_config": said})


@pytest.mark.parametrize(
    ("gpu", "ids"),
    [
        ({}, ()),
        ({"device_ids": []}, ()),
        ({"device_ids": ["0", "1"], "count": 2}, ("0", "1")),
        ({"device_id": "GPU-a"}, ("GPU-a",)),
        ({"device_id": ["0", "GPU-a"], "count": 2}, ("0", "GPU-a")),
        ({"device_id": []}, ()),
    ],
)
def test_the_interim_form_lists_the_drivers_devices(gpu: dict[str, Any], ids: tuple[str, ...]) -> None:
    request = asked(resource_requirements={"gpu": gpu})
    assert (request.device_ids, request.trouble) == (ids, None)


def test_the_interim_form_is_checked_as_the_block() -> None:
    for gpu in ({"device_ids": ["0"], "device_id": "0"}, {"device_ids": [" "]}, {"device_id": ""}):
        with pytest.raises(Refused) as refused:
            asked(resource_requirements={"gpu": gpu})
        assert refused.value.code == "invalid-argument"
    twice = trouble(block={"gpu_device_ids": ["0"]}, resource_requirements={"gpu": {"device_ids": ["0"]}})
    assert "say the same" in twice.message
    assert "twice" in trouble(resource_requirements={"gpu": {"count": 2, "device_ids": ["0", "0"]}}).message
    assert "count" in trouble(resource_requirements={"gpu": {"device_ids": ["0", "1"]}}).message


def test_the_template_of_openshell_is_read_as_the_requests_own_fields() -> None:
    """The shape of its release 0.1: `spec.template` and `spec.resource_requirements`."""
    sent = {
        "job": "sandbox",
        "run": {"driver": "docker", "argv": ["x"], "env": {"A": "1"}},
        "labels": {"team": "vision"},
        "template": {
            "image": "a:1",
            "environment": {"B": "2"},
            "labels": {"app": "sandbox"},
            "driver_config": {"docker": {"cdi_devices": [CDI + "1"]}},
        },
        "resource_requirements": {"cpu": "500m", "memory": "2Gi", "gpu": {"count": 1}},
    }
    ours = {
        "job": "sandbox",
        "run": {"driver": "docker", "argv": ["x"], "env": {"A": "1", "B": "2"}, "image": "a:1"},
        "labels": {"team": "vision", "app": "sandbox"},
        "resources": {"cpu_milli": 500, "memory_mib": 2048},
        "template": {"driver_config": {"docker": {"cdi_devices": [CDI + "1"]}}},
        "resource_requirements": {"gpu": {"count": 1}},
    }
    theirs, own = (decode_request(msgspec.json.encode(each)) for each in (sent, ours))
    assert theirs == own
    assert (theirs.trouble, theirs.image, theirs.device_ids) == (None, "a:1", (CDI + "1",))
    assert decode_request(encode(theirs)) == theirs, "it can be stored and read again"
    for twice in (
        {"run": {"argv": ["x"], "image": "b:1"}, "template": {"image": "a:1"}},
        {"run": {"argv": ["x"], "env": {"A": "1"}}, "template": {"environment": {"A": "1"}}},
        {"run": {"argv": ["x"]}, "labels": {"app": "a"}, "template": {"labels": {"app": "b"}}},
        {"run": {"argv": ["x"]}, "resources": {"cpu_milli": 1}, "resource_requirements": {"cpu": "1"}},
    ):
        with pytest.raises(Refused, match=r"say the same|name the same key"):
            decode_request(msgspec.json.encode(twice))


@pytest.mark.parametrize(
    ("cpu", "memory", "kept"),
    [
        (2, 1 << 30, (2000, 1024)),
        ("1.5", "1G", (1500, 954)),
        ("250m", "100Mi", (250, 100)),
        ("0.0001", "1", (1, 1)),
        ("1k", "1.5Ti", (1_000_000, 1_572_864)),
        (None, "1Gi", (0, 1024)),
    ],
)
def test_quantities_are_cores_and_mebibytes(cpu: str | int | None, memory: str | int, kept: tuple[int, int]) -> None:
    resources = asked(resource_requirements={"cpu": cpu, "memory": memory}).resources
    assert resources is not None
    assert (resources.cpu_milli, resources.memory_mib) == kept


@pytest.mark.parametrize("amount", ["", "-1", "1 Gi", "two", "1e3", "1gi", "1.5.5", "9" * 19, -1])
def test_what_is_no_quantity_is_refused(amount: object) -> None:
    for field in ("cpu", "memory"):
        with pytest.raises(Refused, match=rf"resource_requirements.{field} must be a quantity"):
            asked(resource_requirements={field: amount})


def test_the_image_is_one_word_and_the_block_goes_before_it() -> None:
    run = {"driver": "docker", "argv": ["x"], "image": "a:1"}
    assert asked(run=run).image == "a:1"
    assert asked(run=run, driver_config={"docker": {"image": "b:2"}, "podman": {"image": "c"}}).image == "b:2"
    assert asked(run=run, driver_config={"podman": {"image": "c"}}).image == "a:1"
    assert trouble(run={"argv": ["x"], "image": "a:1"}).field == "run.image"
    assert trouble(run={**run, "image": " "}).field == "run.image"
    assert trouble("docker", {"image": 5}).field == "driver_config.docker.image"


def test_the_sdk_refuses_with_field_found_and_allowed() -> None:
    with pytest.raises(Rejected) as rejected:
        build_request(["x"], 1, fields={"driver_config": {"process": {"gpu_device_ids": ["0", "1"]}}})
    told = rejected.value.problem
    assert (told.code, told.field) == ("invalid-argument", "$.driver_config.process.gpu_device_ids")
    assert (told.found, told.allowed) == ("2", "1, or as many in gpu.count")


@pytest.mark.parametrize("block", [{"device_ids": 5}, {"device_ids": ["0", "0"]}, {"gpu_device_ids": ["0", "1"]}, 5])
def test_what_a_release_before_accepted_unread_names_no_device(block: Any) -> None:
    """A ledger may hold such requests: they were placed on any devices."""
    assert asked(block=block, gpu={"count": 1}).device_ids == ()


@pytest.mark.parametrize(
    ("one", "other"), [("0000:AF:00.1", "0000:af:00.1"), ("00000000:af:00.1", "0000:AF:00.1"), ("01", "1")]
)
def test_two_spellings_of_one_device_are_one(one: str, other: str) -> None:
    assert "twice" in trouble(block={"gpu_device_ids": [one, other]}, gpu={"count": 2}).message
    found = [asked(block={"gpu_device_ids": [each]}, gpu={"count": 1}).device_ids for each in (one, other)]
    assert found[0] == found[1]


def test_ports_are_a_few_numbers_each_once() -> None:
    for driver in ("docker", "podman"):
        assert asked(driver, {"image": "a", "ports": [80, 65535]}).trouble is None
        wrongs: list[Any] = [[], list(range(1, 18)), 80, {}, [0], [65536], ["80"], [True], [80, 80], [8.0]]
        for wrong in wrongs:
            found = trouble(driver, {"image": "a", "ports": wrong})
            assert found.field.startswith(f"driver_config.{driver}.ports"), wrong
            assert "1..16 numbers from 1 to 65535" in found.allowed
    for driver in ("process", "vm", "kubernetes"):
        assert f"reads no driver_config.{driver}.ports" in trouble(driver, {"ports": [80]}).message


@pytest.mark.parametrize("driver", ["docker", "podman", "kubernetes"])
@pytest.mark.parametrize("image", [None, "Bad NAME!", "a b", "--privileged", "a@sha256:12"])
def test_a_container_without_an_image_or_with_no_name_of_one_is_refused_at_submit(driver: str, image: Any) -> None:
    """It was placed, and failed on a worker."""
    for said in ({"image": image}, {"block": {"image": image}}):
        run = {"driver": driver, "argv": ["x"], **({} if "block" in said else said)}
        found = trouble(driver, said.get("block"), run=run)
        named = "block" in said and image is not None
        assert found.field == (f"driver_config.{driver}.image" if named else "run.image")
        assert found.message == (f"a job of the driver {driver} needs an image" if image is None else
                                 "this is not an image name")  # fmt: skip
    assert asked(driver, run={"driver": driver, "argv": ["x"], "image": "nothere.invalid:5000/a/b:1"}).trouble is None


def test_the_size_of_dev_shm_is_a_number_of_mib() -> None:
    for driver in ("docker", "podman"):
        for right in (None, 1, 1 << 22):
            assert asked(driver, {"image": "a", "shm_mib": right}).trouble is None
        for wrong in (0, -1, (1 << 22) + 1, "64", True, 1.5):
            found = trouble(driver, {"image": "a", "shm_mib": wrong})
            assert (found.field, found.allowed) == (f"driver_config.{driver}.shm_mib", "1..4194304"), wrong
    for driver in ("process", "vm", "kubernetes"):
        assert f"reads no driver_config.{driver}.shm_mib" in trouble(driver, {"shm_mib": 64}).message
