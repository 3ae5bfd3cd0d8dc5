"""CDI specs are read as the engines read them, as far as names go; `tests/cdi_specs.py` is their table."""

from __future__ import annotations

import pytest

from moorage.worker.devices.readers.cdi import Registry, read_registry
from tests import cdi_specs


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Registry:
    """What moorage finds with all files of the table in two folders."""
    folders = {name: tmp_path_factory.mktemp(name) for name in (cdi_specs.ETC, cdi_specs.RUN)}
    cdi_specs.write_all(folders)
    return read_registry(folders.values())


@pytest.mark.parametrize("at", range(len(cdi_specs.CASES)), ids=[case.what for case in cdi_specs.CASES])
def test_a_spec_is_read_as_the_engines_read_it(found: Registry, at: int) -> None:
    nodes = {
        name: {node.path for node in device.container_edits.nodes}
        for name, (_, device) in found.devices.items()
        if name.startswith(f"{cdi_specs.vendor_of(at)}/")
    }
    due = cdi_specs.expected_of("moorage", at)
    assert nodes == due, [fault for fault in found.faults if f"case{at:02d}" in fault]


def test_each_file_that_is_refused_is_named_with_the_reason(found: Registry) -> None:
    refused = {fault.partition(": ")[0].rpartition("/")[2] for fault in found.faults}
    for at, case in enumerate(cdi_specs.CASES):
        if len(case.files) == 1 and not cdi_specs.expected_of("moorage", at):
            [name] = case.files
            assert (f"case{at:02d}-{name}" in refused) == name.endswith((".json", ".yaml")), case.what
