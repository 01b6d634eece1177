"""``sparsebp top`` shows what is not over, from the journals."""

from __future__ import annotations

from sparsebp_cli.cli.top import BARS, draw_spark
from sparsebp_cli.run import JournalWriter, State

from .conftest import Cli, Write, write_run


def test_a_page_without_runs_says_so_and_ended_runs_are_not_on_it(call: Cli, write_recipe: Write) -> None:
    assert "nothing is running" in call("top").stdout
    write_run(write_recipe(name="over"))
    assert "nothing is running" in call("top").stdout


def test_a_living_run_has_its_target_step_loss_and_time_left(call: Cli, write_recipe: Write) -> None:
    run = write_run(write_recipe(name="alive"), max_steps=40)
    with JournalWriter(run.path) as journal:
        journal.write("attempt", from_step=0, environment={"gpu": "NVIDIA H100 80GB HBM3, NVIDIA H100 80GB HBM3"})
        for step in range(1, 21):
            journal.write("metrics", step=step, values={"train/loss": 20.0 - step / 2})
    with run.lock("worker"):
        assert run.state() is State.RUNNING
        page = call("top").stdout
    row = next(line for line in page.splitlines() if run.run_id in line)
    assert all(word in row for word in ("alive", "local, 2 x H100", "running", "20/", "10.0000", "█"))
    assert max(map(len, page.splitlines())) <= 100


def test_a_sparkline_goes_from_the_lowest_to_the_highest_bar() -> None:
    assert draw_spark([]) == draw_spark([float("nan"), float("inf")]) == ""
    assert draw_spark([1.0, 1.0]) == BARS[0] * 2
    assert draw_spark([float(value) for value in range(8)]) == BARS
    assert draw_spark([-1.7e308, 1.7e308] * 2) == (BARS[0] + BARS[-1]) * 2
    assert len(set(draw_spark([-1.7e308] * 64 + [1.7e308] * 64))) == 2
    assert len(draw_spark([float(value) for value in range(256)])) == 16
