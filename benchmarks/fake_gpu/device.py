"""A CUDA device without one: what would wait for the device is found by running on fake tensors, which hold no data.

PyTorch's FakeTensorMode runs every operation on shapes alone. For tensors on ``cuda`` it needs a device guard and hooks
that a build for CPUs lacks; ``guard.cpp`` is both. A dispatch mode sees each operation that the host has to wait for,
with the line that asked for it. Replaced are random generators, which need CUDA's own, and the choice of a kernel for
attention.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from sparsebp_cli.policy import Step

PACKAGES = "/sparsebp_cli/", "/sparsebp_shelf/"
CPU = torch.device("cpu")
UNKNOWN_SIZE = frozenset({"nonzero", "bincount"})  # the host has to know how many there are
WAITING = UNKNOWN_SIZE | {"masked_select", "unique_dim", "unique_consecutive", "equal", "_local_scalar_dense"}
MASKS = (torch.bool, torch.uint8)


@contextmanager
def fake_cuda() -> Iterator[Counter[str]]:
    """Run a block with a fake CUDA device; what waits is counted: ``what at file:line``."""
    watch = Watch()
    cuda: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda *_: (9, 0),
        "synchronize": lambda *_: watch.note("torch.cuda.synchronize"),
        # Seed and offset of CUDA's generator are on the host, so these do not wait.
        "get_rng_state": lambda *_: torch.zeros(16),
        "set_rng_state": lambda *_: None,
        "Event": partial(Event, watch),
        "is_current_stream_capturing": lambda: False,  # of a build for CUDA; optimizers ask it
    }
    with ExitStack() as stack:
        stack.enter_context(patch.object(Step, "generator", lambda *_, **__: None))
        stack.enter_context(patch.object(torch.nn.functional, "scaled_dot_product_attention", _attend))
        # A build for CUDA has it, one for CPUs does not, and fake tensors have no kernel of it.
        stack.enter_context(patch.object(torch.backends.cusparselt, "is_available", lambda: False))
        # Makes a tensor on the device, to which a build for CUDA needs a driver; the guard needs no context.
        stack.enter_context(patch("torch._subclasses.fake_tensor.init_gpu_context", lambda _: None))
        for name, function in cuda.items():
            stack.enter_context(patch.object(torch.cuda, name, function))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(watch)
        yield watch.found


class Event:
    """A CUDA event that knows no time."""

    def __init__(self, watch: Watch, **_: object) -> None:
        self._watch = watch

    def record(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """Say that all is done."""
        return True

    def synchronize(self) -> None:
        """Count a wait."""
        self._watch.note("torch.cuda.Event.synchronize")

    def elapsed_time(self, _: Event) -> float:
        """Return some milliseconds."""
        return 1.0


class Watch(TorchDispatchMode):
    """Sees every operation. Those of the host alone are carried out; of others there are shapes alone."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def note(self, what: str) -> None:
        """Count a wait."""
        self.found[f"{what} at {_find_line()}"] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        target = torch.device(kwargs.get("device") or CPU)
        if name == "_pin_memory":
            return args[0]
        if target == CPU and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            with _disable_current_modes():
                return func(*args, **kwargs)
        if name == "_to_copy" and "device" in kwargs and target.type != args[0].device.type:
            return self._move(args[0], target, kwargs)
        if name == "copy_" and args[0].device.type != args[1].device.type and not (len(args) > 2 and args[2]):
            self.note(f"copy to {args[0].device.type}")
        if name.startswith("index") and any(_is_mask(index) for index in tree_leaves(args[1:2])):
            self.note("boolean index")
        if name in WAITING:
            self.note(name)
        if name == "_local_scalar_dense":
            return True if args[0].dtype == torch.bool else 1
        if name in UNKNOWN_SIZE:
            size = (args[0].numel(), args[0].dim()) if name == "nonzero" else (args[0].numel(),)
            return args[0].new_empty(size, dtype=torch.long)
        return func(*args, **kwargs)

    def _move(self, source: Tensor, target: torch.device, kwargs: dict[str, Any]) -> Tensor:
        if not kwargs.get("non_blocking"):
            self.note(f"copy to {target.type}")
        dtype = kwargs.get("dtype") or source.dtype
        if target.type == "cuda":
            return torch.empty(source.shape, dtype=dtype, device=target)
        with _disable_current_modes():  # values that nobody knows: of a choice a quarter, never the last
            made = torch.zeros(source.shape, dtype=dtype)
            made[..., 1::4] = 1
            if made.dim() == 3:  # masks in one copy: what there is, then what is chosen of it
                made[: len(made) // 2, :, :-1] = 1
            return made


def _is_mask(index: object) -> bool:
    return isinstance(index, Tensor) and index.dtype in MASKS


def _attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **_: Any) -> Tensor:
    if key.shape[1] != query.shape[1]:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    score = query @ key.transpose(-1, -2)
    if attn_mask is not None:
        score = score.masked_fill(~attn_mask, -1e9) if attn_mask.dtype == torch.bool else score + attn_mask
    return score.softmax(-1) @ value


def _find_line() -> str:
    """Return the innermost line of our packages on the stack, or else of another package that is not torch."""
    frames = traceback.extract_stack()
    for frame in reversed(frames):
        for package in PACKAGES:
            if package in frame.filename:
                return f"{frame.filename.rpartition(package)[2]}:{frame.lineno}"
    outside = [f for f in frames if "site-packages" in f.filename and "/torch/" not in f.filename]
    return f"{outside[-1].filename.rpartition('site-packages/')[2]}:{outside[-1].lineno}" if outside else "?"
