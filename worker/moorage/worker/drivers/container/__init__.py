"""Jobs as containers of Docker or podman."""
