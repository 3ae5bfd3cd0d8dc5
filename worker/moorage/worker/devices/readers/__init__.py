"""Read this machine's devices: in slot order, with their load and health, and whether their memory is free."""
