"""Forecast large models from small ones: layers are alike, so each adds the same amount to a step.

A rehearsal at a third depth checks this before it is used.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sparsebp_tools.forecast.record import Parts, StepForecast

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FULL = 8  # models of at most this many layers are rehearsed whole
DEPTHS = (2, 4, 8)  # the last one is the check
TOLERANCE = 0.002  # relative tolerance of the peak and of the FLOPs


def count_layers(config: PreTrainedConfig) -> int | None:
    """Return the number of layers of a decoder or an encoder; None for a model with both, or composed of parts."""
    inner = config.get_text_config()
    number = getattr(inner, "num_hidden_layers", None)
    return number if inner is config and not config.is_encoder_decoder and isinstance(number, int) else None


def shorten(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    """Return the config of a model of fewer layers."""
    made: Any = copy.deepcopy(config)
    before, made.num_hidden_layers = made.num_hidden_layers, layers
    for key, value in vars(made).items():
        if isinstance(value, list) and len(value) == before:  # the type of each layer
            setattr(made, key, value[:layers])
    return made  # type: ignore[no-any-return]


class Depth:
    """How many layers to rehearse of a model with ``layers``: all, or a few if a step is linear in them."""

    def __init__(self, layers: int | None) -> None:
        self.layers = layers
        self.is_short = layers is not None and layers > FULL

    def forecast(self, rehearse: Callable[[int | None], StepForecast], *, checks: bool) -> StepForecast:
        """Return the forecast of the whole model. With ``checks``, first test whether few layers predict it; if so,
        later calls use them, otherwise they rehearse the whole model."""
        if not self.is_short or self.layers is None:
            return rehearse(None)
        try:
            few = [rehearse(number) for number in DEPTHS[:2]]
            if checks:
                tried, expected = rehearse(DEPTHS[2]), extend(few[0], few[1], *DEPTHS)
                self.is_short = _agree(tried, expected)
        except Exception:
            if not checks:
                raise
            self.is_short = False  # for example a policy that names the tenth layer
        return extend(few[0], few[1], *DEPTHS[:2], self.layers) if self.is_short else rehearse(None)

    def describe(self) -> str:
        """Return a line about the rehearsed layers."""
        if not self.is_short:
            return ""
        first, second, third = DEPTHS
        return (
            f"the forecast extrapolates from {first} and {second} layers to {self.layers}; it predicts {third} layers "
            f"within {TOLERANCE:.1%}"
        )


def extend(few: StepForecast, more: StepForecast, low: int, high: int, layers: int) -> StepForecast:
    """Return the forecast of a model of ``layers``, from forecasts of models with ``low`` and ``high`` layers."""

    def line(one: float, other: float) -> float:
        return one + (other - one) / (high - low) * (layers - low)

    def parts(one: Parts | None, other: Parts | None) -> Parts | None:
        if one is None or other is None:
            return None
        return Parts(**{part: round(line(size, getattr(other, part))) for part, size in one.model_dump().items()})

    numbers = ("gradient_bytes", "num_parameters", "num_trained")
    return more.model_copy(
        update={
            "phases": {phase: parts(few.phases[phase], more.phases[phase]) for phase in few.phases},
            "comparison": parts(few.comparison, more.comparison),
            "trial": parts(few.trial, more.trial),
            **{name: line(getattr(few, name), getattr(more, name)) for name in _WORK},
            **{name: round(line(getattr(few, name), getattr(more, name))) for name in numbers},
        }
    )


_WORK = ("pass_flops", "attention_flops", "update_flops")


def _agree(one: StepForecast, other: StepForecast) -> bool:
    if set(one.phases) != set(other.phases):
        return False
    pairs = [(one.phases[phase].total, other.phases[phase].total) for phase in one.phases]
    pairs.append((one.largest_bytes, other.largest_bytes))
    pairs.append((round(one.pass_flops), round(other.pass_flops)))
    return all(abs(a - b) <= TOLERANCE * a for a, b in pairs)
