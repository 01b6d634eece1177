"""Access to private names of PyTorch and transformers, each through a function that says why we need it.

Other modules may use names of operators, and of tensors that certain kinds of nodes save. `make test-oldest` runs all
of these with the oldest supported versions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import _get_current_graph_task_keep_graph
from torch._C._functorch import peek_interpreter_stack
from torch.autograd.graph import Node
from torch.autograd.variable import Variable
from torch.nn.attention import SDPBackend
from torch.nn.parallel import DistributedDataParallel

# torch.func (vmap, grad, jacrev) has no public query. An alias instead of a function, since every linear calls it.
are_transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active  # noqa: SLF001


def outputs_of(node: Node) -> Sequence[Any]:
    """Return shape, dtype and device of a node's outputs in the forward, which are the inputs of its backward.

    The public ``node.metadata`` is a dictionary for users' own notes. We need this record to make zeros for an output
    without gradient.
    """
    metadata: Sequence[Any] = node._input_metadata  # noqa: SLF001
    return metadata


def sequence_number_of(node: Node) -> int:
    """Return the number that autograd gave a node at its creation; it determines the order of a backward."""
    number: int = node._sequence_nr()  # noqa: SLF001
    return number


def next_sequence_number() -> int:
    """Return the number that the next node of this thread will get, since a node does not know its module."""
    number: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]  # noqa: SLF001
    return number


def current_pass() -> int | None:
    """Return the number of the backward pass that runs in this thread; None outside of one."""
    number: int = torch._C._current_graph_task_id()  # noqa: SLF001
    return None if number == -1 else number


def keeps_graph() -> bool:
    """Return whether the backward pass that runs in this thread keeps its graph, so that another may follow.

    If no other pass can follow, saved tensors may be changed in place. PyTorch's compiled functions use the same query.
    """
    keeps: bool = _get_current_graph_task_keep_graph()
    return keeps


def running_node() -> Node | None:
    """Return the node that autograd runs in this thread, to attribute the FLOPs of its kernels."""
    node: Node | None = torch._C._current_autograd_node()  # noqa: SLF001
    return node


def call_after_pass(function: Callable[[], None]) -> None:
    """Call a function at the end of the running backward pass, like DDP to finish its reduction."""
    Variable._execution_engine.queue_callback(function)  # noqa: SLF001


def variable_of(leaf: Node) -> Tensor:
    """Return the tensor whose gradient a node accumulates; the type of nodes does not have the attribute."""
    variable: Tensor = leaf.variable  # type: ignore[attr-defined]
    return variable


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; autograd checks saved tensors by the same counter.

    Comparing contents instead would need a copy and synchronise with the device. 0 for a tensor made under
    ``inference_mode``, which has no counter.
    """
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return a module's own dictionary of buffers; ``named_buffers()`` skips buffers that are None."""
    return module._buffers  # noqa: SLF001


def parameter_of(module: nn.Module, name: str) -> nn.Parameter:
    """Return a parameter that a module registered; ``getattr`` would run a parametrization instead."""
    parameter = module._parameters[name]  # noqa: SLF001
    assert parameter is not None
    return parameter


def has_backward_hooks(part: nn.Module | Tensor) -> bool:
    """Return whether a module or parameter has backward hooks; no public query exists."""
    # Parameters have no backward pre-hooks.
    return bool(part._backward_hooks or getattr(part, "_backward_pre_hooks", None))  # noqa: SLF001


@contextmanager
def without_hooks(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Take the hooks on gradients from tensors for a pass that must not run them; no public function does."""
    taken = [(tensor, tensor._backward_hooks) for tensor in tensors if tensor._backward_hooks]  # noqa: SLF001
    try:
        for tensor, _ in taken:
            tensor._backward_hooks = None  # noqa: SLF001
        yield
    finally:
        for tensor, hooks in taken:
            tensor._backward_hooks = hooks  # noqa: SLF001


def forward_hooks_of(module: nn.Module) -> list[object]:
    """Return the hooks that run after a module's forward; they can be added but not listed."""
    return list(module._forward_hooks.values())  # noqa: SLF001


# Hooks of these libraries belong to the model's own computation, or to the engine. Those of peft do not: they pass an
# adapter one value for each example of the plain batch.
LIBRARIES = ("sparsebp_cli", "torch", "transformers", "accelerate")


def find_hook(model: nn.Module, *, inside: bool = False) -> str:
    """Return a sentence about the first foreign hook of a module's forward or backward, which would see rows of a short
    forward instead of the batch; empty without one.

    ``inside`` skips the model itself, whose inputs and outputs have the shapes of the plain forward.
    """
    for where, module in model.named_modules():
        # This runs for every module at every forward. Most have no hooks, and checking empty dicts is fast.
        m = module
        found = (m._forward_pre_hooks, m._forward_hooks, m._backward_pre_hooks, m._backward_hooks)  # noqa: SLF001
        if not any(found) or (inside and module is model):
            continue
        for hook in chain.from_iterable(hooks.values() for hooks in found):
            function = hook
            while isinstance(function, functools.partial):
                function = function.func
            home = str(getattr(function, "__module__", None) or type(function).__module__).partition(".")[0]
            if home not in LIBRARIES:
                name = getattr(function, "__qualname__", type(function).__qualname__)
                owner = "peft" if home == "peft" else "the script"
                return f"a hook of {owner} ({name}, at {where or 'the model'!r}) would not get the whole batch"
    return ""


def find_switches(model: nn.Module) -> tuple[object, ...]:
    """Return what a script may switch between two forwards without changing a value of a parameter: which parameters
    are trained, and which adapters of peft act and how strongly.
    """
    adapters = (
        repr(vars(module)[name])
        for module in model.modules()
        for name in ("_active_adapter", "_disable_adapters", "scaling")
        if name in vars(module)
    )
    return (*(parameter.requires_grad for parameter in model.parameters()), *adapters)


def is_batch_norm(module: nn.Module) -> bool:
    """Return whether a module normalises by the whole batch; its kinds share a base that is not public."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm)  # noqa: SLF001


def has_attention(config: object) -> bool:
    """Return whether a transformers configuration selects an attention implementation."""
    return hasattr(config, "_attn_implementation")


def attention_name(config: object) -> str:
    """Return the name of the attention implementation that a transformers configuration selects, such as sdpa."""
    name: str = config._attn_implementation  # type: ignore[attr-defined]  # noqa: SLF001
    return name


def find_attentions(model: nn.Module) -> frozenset[str]:
    """Return the names of the attention implementations that a transformers model uses.

    Args:
        model: The whole model. Its parts may have their own configurations; the function skips configurations without
            an attention.

    Returns:
        Names such as ``sdpa``; empty for other models.
    """
    configs = (getattr(module, "config", None) for module in model.modules())
    return frozenset(attention_name(config) for config in configs if has_attention(config))


def use_attention(config: object, name: str) -> None:
    """Select another attention implementation. The public setter would also check the name and switch all parts."""
    config._attn_implementation = name  # type: ignore[attr-defined]  # noqa: SLF001


def hooks_after_accumulation(parameter: Tensor) -> list[Callable[[Tensor], object]]:
    """Return the hooks that run after a parameter's gradient is accumulated; no public function lists them."""
    hooks: dict[int, Callable[[Tensor], object]] | None = parameter._post_accumulate_grad_hooks  # noqa: SLF001
    return list((hooks or {}).values())


def count_stored(tensor: Tensor) -> int:
    """Return the number of entries that a sparse tensor stores, in any layout."""
    return tensor._nnz()  # noqa: SLF001


def count_sparse_bytes(gradient: Tensor) -> int:
    """Return the bytes of a sparse gradient.

    Autograd does not coalesce its gradients, and the public accessors refuse tensors that are not coalesced.
    """
    return int(gradient._indices().nbytes + gradient._values().nbytes)  # noqa: SLF001


def run_checkpointed(layer: nn.Module, run: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """Run a function under a transformers layer's activation checkpointing, with the layer's own options."""
    checkpoint = layer._gradient_checkpointing_func  # noqa: SLF001 - gradient_checkpointing_enable() sets only this
    assert callable(checkpoint)
    output: Tensor = checkpoint(run, hidden)
    return output


# The attention kernel on CPUs. The public function does not return the sums of exponents that its backward reads.
FLASH_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001
FLASH_ON_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001


def picks_flash(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> bool:
    """Return whether PyTorch runs a causal attention by a flash kernel; no public query exists on a CPU."""
    chosen: int = torch._fused_sdp_choice(query, key, value, None, 0.0, True, scale=scale)  # noqa: SLF001
    return chosen == SDPBackend.FLASH_ATTENTION.value


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``nn.Module.compile`` was called on a module, which leaves no public trace."""
    return module._compiled_call_impl is not None  # noqa: SLF001


def misses_gradients() -> bool:
    """Return whether a DDP forward is running that waits for the gradient of every parameter, since a module inside
    cannot see its wrapper.
    """
    wrapper = DistributedDataParallel._active_ddp_module  # noqa: SLF001
    return wrapper is not None and not wrapper.find_unused_parameters


def is_in_transform() -> bool:
    """Return whether a transform of ``torch.func`` runs in this thread."""
    return peek_interpreter_stack() is not None
