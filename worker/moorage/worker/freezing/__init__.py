"""Freezes processes that use a GPU, and resumes them: their memory is in the host's RAM meanwhile."""
