"""Jobs as calls of functions of a running service."""
