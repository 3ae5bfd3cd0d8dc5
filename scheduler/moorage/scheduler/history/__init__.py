"""Histories: the transitions of a job, as the history stream has them. Pure."""
