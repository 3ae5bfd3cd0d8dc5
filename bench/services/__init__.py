"""What services cost and do, chapter by chapter: `python -m bench.services`."""
