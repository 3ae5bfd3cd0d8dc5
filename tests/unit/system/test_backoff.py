from __future__ import annotations

from moorage.system.backoff import Backoff


def test_waits_double_up_to_a_bound_and_begin_anew_after_a_success() -> None:
    backoff = Backoff(0.5, 3.0)
    assert [backoff.next_s() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    backoff.reset()
    assert backoff.coming_s == 0.5
    assert backoff.next_s() == 0.5
