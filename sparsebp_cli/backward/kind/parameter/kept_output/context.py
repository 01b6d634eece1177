"""The digest of everything but arguments that determines outputs of frozen layers: weights, code, modes, libraries."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from sparsebp_cli.backward.decoder.decoder import dropout_rates
from sparsebp_cli.errors import UnsupportedError

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SCALARS = (bool, int, float, str, torch.dtype)
# Attributes that torch stores in each module, such as hooks, which probes add temporarily.
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
# Outputs do not depend on the state of our own forwards either.
_NOT_HELD = _OF_TORCH | {"config", "forward"}
# Options that apply after the layers. transformers sets the first one in a model's first forward.
_OF_THE_HEAD = frozenset({"problem_type", "num_labels", "id2label", "label2id", "return_dict", "use_cache"})


class FrozenContext:
    """The digest of some layers and of how they run. It changes with any of these.

    Args:
        names: Names of the layers, for messages.
        layers: The layers, in which all parameters are frozen.
    """

    def __init__(self, names: Sequence[str], layers: Sequence[nn.Module]) -> None:
        self._modules = {
            f"{name}.{inner}".rstrip("."): module
            for name, layer in zip(names, layers, strict=True)
            for inner, module in layer.named_modules()
        }
        self._seen: object = None
        self._weights = b""

    def refuse_random(self) -> None:
        """Raise :class:`UnsupportedError` for dropout in the layers, in any mode."""
        for name, module in self._modules.items():
            rate = max(dropout_rates(module), default=0.0)
            if rate > 0.0:
                raise UnsupportedError(
                    f"frozen: outputs cannot be cached: {name} drops out {rate:g} of its numbers anew in each "
                    "forward; set its dropout to 0"
                )

    def refuse_hooks(self) -> None:
        """Raise :class:`UnsupportedError` for hooks in the layers, which would not see cached examples."""
        for name, module in self._modules.items():
            if module._forward_hooks or module._forward_pre_hooks:  # noqa: SLF001 - torch has no other way to ask
                raise UnsupportedError(
                    f"frozen: outputs cannot be cached: {name} has a forward hook, which would not be called "
                    "for an example whose output is known; remove it"
                )

    @property
    def trains(self) -> bool:
        """Whether a parameter of the layers requires a gradient now."""
        return any(p.requires_grad for module in self._modules.values() for p in module.parameters(recurse=False))

    def digest(self) -> bytes:
        """Return the digest. Read weights completely only if their addresses, versions or sums of bits have changed.
        The sums detect writes that autograd does not count."""
        # torch has no public name for the number of writes that autograd has counted.
        seen = [(id(tensor), tensor.data_ptr(), tensor._version) for _, tensor in self._tensors()]  # noqa: SLF001
        found = (seen, self._sum_bits())
        if found != self._seen:
            self._seen, self._weights = found, self._digest_weights()
        digest = hashlib.blake2b(self._weights, digest_size=32)
        for name, module in self._modules.items():
            digest.update(_describe(name, module).encode())
        digest.update(_describe_place().encode())
        return digest.digest()

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, module in self._modules.items():
            for own, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                yield f"{name}.{own}", tensor
                yield from _find_held(f"{name}.{own}", tensor)
            yield from _find_held(name, module)

    def _sum_bits(self) -> tuple[int, ...]:
        sums = []
        for _, tensor in self._tensors():
            bits = tensor.detach().contiguous().reshape(-1).view(_INTEGERS[tensor.element_size()])
            sums += [bits.sum(dtype=torch.int64), bits[::3].sum(dtype=torch.int64)]
        return tuple(torch.stack(sums).tolist()) if sums else ()

    def _digest_weights(self) -> bytes:
        digest = hashlib.blake2b(digest_size=32)
        for name, tensor in self._tensors():
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
            digest.update(tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.digest()


def _find_held(name: str, owner: object, depth: int = 3) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors in plain attributes of a module, a weight or their attributes. Scales of a quantised weight are in
    its ``quant_state`` (bitsandbytes, 4 bits) or in its layer's ``state`` (8 bits)."""
    for key, value in getattr(owner, "__dict__", {}).items():
        if isinstance(value, Tensor):
            yield f"{name}.{key}", value
        elif depth and key not in _NOT_HELD and not isinstance(value, nn.Module | type):
            yield from _find_held(f"{name}.{key}", value, depth - 1)


def _describe(name: str, module: nn.Module) -> str:
    """Return a description of a module's code and its plain attributes."""
    scalars = {key: value for key, value in sorted(vars(module).items()) if key not in _OF_TORCH and _is_plain(value)}
    config: Any = getattr(module, "config", None)
    options = config.to_dict() if hasattr(config, "to_dict") else {}
    given = sorted(((key, value) for key, value in options.items() if key not in _OF_THE_HEAD), key=str)
    attention = getattr(config, "_attn_implementation", None)
    code = getattr(type(module).forward, "__code__", None)
    body = b"" if code is None else hashlib.blake2b(code.co_code, digest_size=8).digest()
    own = getattr(module.__dict__.get("forward"), "__qualname__", "")
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    return f"{name} {kind} {body.hex()} {own} {scalars} {attention} {given}\n"


def _is_plain(value: object) -> bool:
    """Return whether a value is a number, a string, or a collection of these, such as adapters' scales by name."""
    if isinstance(value, dict):
        return all(map(_is_plain, value.values())) and all(map(_is_plain, value))
    return (
        value is None or isinstance(value, _SCALARS) or (isinstance(value, list | tuple) and all(map(_is_plain, value)))
    )


def _describe_place() -> str:
    """Return a description of everything that determines the order of sums."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    casts = [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in devices]
    attention = (
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
    )
    hardware = torch.cuda.get_device_name() if torch.cuda.is_available() else torch.backends.cpu.get_cpu_capability()
    settings = (
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.mkldnn.enabled,
    )
    libraries = [version(name) for name in ("torch", "transformers", "sparsebp")]
    return f"{casts} {attention} {hardware} {settings} {libraries}"
