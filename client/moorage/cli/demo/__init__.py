"""The demo: a real trace on simulated GPUs, submitted to a node of its own whose scheduler is killed midway."""
