"""One pass: who is placed, and who ends for whom."""
