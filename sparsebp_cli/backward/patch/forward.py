"""What stands in a covered module's place while a model is attached, and what must not be there before."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

from torch import Tensor, nn

from sparsebp_cli.errors import UnsupportedError


def check_free(name: str, module: nn.Module) -> None:
    """Refuse a module whose ``forward`` is taken.

    Args:
        name: The module's name.
        module: That is to be covered.

    Raises:
        UnsupportedError: It is attached, or has a forward of its own.
    """
    current = module.__dict__.get("forward")
    if isinstance(current, ForwardOverride):
        raise UnsupportedError(f"the model is already attached (at {name!r}): call detach() of its engine first")
    if current is not None:
        own = getattr(current, "__qualname__", type(current).__name__)  # the repr of a method is that of its module
        raise UnsupportedError(f"{name!r} has a forward of its own ({own}): exclude it or remove its hook")


class ForwardOverride(ABC):
    """The ``forward`` of a covered module, in its instance dictionary."""

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""

    def __reduce_ex__(self, _: Any) -> NoReturn:
        # A copy would share this module's weights with the copied model, without a word.
        raise UnsupportedError("an attached model cannot be copied or pickled: call engine.detach() first")


def call_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a module by its class's own forward, whatever covers it."""
    return type(module).forward(module, *args, **kwargs)


@contextmanager
def replace_forwards(modules: Iterable[tuple[nn.Module, Callable[[Tensor], Tensor]]]) -> Iterator[None]:
    """Let some modules compute something else.

    Args:
        modules: Each with what it computes instead.

    Yields:
        None: As long as they do.
    """
    with ExitStack() as stack:
        for module, forward in modules:
            stack.callback(_put_back, module, module.__dict__.get("forward"))
            module.forward = forward
        yield


def _put_back(module: nn.Module, covered: Any) -> None:
    if covered is None:
        del module.__dict__["forward"]
    else:
        module.forward = covered
