"""Published tables as studies: what a paper claims beside what is measured, and the same study at a size that fits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparsebp_cli.compare.loaded import LoadedRun
from sparsebp_cli.errors import RecipeError, UsageError
from sparsebp_cli.recipe.loader import load_recipe
from sparsebp_cli.run import History, State
from sparsebp_cli.run.series import add_together
from sparsebp_lab.study.loader import load_study
from sparsebp_lab.study.place import move
from sparsebp_lab.study.published import Paper, PaperClaim, hold_beside, make_grid

from .conftest import Cli, Write

STUDY = """\
version: 1
study: table
paper:
  title: "A. Author: On Halves (2026)"
  link: https://example.org/halves
  claimed:
    - {arm: topk, metric: eval/loss, value: 3.5, where: table 1}
    - {arm: topk, metric: flops/step, of: dense, value: 0.4, where: table 2}
base:
  model: {name: none}
  dataset: {name: none, test_fraction: 0.5}
  training: {max_steps: 20, learning_rate: 1e-3}
  tracking: {uri: "sqlite:////dev/null/mlflow.db"}
arms:
  dense: {}
  topk: {policy: [{name: topk, keep: 0.25}]}
seeds: {report: 1-3}
scale:
  base:
    model: {name: small}
    dataset: {name: few}
    training: {max_steps: 10}
  arms:
    topk: {policy.0.keep: 0.5}
"""
WRONG = [
    ("version: 1", "version: 2", "1:10: version: got 2, allowed: 1"),
    ("{name: none}", "{nam: none}", "10:11: base.model.nam: unknown key 'nam'"),
    ("max_steps: 20", "max_steps: 0", "base.training.max_steps: must be at least 1, got 0"),
    ("base:\n  model", "base:\n  name: a\n  model", "10:9: base.name: leave it out"),
    ("keep: 0.25", "keep: 2.5", "arms.topk.policy.0.keep: must be in (0, 1], got 2.5"),
    ("arm: topk, metric: eval/loss", "arm: topp, metric: eval/loss", "paper.claimed.0.arm: must be one of the arms"),
    (
        "of: dense",
        "of: dens",
        "paper.claimed.1.of: must be one of the arms (dense, topk), got 'dens'; did you mean dense",
    ),
    ("flops/step", "flops/stepp", "paper.claimed.1.metric: 'flops/stepp' is no metric that runs log; did you mean"),
    (", where: table 1", "", "7:7: paper.claimed.0.where: missing"),
    ("https://", "ftp://", "paper.link: must be text that matches"),
    (
        "    topk: {policy.0",
        "    topp: {policy.0",
        "scale.arms.topp: must be one of the arms (dense, topk), got 'topp'",
    ),
    ("    training: {max_steps: 10}", "    name: x", "scale.base.name: leave it out"),
    ("scale:\n", "scale:\n  model: {name: small}\n", "scale.model: unknown key 'model'; allowed: base, arms, vary"),
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "table.yaml"
    path.write_text(STUDY)
    return path


@pytest.mark.parametrize(("old", "new", "text"), WRONG)
def test_what_is_wrong_is_one_line_with_its_place(file: Path, old: str, new: str, text: str) -> None:
    assert old in STUDY
    file.write_text(STUDY.replace(old, new))
    with pytest.raises(RecipeError) as caught:
        load_study(file)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


SCALED = [
    ("max_steps: 10", "max_steps: 0", "scale.base.training.max_steps: must be at least 1, got 0"),
    ("policy.0.keep: 0.5", "policy.0.keep: 5.5", "scale.arms.topk.policy.0.keep: must be in (0, 1], got 5.5"),
    (STUDY[STUDY.index("scale:") :], "", "scale: --scaled needs the study"),
]


@pytest.mark.parametrize(("old", "new", "text"), SCALED)
def test_an_error_of_the_small_study_names_its_key(file: Path, old: str, new: str, text: str) -> None:
    file.write_text(STUDY.replace(old, new))
    load_study(file) if "steps" not in old else None
    with pytest.raises(RecipeError) as caught:
        load_study(file, scaled=True)
    assert text.rsplit(": ", maxsplit=1)[-1] in str(caught.value)
    assert text in str(caught.value)


def test_a_scaled_study_is_the_file_with_scale_laid_over_it_under_a_name_of_its_own(file: Path) -> None:
    whole, small = load_study(file), load_study(file, scaled=True)
    assert (whole.study.study, small.study.study) == ("table", "table-scaled")
    assert whole.paper is not None
    assert not whole.paper.scaled
    before, after = (study.firsts["topk"].recipe for study in (whole, small))
    assert (before.model.name, before.training.max_steps, before.policy[0].options["keep"]) == ("none", 20, 0.25)
    assert (after.model.name, after.training.max_steps, after.policy[0].options["keep"]) == ("small", 10, 0.5)
    assert after.training.learning_rate == before.training.learning_rate, "what scale does not name stays"
    assert after.dataset.test_fraction is None, "a dataset with a name is another one"
    assert small.paper is not None
    expected = ("model.name=small", "dataset.name=few", "training.max_steps=10", "topk policy.0.keep=0.5")
    assert small.paper.scaled == expected


def test_a_scale_of_other_seeds_alone_changes_no_key_of_a_recipe(file: Path) -> None:
    file.write_text(STUDY[: STUDY.index("scale:")] + "scale: {seeds: {report: 1-2}}\n")
    small = load_study(file, scaled=True)
    assert small.paper is not None
    assert small.paper.scaled == ()
    assert small.words == f"{file} --scaled"


def test_the_command_that_goes_on_has_the_options_that_made_the_study(file: Path, cli: Cli) -> None:
    text = STUDY.replace("{name: few}", "{name: cmudict, format: completion, eval_split: test}")
    file.write_text(
        text.replace("{name: small}", "{name: austen-llama}").replace('"sqlite:////dev/null/mlflow.db"', "null")
    )
    done = cli("study", str(file), "--scaled", "--target", "local", "--dry-run", "-o", "json")
    assert json.loads(done.stdout)["next"] == [f"sparsebp study {file} --scaled --target local"]


def test_a_section_that_a_dotted_key_of_the_arm_would_hide_is_refused(file: Path) -> None:
    text = STUDY.replace("dense: {}", "dense: {training.max_steps: 5}")
    file.write_text(text.replace("    topk: {policy.0.keep: 0.5}", "    dense: {training: {max_steps: 6}}"))
    with pytest.raises(
        RecipeError, match=r"scale.arms.dense.training: the arm sets training.max_steps as a dotted key"
    ):
        load_study(file)


def test_a_recipes_verb_says_that_a_study_is_none(file: Path) -> None:
    with pytest.raises(RecipeError, match=r"is a study, not a recipe: `sparsebp study .*` runs it"):
        load_recipe(file)


def test_a_target_from_the_command_line_takes_the_place_of_all(file: Path) -> None:
    loaded = load_study(file)
    moved = move(loaded, "slurm")
    assert [place.target for place in moved.study.where or [] if not isinstance(place, str)] == ["slurm"]
    with pytest.raises(UsageError, match="unknown target 'gpu1'"):
        move(loaded, "gpu1")


def _run(name: str, seed: int, **metrics: dict[int, float]) -> LoadedRun:
    history = History()
    for key, points in metrics.items():
        for step, value in points.items():
            add_together(history.metrics, step, 0.0, {key.replace("_", "/", 1): value})
    recipe: dict[str, object] = {"policy": [], "training": {"max_steps": 2, "per_device_train_batch_size": 1}}
    return LoadedRun(name, name, seed, name, recipe, 0.0, history, State.FINISHED, steps_planned=2)


def test_numbers_are_reduced_by_what_they_are_and_ratios_are_paired_by_seed() -> None:
    dense = [_run("dense", seed, flops_step={1: 10.0, 2: 30.0}, eval_loss={1: 9.0, 2: 2.0}) for seed in (1, 2, 3)]
    topk = [_run("topk", s, flops_step={1: 5.0, 2: 5.0 + 10.0 * s}, eval_loss={1: 1.0, 2: 2.0 + s}) for s in (1, 2)]
    claims = (
        PaperClaim("topk", "eval/loss", 3.0, "a"),
        PaperClaim("topk", "flops/step", 0.5, "b", of="dense"),
        PaperClaim("topk", "test/loss", 1.0, "c"),
        PaperClaim("topk", "time/step_seconds", 1.0, "d"),
    )
    counted = {"dense": dense, "topk": topk}
    found = hold_beside(Paper("T", "https://l", claims), counted, {"topk": "topk#1"}, ["topk"])
    loss, flops, absent, timed = found.numbers
    assert loss.measured is not None
    assert (loss.measured.mean, loss.measured.n, loss.difference) == (3.5, 2, 0.5)
    # (10/20 + 15/20) / 2 over seeds 1 and 2; the third seed of dense has no partner.
    assert flops.measured is not None
    assert (flops.measured.mean, flops.measured.n) == (0.625, 2)
    assert flops.difference == pytest.approx(0.125)
    assert (absent.measured, absent.missing) == (None, "not measured")
    assert (timed.measured, timed.missing) == (None, "withheld: the machine was busy")
    assert [row[0] for row in make_grid(found).rows] == ["topk#1"] * 4
    small = hold_beside(Paper("T", "https://l", claims, ("model.name=small",)), counted, {}, [])
    assert [number.difference for number in small.numbers] == [None] * 4
    assert "neither support nor contradict" in make_grid(small).note
    assert "difference" not in make_grid(small).columns


@pytest.mark.slow
def test_every_face_has_claimed_beside_measured_and_a_scaled_study_claims_nothing(
    file: Path, cli: Cli, tmp_path: Path
) -> None:
    done = cli("study", file)
    assert done.returncode == 0, done.stderr
    shown = cli("compare", "--study", "table", "--all", "--html", "r.html")
    rows = [line.split() for line in shown.stdout.splitlines()]
    assert ["topk", "flops/step", "of", "dense", "0.4", "0.5", "±", "0", "(3)", "+0.1", "table", "2"] in rows
    assert "Claimed by A. Author: On Halves (2026), https://example.org/halves." in " ".join(shown.stdout.split())
    page = (tmp_path / "r.html").read_text()
    assert "Claimed beside measured" in page
    assert "table 2" in page

    assert cli("archive", "@table", "--to", "table.tar.gz").returncode == 0
    again = cli("compare", "--study", "table", "--from", "table.tar.gz", "-o", "md").stdout
    assert "### Claimed beside measured" in again

    done = cli("study", file, "--scaled")
    assert done.returncode == 0, done.stderr
    assert "next: sparsebp compare --study table-scaled" in done.stdout
    text = " ".join(cli("compare", "@table-scaled", "--all").stdout.split())
    assert "Scaled: these runs have another setting, model.name=small, dataset.name=few" in text
    assert (
        "warning: scaled: these runs do not test the claims of A. Author: On Halves (2026), because they have "
        "model.name" in text
    )


def test_a_study_without_a_paper_has_none(write_study: Write) -> None:
    loaded = load_study(write_study())
    assert (loaded.paper, loaded.scaled) == (None, ())
