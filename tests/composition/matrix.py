"""What goes with what: every policy at every site in every way of training. The test and the page both read this."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sparsebp_cli.policy import EdgeRouter, FoundPolicy, InformedSelector, Stateful, make_policy
from tests.guess import guess_required
from tests.plugin import find_ours

AT_SITES = ("GradientSelector", "EdgeRouter")  # kinds of policies that are asked at sites
SITES = ("linears", "nodes")
COMPOSITIONS = {
    "accumulation": "gradients of two micro-batches added up",
    "clipping": "`clip_grad_norm_` between backward and step",
    "tied weights": "input and output embeddings are one parameter",
    "checkpointing": "activation checkpointing of every layer, `use_reentrant=False`",
    "reentrant checkpointing": "the same with `use_reentrant=True`",
    "compile": "`torch.compile` of a layer's attention and MLP, before or after; at `linears` one graph each",
    "autocast": "`torch.autocast` to bfloat16",
    "DDP": "two processes on gloo, wrapped before and after attaching",
    "LoRA": "adapters of peft at every linear, the rest frozen",
    "QLoRA": "the same over linears in 4 bits (bitsandbytes nf4), in float32",
    "resume": "engine, model and optimizer saved after a step, loaded into new ones",
}


@dataclass(frozen=True)
class Entry:
    """One policy with options.

    Args:
        policy: Name of the policy.
        options: Options of the policy, as pairs.
        kind: The kind of policy.
    """

    policy: str
    options: tuple[tuple[str, Any], ...] = ()
    kind: str = "GradientSelector"

    def options_at(self, site: str) -> dict[str, Any]:
        """Return the options at a site: of what is drawn at every node in turn, nothing would be left at the end."""
        options = dict(self.options)
        if self.policy != "random" or site != "nodes":
            return options
        return options | ({"layers": [-1]} if options["along"] == "2:4" else {"keep": 0.95})

    @property
    def label(self) -> str:
        """What the table calls it."""
        shown = ", ".join(f"{key}: {value}".lower() for key, value in self.options if key not in ("keep", "block"))
        return f"{self.policy} ({shown})" if shown else self.policy


def _structured(policy: str, **more: Any) -> list[Entry]:
    shares = {"rows": 0.3, "columns": 0.3, "blocks": 0.3, "elements": 0.3, "2:4": 0.5}
    blocks = {"blocks": (("block", (4, 8)),)}
    return [
        Entry(policy, (("keep", share), ("along", along), *blocks.get(along, ()), *more.items()))
        for along, share in shares.items()
    ]


# Policies with options that are worth a row of their own.
NAMED = {
    "crs": [
        Entry("crs", (("keep", 0.3), ("products", "wgrad"))),
        Entry("crs", (("keep", 0.3), ("products", "both"), ("draw", "bernoulli"))),
    ],
    "mvue": [Entry("mvue", (("products", "both"),))],
    "random": _structured("random", weighted=True),
    "topk": [*_structured("topk"), Entry("topk", (("keep", 0.3), ("along", "rows"), ("within", "example")))],
    "vcas": [Entry("vcas", (("every", 100),))],
}


def _make_entries() -> Iterator[Entry]:
    """Yield the rows of each policy that is asked at sites; those of one that nobody named by what it requires."""
    for name, found in find_ours().items():
        if found.kind in AT_SITES and name in NAMED:
            yield from NAMED[name]
        elif found.kind in AT_SITES:
            required = guess_required(found.policy_class)
            for more in ({"along": along} for along in find_forms(found)) if find_forms(found) else ({},):
                yield Entry(name, tuple((required | more).items()), found.kind)


def find_forms(found: FoundPolicy) -> list[str]:
    """Return the forms of selections that a policy can be asked for; empty if it has one."""
    assert found.policy_class is not None, found.problem
    schema = found.policy_class.model_json_schema()
    return list(schema.get("properties", {}).get("along", {}).get("enum", []))


ENTRIES = tuple(_make_entries())


@dataclass(frozen=True)
class Refusal:
    """Why something does not go together.

    Args:
        message: The one line that is raised, whole.
        recipe: Line that `sparsebp validate` says, without the place; empty where a recipe cannot ask for it.
    """

    message: str
    recipe: str = ""


def find_refusal(entry: Entry, site: str, composition: str) -> Refusal | None:
    """Return why a cell is refused; None: it works.

    Args:
        entry: Policy with its options.
        site: One of :data:`SITES`.
        composition: One of :data:`COMPOSITIONS`.
    """
    policy = make_policy(entry.policy, **dict(entry.options))
    name = type(policy).__name__
    if isinstance(policy, EdgeRouter):
        if site != "nodes":
            return Refusal(
                f"{name} decides at nodes of the autograd graph: it needs sites='nodes', got {site!r}",
                f"{entry.policy!r} decides at nodes of the autograd graph: it needs backward.sites: nodes, got {site}",
            )
        if composition == "DDP":
            return Refusal(f"{name} works in one process, got several (DDP or FSDP)")
    if isinstance(policy, Stateful) and not policy.is_identical and composition == "DDP":
        text = "keeps a state from what it observes: it works in one process, got several (DDP or FSDP)"
        return Refusal(f"{name} {text}")
    if isinstance(policy, InformedSelector) and site != "linears":
        text = "reads inputs and weights of linears: needs"
        return Refusal(
            f"{name} {text} sites='linears', got {site!r}",
            f"{entry.policy!r} {text} backward.sites: linears, got {site}",
        )
    if site == "nodes":
        reason = {
            "reentrant checkpointing": "CheckpointFunctionBackward: reentrant activation checkpointing; "
            "use use_reentrant=False",
            "compile": "CompiledFunctionBackward: torch.compile; leave the model uncompiled",
        }.get(composition)
        if reason:
            return Refusal(f"sites='nodes' cannot see into {reason}")
    return None
