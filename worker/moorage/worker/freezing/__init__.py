"""Freeze attempts that use a GPU, and resume them: meanwhile their GPU memory is in the host's RAM.

- unused.py: which attempts are due to be frozen, because they do not use their GPUs
- attempts.py: freezes and resumes a driver's attempts by order: the gate, then the lock; reports what became of it
- gate.py: has the calls of a frozen attempt wait, and sees its next use; the gate itself is in
  sharing/limiter/limiter.c
- freezer.py: which processes are frozen, and the record of them, which outlives the agent
- room.py: whether there is memory for what they hold
- played.py: a freezer of simulated devices, which stops nothing
- engines.py: members of services that sleep by a request to their own program, in place of all of these
- cuda.py: the helper process, which calls the driver: lock, checkpoint, restore, unlock

What an order means for an attempt, and when it gives up its devices and gets them again, is part of its state:
session/attempt_table.py (`freeze` to `_resume_to_end`).
"""
