"""The library that keeps a job's processes to their part of a GPU from within, and the worker's side of it."""
