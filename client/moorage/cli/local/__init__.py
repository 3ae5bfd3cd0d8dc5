"""Running moorage on this machine: the whole of it, or a scheduler or a worker."""
