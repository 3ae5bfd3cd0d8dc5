"""One scheduling pass: placements, reservations, run time estimates and preemption."""
