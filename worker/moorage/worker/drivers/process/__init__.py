"""Jobs as processes of the host."""
