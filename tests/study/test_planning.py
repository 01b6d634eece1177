"""Planning is pure: it reads the file and the store, imports no torch, and says what a study trains."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from sparsebp_cli.compare.loaded import LoadedRun
from sparsebp_cli.errors import RecipeError, UsageError
from sparsebp_lab.study import summary
from sparsebp_lab.study.budget import ArmStepPrice, make_rehearsals, read_price, share_budget
from sparsebp_lab.study.course import Course, Tuned, choose_best, plan_course
from sparsebp_lab.study.driver import Status
from sparsebp_lab.study.loader import LoadedStudy, load_study
from sparsebp_lab.study.place import deal, find_places
from sparsebp_lab.study.schema import BudgetSection
from sparsebp_lab.study.store import TrialStore
from sparsebp_lab.study.trial import StudyTrial, TrialMaker, with_steps

from .conftest import STUDY, Write

COST = BudgetSection.model_validate({"same": "cost", "as": "dense", "steps": 20})


def plan(file: Path) -> tuple[LoadedStudy, Course]:
    loaded = load_study(file)
    maker = TrialMaker(loaded.study.study, loaded.folders)
    return loaded, plan_course(loaded, maker, TrialStore(maker))


def test_a_plan_has_each_arm_with_each_combination_and_seed(write_study: Write) -> None:
    loaded, course = plan(write_study(STUDY.replace("tune: [0]", "tune: [7, 8]")))
    assert [(trial.arm, trial.combination, trial.seed) for trial in course.tuning[:4]] == [
        ("dense", "learning_rate=0.0005", 7),
        ("dense", "learning_rate=0.0005", 8),
        ("dense", "learning_rate=0.001", 7),
        ("dense", "learning_rate=0.001", 8),
    ]
    assert len({trial.run_id for trial in course.tuning}) == 8
    assert course.report == ()  # what is best is not known
    assert course.missing_of(loaded) == {arm: {"tune": 0, "report": 2} for arm in ("dense", "topk")}


def test_an_id_follows_from_what_is_trained_alone(write_study: Write, tmp_path: Path) -> None:
    ids = {trial.run_id for trial in plan(write_study())[1].tuning}
    renamed = STUDY.replace("study: tiny", "study: other").replace("topk: {pol", "kept: {pol")
    assert {trial.run_id for trial in plan(write_study(renamed, pace="1"))[1].tuning} == ids
    assert not {trial.run_id for trial in plan(write_study(STUDY.replace("tune: [0]", "tune: [5]")))[1].tuning} & ids
    base = tmp_path / "base.yaml"
    write_study()
    base.write_text(base.read_text().replace("warmup_steps: 4", "warmup_steps: 5"))
    assert not {trial.run_id for trial in plan(tmp_path / "study.yaml")[1].tuning} & ids


def test_an_id_follows_the_content_of_local_data(write_study: Write, tmp_path: Path) -> None:
    found = []
    for text in ("one", "two"):
        (tmp_path / "text.txt").write_text(text)
        write_study()
        base = tmp_path / "base.yaml"
        base.write_text(base.read_text().replace("dataset: {name: none", "dataset: {name: text.txt"))
        found.append(plan(tmp_path / "study.yaml")[1].tuning[0])
    assert found[0].recipe.dataset.name == str(tmp_path / "text.txt")
    assert found[0].run_id != found[1].run_id


def test_without_a_choice_the_report_is_known_at_once(write_study: Write) -> None:
    _, course = plan(write_study(STUDY.replace("[5e-4, 1e-3]", "[1e-3]")))
    assert course.tuning == ()
    assert [(trial.arm, trial.seed) for trial in course.report] == [
        ("dense", 1),
        ("dense", 2),
        ("topk", 1),
        ("topk", 2),
    ]


def test_combinations_of_one_cost_share_a_rehearsal(write_study: Write) -> None:
    text = STUDY.replace("vary:", "vary:\n  training.per_device_train_batch_size: [4, 8]")
    loaded = load_study(write_study(text + "budget: {same: cost, as: dense, steps: 20}\n"))
    maker = TrialMaker("tiny", loaded.folders)
    rehearsals = make_rehearsals(loaded, maker, TrialStore(maker))
    assert len(rehearsals) == 8
    assert len({trial.run_id for (trial,) in rehearsals.values()}) == 4  # two arms of two batches; rates cost nothing
    course = plan(loaded.file)[1]
    assert len(course.rehearsals) == 4
    assert course.tuning == ()  # its steps are not known


def test_no_seed_tunes_and_is_reported_and_no_tuning_trial_has_a_test(write_study: Write) -> None:
    """Seeds of both are refused when the file is read; what is left is fresh, and so is the test split."""
    loaded = load_study(write_study(STUDY.replace("tune: [0]", "tune: 5-7")))
    maker = TrialMaker("tiny", loaded.folders)
    runs = {"dense": 2.0, "topk": 3.0}

    class Finished(TrialStore):
        def load(self, trial: StudyTrial) -> LoadedRun:
            value = runs[trial.arm] + trial.recipe.training.learning_rate
            run = SimpleNamespace(finished=True, broke_down=False, evaluations=lambda name: [value])
            return cast("LoadedRun", run)

    course = plan_course(loaded, maker, Finished(maker))
    tuning, report = ({trial.seed for trial in some} for some in (course.tuning, course.report))
    assert (tuning, report) == ({5, 6, 7}, {1, 2})
    assert not any(trial.recipe.measure.test for trial in course.tuning)
    assert all(trial.recipe.measure.test for trial in course.report)
    same = STUDY.replace("tune: [0]", "tune: 1-2").replace("[5e-4, 1e-3]", "[1e-3]")
    assert len(plan(write_study(same))[1].report) == 4  # nothing is chosen, so that no seed has chosen


def test_the_best_of_an_arm_waits_for_all_its_results(write_study: Write) -> None:
    first, second, *_ = load_study(write_study()).variants
    assert choose_best([Tuned(first, 3.0), Tuned(second, None)]) == {}
    assert choose_best([Tuned(first, 3.0), Tuned(second, 2.0)]) == {"dense": second}
    assert choose_best([Tuned(first, 3.0), Tuned(second, 3.0)]) == {"dense": first}
    assert choose_best([Tuned(first, 3.0), Tuned(second, None, diverged=True)]) == {"dense": first}
    assert choose_best([Tuned(first, None, diverged=True), Tuned(second, None, diverged=True)]) == {}


def test_a_schedule_runs_over_the_steps_that_are_run(write_study: Write) -> None:
    recipe = load_study(write_study()).variants[0].recipe  # 20 steps, of which 4 warm up
    assert (with_steps(recipe, 40).training.max_steps, with_steps(recipe, 40).training.warmup_steps) == (40, 8)
    assert with_steps(recipe, 10, fixed_warmup=True).training.warmup_steps == 4
    assert with_steps(recipe, 20) is recipe


@pytest.mark.parametrize(("ratio", "steps"), [(1.0, 20), (0.5, 40), (0.3, 66), (1.5, 13), (2.0, 10)])
def test_an_arm_gets_the_steps_that_the_budget_pays_for(write_study: Write, ratio: float, steps: int) -> None:
    variant = load_study(write_study()).variants[2]
    assert share_budget(20, ArmStepPrice(8.0), ArmStepPrice(8.0 * ratio), variant, COST) == steps


def test_an_arm_with_a_part_of_the_budget_gets_the_steps_that_the_part_pays_for(write_study: Write) -> None:
    dense, *_, topk = load_study(write_study()).variants
    half = BudgetSection.model_validate({"same": "cost", "as": "dense", "steps": 40, "part": {"topk": 0.5}})
    assert share_budget(40, ArmStepPrice(8.0), ArmStepPrice(8.0), dense, half) == 40
    assert share_budget(40, ArmStepPrice(8.0), ArmStepPrice(4.0), topk, half) == 40
    with pytest.raises(
        UsageError, match=r"arm topk: the budget of 0\.5 of 40 steps of dense allows only 9 steps of this arm"
    ):
        share_budget(40, ArmStepPrice(8.0), ArmStepPrice(16.8), topk, half)


def test_an_arm_that_gets_too_few_steps_is_refused_by_name(write_study: Write) -> None:
    variant = load_study(write_study()).variants[2]
    with pytest.raises(
        UsageError,
        match=r"arm topk: the budget of 20 steps of dense allows only 9 steps of this arm, at 2\.10 steps of dense",
    ):
        share_budget(20, ArmStepPrice(8.0), ArmStepPrice(16.8), variant, COST)


@pytest.mark.parametrize(
    ("budget", "price", "words"),
    [
        (
            {"seconds": 30.0},
            ArmStepPrice(4.0, "seconds"),
            "arm topk: the budget of 30 seconds allows only 7 steps of this arm, at 4 sec",
        ),
        ({"same": "tokens", "tokens": 640}, ArmStepPrice(128.0, "tokens"), "steps: raise budget.tokens"),
    ],
)
def test_too_few_seconds_or_tokens_are_refused_by_name(
    write_study: Write, budget: dict[str, object], price: ArmStepPrice, words: str
) -> None:
    variant = load_study(write_study()).variants[2]
    section = BudgetSection.model_validate(budget)
    assert share_budget(0, None, ArmStepPrice(1.0), variant, section) == section.amount
    with pytest.raises(UsageError, match=words):
        share_budget(0, None, price, variant, section)


def test_time_and_tokens_of_a_step_are_read_from_the_rehearsal() -> None:
    series = {"time/step_seconds": {4: 3.0, 5: 2.0, 6: 2.5}, "train/tokens": {1: 70.0, 2: 130.0, 3: 180.0}}
    run = SimpleNamespace(series=series.__getitem__, values=lambda name, **_: [*series[name].values()])
    found = [
        read_price(cast("LoadedRun", run), BudgetSection.model_validate(given))[0]
        for given in ({"seconds": 9.0}, {"same": "tokens", "as": "dense"})
    ]
    assert found == [ArmStepPrice(2.5, "seconds"), ArmStepPrice(60.0, "tokens")]


def test_many_trials_are_planned_without_torch_and_without_a_process(
    write_study: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = ", ".join(f"{number}e-5" for number in range(1, 51))
    file = write_study(STUDY.replace("5e-4, 1e-3", rates).replace("tune: [0]", "tune: 3-5"))
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("a process was started"))
        assert len(plan(file)[1].tuning) == 2 * 50 * 3
    source = (
        "import sys; from pathlib import Path; from tests.study.test_planning import plan; "
        "plan(Path(sys.argv[1])); print('torch' in sys.modules)"
    )
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", source, str(file)], capture_output=True, text=True, check=True, cwd=root
    )
    assert done.stdout == "False\n"


def test_places_take_trials_in_turn_by_their_slots(write_study: Write) -> None:
    places = find_places(load_study(write_study(more="where: [local, {target: docker, max_parallel: 2}]\n")))
    assert [place.name for place in itertools.islice(deal(places), 6)] == ["local", "docker", "docker"] * 2
    assert [place.put(load_study(write_study()).variants[0].recipe).target.kind for place in places] == [
        "local",
        "docker",
    ]


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("[locl]", "10:9: where.0: must be 'local' or a mapping, got 'locl'"),
        ("[local, {target: dockr}]", "10:16: where.1: target dockr: kind: unknown target 'dockr'"),
        ("[{target: docker, max_parallel: 0}]", "10:40: where.0.max_parallel: must be at least 1, got 0"),
    ],
)
def test_a_wrong_place_is_an_error_with_its_place(write_study: Write, where: str, words: str) -> None:
    with pytest.raises(RecipeError) as found:
        find_places(load_study(write_study(more=f"where: {where}\n")))
    assert words in str(found.value)


@pytest.mark.parametrize(
    ("roles", "attempts", "expected"),
    [(["rehearse"], 1, 0.5), (["rehearse", "tune"], 1, 60.0), (["rehearse", "tune"], 2, 0.5)],
)
def test_the_time_left_counts_no_probes_of_a_rehearsal_and_no_pause(
    roles: list[str], attempts: int, expected: float
) -> None:
    metrics = {"train/loss": {n: (60.0 * n, 4.0) for n in range(4)}}  # by step: when, and the value
    metrics |= {"time/step_seconds": {n: (60.0 * n, 0.5) for n in range(4)}}
    run = SimpleNamespace(history=SimpleNamespace(metrics=metrics, warm=[(0.0, 0)] * attempts))
    recipe = SimpleNamespace(training=SimpleNamespace(per_device_train_batch_size=8))
    trials = [SimpleNamespace(arm="dense", role=role, run_id=role, recipe=recipe) for role in roles]
    found = summary._time_steps(
        "dense",
        SimpleNamespace(trials=trials),  # type: ignore[arg-type]
        dict.fromkeys(roles, Status.FINISHED),
        SimpleNamespace(load=lambda trial: run),  # type: ignore[arg-type]
    )
    assert found == {8: expected}


def test_the_time_left_knows_that_small_batches_have_shorter_steps() -> None:
    """A study said 50 hours where 4 were left: it took a step of one text for one of 16."""
    paces = {16: 0.32, 4: 0.1}

    def predict(batch: int, steps: int) -> float | None:
        training = SimpleNamespace(per_device_train_batch_size=batch)
        return summary._predict(paces, SimpleNamespace(training=training), steps)  # type: ignore[arg-type]

    assert predict(16, 60) == pytest.approx(19.2)
    assert predict(4, 240) == pytest.approx(24.0)
    assert predict(1, 960) == pytest.approx(24.0)
    assert predict(64, 15) == pytest.approx(19.2)
    paces.clear()
    assert predict(16, 60) is None
