"""Leases for processes that already run on the worker's host, over a UNIX socket of the agent."""
