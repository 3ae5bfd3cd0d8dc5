"""For tests of services without a server, and for simulations: `SimFleet`, virtual time, the simulated NATS.

Nothing here is used by a scheduler, worker or client that runs for real.
"""

from moorage.testing.bus.clock import SimulatedClock
from moorage.testing.sim_fleet import Ran, SimFleet, Task

__all__ = ["Ran", "SimFleet", "SimulatedClock", "Task"]
