"""The folded state: what a record makes of it, what must hold of it, and it as bytes."""
