"""A recorded hello is read once, as it is: of any release, and kept with what this one does not know."""

from __future__ import annotations

from typing import Any

import msgspec

from moorage.scheduler.core.ledger import acts
from moorage.scheduler.core.ledger.fold import fold
from moorage.scheduler.core.ledger.inventory import NO_INVENTORY
from moorage.scheduler.core.ledger.record import decode_record, encode_record
from moorage.scheduler.core.ledger.state import State, Worker
from moorage.scheduler.ledger.state_bytes import dump, load
from moorage.schemas.capabilities import Capabilities
from moorage.schemas.frames import Device
from tests.unit.scheduler.ledger.test_fold import begun, following

GPU: dict[str, Any] = {"index": 3, "vendor": "nvidia", "name": "T4", "uuid": "GPU-a"}


def joined(hello: dict[str, Any]) -> tuple[State, Worker]:
    """A state whose worker 0 has joined with this hello, by the bytes of the record."""
    state = begun()
    record = following(state, acts=[acts.Join(0, "b2", 2, "e" * 32, 0, hello)])
    fold(state, decode_record(encode_record(record)), 3)
    return state, state.worker_by_num[0]


def test_a_hello_of_a_later_release_is_read_and_kept_whole() -> None:
    hello = {
        "kind": "hello", "worker": "w0", "boot": "b2", "drivers": ["noop"], "modes": ["mps"], "labels": {"a": "b"},
        "gpu_pool": [{**GPU, "memory_mib": 16, "cooling": "water"}], "cpu_milli": 8_000, "load_s": 120, "lease_s": 9e9,
        "capabilities": {"noop": {"freezes": True, "teleports": True}}, "lost_ms": 21_000, "json": True, "rack": 7,
    }  # fmt: skip
    state, worker = joined(hello)
    assert worker.hello == hello
    has = worker.inventory
    assert (has.drivers, has.modes, has.labels, has.cpu_milli) == (["noop"], ["mps"], {"a": "b"}, 8_000)
    assert (has.load_s, has.lost_ms, worker.lost_ms, worker.inventory.json) == (120.0, 21_000, 21_000, True)
    assert worker.pool_at(3).devices == [Device(3, "nvidia", "T4", "GPU-a", 16)]
    assert worker.can("noop") == Capabilities(freezes=True)
    assert worker.can("other") == Capabilities()
    again = load(dump(state)).worker_by_num[0]
    assert (again.hello, again.inventory, again.pool) == (hello, has, worker.pool)


def test_devices_of_a_former_hello_stand_in_a_snapshot_as_they_were_sent() -> None:
    state, worker = joined({"gpu_pool": [GPU], "drivers": [], "simulated": True})
    record = following(state, acts=[acts.Join(0, "b3", 3, "d" * 32, 0, {"gpu_pool": []})])
    fold(state, record, 4)
    former = worker.former[-1]
    assert (former.until, former.simulated) == (4, True)
    assert msgspec.to_builtins(former.devices) == [GPU]
    assert load(dump(state)).worker_by_num[0].former == worker.former


def test_a_hello_that_cannot_be_read_ends_no_fold() -> None:
    state, worker = joined({"gpu_pool": "none", "drivers": 7})
    assert worker.inventory is NO_INVENTORY
    assert load(dump(state)).worker_by_num[0].hello == {"gpu_pool": "none", "drivers": 7}
