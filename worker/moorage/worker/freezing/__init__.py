"""Freeze processes that use a GPU, and resume them: meanwhile their GPU memory is in the host's RAM."""
