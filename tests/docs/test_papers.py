"""The page of published tables says of the small forms what their data hold; the data hold every study."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sparsebp_lab.study.loader import load_study
from tests.docs.block import ROOT

STUDIES = sorted((ROOT / "recipes" / "papers").glob("*.yaml"))
RAN: dict[str, Any] = {
    study["study"]: study
    for study in json.loads((ROOT / "docs" / "results" / "papers.json").read_text(encoding="utf-8"))["studies"]
}
PAGE = (ROOT / "docs" / "results" / "papers.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("file", STUDIES, ids=lambda file: file.stem)
def test_what_ran_is_the_small_form_of_the_file(file: Any) -> None:
    loaded = load_study(file, scaled=True)
    study = RAN[file.stem]
    if not study["arms"]:
        return  # the page says so, as the next test holds
    recipe = next(iter(loaded.firsts.values())).recipe
    batch = recipe.training.per_device_train_batch_size * recipe.training.gradient_accumulation_steps
    assert (study["data"], study["steps"], study["batch"]) == (recipe.dataset.name, recipe.training.max_steps, batch)
    planned = set(loaded.study.seeds.report)
    for arm in study["arms"]:
        assert arm["arm"] in loaded.study.arms
        assert set(arm["seeds"]) <= planned
        assert arm["verdict"], "the product's own words"
        if set(arm["seeds"]) < planned:
            assert not any(word in arm["verdict"] for word in ("better", "worse")), "of fewer seeds nothing follows"


def test_every_study_is_in_the_table_or_among_those_that_did_not_run() -> None:
    ran, _, missing = (
        PAGE.partition("<!-- papers: ran -->")[2].partition("<!-- end of papers -->")[0].partition("Not run:")
    )
    for file in STUDIES:
        place = ran if any(arm["seeds"] for arm in RAN[file.stem]["arms"]) else missing
        assert f"`{file.stem}`" in place


def test_no_arm_of_a_small_form_is_said_to_reproduce_a_paper() -> None:
    assert "nothing follows" in PAGE
    for study in RAN.values():
        assert "reproduce" not in json.dumps(study)
