"""Every check for the drivers of which CI runs a few: a VM boots for seconds, and rootless podman is slow."""

from __future__ import annotations

import pytest

from tests.guests import why_no_vm
from tests.system.worker.drivers.test_conformance import Rootless, Vm

pytestmark = pytest.mark.slow


class TestRootless(Rootless):
    pass


@pytest.mark.skipif(bool(why_no_vm()), reason=why_no_vm())
class TestVm(Vm):
    pass
