"""Metrics that come together share their columns, whatever is repeated, skipped or late."""

from __future__ import annotations

import random

from sparsebp_cli.run import History


def test_any_order_of_records_is_read_as_a_dictionary_of_first_values() -> None:
    chance, names = random.Random(0), ["a", "b", "c", "d"]
    for _ in range(60):
        history = History()
        plain: dict[str, dict[int, tuple[float, float]]] = {}
        for number in range(40):
            step, some = chance.randrange(12), chance.sample(names, chance.randrange(1, 5))
            values = {name: chance.random() for name in some}
            record = {"kind": "metrics", "attempt": 1, "time": float(number), "step": step, "values": values}
            new = history.add(record)  # type: ignore[arg-type]
            assert new == {name: value for name, value in values.items() if step not in plain.get(name, {})}
            for name, value in values.items():
                plain.setdefault(name, {}).setdefault(step, (float(number), value))
        for name, points in plain.items():
            assert list(history.metrics[name].items()) == sorted(points.items())
            assert history.last(name) == points[max(points)][1]
            assert history.series(name) == {step: value for step, (_, value) in sorted(points.items())}


def test_metrics_that_always_come_together_have_one_column_of_steps_and_times() -> None:
    history = History()
    for step in range(1, 100):
        values = {"a": 1.0, "b": 2.0} | ({"c": 3.0} if step % 10 == 0 else {})
        history.add({"kind": "metrics", "attempt": 1, "time": 0.0, "step": step, "values": values})
    rows = {id(series._rows) for series in history.metrics.values()}
    assert len(rows) == 2
