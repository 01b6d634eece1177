"""Every cell of the column DDP, in two processes: ``torchrun ... two_ranks.py RESULT``.

Two ranks' averaged gradients are held against the mean of what each rank alone gives by the reference; at nodes by the
hooks, since the walk, which other cells hold them against, is refused where there are several processes. Rank 0 writes
what each cell came to: the largest difference, or the refusal.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import sparsebp_cli as sbp
from sparsebp_cli.errors import SparseBPError, UnsupportedError
from sparsebp_cli.policy.known_kind import list_kinds
from tests.composition.matrix import ENTRIES, SITES, Entry
from tests.composition.step import NUM_STEPS, SEED, columns_for, policies_of
from tests.composition.training import Gradients, attach, batch, build, largest_difference
from tests.composition.way import WAYS, Way

STEPS = 2


def run(entry: Entry, site: str, wrapped: str) -> Gradients:
    """Return the gradients of two steps.

    Args:
        entry: Policy with its options.
        site: One of :data:`SITES`.
        wrapped: ``before`` attaching, ``after`` it, or ``never``: when DDP wraps the model.
    """
    inner = build("DDP")
    model: nn.Module = DistributedDataParallel(inner) if wrapped == "before" else inner
    options = {"execution": "reference"} if wrapped == "never" and site != "nodes" else {}
    optimizer = torch.optim.AdamW(inner.parameters(), 1e-2)
    plain = wrapped == "never" and entry.policy == "dense"
    engine = None if plain else attach(model, entry, site, optimizer, **options)
    if wrapped == "after":
        model = DistributedDataParallel(inner)
    gradients: Gradients = []
    for number in range(STEPS):
        ids = batch(number, distributed.get_rank())
        loss = model(input_ids=ids, labels=ids).loss
        engine.backward(loss) if engine else loss.backward()
        if wrapped == "never":
            for parameter in inner.parameters():
                distributed.all_reduce(parameter.grad)
                parameter.grad /= distributed.get_world_size()
        gradients.append({name: p.grad.clone() for name, p in inner.named_parameters()})  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    if engine:
        assert [site_.name.startswith("module.") for site_ in engine.report().sites].count(True) == 0
        engine.detach()
    return gradients


def judge(entry: Entry, site: str, wrapped: str) -> float | str:
    """Return the largest difference to the reference, or the refusal."""
    try:
        ours = run(entry, site, wrapped)
    except UnsupportedError as error:
        return str(error)
    return largest_difference(ours, run(entry, site, "never"))


def run_way(way: Way, wrapped: str) -> Gradients:
    """Return how far each weight has come after two steps; see :func:`run`.

    Args:
        way: Way that acts on the step.
        wrapped: ``before`` attaching, ``after`` it, or ``never``: when DDP wraps the model.
    """
    inner, unused = build("DDP"), any(kind.leaves_out_gradients for kind in list_kinds(policies_of([way])))
    before = [parameter.detach().clone() for parameter in inner.parameters()]
    model: nn.Module = DistributedDataParallel(inner, find_unused_parameters=unused) if wrapped == "before" else inner
    options = dict(way.options)
    if wrapped == "never":
        options = {"execution": "reference"} | {name: options[name] for name in options if name == "reference"}
    optimizer = torch.optim.SGD(inner.parameters(), 0.5, momentum=0.9)
    policies = policies_of([way])
    engine = sbp.attach(model, policies, optimizer=optimizer, seed=SEED, num_steps=NUM_STEPS, **options)
    if wrapped == "after":
        model = DistributedDataParallel(inner, find_unused_parameters=unused)
    for number in range(STEPS):
        ids = torch.cat([batch(number, distributed.get_rank()), batch(5 + number, distributed.get_rank())])
        engine.backward(model(input_ids=ids, labels=ids, **columns_for(policies, number)).loss)
        for parameter in inner.parameters() if wrapped == "never" else ():
            if parameter.grad is not None:
                distributed.all_reduce(parameter.grad)
                parameter.grad /= distributed.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
    engine.detach()
    changes = zip(inner.named_parameters(), before, strict=True)
    return [{name: parameter.detach() - start for (name, parameter), start in changes}]


def judge_way(way: Way, wrapped: str) -> float | str:
    """Return the largest difference to the reference, or the refusal."""
    try:
        ours = run_way(way, wrapped)
    except SparseBPError as error:
        return str(error)
    return largest_difference(ours, run_way(way, "never"))


def main(result: Path) -> None:
    """Judge every cell."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    found: list[tuple[str, str, str, Any]] = [
        (entry.label, site, wrapped, judge(entry, site, wrapped))
        for entry in ENTRIES
        for site in SITES
        for wrapped in ("before", "after")
    ]
    found += [(way.label, "", wrapped, judge_way(way, wrapped)) for way in WAYS for wrapped in ("before", "after")]
    everywhere: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everywhere, found)
    assert everywhere[0] == everywhere[1]
    if distributed.get_rank() == 0:
        result.write_text(json.dumps(found))
    distributed.barrier()
    os._exit(0)  # destroying a group of gloo may abort or hang (torch 2.13)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
