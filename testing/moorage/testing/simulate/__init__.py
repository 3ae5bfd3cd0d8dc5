"""The production core under a virtual clock: traces in, what would have happened out."""
