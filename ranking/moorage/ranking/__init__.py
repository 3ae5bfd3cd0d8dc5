"""Rankers beside the scheduler, which ranks by `pack` without them: `fragments`, which learns, and `headroom`.

A scheduler loads them by name (`moorage.scheduler.core.rank.rankers`) and imports nothing of this package. Their bench
is `bench/studies/placement`.
"""
