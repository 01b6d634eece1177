"""The studies of published tables: checked against configs and columns as hubs have them, without a hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparsebp_cli.cli.starter import list_shipped
from sparsebp_cli.policy.discovery import find_policies
from sparsebp_cli.source import inspect_sources
from sparsebp_cli.source.inspection import SourceProblem
from sparsebp_lab.study.loader import LoadedStudy, load_study
from sparsebp_lab.verb.study_tool import is_study
from tests.fixture.hub.lay_out import lay_out

pytestmark = pytest.mark.model
FOLDER = Path(__file__).parents[2] / "recipes"
STUDIES = sorted(FOLDER.glob("papers/*.yaml"))
FETCHED = ("minilm-l6", "movie-snippets")


@pytest.fixture(scope="session")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    lay_out(folder)
    return folder


def _inspect(loaded: LoadedStudy, folder: Path) -> dict[str, list[SourceProblem]]:
    return {
        arm: list(inspect_sources(first.placed.recipe, [folder], is_here=True)) for arm, first in loaded.firsts.items()
    }


@pytest.mark.parametrize("file", STUDIES, ids=lambda file: file.stem)
def test_every_arm_fits_the_real_config_and_the_real_columns(
    file: Path, hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(hub)
    found = _inspect(load_study(file), hub)
    assert found == {arm: [] for arm in found}, "nothing is wrong, and nothing unknown"


def test_a_column_a_split_or_a_length_that_the_hub_does_not_have_is_found(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the test above can fail."""
    monkeypatch.chdir(hub)
    text = (FOLDER / "papers" / "vcas-mnli.yaml").read_text()
    for old, new, key in (
        ("premise, hypothesis", "premise, hypotheses", "columns"),
        ("validation_matched", "validation", "eval_split"),
        ("max_seq_length: 128", "max_seq_length: 1024", "max_seq_length"),
        ("subset: mnli", "subset: mnly", "name"),
        ("bert-large-cased", "bert-huge", "name"),
    ):
        assert old in text
        file = tmp_path / "study.yaml"
        file.write_text(text.replace(old, new))
        (problem, *_) = _inspect(load_study(file), hub)["dense"]
        assert problem.location[-1] == key


@pytest.mark.parametrize("file", STUDIES, ids=lambda file: file.stem)
def test_every_study_has_a_small_form_of_models_and_data_of_the_package(file: Path, tmp_path: Path) -> None:
    loaded = load_study(file, scaled=True)
    assert loaded.paper is not None
    assert loaded.paper.scaled
    for problems in _inspect(loaded, tmp_path).values():
        assert all(problem.text.startswith(FETCHED) for problem in problems), problems
    recipe = next(iter(loaded.firsts.values())).recipe
    assert recipe.training.max_steps <= 60
    assert recipe.target.threads == 1, "two threads under load are slower than one"
    is_fetched = recipe.model.name in FETCHED or recipe.dataset.name in FETCHED
    assert is_fetched is ("sparsebp fetch" in file.read_text()), "the comment says what must be fetched"


def test_eight_methods_are_there_and_each_study_has_a_dense_arm_or_says_against_what() -> None:
    policies, optimizers = set[str](), set[str]()
    for file in STUDIES:
        for first in load_study(file).firsts.values():
            policies |= {entry.name for entry in first.recipe.policy} - {"dense"}
            optimizers |= {first.recipe.training.optim} - {"adamw", "sgd"}
    assert policies <= find_policies().keys()
    assert len(policies | optimizers) >= 8, sorted(policies | optimizers)


def test_studies_are_listed_with_their_folder_and_are_told_from_recipes() -> None:
    shipped = {one.short_name: one.file for one in list_shipped()}
    assert {f"papers/{file.stem}" for file in STUDIES} == {name for name in shipped if is_study(shipped[name])}
