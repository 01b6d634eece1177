"""The contract of a policy: a frozen set of options, and one decision.

A policy never touches autograd, the optimizer, the device or the global random generators. The engine keeps all state
and passes each decision its arguments: the gradient, the :class:`Site` and the :class:`Step`. So the same seed yields
the same decisions, and a resumed run decides as the uninterrupted one would have.

Shape letters: N rows (= B*T), O output width, D input width.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol, Self, TypeAlias

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from sparsebp_cli.errors import UnsupportedError
from sparsebp_cli.policy.card import MethodCard
from sparsebp_cli.policy.kind import Kind
from sparsebp_cli.policy.rule import SAME, Rule
from sparsebp_cli.policy.schedule import Schedule

if TYPE_CHECKING:
    import torch

    from sparsebp_cli.policy.selection import Selection

State: TypeAlias = Mapping[str, "torch.Tensor | float"]  # the state of a Stateful policy


@dataclass(frozen=True)
class Site:
    """A place where the engine calls a policy, by default the output of a linear.

    Args:
        name: The module's name in the model, such as ``model.layers.3.mlp.down_proj``.
        num_features: O, the width of the output whose gradient the policy receives.
        batch_shape: The output's shape without the feature dimension, usually (B, T); its product is N.
        layer: Index of its layer, from 0; an encoder's layers come before a decoder's. None outside of layers.
        unknown: Why the engine cannot tell which example each row belongs to; empty if it can.
    """

    name: str
    num_features: int
    batch_shape: tuple[int, ...]
    layer: int | None = None
    unknown: str = ""

    @property
    def num_examples(self) -> int:
        """Return B, or 1 if the output has no dimension for examples. Rows are ordered by example.

        Raises:
            UnsupportedError: The engine cannot tell which rows belong to one example.
        """
        if self.unknown:
            raise UnsupportedError(
                f"'within: example' cannot tell which example each gradient row of {self.name!r} belongs to: "
                f"{self.unknown}; exclude this module, or set 'within: batch'"
            )
        return self.batch_shape[0] if len(self.batch_shape) > 1 else 1


class Named(Protocol):
    """A site or an edge of the graph, with a name that is the same in every step."""

    @property
    def name(self) -> str:
        """The name."""


@dataclass(frozen=True)
class Step:
    """The optimizer step and call for which a policy decides, and the source of its random generators.

    Args:
        index: Current optimizer step, counted from 0.
        micro_batch: Backward within this step, counted from 0 (gradient accumulation).
        call: Gradient of this site within this backward, counted from 0. A shared layer has more than one.
        seed: The run's seed.
        draw: 0 in training. Positive numbers are independent draws, for measuring a random policy. -1 repeats the draw
            of training.
        rank: Index of this process, from 0. Each process decides about its own examples.
        num_steps: Optimizer steps of the whole training; None if not known.
        state: The deciding policy's state before this step, if it is :class:`Stateful`. It must not be changed.
        loss_scale: Factor of this backward's loss, a number or 0-d tensor; None means 1. The gradient that the decision
            receives contains it. Measures from which a state was computed do not.
        on_draw: Called at each request for a random generator, so that a measurement can detect whether decisions are
            random; None: no call.
    """

    index: int
    micro_batch: int = 0
    call: int = 0
    seed: int = 0
    draw: int = 0
    rank: int = 0
    num_steps: int | None = None
    state: State = field(default_factory=dict, compare=False, repr=False)
    loss_scale: torch.Tensor | float | None = field(default=None, compare=False, repr=False)
    on_draw: Callable[[], None] | None = field(default=None, compare=False, repr=False)

    def generator(self, site: Named, device: torch.device | str = "cpu") -> torch.Generator:
        """Return a fresh random generator that depends only on seed, step, draw, rank and site.

        Args:
            site: What the policy decides about. Different names have independent random numbers.
            device: Device on which the random numbers are needed.

        Returns:
            A new generator. It does not use the global generators, so a checkpoint needs to save nothing for it.
        """
        import torch

        if self.on_draw is not None:
            self.on_draw()
        # -1 repeats the draw of training.
        draw = max(0, self.draw)
        key = f"{self.seed}/{self.index}/{self.micro_batch}/{self.call}/{draw}/{site.name}"
        # Ranks draw different rows; rank 0 draws the rows that a single process would.
        key += f"/rank {self.rank}" if self.rank else ""
        digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
        return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


@dataclass(frozen=True)
class Budget:
    """Fractions of a site's work that a policy keeps, for each of the two products of a linear's backward.

    Args:
        dgrad: Fraction kept for the gradient of the input, in (0, 1].
        wgrad: Fraction kept for the gradients of the weight and the bias, in (0, 1].
        is_mean: Whether the fractions are means over draws. Otherwise they are upper limits for every draw.
    """

    dgrad: float
    wgrad: float
    is_mean: bool = False

    @classmethod
    def of(cls, budget: float | Budget) -> Budget:
        """Return the fractions that a policy declared; a single number, in (0, 1], applies to both products."""
        return budget if isinstance(budget, Budget) else cls(budget, budget)


class Policy(BaseModel, ABC):
    """The base class of all policies: an immutable set of options that are checked before a run starts. Subclass a
    *kind*, such as :class:`GradientSelector`, not this class.

    Options are pydantic fields with a description and a range. Unknown options are refused. Import torch inside the
    decision, not at the top of the file, so that recipes can be checked without it.

    Each option that is a real number may follow a :class:`Schedule` over the training, unless ``constants`` names it.
    The policy needs no code for this: the engine calls a copy that has the step's values.

    Args:
        takes_schedules: Whether options may follow a schedule; False for kinds that decide alike at every step.
        constants: Names of options that may not follow one, such as an option that itself sets a time.
        card: Use, cost and results of the method, for the catalogue; None without a card.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    # Options that a later version added. Plans leave them out at their defaults, so that ids of runs and trials stay.
    later_options: ClassVar[frozenset[str]] = frozenset()
    # Removed options, each with the only value that is still accepted. Every plan contains it, so that ids of runs and
    # trials stay the same.
    former_options: ClassVar[tuple[tuple[str, object], ...]] = ()
    takes_schedules: ClassVar[bool] = True
    constants: ClassVar[tuple[str, ...]] = ()
    card: ClassVar[MethodCard | None] = None
    _schedules: tuple[tuple[str, Schedule], ...] = PrivateAttr(())

    @property
    @abstractmethod
    def exact(self) -> bool:
        """Whether, with these options, every gradient equals the dense one. The conformance suite tests this."""

    @property
    @abstractmethod
    def unbiased(self) -> bool:
        """Whether, with these options, the mean of a site's selected gradient over draws is the dense gradient. The
        conformance suite tests this."""

    @property
    def control(self) -> Mapping[str, object] | None:
        """Name and options of a policy that selects the same amount at random, as a recipe writes them under
        ``policy``; None without one, such as for a random policy. A comparison asks for runs with this control."""
        return None

    @property
    def schedules(self) -> Mapping[str, Schedule]:
        """The schedules by name of the option. The option's own value is one end of its schedule."""
        return dict(self._schedules)

    def follow(self, schedules: Mapping[str, Schedule]) -> Self:
        """Return a copy in which some options, by name, follow schedules. Both ends must be allowed values."""
        policy = self.model_copy()
        policy._schedules = tuple(schedules.items())  # noqa: SLF001 - a copy of this class
        return policy

    def values_at(self, step: Step) -> tuple[float, ...]:
        """Return the values of the scheduled options at a step, which needs ``num_steps`` if there are any."""
        if not self._schedules:
            return ()
        assert step.num_steps is not None, "attach should have refused it"
        return tuple(schedule.value(step.index, step.num_steps) for _, schedule in self._schedules)

    def at(self, step: Step) -> Self:
        """Return the policy with the numbers of a step; itself if no option follows a schedule."""
        if not self._schedules:
            return self
        names = (name for name, _ in self._schedules)
        return self.model_copy(update=dict(zip(names, self.values_at(step), strict=True))).follow({})

    @model_serializer(mode="wrap")
    def _write(self, handler: SerializerFunctionWrapHandler) -> dict[str, object]:
        options: dict[str, object] = handler(self)
        for name in self.later_options & options.keys():
            if options[name] == type(self).model_fields[name].default:
                del options[name]
        # Plans must contain the former options to hash to the ids of their runs.
        options = {**dict(self.former_options), **options}
        return {**options, **{name: schedule.model_dump() for name, schedule in self._schedules if name in options}}


class GradientSelector(Policy):
    """Selects the part of a gradient that continues from a site, inside the backward. The engine implements the two
    options below for all gradient selectors. Several selectors work in one model if each has its own sites, by
    ``where`` or ``layers``. All other sites stay dense."""

    former_options: ClassVar[tuple[tuple[str, object], ...]] = (("keep_warmup_steps", 0), ("error_feedback", False))

    where: list[str] | None = Field(
        None,
        description="Linear layers (with 'backward.sites: nodes', autograd nodes) at which the policy acts: globs "
        "over names, such as *.mlp.*. Others stay dense. null: all.",
        min_length=1,
    )
    layers: list[int] | None = Field(
        None,
        description="Transformer layers in which the policy acts: numbers from 0, or from the end as -1; an "
        "encoder's layers come first. Other layers stay dense. null: all.",
    )

    @abstractmethod
    def select(self, grad_NO: torch.Tensor, site: Site, step: Step) -> Selection | None:
        """Select the part of the gradient of a site's output that is kept.

        Select by count (top-k) rather than by threshold: counting on the host stalls a GPU.

        Args:
            grad_NO: Gradient of the site's output, all leading dimensions flattened to rows. It must not be changed.
            site: The linear or residual block whose output has this gradient.
            step: The step and call of the decision; ``step.generator(site, grad_NO.device)`` is the only source of
                randomness allowed.

        Returns:
            The selection; None keeps everything.
        """

    @property
    @abstractmethod
    def selection(self) -> type[Selection] | None:
        """The type that ``select`` returns with these options; None if it always returns None. The engine prepares for
        this type, and estimates the FLOPs of the backward from it and the budget."""

    @property
    @abstractmethod
    def budget(self) -> float | Budget:
        """Fraction of the gradient's entries that is kept at each site, in (0, 1], or a :class:`Budget`. The engine
        checks it against the kept entries. If sites or steps differ, return the largest; see :meth:`budget_at`."""

    def budget_at(self, site: Site, step: Step) -> float | Budget:  # noqa: ARG002 - for overrides
        """Return the fraction that is kept at one site and step, from which the engine estimates FLOPs.

        Args:
            site: The site of the decision.
            step: The step of the decision.

        Returns:
            At most ``budget``. Without an override it equals ``budget``.
        """
        return self.budget


def _find_facts(policy: GradientSelector) -> Mapping[str, object]:
    layers = policy.layers is not None
    return {"placed": policy.where is not None or layers, "names_layers": layers}


GRADIENT_SELECTOR = Kind(
    GradientSelector,
    suite="sparsebp_cli.testing.selector:check_selector",
    at_sites=True,
    needs_linears=True,
    may_repeat=True,
    facts=_find_facts,
    limits=(
        Rule(
            "{other} and {policy} make the same decision ({kind}) at the same place: give only one of them, or "
            "limit each to its own sites by where or layers",
            policy={"placed": (False,)},
            other={"kind": SAME},
        ),
        Rule(
            "{other} and {policy} at {sites} are not supported: give only one of them",
            why="Nodes have no names before the first backward, so where and layers cannot assign them to policies.",
            other={"kind": SAME},
            options={"sites": ("nodes",)},
        ),
    ),
)
