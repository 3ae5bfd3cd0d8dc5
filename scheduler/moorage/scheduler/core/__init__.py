"""Decisions without I/O: no await, no socket, no clock, no randomness that was not passed in."""
