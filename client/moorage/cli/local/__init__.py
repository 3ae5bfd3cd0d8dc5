"""Runs moorage on this machine: all of it, or a scheduler or a worker."""
