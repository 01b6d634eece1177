"""Keep one number for each group of features of a linear's input: its projection on one direction.

Roy Miles, Pradyumna Reddy, Ismail Elezi and Jiankang Deng, "VeLoRA: Memory Efficient Training using Rank-1 Sub-Token
Projections" (NeurIPS 2024), https://arxiv.org/abs/2405.17991, after its abstract and formulas. An input's direction is
the mean of its groups in the first batch, and stays fixed. We differ: in the first step, each micro-batch uses the mean
of its own groups, as ``by: mean`` does at every step. We change the requested group size slightly, so that all groups
of an input are equally large. The paper projects only the inputs of the value layers and of the MLP's last linear
layer: select them with ``where``, as `recipes/methods/velora.yaml` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, final

from pydantic import Field, PositiveInt

from sparsebp_cli.policy import Measure, MethodCard, Observation, Observed, Site, Stateful, Step, choice
from sparsebp_shelf.saver import InputSaver, LinearInput, SavedDirection

if TYPE_CHECKING:
    from torch import Tensor

    from sparsebp_cli.policy import State


@final
class VeLoRA(Stateful[Site], InputSaver):
    """Keep the projection of each group of neighbouring features on one direction; the gradient is biased."""

    card: ClassVar[MethodCard | None] = MethodCard(
        use="To study how much of an input lies along one direction. In float32, gact with 2 bits needs about as "
        "much memory as velora with group: 16, and is unbiased.",
        year=2024,
        saves=("memory", "time"),
        work="(2 + 1 / group) / 3",
        memory="N * D / group entries of each input.",
        claimed="Less memory than QLoRA and GaLore with equal quality; LLaMA and RoBERTa (abstract).",
        code="roymiles/VeLoRA; not read.",
    )

    group: PositiveInt = Field(32, description="Approximate number of features in a group; 1 is dense.")
    by: Literal["first", "mean", "random"] = Field(
        "first",
        description=(
            "The direction of the projection. first: the mean of the groups in a linear layer's first batch; it "
            "stays fixed, and training needs a single process. mean: the mean of each input's own groups. random: "
            "drawn for each input, as a control."
        ),
    )

    @property
    def exact(self) -> bool:
        return self.group == 1

    @property
    def unbiased(self) -> bool:
        return self.exact

    @property
    def budget(self) -> float:
        return 1.0 / self.group

    @property
    def form(self) -> type[SavedDirection] | None:
        return None if self.exact else SavedDirection

    @property
    def control(self) -> dict[str, object] | None:
        if self.exact or self.by == "random":
            return None
        return {"name": "velora", **self.model_dump(mode="json"), "by": "random"}

    @property
    def observes(self) -> frozenset[type[Observed]]:
        return frozenset({LinearInput}) if self._remembers else frozenset()

    def measure(self, seen: Observed, step: Step) -> dict[str, Measure]:
        import torch

        assert isinstance(seen, LinearInput)
        if step.micro_batch or step.call:  # the first forward of a step decides
            return {}
        return {"mean": Measure(seen.x_ND.mean(0, dtype=torch.promote_types(seen.x_ND.dtype, torch.float32)))}

    @property
    def is_identical(self) -> bool:
        return not self._remembers

    @property
    def _remembers(self) -> bool:
        return self.by == "first" and not self.exact

    def init(self, places: Sequence[Site], /) -> State:
        """Return a state without directions, with space for the largest group, because widths are not known."""
        if not self._remembers:
            return {}
        import torch

        empty = {f"direction/{site.name}": torch.zeros(2 * self.group, dtype=torch.float64) for site in places}
        return {**empty, **{f"is_known/{site.name}": 0.0 for site in places}}

    def observe(self, state: State, observation: Observation, step: Step) -> State:  # noqa: ARG002
        import torch

        found = dict(state)
        for name, mean_D in observation["mean"].items():
            if not state[f"is_known/{name}"]:
                _, size = self._divide(len(mean_D))
                direction = torch.zeros(2 * self.group, dtype=torch.float64, device=mean_D.device)
                direction[:size] = SavedDirection.mean_direction(mean_D[None], size)
                found |= {f"direction/{name}": direction, f"is_known/{name}": 1.0}
        return found

    def save(self, x_ND: Tensor, site: Site, step: Step) -> SavedDirection | None:
        if self.exact:
            return None
        return SavedDirection.of(x_ND, self._find_direction(x_ND, site, step))

    def _find_direction(self, x_ND: Tensor, site: Site, step: Step) -> Tensor:
        import torch

        _, size = self._divide(x_ND.shape[1])
        dtype = torch.promote_types(x_ND.dtype, torch.float32)
        if self.by == "random":
            generator = step.generator(site, x_ND.device)
            drawn_C: Tensor = torch.randn(size, generator=generator, dtype=dtype, device=x_ND.device)
            return drawn_C.div_(torch.linalg.vector_norm(drawn_C))
        if step.state.get(f"is_known/{site.name}"):
            known = torch.as_tensor(step.state[f"direction/{site.name}"])
            return known[:size].to(x_ND.device, dtype)
        return SavedDirection.mean_direction(x_ND, size)

    def count_bytes(self, num_rows: int, num_features: int, itemsize: int) -> int:
        if self.exact:
            return num_rows * num_features * itemsize
        return SavedDirection.count_bytes(*self._divide(num_features), num_rows, itemsize)

    def _divide(self, num_features: int) -> tuple[int, int]:
        """Return the number of groups, and the features of each."""
        size = -(-num_features // choice.count_kept(self.budget, num_features))
        return -(-num_features // size), size
