"""The process around the core while it leads: its loop, intake, outputs, and what runs beside them."""
