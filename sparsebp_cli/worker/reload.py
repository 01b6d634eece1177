"""Check that a saved model, loaded with plain transformers, gives the same outputs as the trained model in memory.

They can differ where saving changes weights: adapters are merged, quantised bases are dequantised, shards are gathered,
tied weights are written once. The check costs two forward passes of one batch and one load. It runs in the process that
saved, which has torch already loaded: a new process would add seconds to each run, and `from_pretrained` reads only the
folder. `sparsebp model` repeats the check for an exported folder in a new process (`python -m
sparsebp_cli.worker.reload FOLDER RECORDED`), with the record in the run's manifest.
"""

from __future__ import annotations

import inspect
import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil
import torch
import transformers
from torch import Tensor, nn
from transformers.utils.logging import disable_progress_bar

from sparsebp_cli.backward.linear.quantized import find_quantized
from sparsebp_cli.errors import RunFailedError, is_out_of_memory
from sparsebp_cli.run.manifest import MANIFEST, OUTPUTS
from sparsebp_cli.worker.adapter import is_adapted
from sparsebp_cli.worker.answer import answer
from sparsebp_cli.worker.asked import ask
from sparsebp_cli.worker.prompt import Prompt

MOST_POSITIONS = 256  # of each example, because the logits of a large vocabulary are large
MOST_ROWS = 64  # number of logit vectors to compare
STORED = 64  # number of logits stored in the manifest, for the check in a new process
ROOM = 1.5  # memory needed for loading, relative to the size of the files
# Largest relative difference due to rounding. A merge in 16 bits rounds the sum of base and adapter. Float8 linears
# round both factors to 3 bits, but the saved weights do not.
ROUNDING = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.05}
ROUNDING_FLOAT8 = 0.3


@dataclass(frozen=True)
class ReloadedOutputs:
    """The logits of a model for one batch."""

    inputs: dict[str, Tensor]  # on the host
    logits_NO: Tensor  # at up to 64 positions, float32, on the host
    tolerance: float  # relative
    questions: Sequence[Prompt] = ()  # questions for the saved model

    @classmethod
    @torch.no_grad()
    def of(cls, model: nn.Module, batch: Mapping[str, Tensor]) -> Self:
        """Compute a model's outputs for a batch. Collective if the model is sharded. Its mode is restored."""
        inner: Any = model.get_base_model() if is_adapted(model) else model  # type: ignore[operator]
        known = inspect.signature(type(inner).forward).parameters
        needed = {"labels"} if inner.config.is_encoder_decoder else set[str]()
        inputs = {name: tensor for name, tensor in batch.items() if name in known and name != "labels"}
        inputs = _shorten(inputs | {name: batch[name] for name in needed})
        was_training = model.training
        logits_NO = _run(model, inputs)
        model.train(was_training)
        return cls(inputs, logits_NO, _find_tolerance(model))

    def check(self, folder: Path, device: torch.device) -> dict[str, object]:
        """Load a folder and return the record of the comparison for its manifest. Raise RunFailedError if the outputs
        differ by more than rounding."""
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        place = _find_place(device, ROOM * size)
        if place is None:
            return {"checked": False, "reason": f"loading {size / 1e9:.1f} GB again needs more memory than is free"}
        try:
            loaded = _load(folder, place)
            difference = measure_difference(_run(loaded, self.inputs), self.logits_NO)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            # Another process took the free memory.
            return {"checked": False, "reason": f"loading {size / 1e9:.1f} GB again needs more memory than is free"}
        if not difference <= self.tolerance:
            raise RunFailedError(
                f"the saved model differs from the trained one: after loading, its outputs have a relative error of "
                f"{difference:.2g}, allowed {self.tolerance:g}; the files stay in {folder}"
            )
        stride = -(-self.logits_NO.numel() // STORED)
        return {
            "checked": True,
            "difference": float(f"{difference:.3g}"),
            "tolerance": self.tolerance,
            "inputs": {name: tensor.tolist() for name, tensor in self.inputs.items()},
            "logits": [float(f"{value:.6g}") for value in self.logits_NO.flatten()[::stride].tolist()],
            **self._ask(folder, loaded),
        }

    def _ask(self, folder: Path, loaded: nn.Module) -> dict[str, object]:
        """Return the loaded model's answers. This is not part of the check: no failure here ends the run."""
        if not self.questions or not getattr(loaded, "can_generate", bool)():
            return {}
        try:
            with warnings.catch_warnings(action="ignore"):
                return {"asked": ask(loaded, transformers.AutoTokenizer.from_pretrained(folder), self.questions)}
        except Exception as error:  # a model may raise anything when it first generates
            return {"unasked": " ".join(f"{type(error).__name__}: {error}".split())[:300]}


def make_batch(vocab_size: int) -> dict[str, Tensor]:
    """Return a batch of random tokens, for a model without its data."""
    ids = torch.randint(vocab_size, (2, 16), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def measure_difference(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference, relative to the norm of the expected tensor."""
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))


def check_again(folder: Path, recorded: Path) -> dict[str, object]:
    """Repeat a check with the record in a manifest. Raise RunFailedError if the outputs differ."""
    record: dict[str, Any] = json.loads((recorded / MANIFEST).read_bytes())[OUTPUTS]
    if not record.get("checked"):
        return {"checked": False}
    inputs = {name: torch.tensor(values) for name, values in record["inputs"].items()}
    found = _run(_load(folder, torch.device("cpu")), inputs)
    stride = -(-found.numel() // STORED)
    difference = measure_difference(found.flatten()[::stride], torch.tensor(record["logits"]))
    if not difference <= record["tolerance"]:
        raise RunFailedError(
            f"{folder}: the loaded model's outputs differ from those in training by {difference:.2g} (relative)"
        )
    return {"checked": True, "difference": difference}


def _load(folder: Path, device: torch.device) -> nn.Module:
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    kind = getattr(transformers, config.architectures[0])
    model: nn.Module = kind.from_pretrained(folder, config=config, use_safetensors=True).to(device)
    return model


def _shorten(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the first positions of each example, or the last ones if padding is on the left."""
    mask = inputs.get("attention_mask")
    pads_left = mask is not None and not bool(mask[:, 0].all())
    part = slice(-MOST_POSITIONS, None) if pads_left else slice(MOST_POSITIONS)
    return {name: tensor[:, part] if tensor.ndim == 2 else tensor for name, tensor in inputs.items()}


@torch.no_grad()
def _run(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the logits at some positions that are not padding."""
    device = next(model.parameters()).device
    logits = model.eval()(**{name: tensor.to(device) for name, tensor in inputs.items()}).logits
    if logits.ndim == 3:
        mask = inputs["labels"] != -100 if "labels" in inputs else inputs.get("attention_mask")
        logits = logits.flatten(0, 1) if mask is None else logits[mask.to(device).bool()]
    rows: Tensor = logits[:: -(-len(logits) // MOST_ROWS)].float().cpu()
    return rows


def _find_tolerance(model: nn.Module) -> float:
    if any(type(module).__name__ == "Float8Linear" for module in model.modules()):
        return ROUNDING_FLOAT8
    if next(find_quantized(model), None) is not None:
        return ROUNDING[torch.bfloat16]  # its products may have another dtype than its parameters
    return max(ROUNDING.get(parameter.dtype, 0.0) for parameter in model.parameters())


def _find_place(device: torch.device, size: float) -> torch.device | None:
    """Return where a second copy of the weights fits: the device, else the host, else None."""
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] > size:
        return device
    return torch.device("cpu") if psutil.virtual_memory().available > size else None


if __name__ == "__main__":
    disable_progress_bar()
    sys.exit(answer(lambda: check_again(Path(sys.argv[1]), Path(sys.argv[2]))))
