"""The study's file: what it may say, and one line with a place for everything that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparsebp_cli.errors import RecipeError
from sparsebp_lab.study.loader import load_study

from .conftest import STUDY, Write

SEARCH = "search: {kind: tpe, trials: 3}\n"
BUDGET = "budget: {same: cost, as: dense, steps: 20}\n"
WRONG = [
    ("arms:", "arm:", "4:1: arm: unknown key 'arm'"),
    ("keep: 0.25", "kep: 0.25", "6:32: arms.topk.policy.0.kep: unknown key 'kep'"),
    ("keep: 0.25", "keep: 1.25", "6:38: arms.topk.policy.0.keep: must be in (0, 1], got 1.25"),
    ("dense: {}", "dense: {training: {max_stebs: 5}}", "did you mean max_steps?"),
    ("dense: {}", "dense: {training: {max_steps: 5}}", "arms.dense.training.max_steps: leave it out"),
    ("dense: {}", "dense: {training.max_steps: 5}", "arms.dense.training.max_steps: leave it out"),
    ("dense: {}", "dense: {name: other}", "5:17: arms.dense.name: an arm cannot set this"),
    ("dense: {}", "dense:", "5:9: arms.dense: must be a mapping, got nothing"),
    ("dense: {}", "a b: {}", "text that matches"),
    ("5e-4", "-1.0", "8:28: vary.training.learning_rate: must be above 0, got -1.0"),
    ("learning_rate:", "learning_rat:", "8:27: vary.training.learning_rat: unknown key 'learning_rat'"),
    ("[5e-4, 1e-3]", "[]", "vary.training.learning_rate: must be at least 1 item long"),
    ("[5e-4, 1e-3]", "[5e-4, 1e-3, 0.0005]", "vary.training.learning_rate: 0.0005 is given twice"),
    ("training.learning_rate:", "tracking.experiment:", "vary.tracking.experiment: cannot be varied"),
    ("training.learning_rate:", "training.seed:", "vary.training.seed: cannot be varied"),
    ("training.learning_rate: [5e-4, 1e-3]", "dataset.columns.text: [a, b]", "vary.dataset.columns.text: cannot be"),
    ("training.learning_rate: [5e-4, 1e-3]", "dataset.eval_fraction: [0.1, 0.2]", "validation data would differ"),
    ("same: cost", "same: money", "budget.same: got 'money', allowed: 'steps', 'cost', 'time', 'tokens'"),
    ("same: cost", "same: steps", "budget: the key `as` needs 'same: cost', 'same: time' or 'same: tokens'"),
    ("same: cost, as: dense, steps: 20", "same: time", "budget: 'same: time' needs either 'seconds: N' or 'as: ARM'"),
    ("steps: 20", "seconds: 5.0", "budget: seconds needs 'same: time', got 'same: cost'"),
    ("same: cost, as: dense, steps: 20", "same: tokens, as: dense, tokens: 5", "'tokens: N' or 'as: ARM', where"),
    (
        "same: cost, as: dense, steps: 20",
        "seconds: 5.0, steps: 20",
        "budget: `steps` is used only with `as`",
    ),
    ("same: cost, as: dense, steps: 20", "seconds: 0.0", "budget.seconds: must be above 0"),
    (
        "as: dense",
        "as: dens",
        "10:26: budget.as: must be one of the arms (dense, topk), got 'dens'; did you mean dense?",
    ),
    ("steps: 20", "steps: 20, part: {topk: 1.5}", "budget.part.topk: must be at most 1, got 1.5"),
    ("steps: 20", "steps: 20, part: {tpk: 0.5}", "budget.part.tpk: must be one of the arms (dense, topk), got 'tpk'"),
    (
        "same: cost, as: dense",
        "same: steps, part: {topk: 0.5}",
        "budget: the key `part` needs 'same: cost', 'same: time'",
    ),
    ("as: dense, ", "", "budget: 'same: cost' needs 'as: ARM'"),
    ("steps: 20", "steps: 9", "budget.steps: must be at least 10, got 9"),
    ("tune: [0]", "tune: 2-0", "seeds.tune: a range must ascend, got 2-0; did you mean 0-2?"),
    ("tune: [0]", "tune: [0, 0]", "seeds.tune: seed 0 is given twice"),
    (
        "tune: [0]",
        "tune: 0-2",
        "seeds.report: must not contain seeds of seeds.tune, got 1, 2 in both; for example, use 3",
    ),
    ("[0], report: 1-2", "[4], report: 4-6", "9:28: seeds.report: must not contain seeds of seeds.tune, got 4 in both"),
    ("tune: [0], report: 1-2", "report: 2", "seeds.report: must not contain seeds of seeds.tune, got 2 in both"),
    ("study: tiny", "study: a/b", "2:8: study: must be text that matches"),
    ("base.yaml", "bas.yaml", "3:7: base: "),
    ("budget:", "search: {kind: tpe}\nbudget:", "search: 'kind: tpe' needs 'trials: N', where N is the number"),
    ("budget:", "search: {trials: 5}\nbudget:", "search: trials needs 'kind: tpe' or 'kind: random'"),
    ("budget:", "search: {kind: cma}\nbudget:", "search.kind: got 'cma', allowed: 'grid'"),
    ("[5e-4, 1e-3]", "{from: 1e-4, to: 1e-2}", "learning_rate: grid needs a list of values"),
    ("[5e-4, 1e-3]", f"{{from: 1e-2, to: 1e-4}}\n{SEARCH}", "rate.to: must be above the key from (0.01), got 0.0001"),
    ("[5e-4, 1e-3]", f"{{from: 0.0, to: 1, by: log}}\n{SEARCH}", "rate.from: must be above 0 with by: log, got 0"),
    ("budget:", "controls: none\ncontrols: auto\nbudget:", "duplicate key, first on line 10"),
    ("version: 1", "version: 2", "1:10: version: got 2, allowed: 1"),
]


@pytest.mark.parametrize(("old", "new", "words"), WRONG)
def test_what_is_wrong_is_one_line_with_its_place(write_study: Write, old: str, new: str, words: str) -> None:
    text = STUDY + BUDGET
    assert old in text
    file = write_study(text.replace(old, new, 1))
    with pytest.raises(RecipeError) as found:
        load_study(file)
    line = str(found.value)
    assert line.startswith(f"{file}:")
    assert "\n" not in line
    assert words in line


def test_an_error_of_the_base_names_the_base_and_the_arm(write_study: Write, tmp_path: Path) -> None:
    file = write_study()
    base = tmp_path / "base.yaml"
    base.write_text(base.read_text().replace("warmup_steps", "warmup_stebs"))
    with pytest.raises(RecipeError, match=r"base\.yaml:5:\d+: training\.warmup_stebs: .*\(arm dense\)"):
        load_study(file)


def test_an_arm_takes_sections_and_dotted_keys(write_study: Write) -> None:
    text = STUDY.replace("dense: {}", "dense: {training.optim: sgd, training: {max_grad_norm: null}}")
    dense = load_study(write_study(text)).of_arm("dense")[0].recipe
    assert (dense.name, dense.training.optim, dense.training.max_grad_norm) == ("dense", "sgd", None)
    assert dense.training.max_steps == 20  # the base's


def test_each_arm_has_every_combination_in_order(write_study: Write) -> None:
    text = STUDY.replace("vary:", "vary:\n  training.warmup_steps: [0, 2]")
    loaded = load_study(write_study(text))
    assert [(variant.arm, variant.label) for variant in loaded.variants[:5]] == [
        ("dense", "warmup_steps=0 learning_rate=0.0005"),
        ("dense", "warmup_steps=0 learning_rate=0.001"),
        ("dense", "warmup_steps=2 learning_rate=0.0005"),
        ("dense", "warmup_steps=2 learning_rate=0.001"),
        ("topk", "warmup_steps=0 learning_rate=0.0005"),
    ]


def test_seeds_are_a_number_a_list_or_a_range(write_study: Write) -> None:
    found = load_study(write_study(STUDY.replace("{tune: [0], report: 1-2}", "{tune: 4, report: '0-2,7'}"))).study.seeds
    assert (found.tune, found.report) == ([4], [0, 1, 2, 7])


def test_dense_by_length_and_dense_with_a_fused_optimizer_are_added_where_they_apply(
    write_study: Write, tmp_path: Path
) -> None:
    """They have the same budget as every arm. The fused form trains the same model, so it takes dense's values."""
    padded = "dataset: {name: none, format: completion, test_fraction: 0.5}\n"
    file = write_study(STUDY + BUDGET + "controls: auto\n")
    assert [*load_study(file).study.arms] == ["dense", "topk", "dense-fused"]  # packed texts have no padding
    base = tmp_path / "base.yaml"
    base.write_text(base.read_text().replace("dataset: {name: none, test_fraction: 0.5}\n", padded))
    study = load_study(file).study
    assert [*study.arms] == ["dense", "topk", "dense-by-length", "dense-fused"]
    assert study.arms["dense-by-length"] == {"training.group_by": "length"}
    assert study.arms["dense-fused"] == {"training.optim_args": {"fused": True}}
    assert study.shares == {"dense-fused": "dense"}
    own = STUDY.replace("topk:", "mine: {training.group_by: length}\n  topk:") + BUDGET + "controls: auto\n"
    (tmp_path / "study.yaml").write_text(own)
    assert [*load_study(file).study.arms] == ["dense", "mine", "topk", "dense-fused"]  # there is one already
    base.write_text(base.read_text().replace("training: {", "training: {optim: adafactor, "))
    assert [*load_study(file).study.arms] == ["dense", "mine", "topk"]  # it has no fused form
    (tmp_path / "study.yaml").write_text(STUDY + BUDGET)
    assert [*load_study(file).study.arms] == ["dense", "topk"]
