"""What a person does with jobs: ask for GPUs, follow, look, cancel."""
