"""What was timed of forms: which are used, how it is stored, and what a run says about it."""

from __future__ import annotations

import json

import pytest

from sparsebp_cli.run.break_even import FormTime, FormTimes, FormUse, describe_use, find_crossing, read_times, read_use

WIDE = FormTime("Rows", 512, 256, 64, "float32", "cpu", ((0.25, 0.5),))
NARROW = FormTime("Rows", 32, 256, 64, "float32", "cpu", ((0.1, 0.8), (0.5, 1.2)))


def test_a_form_is_used_below_the_first_share_at_which_it_is_slower() -> None:
    assert find_crossing([(0.5, 1.2), (0.1, 0.8)]) == ("at", pytest.approx(0.3))
    assert find_crossing([(0.25, 0.99)]) == ("always", 1.0)
    assert find_crossing([(0.25, 1.0)]) == ("never", 0.0)
    kind, share = find_crossing([(0.1, 0.8), (0.25, 1.2), (0.5, 0.9)])
    assert (kind, share) == ("unclear", pytest.approx(0.175))
    assert find_crossing([(0.1, 1.1), (0.5, 0.9)]) == ("unclear", 0.0)


def test_what_was_timed_is_the_same_after_it_was_stored() -> None:
    times = FormTimes((WIDE, NARROW))
    assert FormTimes.from_json(json.loads(json.dumps(times.to_json()))) == times
    for content in (None, {}, [{}], [WIDE.__dict__ | {"points": []}], [WIDE.__dict__ | {"more": 1}]):
        with pytest.raises(ValueError, match="no times of forms"):
            FormTimes.from_json(content)


def test_the_sentence_counts_linears_that_stay_dense_and_says_why() -> None:
    uses = [
        FormUse("up", "Rows", 512, 256, 0.25),
        FormUse("k", "Rows", 32, 256, 0.5),
        FormUse("v", "Rows", 32, 256, 0.5),
        FormUse("head", "Rows", 999, 256, 0.5),
    ]
    fact = describe_use(FormTimes((WIDE, NARROW)), uses)
    assert fact["text"] == (
        "2 of 4 linears mask what is selected and multiply densely, which was faster; 2 with rows of 256 x 32: 0.80 at "
        "0.1, 1.20 at 0.5 times as long; 1 not timed"
    )
    assert fact["used"] == ["Rows 256x32 masked", "Rows 256x512 used"]
    assert read_use({"forms": fact}) == (fact["text"], fact["used"])
    assert read_times({"forms": json.loads(json.dumps(fact))}) == FormTimes((WIDE, NARROW))
    assert (read_use({}), read_times({})) == (("", []), None)


def test_shares_that_change_over_the_training_are_compared_by_the_break_even() -> None:
    fact = describe_use(FormTimes((NARROW,)), [FormUse("k", "Rows", 32, 256, None)])
    assert fact["used"] == ["Rows 256x32 below 0.3"]
    assert str(fact["text"]).startswith("0 of 1 linears")
