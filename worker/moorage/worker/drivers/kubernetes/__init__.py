"""Jobs as pods of one node."""
