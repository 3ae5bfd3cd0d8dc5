"""The borrower's side of the worker's lease socket, and the frames that both sides speak."""
