"""Limit a job's processes to their part of a GPU by a library inside them; this is the worker's side of it."""
