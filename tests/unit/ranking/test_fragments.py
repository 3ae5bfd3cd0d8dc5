"""The ranker `fragments`: kept scores are what a full scan says, nothing that fits is missed, the mix is learned."""

from __future__ import annotations

import random

import pytest

from moorage.ranking import fragments as fragments_module
from moorage.ranking import table as table_module
from moorage.ranking import waste as waste_module
from moorage.ranking.fragments import Fragments
from moorage.ranking.mix import LOOK_FIRST
from moorage.scheduler.core.config import Config
from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.host import EXCLUSIVE, Host
from moorage.scheduler.core.fleet.shape import Shape, Shapes
from moorage.scheduler.core.ledger.state import Worker
from moorage.scheduler.core.rank.ranker import Choice, Pack
from moorage.scheduler.core.rank.rankers import ranker_class
from moorage.schemas.gpu import GpuSpec, Share, Sharing
from moorage.schemas.job import Request, Resources, Run
from tests.turns import turns
from tests.unit.scheduler.driving import Driving
from tests.unit.scheduler.queue.test_groups import world

MODELS = ("NVIDIA T4", "NVIDIA A10", "NVIDIA A100-SXM4-80GB")


def request(gpu: GpuSpec | None, cpu_milli: int = 0, memory_mib: int = 0) -> Request:
    return Request(gpu=gpu, resources=Resources(cpu_milli, memory_mib), run=Run(argv=["true"]))


def worker(num: int, models: list[str], cpu_milli: int = 0, **fields: object) -> Worker:
    made = Worker(num, f"w{num}", "m")
    made.session = "s"
    made.hello = {
        "gpu_pool": [
            {"index": i, "vendor": "nvidia", "name": m, "uuid": f"GPU-{num}-{i}", "memory_mib": 40_000}
            for i, m in enumerate(models)
        ],
        "drivers": ["process"],
        "modes": ["exclusive", "mps", "time-slice"],
        "labels": {},
        "sharers_max": {},
        "cpu_milli": cpu_milli,
        "memory_mib": 0,
        **fields,
    }
    return made


def add(fleet: Fleet, made: Worker) -> Host:
    made.read_hello()
    host = fleet.join(made, [])
    host.heard = True
    fleet.refresh(host)
    return host


def asked(chance: random.Random, shapes: Shapes, modes: tuple[Sharing, ...] = ("mps", "time-slice")) -> Shape:
    models: list[str | list[str] | None] = [None, None, None, "A10", "=A10", ["T4", "A100"]]
    model = chance.choice(models)
    cpu, memory = chance.choice((0, 1_000, 4_000, 9_000)), chance.choice((0, 2_000))
    if chance.random() < 0.15:
        return shapes.of(request(None, cpu, memory))
    if chance.random() < 0.5:
        return shapes.of(request(GpuSpec(count=chance.choice((1, 1, 1, 2, 4, 8)), model=model), cpu, memory))
    sharing: Sharing = chance.choice(modes)
    share = Share(chance.choice((0, 0, 9_000, 30_000)), chance.choice((5, 20, 35, 50, 80, 100)))
    return shapes.of(
        request(GpuSpec(count=chance.choice((1, 1, 1, 2)), model=model, sharing=sharing, share=share), cpu)
    )


def fits(choice: Choice, shape: Shape) -> bool:
    """Whether a choice is one that the fleet may take, by the host's own checks."""
    host = choice.host
    if not host.usable or not host.fits_host(shape) or choice.mask & ~host.cls.fit(shape).mask:
        return False
    if choice.mask.bit_count() != shape.count:
        return False
    for slot in range(64):
        if choice.mask >> slot & 1 and not host.open >> slot & 1:
            device = host.shared.get(slot)
            if shape.mode <= EXCLUSIVE or device is None or not host.room_beside(slot, device, shape):
                return False
    return True


@pytest.mark.parametrize("seed", turns(range(25), often=1, more=3))
def test_kept_scores_choose_what_a_full_scan_chooses(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A random life of a fleet: arrivals, ends, hosts that come, go and fall ill, excluded hosts and spread.

    Of some seeds all hosts have devices of one kind and all share in one mode.
    """
    plain = seed % 5 < 3
    if seed % 2:  # rows are looked up in the order in which they were written, as of a large fleet
        monkeypatch.setattr(table_module, "WRITTEN_PART", 1)
        monkeypatch.setattr(table_module, "WRITTEN_KEPT", 32)
    chance, shapes = random.Random(seed), Shapes()
    rankers = (Fragments(), Fragments())  # the second keeps no scores: it scores every host each time
    fleets = (Fleet(), Fleet())  # each ranker looks after a fleet of its own; the two fleets live the same life
    kinds = [asked(chance, shapes, ("mps",) if plain else ("mps", "time-slice")) for _ in range(30)]
    members: list[tuple[int, Shape, int]] = []
    placed = 0

    def join(num: int) -> None:
        mixed = not plain and chance.random() < 0.2
        model = chance.choice(MODELS)
        count = chance.choice((0, 1, 2, 4, 8, 8))
        models = [chance.choice(MODELS) if mixed else model for _ in range(count)]
        made = worker(num, models, chance.choice((0, 8_000, 32_000)))
        members[:] = [member for member in members if member[0] != num]
        for fleet in fleets:
            add(fleet, made)

    for num in range(12):
        join(num)
    for _ in range(400):
        shape = chance.choice(kinds)
        excluded = frozenset(chance.sample(range(14), chance.choice((0, 0, 3))))
        avoid = dict.fromkeys(chance.sample(range(14), chance.choice((0, 0, 4))), 1)
        choices = []
        for ranker, fleet in zip(rankers, fleets, strict=True):
            ranker.arrived(shape, 1)
            choices.append(ranker.choose(fleet, shape, avoid, excluded))
        rankers[1]._scores.clear()
        first, second = choices
        assert (first and (first.host.worker.num, first.mask)) == (second and (second.host.worker.num, second.mask))
        pack = Pack().choose(fleets[0], shape, avoid, excluded)
        assert (first is None) == (pack is None)  # nothing that fits is missed
        if first is not None:
            num, mask = first.host.worker.num, first.mask
            assert fits(first, shape)
            assert num not in excluded
            for fleet in fleets:
                fleet.take(fleet.hosts[num], shape, mask)
            members.append((num, shape, mask))
            placed += 1
        while members and chance.random() < 0.45:
            num, ended, mask = members.pop(chance.randrange(len(members)))
            for fleet in fleets:
                fleet.give(fleet.hosts[num], ended, mask)
        if chance.random() < 0.05:
            num = chance.randrange(14)
            if num in fleets[0].hosts and chance.random() < 0.5:
                members[:] = [member for member in members if member[0] != num]
                for fleet in fleets:
                    fleet.leave(num)
            else:
                join(num)
        if chance.random() < 0.1:
            num, sick = chance.choice(list(fleets[0].hosts)), chance.choice((0, 1, 3))
            for fleet in fleets:
                fleet.hosts[num].sick = sick
                fleet.refresh(fleet.hosts[num])
    assert placed > 60


def test_a_host_may_come_back_with_more_devices_than_any_had() -> None:
    shapes, fleet, ranker = Shapes(), Fleet(), Fragments()
    add(fleet, worker(0, ["NVIDIA T4"] * 2))
    add(fleet, worker(1, ["NVIDIA T4"] * 2))
    pair = shapes.of(request(GpuSpec(count=2)))
    ranker.arrived(pair, 64)
    assert ranker.choose(fleet, pair, {}, frozenset()) is not None
    grown = add(fleet, worker(1, ["NVIDIA T4"] * 8))
    large = shapes.of(request(GpuSpec(count=8)))
    choice = ranker.choose(fleet, large, {}, frozenset())
    assert choice is not None
    assert (choice.host, choice.mask) == (grown, 255)


class OneByOne(Fragments):
    """Is asked for every single replica."""

    def again(self, choice: Choice, shape: Shape, most: int) -> list[int]:
        return []


@pytest.mark.parametrize("seed", turns(range(6), often=1, more=2))
def test_groups_are_placed_as_one_by_one(seed: int) -> None:
    grouped, places = world(seed, Fragments())
    single, expected = world(seed, OneByOne())
    assert places == expected
    assert sum(map(len, places)) > 50
    assert grouped.state.digest == single.state.digest


def test_after_a_takeover_the_mix_is_that_of_the_live_jobs() -> None:
    drive = Driving.with_hosts(2, config=Config(ranker="fragments"), cpu_milli=8_000)
    for number in range(6):
        drive.submit(f"j{number}", gpu={"count": 1 + number % 2}, replicas=1 + number % 3)
    before = drive.engine.planner.placing.ranker
    assert isinstance(before, Fragments)
    counted = sorted((shape.key, count) for shape, count in before.mix.counts.items())
    drive.lead()
    after = drive.engine.planner.placing.ranker
    assert isinstance(after, Fragments)
    assert after is not before
    assert sorted((shape.key, count) for shape, count in after.mix.counts.items()) == counted


def test_a_small_request_leaves_the_whole_devices_that_others_ask_for() -> None:
    """Half a device goes where a half is left, and a request without a GPU where no device loses its processors."""
    shapes, fleet, ranker = Shapes(), Fleet(), Fragments()
    poor = add(fleet, worker(0, ["NVIDIA T4"] * 8, 80_000))
    rich = add(fleet, worker(1, ["NVIDIA T4"] * 2, 100_000))
    whole = shapes.of(request(GpuSpec(), 10_000))
    half = shapes.of(request(GpuSpec(sharing="mps", share=Share(0, 50)), 1_000))
    alone = shapes.of(request(None, 20_000))
    for shape in [whole] * 40 + [half] * 10 + [alone] * 10:
        ranker.arrived(shape, 1)
    fleet.take(poor, half, 1)
    choice = ranker.choose(fleet, half, {}, frozenset())
    assert choice is not None
    assert (choice.host, choice.mask) == (poor, 1)
    choice = ranker.choose(fleet, alone, {}, frozenset())
    assert choice is not None
    assert choice.host is rich


def test_a_share_goes_where_the_rest_can_be_filled_to_the_end() -> None:
    """40 of 100 leave 60, where 10 or 20 stay idle; 40 of 90 leave 50. To the next arrival alone they are alike."""
    shapes, fleet, ranker = Shapes(), Fleet(), Fragments()
    hosts = [add(fleet, worker(num, ["NVIDIA T4"])) for num in range(2)]
    tenth, small, half = (
        shapes.of(request(GpuSpec(sharing="mps", share=Share(0, percent)))) for percent in (10, 40, 50)
    )
    fleet.take(hosts[1], tenth, 1)
    for shape in [small, half] * 32:
        ranker.arrived(shape, 1)
    choice = ranker.choose(fleet, small, {}, frozenset())
    assert choice is not None
    assert choice.host is hosts[1]


def test_who_may_go_elsewhere_stays_off_a_model_that_others_must_have() -> None:
    shapes, fleet, ranker = Shapes(), Fleet(), Fragments()
    add(fleet, worker(0, ["NVIDIA T4"] * 4, 64_000))
    common = add(fleet, worker(1, ["NVIDIA A10"] * 8, 128_000))
    bound, free = shapes.of(request(GpuSpec(model="=T4"), 4_000)), shapes.of(request(GpuSpec(), 4_000))
    for shape in [bound, free, free] * 20:
        ranker.arrived(shape, 1)
    for _ in range(8):
        choice = ranker.choose(fleet, free, {}, frozenset())
        assert choice is not None
        assert choice.host is common
        fleet.take(choice.host, free, choice.mask)


def test_the_model_that_is_asked_for_most_by_name_is_left_alone_even_where_most_devices_are_of_it() -> None:
    """5 of 9 must have one of 16 A100, 2 of 9 one of 8 T4: for each device more are bound to an A100."""
    shapes, fleet, ranker = Shapes(), Fleet(), Fragments()
    for num in range(2):
        add(fleet, worker(num, ["NVIDIA A100-SXM4-80GB"] * 8, 128_000))
    rare = add(fleet, worker(2, ["NVIDIA T4"] * 8, 128_000))
    common, few, free = (shapes.of(request(GpuSpec(model=model), 4_000)) for model in ("=A100", "=T4", None))
    for shape in [common, free, few, common, common, free, few, common, common] * 20:
        ranker.arrived(shape, 1)
    for _ in range(4):
        choice = ranker.choose(fleet, free, {}, frozenset())
        assert choice is not None
        assert choice.host is rare
        fleet.take(choice.host, free, choice.mask)


@pytest.mark.parametrize(
    ("peers", "numa", "taken", "count", "slots"),
    [
        ({0: [1], 2: [3]}, None, [0], 2, [2, 3]),  # a pair that is linked, not 1 and 2
        ({0: [1, 2, 3], 4: [5, 6, 7]}, None, [0, 1], 2, [2, 3]),  # the island that is broken already
        ({0: [1, 2, 3], 4: [5, 6, 7]}, None, [0, 1], 1, [2]),
        ({0: [1, 2, 3], 4: [5, 6, 7]}, None, [0], 4, [4, 5, 6, 7]),
        ({}, [0, 0, 1, 1], [1], 2, [2, 3]),  # no links: one NUMA node
        ({0: [1], 2: [3], 4: [5], 6: [7]}, [0, 0, 0, 0, 1, 1, 1, 1], [0], 4, [4, 5, 6, 7]),
        ({0: [1, 2, 3], 4: [5, 6, 7]}, None, [0, 4], 6, [1, 2, 3, 5, 6, 7]),
    ],
)
@pytest.mark.parametrize("name", ["pack", "fragments", "headroom"])
def test_several_devices_of_a_host_are_linked_ones(
    name: str, peers: dict[int, list[int]], numa: list[int] | None, taken: list[int], count: int, slots: list[int]
) -> None:
    shapes, fleet = Shapes(), Fleet()
    made = worker(0, ["NVIDIA A100"] * (4 if (numa and len(numa) == 4) or not peers or max(peers) < 4 else 8))
    for device in made.hello["gpu_pool"]:
        device["peers"] = peers.get(device["index"], [])
        device["numa"] = numa[device["index"]] if numa else -1
    host = add(fleet, made)
    fleet.take(host, shapes.of(request(GpuSpec(count=len(taken)))), sum(1 << slot for slot in taken))
    choice = ranker_class(name)().choose(fleet, shapes.of(request(GpuSpec(count=count))), {}, frozenset())
    assert choice is not None
    assert [slot for slot in range(8) if choice.mask >> slot & 1] == slots


def test_a_flood_of_what_nobody_has_leaves_best_fit_where_it_was_enough() -> None:
    fleet, shapes, ranker = Fleet(), Shapes(), Fragments()
    for num in range(4):
        add(fleet, worker(num, ["NVIDIA A10"] * 4))
    one = shapes.of(request(GpuSpec(model="A10")))
    ranker.arrived(one, LOOK_FIRST)
    ranker.arrived(shapes.of(request(GpuSpec(count=8, model="B300"), 64_000)), 100 * LOOK_FIRST)
    for _ in range(16):
        choice = ranker.choose(fleet, one, {}, frozenset())
        best = Pack().choose(fleet, one, {}, frozenset())
        assert choice is not None
        assert best is not None
        assert (choice.host, choice.mask) == (best.host, best.mask)
        fleet.take(choice.host, one, choice.mask)
    assert ranker.held_bytes() == 0, "no host was ever scored"
    assert ranker.choose(fleet, one, {}, frozenset()) is None


def _many(shapes: Shapes, *rankers: Fragments) -> list[Shape]:
    """Requests of which none asks for as many processors as another; these rankers have heard of each."""
    many = [shapes.of(request(GpuSpec(count=1 + number % 2), 1_000 + 10 * number)) for number in range(LOOK_FIRST)]
    for shape in many:
        for ranker in rankers:
            ranker.arrived(shape, 1)
    return many


def _six_hosts() -> Fleet:
    fleet = Fleet()
    for num in range(6):
        add(fleet, worker(num, [MODELS[num % 3]] * 4, 64_000))
    return fleet


def test_a_large_mix_is_taken_into_use_in_parts_and_chooses_as_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fragments_module, "LARGE_SHAPES", 0)
    shapes, rankers, fleets = Shapes(), (Fragments(), Fragments()), (_six_hosts(), _six_hosts())
    many = _many(shapes, *rankers)
    parts = 0
    while not rankers[0].prepare(fleets[0]):
        parts += 1
        if parts == 2:  # a mix that comes meanwhile has to wait, or whoever sends many could keep all from starting
            rankers[0].arrived(shapes.of(request(GpuSpec(count=4), 5_000)), 8 * LOOK_FIRST)
    assert parts >= 5
    assert rankers[0].mix.version == 2
    for shape in many[:8]:
        first, second = (
            ranker.choose(fleet, shape, {}, frozenset()) for ranker, fleet in zip(rankers, fleets, strict=True)
        )
        assert first is not None
        assert second is not None
        assert (first.host.worker.num, first.mask) == (second.host.worker.num, second.mask)
        for fleet in fleets:
            fleet.take(fleet.hosts[first.host.worker.num], shape, first.mask)
    assert not rankers[0].prepare(fleets[0]), "the other mix is next"


def test_a_fleet_that_changes_all_the_time_keeps_nobody_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fragments_module, "LARGE_SHAPES", 0)
    shapes, ranker, fleet = Shapes(), Fragments(), Fleet()
    add(fleet, worker(0, [MODELS[0]] * 2, 64_000))
    _many(shapes, ranker)
    for num in range(1, 2 * fragments_module.PARTS_MAX):
        if ranker.prepare(fleet):
            break
        add(fleet, worker(num, [MODELS[0]] * 2, 64_000 + 1_000 * num))  # of another type than all before
    else:
        raise AssertionError("nobody would ever start")


def test_jobs_start_once_a_large_mix_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fragments_module, "LARGE_SHAPES", 0)
    drive = Driving.with_hosts(8, cpu_milli=64_000)
    for number in range(LOOK_FIRST):
        drive.offer_submit(f"j{number}", gpu={"count": 1 + number % 2}, resources={"cpu_milli": 1_000 + 10 * number})
    drive.tick()
    assert not drive.states("j0") or drive.states("j0") == ["QUEUED"]
    records = 0
    while drive.engine.urgent:
        drive.tick()
        records += 1
    assert records >= 5
    assert drive.free_gpus() == 0


def test_many_demands_for_processors_make_no_table_larger_than_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waste_module, "CELLS_MAX", 3 * 8 * table_module.ROOMS)
    shapes, fleets, rankers = Shapes(), (_six_hosts(), _six_hosts()), (Fragments(), Fragments())
    many = _many(shapes, *rankers)
    for shape in many:
        first, second = (
            ranker.choose(fleet, shape, {}, frozenset()) for ranker, fleet in zip(rankers, fleets, strict=True)
        )
        assert (first and (first.host.worker.num, first.mask)) == (second and (second.host.worker.num, second.mask))
        rankers[1]._scores.clear()
        if first is not None:
            for fleet in fleets:
                fleet.take(fleet.hosts[first.host.worker.num], shape, first.mask)
    assert rankers[0]._waste.waste.size <= waste_module.CELLS_MAX
    assert 4 < rankers[0]._waste.levels < len(many)
