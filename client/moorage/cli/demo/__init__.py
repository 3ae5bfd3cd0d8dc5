"""The demo: a real trace on simulated GPUs, and the judge of what came of it."""
