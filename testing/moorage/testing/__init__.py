"""For tests of services without a server, and for simulations: `SimFleet`, virtual time, the simulated NATS.

Nothing here is used by a scheduler, worker or client that runs for real.
"""

from moorage.schemas.optional import need_server

need_server("moorage.testing")  # before the imports, which would end with the name of a module that is missing

from moorage.testing.bus.clock import SimulatedClock  # noqa: E402
from moorage.testing.sim_fleet import Ran, SimFleet, Task  # noqa: E402
from moorage.testing.sim_service import SimService  # noqa: E402

__all__ = ["Ran", "SimFleet", "SimService", "SimulatedClock", "Task"]
