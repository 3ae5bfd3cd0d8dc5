"""What would happen: the production engine driven ahead of time, under a virtual clock."""
