"""The contract of a policy: a frozen set of options, and one decision.

A policy never touches autograd, the optimizer, the device or the global random generators. The engine keeps all state
and passes what a decision needs: the gradient, the :class:`Site` and the :class:`Step`. So the same seed gives the same
decisions, and a resumed run decides as the uninterrupted one would have.

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
    NonNegativeInt,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from sparsebp_cli.errors import UnsupportedError
from sparsebp_cli.policy.card import MethodCard
from sparsebp_cli.policy.kind import Kind
from sparsebp_cli.policy.rule import SAME, Rule
from sparsebp_cli.policy.schedule import Schedule

if TYPE_CHECKING:
    import torch

    from sparsebp_cli.policy.selection import Selection

State: TypeAlias = Mapping[str, "torch.Tensor | float"]  # of a policy that is Stateful


@dataclass(frozen=True)
class Site:
    """A module at whose output a policy decides.

    Args:
        name: The module's name in the model, such as ``model.layers.3.mlp.down_proj``.
        num_features: O, the width of the output whose gradient the policy receives.
        batch_shape: The output's shape without the feature dimension, usually (B, T); its product is N.
        layer: Number of the layer that it belongs to, from 0, an encoder's before a decoder's; None outside of layers.
        unknown: Why the example of each row is not known; empty where it is.
    """

    name: str
    num_features: int
    batch_shape: tuple[int, ...]
    layer: int | None = None
    unknown: str = ""

    @property
    def num_examples(self) -> int:
        """B, or 1 if the output has no dimension for examples. Rows are ordered by example.

        Raises:
            UnsupportedError: It is not known which rows belong to one example.
        """
        if self.unknown:
            raise UnsupportedError(
                f"within: example needs to know the example of each row, and at {self.name!r} {self.unknown}; "
                "exclude it, or choose within the batch"
            )
        return self.batch_shape[0] if len(self.batch_shape) > 1 else 1


class Named(Protocol):
    """A site or an edge of the graph, with a name that is the same in every step."""

    @property
    def name(self) -> str:
        """The name."""


@dataclass(frozen=True)
class Step:
    """The step and the call in which a policy decides.

    Args:
        index: Current optimizer step, counted from 0.
        micro_batch: Backward within this step, counted from 0 (gradient accumulation).
        call: Gradient of this site within this backward, counted from 0 (a shared layer has more than one).
        seed: The run's seed.
        draw: 0 in training; other numbers give independent draws for measuring a random policy, and -1 that of
            training itself.
        rank: Number of this process among those that train together, from 0; each decides about its own examples.
        num_steps: Optimizer steps of the whole training; None if not known.
        state: State of the policy that is asked, before this step, if it is :class:`Stateful`. It must not be changed.
        loss_scale: Factor of the loss of this backward, a number or 0-d, and so of the gradient that a decision sees,
            but not of what a state was computed from; None: 1.
        on_draw: Called whenever a random generator is asked for, by which a measurement knows that another draw would
            be the same; None: nobody asks.
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
            site: Place or thing that is decided about; another name has independent numbers.
            device: Device on which the random numbers are needed.

        Returns:
            A new generator. The global ones are not used, so nothing has to be saved for a resume.
        """
        import torch

        if self.on_draw is not None:
            self.on_draw()
        # A draw of -1 repeats that of training.
        draw = max(0, self.draw)
        key = f"{self.seed}/{self.index}/{self.micro_batch}/{self.call}/{draw}/{site.name}"
        # Ranks draw different rows; rank 0 draws what a single process would.
        key += f"/rank {self.rank}" if self.rank else ""
        digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
        return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


@dataclass(frozen=True)
class Budget:
    """Shares of a site's work that are kept, for each of the two products of a linear's backward.

    Args:
        dgrad: Share kept for the gradient of the input, in (0, 1].
        wgrad: Share kept for the gradients of the weight and the bias, in (0, 1].
        is_mean: Whether the shares are means over draws; otherwise no draw keeps more.
    """

    dgrad: float
    wgrad: float
    is_mean: bool = False

    @classmethod
    def of(cls, budget: float | Budget) -> Budget:
        """Return a budget; a number is that of both products.

        Args:
            budget: Budget as a policy declares it; a number is a share in (0, 1].

        Returns:
            The shares of both.
        """
        return budget if isinstance(budget, Budget) else cls(budget, budget)


class Policy(BaseModel, ABC):
    """Options of a policy, checked before a run starts. Subclass one of the *kinds* below, not this class.

    Options are pydantic fields with a description and a range; unknown ones are refused. Import torch inside the
    decision, not at the top of the file, so that recipes can be checked without it.

    A real number among the options may follow a :class:`Schedule` over the training, except those that ``constants``
    names. A policy does nothing for it: the engine asks a copy that has the numbers of the step.

    Args:
        takes_schedules: Whether options may follow a schedule; no for kinds that decide alike at every step.
        constants: Names of options that may not, such as one that says itself when something happens.
        card: Use, cost and results of the method, for the catalogue; None without one.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    # Options that came later, left out of plans while they have their defaults: ids of runs and trials hold.
    later_options: ClassVar[frozenset[str]] = frozenset()
    # Options that are gone, with the value that plans of earlier versions hold: the only one that is still carried out,
    # and written into each plan, so that ids of runs and trials hold.
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
        """Name and options of a policy that selects as much at random, as a recipe writes them under ``policy``. None
        if there is none, as for a policy that itself draws at random. A comparison asks for runs with the control."""
        return None

    @property
    def schedules(self) -> Mapping[str, Schedule]:
        """The options that follow a schedule, by name; their own values are those of one of its ends."""
        return dict(self._schedules)

    def follow(self, schedules: Mapping[str, Schedule]) -> Self:
        """Return a copy of which some options follow schedules.

        Args:
            schedules: Schedules by name of the option. Both ends must be allowed values.

        Returns:
            The copy.
        """
        policy = self.model_copy()
        policy._schedules = tuple(schedules.items())  # noqa: SLF001 - a copy of this class
        return policy

    def values_at(self, step: Step) -> tuple[float, ...]:
        """Return the values of the scheduled options.

        Args:
            step: A step with ``num_steps``, unless no option follows a schedule.

        Returns:
            As many numbers as there are schedules.
        """
        if not self._schedules:
            return ()
        assert step.num_steps is not None, "refused at attach"
        return tuple(schedule.value(step.index, step.num_steps) for _, schedule in self._schedules)

    def at(self, step: Step) -> Self:
        """Return the policy with the numbers of a step; itself if no option follows a schedule.

        Args:
            step: A step with ``num_steps``, unless no option follows a schedule.

        Returns:
            The policy that decides at this step.
        """
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
        # With their former options plans hash to the ids that their runs have.
        options = {**dict(self.former_options), **options}
        return {**options, **{name: schedule.model_dump() for name, schedule in self._schedules if name in options}}


class GradientSelector(Policy):
    """Selects the part of a gradient that continues from a site, inside the backward. All gradient selectors have the
    four options below; the engine implements them. Several selectors work in one model if each has its own sites, by
    ``where`` or ``layers``; a site that none of them names stays dense."""

    where: list[str] | None = Field(
        None,
        description="Globs over the names of the sites at which the policy decides, such as *.mlp.*. Other "
        "sites stay dense. null: everywhere.",
        min_length=1,
    )
    layers: list[int] | None = Field(
        None,
        description="Layers in which the policy decides, from 0, or from the end as -1; an encoder's come before a "
        "decoder's. Other layers stay dense. null: everywhere.",
    )
    keep_warmup_steps: NonNegativeInt = Field(
        0,
        description="Optimizer steps over which the fraction kept falls from 1 to keep, by the same factor each step.",
    )
    error_feedback: bool = Field(
        False,
        description="Whether the part of a site's gradient that was cut is added to it at the next step, before the "
        "selection.",
    )

    @abstractmethod
    def select(self, grad_NO: torch.Tensor, site: Site, step: Step) -> Selection | None:
        """Select what is kept of the gradient of a site's output.

        Select by count (top-k) rather than by threshold: counting on the host stalls a GPU.

        Args:
            grad_NO: Gradient of the site's output, all leading dimensions flattened to rows. It must not be changed.
            site: The linear or branch whose output has this gradient.
            step: The step and call of the decision; ``step.generator(site, grad_NO.device)`` is the only source of
                randomness allowed.

        Returns:
            What is kept; None keeps everything.
        """

    @property
    @abstractmethod
    def selection(self) -> type[Selection] | None:
        """The type that ``select`` returns with these options; None if it always returns None. The engine prepares for
        this type, and computes from it and the budget what the policy claims to leave of the backward."""

    @property
    @abstractmethod
    def budget(self) -> float | Budget:
        """Share of the gradient's entries that is kept at each site, in (0, 1], or a :class:`Budget`. It is checked
        against what was kept. Where sites or steps have other shares, the largest; see :meth:`budget_at`."""

    def budget_at(self, site: Site, step: Step) -> float | Budget:  # noqa: ARG002 - for overrides
        """Return the share that is kept at one site and step, from which the claimed work is computed.

        Args:
            site: The site whose share is asked for.
            step: The step whose share is asked for.

        Returns:
            At most ``budget``, which it is unless a policy defines otherwise.
        """
        return self.budget

    @model_validator(mode="after")
    def _has_keep(self) -> Self:
        if self.keep_warmup_steps and "keep" not in type(self).model_fields:
            raise ValueError("keep_warmup_steps needs a policy with an option keep")
        return self


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
            "{other} and {policy} make the same decision ({kind}) at the same place: give one of them, or each its own "
            "sites by where or layers",
            policy={"placed": (False,)},
            other={"kind": SAME},
        ),
        Rule(
            "{other} and {policy} at {sites} are not built: give one of them",
            why="Nodes have no names before the first backward, so nothing could tell whose a node is.",
            other={"kind": SAME},
            options={"sites": ("nodes",)},
        ),
    ),
)
