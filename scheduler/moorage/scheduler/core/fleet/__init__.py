"""Hosts and devices as placement sees them, the filters over them, and shapes of requests."""
