"""Prefixes of all micro-batches of a step in a trainer: the weights of ``Trainer``, up to rounding."""

from __future__ import annotations

from pathlib import Path

import pytest

import sparsebp_cli as sbp

from .conftest import distance, is_free, weights
from .test_lossless import CASES, build, losses_of

# peft 0.21 asks transformers 5.23 by its old name
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
ALONE = "ran without shared prefixes"
# Case, whether its micro-batches share what they have in common, and arguments of its own. Label smoothing reads logits
# of positions without a label.
STEPS = {
    "accumulation and clipping": True,
    "lora": True,
    "epochs that do not divide": True,
    "label smoothing": False,
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shares"), STEPS.items())
def test_a_trainer_with_prefixes_of_updates_trains_the_plain_weights(name: str, shares: bool, tmp_path: Path) -> None:
    base, kwargs = build(CASES[name], tmp_path / "plain")
    plain = base(**kwargs)
    before = weights(plain.model)
    plain.train()
    _, kwargs = build(CASES[name], tmp_path / "own")
    trainer = base(**kwargs)
    callback = sbp.PolicyCallback(sbp.make_policy("lossless", prefixes="update")).join(trainer)
    trainer.train()
    moved = distance(before, weights(plain.model))
    assert distance(weights(plain.model), weights(trainer.model)) < 1e-4 * moved
    assert losses_of(trainer) == pytest.approx(losses_of(plain), rel=1e-4)
    assert callback.engine is not None
    note = callback.engine.notes["packing of updates"]
    assert "sharing prefixes skipped" in note
    assert (ALONE not in note) == shares, note
    assert is_free(trainer)
