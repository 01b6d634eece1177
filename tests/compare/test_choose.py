"""Which runs a word or a condition chooses."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsebp_cli.compare import choose, describe_left_out, local_candidates
from sparsebp_cli.compare.choose import RunCandidate
from sparsebp_cli.compare.expression import parse
from sparsebp_cli.errors import RunNotFoundError, UsageError
from sparsebp_cli.run import History, RunFolder, folder

MakeRun = Callable[..., RunFolder]
TOPK: dict[str, Any] = {"policy": [{"name": "topk", "keep": 0.1, "along": "rows"}], "exact": False}


def ids(found: list[RunCandidate]) -> list[str]:
    return [candidate.run_id for candidate in found]


def pick(*words: str, where: str | None = None) -> list[str]:
    return ids(choose(local_candidates(), words, where, "here"))


@pytest.fixture
def runs(make_run: MakeRun) -> list[RunFolder]:
    """Dense and topk of two seeds each, a topk that keeps half and failed, and one with a tag."""
    half: dict[str, Any] = {"policy": [{"name": "topk", "keep": 0.5, "along": "columns"}], "exact": False}
    found = [make_run("dense", seed, loss=3.0) for seed in range(2)]
    found += [make_run("topk", seed, loss=3.5, **TOPK) for seed in range(2)]
    found.append(make_run("half", 0, end="failed", steps=5, **half))
    found.append(make_run("dense", 5, tracking={"tags": {"figure": "one"}, "experiment": "other"}))
    return found


def test_ids_prefixes_names_newest_tags_and_folders_name_runs(runs: list[RunFolder], tmp_path: Path) -> None:
    all_ids = [run.run_id for run in runs]
    assert pick(all_ids[1]) == [all_ids[1]]
    assert pick(all_ids[2][:8]) == [all_ids[2]]
    assert pick("topk") == all_ids[2:4]
    assert pick("@last") == all_ids[-1:]
    assert pick("@3") == all_ids[-3:]
    assert pick("figure=one") == all_ids[-1:]
    assert pick("topk", "dense") == [*all_ids[2:4], *all_ids[:2], all_ids[5]]
    assert pick("topk", all_ids[3]) == all_ids[2:4]
    copied = shutil.copytree(runs[0].path, tmp_path / "elsewhere" / runs[0].run_id)
    assert pick(str(copied)) == [all_ids[0]]


def test_seeds_of_another_experiment_were_not_left_out(make_run: MakeRun) -> None:
    for place, first in (("mine", 0), ("theirs", 5)):
        for seed in range(first, first + 3):
            make_run("a", seed, tracking={"experiment": place})
    everything = local_candidates()
    mine = choose(everything, [], "experiment=mine", "here")
    assert describe_left_out(everything, mine) == []
    (line,) = describe_left_out(everything, mine[:2])
    assert line.endswith("the numbers here leave out seeds 2")


def test_a_word_that_names_nothing_is_answered_in_one_line(runs: list[RunFolder]) -> None:
    with pytest.raises(RunNotFoundError, match=r"^no run matches 'tpok' in here; did you mean topk\?$"):
        pick("tpok")
    with pytest.raises(RunNotFoundError, match="there are 6 runs"):
        pick("@7")
    with pytest.raises(RunNotFoundError, match="no run matches 'figure=two'"):
        pick("figure=two")


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("policy=topk and keep<0.2", [2, 3]),
        ("policy = topk", [2, 3, 4]),
        ("policy!=topk", [0, 1, 5]),
        ("not policy=topk", [0, 1, 5]),
        ("seed=0 and (name=dense or name=half)", [0, 4]),
        ("state=failed", [4]),
        ("name~'d*e'", [0, 1, 5]),
        ("tag.figure=one", [5]),
        ("experiment=other", [5]),
        ("eval/loss<3.2", [0, 1, 5]),
        ("training.max_steps>=20 and along=columns", [4]),
        ("model.lora=null and seed>0", [1, 3, 5]),
        ("learning_rate>0 and policy=dense and seed<5", [0, 1]),
    ],
)
def test_a_condition_chooses_by_recipe_state_tags_and_metrics(
    runs: list[RunFolder], where: str, expected: list[int]
) -> None:
    assert pick(where=where) == [runs[number].run_id for number in expected]


def test_a_condition_leaves_of_the_named_runs_those_that_meet_it(runs: list[RunFolder]) -> None:
    assert pick("dense", where="seed=1") == [runs[1].run_id]
    with pytest.raises(RunNotFoundError, match="none of 3 runs meets the condition --where 'seed=7'"):
        pick("dense", where="seed=7")


def test_what_a_run_does_not_have_is_neither_true_nor_false(runs: list[RunFolder]) -> None:
    dense_without_keep = pick(where="keep<0.2 or keep>=0.2")
    assert dense_without_keep == [run.run_id for run in runs[2:5]]
    assert pick(where="not keep<0.2") == [runs[4].run_id]


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("kep<0.2", r"no run has 'kep'; .*did you mean keep\?"),
        ("keep<", "expected a value after keep <, got the end"),
        ("keep 0.2", "expected one of = != < <= > >= ~ after 'keep', got '0.2'"),
        ("(keep<0.2", r"expected '\)', got the end"),
        ("keep<0.2 policy=topk", "expected 'and', 'or' or the end of the condition, got 'policy'"),
        ("= 3", "expected a name, got '='"),
        ("", "expected a name, got the end"),
        ("name='x", 'cannot read "\'x"'),
        ("(" * 30 + "seed=0" + ")" * 30, "brackets may be nested at most 20 deep"),
        ("seed=0 or " * 60 + "seed=0", "at most 500 characters"),
    ],
)
def test_a_condition_that_cannot_be_read_is_refused_in_one_line(runs: list[RunFolder], where: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        pick(where=where)
    assert str(caught.value).startswith("--where: ")
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@given(st.text(max_size=60))
def test_no_text_makes_the_parser_do_anything_but_read_or_refuse(text: str) -> None:
    try:
        condition = parse(text, "--where")
    except UsageError:
        return
    assert condition.holds(lambda name: []) is None


def test_selecting_reads_each_plan_once_and_no_journal(runs: list[RunFolder], monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    original = folder.read_json
    monkeypatch.setattr(folder, "read_json", lambda path, largest: (read.append(path), original(path, largest))[1])
    monkeypatch.setattr(History, "load", lambda folder: pytest.fail("a journal was read"))
    assert len(pick("dense", "topk", where="policy=topk or seed<9")) == 5
    assert sorted(read) == sorted(run.plan_file for run in runs)


def test_another_machines_home_its_runs_and_one_run_are_all_places(runs: list[RunFolder], home_folder: Path) -> None:
    everything = pick()
    assert ids(local_candidates(home_folder)) == everything[::-1]
    assert ids(local_candidates(home_folder / "runs")) == everything[::-1]
    assert ids(local_candidates(runs[0].path)) == [runs[0].run_id]
    assert local_candidates(home_folder / "nothing") == []


def test_a_plan_that_this_version_cannot_read_hides_no_other(
    runs: list[RunFolder],
) -> None:
    plan = runs[0].plan_file
    plan.write_text(plan.read_text().replace('"max_steps"', '"max_stebs"'))
    assert pick(where="state=finished") == [run.run_id for run in (*runs[1:4], runs[5])]
    with pytest.raises(RunNotFoundError, match="is not a plan"):
        _ = choose(local_candidates(), [runs[0].run_id], None, "here")[0].loaded


def test_a_damaged_plan_is_the_last_candidate_and_hides_no_other(runs: list[RunFolder]) -> None:
    runs[0].plan_file.write_text("{")
    assert ids(local_candidates()) == [*(run.run_id for run in runs[:0:-1]), runs[0].run_id]
    assert runs[0].run_id not in pick(where="not policy=no-such")
    assert pick("@5") == [run.run_id for run in runs[1:]]


def test_seeds_of_the_same_recipe_that_were_not_chosen_are_named(make_run: MakeRun) -> None:
    runs = [make_run("dense", seed) for seed in range(10)] + [make_run("other", 3, training={"max_steps": 9})]
    every = local_candidates()
    chosen = choose(every, [runs[0].run_id, runs[7].run_id], None, "here")
    told = "dense: more seeds are stored than you selected; the numbers here leave out seeds 1, 2, 3, 4, 5, 6, 8, 9"
    assert describe_left_out(every, chosen) == [told]
    assert describe_left_out(every, choose(every, [], "seed<5 or seed>6", "here")) == [told.partition("1,")[0] + "5, 6"]
    assert describe_left_out(every, every) == []


def test_text_of_digits_is_compared_as_it_was_written(make_run: MakeRun) -> None:
    make_run("20261130", 1, tracking={"tags": {"date": "20261201", "version": "1.10"}, "experiment": "other"})
    for condition in (
        "tag.date=20261201",
        "tag.version=1.10",
        "name=20261130",
        "tag.date~2026120?",
        "tag.version~1.1*",
    ):
        assert len(pick(where=condition)) == 1, condition
    for condition in ("tag.date!=20261201", "tag.version=1.1", "not name=20261130"):
        with pytest.raises(RunNotFoundError, match="none of 1 runs meets the condition"):
            pick(where=condition)
