"""Compile the model that the training steps run under ``training.compile``."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from typing import cast

import torch
from torch import nn

from sparsebp_cli.errors import DataError

BACKEND = "inductor"


def compile_model(model: nn.Module, device: torch.device) -> nn.Module:
    """Return a model compiled for training. It shares parameters and state with the given model, which stays eager.

    Raise DataError if this machine lacks what PyTorch needs to compile. The first forward compiles.
    """
    if missing := _find_missing(device):
        raise DataError(f"'training.compile: true' needs {missing}, which this machine lacks: install it, or use false")
    return cast("nn.Module", torch.compile(model, backend=BACKEND))


def _find_missing(device: torch.device) -> str:
    compiler = os.environ.get("CXX") or "g++"  # as PyTorch chooses it on Linux
    if shutil.which(compiler.split()[0]) is None:
        return f"a C++ compiler ({compiler}; CXX can name another)"
    if device.type == "cuda" and find_spec("triton") is None:
        return "the package triton"
    return ""


def describe_graphs() -> str:
    """Return one line about the graphs compiled in this process."""
    from torch._dynamo.utils import counters

    count = counters["stats"]["unique_graphs"]
    graphs = "one graph" if count == 1 else f"{count} graphs"
    breaks = "; ".join(reason.splitlines()[0] for reason in list(counters["graph_break"])[:2])
    return f"training.compile: torch.compile compiled the model into {graphs}" + (f" ({breaks})" if breaks else "")
