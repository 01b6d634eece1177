"""Keep each linear's input in a few bits for the gradient of its weight.

Xiaoxuan Liu, Lianmin Zheng, Dequan Wang, Yukuo Cen, Weize Chen, Xu Han, Jianfei Chen, Zhiyuan Liu, Jie Tang, Joey
Gonzalez, Michael Mahoney and Alvin Cheung, "GACT: Activation Compressed Training for Generic Network Architectures"
(ICML 2022), https://arxiv.org/abs/2206.11357, with the grid and rounding of Jianfei Chen et al., "ActNN" (ICML 2021),
https://arxiv.org/abs/2104.14129. We differ: we round only inputs of linear layers; GACT rounds all tensors that
autograd saves. So our input gradients are exact and our weight gradients unbiased; rounding the saved values of a
nonlinear operator would add a bias. ``adapt_interval`` distributes the bits like GACT's automatic precision: trial
passes measure how much an input with 1 bit changes the gradient, and a greedy algorithm distributes the bits. Each
input changes only the gradients of its own weights, so three passes measure all inputs at once; GACT needs two passes
per tensor. We compare every hundredth gradient entry. An input gets 1, 2, 4 or 8 bits, because these fill bytes.

Cost: each measurement of ``adapt_interval`` needs three forwards and three dense backwards of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self, final

from pydantic import Field, PositiveInt, model_validator

from sparsebp_cli.policy import Measure, MethodCard, Observation, Observed, Site, Stateful, Step, TrialPass
from sparsebp_shelf.gradient_sample import sample_gradient
from sparsebp_shelf.policies.bit_sharing import FEWEST, MOST, find_sensitivity, share_bits
from sparsebp_shelf.policies.saved_codes import SavedCodes
from sparsebp_shelf.saver import InputSaver, ReaderGradients

if TYPE_CHECKING:
    from torch import Tensor

    from sparsebp_cli.policy import State


@final
class GACT(Stateful[Site], InputSaver):
    """Round each group of an input's entries to a grid between its smallest and its largest one."""

    card: ClassVar[MethodCard | None] = MethodCard(
        use="If activations do not fit into memory, and checkpointing costs too much. Of all input savers, gact "
        "changes the gradient least.",
        year=2022,
        saves=("memory",),
        work="1",
        memory="N * D * (bits / 8 + 8 / group) bytes of each input.",
        claimed="Activations 8.1 times smaller; convolutional, graph and transformer networks.",
        measured="With 4 bits, saved activations fall only to 82 % of dense, because norms, attention and activation "
        "functions are not rounded (results, measurements).",
        code="LiuXiaoxuanPKU/GACT-ICML, no licence seen; not read.",
    )

    former_options: ClassVar[tuple[tuple[str, object], ...]] = (("rounding", "stochastic"),)
    constants: ClassVar[tuple[str, ...]] = ("bits",)  # trial passes distribute their mean; it does not change by step

    bits: Literal[1, 2, 4, 8, 32] | Annotated[float, Field(ge=1.0, le=8.0)] = Field(
        4,
        description=(
            "Number of bits of each saved entry: 1, 2, 4 or 8. 32 saves the input unchanged. With adapt_interval: "
            "the mean number of bits, from 1 to 8."
        ),
    )
    adapt_interval: PositiveInt | None = Field(
        None,
        description=(
            "Number of steps between two measurements that distribute the bits. An input gets more bits (1, 2, 4 or "
            "8) if its rounding changes the gradient more. null: all inputs get the same number."
        ),
    )
    group: Annotated[int, Field(ge=8, multiple_of=8)] = Field(
        256, description="Number of entries that share a rounding grid, a multiple of 8."
    )

    @model_validator(mode="after")
    def _can_be_shared_out(self) -> Self:
        if self.adapt_interval is not None and not FEWEST <= self.bits <= MOST:
            raise ValueError(
                f"with adapt_interval, bits is a mean and must be in [{FEWEST}, {MOST}], got {self.bits:g}"
            )
        if self.adapt_interval is None and self.bits != self._same_bits:
            raise ValueError(f"without adapt_interval, bits must be 1, 2, 4, 8 or 32, got {self.bits:g}")
        return self

    @property
    def exact(self) -> bool:
        return self.bits == 32

    @property
    def unbiased(self) -> bool:
        return True

    @property
    def budget(self) -> float:
        return 1.0

    @property
    def form(self) -> type[SavedCodes] | None:
        return None if self.exact else SavedCodes

    @property
    def control(self) -> dict[str, object] | None:
        if self.adapt_interval is None:
            return None
        plain = {"bits": self._same_bits, "adapt_interval": None}
        return {"name": "gact", **self.model_dump(mode="json"), **plain}

    @property
    def is_identical(self) -> bool:
        return self.adapt_interval is None

    @property
    def has_trials(self) -> bool:
        return self.adapt_interval is not None

    @property
    def observes(self) -> frozenset[type[Observed]]:
        return frozenset({ReaderGradients}) if self.has_trials else frozenset()

    def measure(self, seen: Observed, step: Step) -> dict[str, Measure]:
        import torch

        assert isinstance(seen, ReaderGradients)
        samples = [sample_gradient(gradient, reader, step) for reader, gradient in seen.gradients.items()]
        entries = torch.tensor(float(seen.num_entries), dtype=torch.float64)
        return {"gradient": Measure(torch.cat(samples)), "entries": Measure(entries)}

    def init(self, places: Sequence[Site], /) -> State:
        return {site.name: float(self._same_bits) for site in places} if self.has_trials else {}

    def observe(self, state: State, observation: Observation, step: Step) -> State:  # noqa: ARG002
        return state

    def wants_trials(self, step: Step) -> Sequence[TrialPass]:
        if self.adapt_interval is None or step.index % self.adapt_interval:
            return ()
        coarse, fine = (dict.fromkeys(step.state, float(bits)) for bits in (FEWEST, MOST))
        return [TrialPass(0, 1, coarse), TrialPass(0, 2, coarse), TrialPass(0, 1, fine)]

    def observe_trials(self, state: State, observations: Sequence[Observation], step: Step) -> State:  # noqa: ARG002
        one, other, fine = (observation["gradient"] for observation in observations)
        names = list(one)
        sensitivities = [find_sensitivity(one[name], other[name], fine[name]) for name in names]
        entries = [float(observations[0]["entries"][name]) for name in names]
        bits = share_bits(sensitivities, entries, float(self.bits))
        return {**state, **{name: float(number) for name, number in zip(names, bits, strict=True)}}

    def save(self, x_ND: Tensor, site: Site, step: Step) -> SavedCodes | None:
        if self.exact:
            return None
        generator = step.generator(site, x_ND.device)
        return SavedCodes.of(x_ND, self._bits_at(site, step), self.group, generator)

    def count_bytes(self, num_rows: int, num_features: int, itemsize: int) -> int:
        if self.exact:
            return num_rows * num_features * itemsize
        return SavedCodes.count_bytes(num_rows * num_features, self._same_bits, self.group, itemsize)

    def count_bytes_at(self, site: Site, step: Step, num_rows: int, num_features: int, itemsize: int) -> int:
        if self.exact:
            return self.count_bytes(num_rows, num_features, itemsize)
        return SavedCodes.count_bytes(num_rows * num_features, self._bits_at(site, step), self.group, itemsize)

    def _bits_at(self, site: Site, step: Step) -> int:
        return int(step.state.get(site.name, self._same_bits))

    @property
    def _same_bits(self) -> int:
        """The most bits that all inputs can have equally within the mean."""
        return max(number for number in (1, 2, 4, 8, 32) if number <= self.bits)
