"""Check what an attention implementation needs of a machine, by its name and without torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec

from sparsebp_cli.errors import AbsentDataError, DataError
from sparsebp_cli.recipe.schema import HUB_KERNEL


@dataclass(frozen=True)
class AttentionNeeds:
    """The requirements of an attention implementation."""

    package: str = ""  # the required module; empty: none
    install: str = ""  # its name for pip
    needs_cuda: bool = False
    why: str = ""  # the reason, for an error message


ALWAYS = ("sdpa", "eager")
NEEDS = {
    "flash_attention_2": AttentionNeeds("flash_attn", "flash-attn", needs_cuda=True),
    "flash_attention_3": AttentionNeeds("flash_attn_interface", "flash-attn-3", needs_cuda=True),
    "flex_attention": AttentionNeeds(needs_cuda=True, why="PyTorch has no backward pass for it on CPUs"),
}
OF_THE_HUB = AttentionNeeds("kernels", "kernels", needs_cuda=True)


def is_kernel(name: str) -> bool:
    """Return whether a name is that of a hub kernel, such as ``kernels-community/flash-attn``."""
    return re.fullmatch(HUB_KERNEL, name) is not None


def refuse_missing_package(name: str) -> None:
    """Raise AbsentDataError for an implementation whose package is not installed on this machine."""
    needs = _find(name)
    if needs.package and find_spec(needs.package) is None:
        raise AbsentDataError(f"{name} needs the package {needs.install}, which is not installed here; {_always()}")


def refuse_device(name: str, device: str) -> None:
    """Raise DataError for an implementation that does not run on a device type such as ``cpu``."""
    needs = _find(name)
    if needs.needs_cuda and device != "cuda":
        reason = f", because {needs.why}" if needs.why else ""
        raise DataError(f"model.attention: {name} needs a CUDA device{reason}; this run is on {device}; {_always()}")


def _find(name: str) -> AttentionNeeds:
    return OF_THE_HUB if is_kernel(name) else NEEDS.get(name, AttentionNeeds())


def _always() -> str:
    return f"{' and '.join(ALWAYS)} always work"
