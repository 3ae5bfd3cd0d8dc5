"""A real trace on simulated GPUs: the jobs that are drawn from it, and the judge of what became of them."""
