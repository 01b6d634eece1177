"""The share below which a form is faster than another computation."""

from __future__ import annotations

import pytest

from sparsebp_cli.run.break_even import find_crossing


def test_a_form_is_used_below_the_first_share_at_which_it_is_slower() -> None:
    assert find_crossing([(0.5, 1.2), (0.1, 0.8)]) == ("at", pytest.approx(0.3))
    assert find_crossing([(0.25, 0.99)]) == ("always", 1.0)
    assert find_crossing([(0.25, 1.0)]) == ("never", 0.0)
    kind, share = find_crossing([(0.1, 0.8), (0.25, 1.2), (0.5, 0.9)])
    assert (kind, share) == ("unclear", pytest.approx(0.175))
    assert find_crossing([(0.1, 1.1), (0.5, 0.9)]) == ("unclear", 0.0)
