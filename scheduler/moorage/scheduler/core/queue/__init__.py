"""The queue: whose turn it is, for whom hosts are held back, how long work runs."""
