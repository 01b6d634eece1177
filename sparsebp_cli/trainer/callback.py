"""Policies in a ``transformers.Trainer`` of any class: the engine is attached while it trains.

transformers calls a callback when training begins, but passes it neither the loss nor an error. Therefore ``join``
wraps some of the trainer's methods and, while a model is attached, the accelerator's ``backward``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, ParamSpec, Self, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint
from typing_extensions import override

from sparsebp_cli.backward import Engine, attach
from sparsebp_cli.errors import UsageError
from sparsebp_cli.policy import PolicyLike
from sparsebp_cli.policy.composition import BackwardChoices, BackwardOptions
from sparsebp_cli.trainer.attach_option import AttachArguments, AttachOptions
from sparsebp_cli.trainer.log_value import count_step, interval_values, restored_counters, total_values
from sparsebp_cli.trainer.micro_batch import MicroBatches
from sparsebp_cli.trainer.precision import attach_inside
from sparsebp_cli.trainer.refusal import (
    find_advantages,
    find_reference,
    make_first_batch,
    mask_noncandidates,
    model_of,
    pass_advantages,
    pass_columns,
    reads_loss_alone,
    refuse_unsupported,
)
from sparsebp_cli.trainer.state import check_same, load_state, save_state

P = ParamSpec("P")
T = TypeVar("T")


class PolicyCallback(TrainerCallback):
    """Adds policies to a trainer whose class you cannot change: ``PolicyCallback(policies).join(trainer)``.

    Args:
        policies: Each a policy, its name, or a mapping of ``name`` and its options. Without policies training is dense.
        backward: Options of the backward pass, such as ``{"exclude": ["lm_head"]}``. ``update="eager"`` and
            ``checkpointing="full"`` are refused: the trainer steps its optimizer itself, and checkpointing of whole
            layers is an option of ``TrainingArguments``.
        reference: A model with whose losses a policy compares, as for :func:`sparsebp_cli.attach`.
        seed: Seed of random decisions; None: ``args.seed``.
        log_flops_every: Optimizer steps, at least 1, between counts of the FLOPs of one micro-batch, dense and with the
            policies. The callback always counts the first step, and logs the newest counts. None: never count.

    Raises:
        UsageError: A policy or an option is wrong.
    """

    def __init__(
        self,
        policies: PolicyLike | Sequence[PolicyLike] = (),
        *,
        backward: BackwardOptions | BackwardChoices | None = None,
        reference: nn.Module | Literal["batch"] | None = None,
        seed: int | None = None,
        log_flops_every: int | None = 500,
    ) -> None:
        if log_flops_every is not None and log_flops_every < 1:
            raise UsageError(f"log_flops_every must be None or a whole number of 1 or more, got {log_flops_every}")
        self._engine: Engine | None = None
        self._attach_options = AttachOptions.of(policies, backward, seed, reference)
        self._policies = self._attach_options.policies
        self.log_flops_every = log_flops_every
        self._trainer: Trainer | None = None
        self._coming: MicroBatches | None = None
        self._undo: list[Callable[[], object]] = []  # called in reverse order to detach; empty while not attached
        self._resumed: Mapping[str, Any] | None = None
        self._counts_next, self._counted = False, dict[str, float]()
        # Candidates in the current optimizer step, if a data column marks them.
        self._num_candidates: Tensor | int | None = None
        self._began = self._logged = 0  # optimizer steps completed before this training, and at the last log line

    def join(self, trainer: Trainer) -> Self:
        """Attach the policies in every training of a trainer from now on.

        Args:
            trainer: A trainer of any class. Its class, model and arguments do not change.

        Returns:
            This callback, which is now one of the trainer's callbacks.

        Raises:
            UsageError: A pattern matches nothing, or the callback has already joined a trainer.
            UnsupportedError: The trainer or its model uses an unsupported feature.
        """
        if self._trainer is not None:
            raise UsageError("this PolicyCallback has already joined a trainer: make a new one for each trainer")
        refuse_unsupported(trainer, self._policies)
        # Raise errors now rather than in train(), which makes the optimizer.
        first = make_first_batch(trainer)
        engine, remove = self._attach(trainer, 1, torch.optim.SGD([torch.zeros(1)], 0.0))
        try:
            engine.check_arguments(first)
        finally:
            remove()
        self._trainer, self._coming = trainer, MicroBatches(trainer)
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        for name, wrapper in (
            ("train", self._train),
            ("training_step", self._step),
            ("_prepare_inputs", self._prepare),
            ("compute_loss", self._compute_loss),
            ("_get_num_items_in_batch", self._count_items),
            ("evaluate", self._evaluate),
            ("predict", self._dense),
            ("log", self._log),
            ("_save_rng_state", self._save),
        ):
            _wrap_method(trainer, name, wrapper)
        return self

    @override
    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Attach the engine. Optimizer and wrapped model exist now, and the trainer has loaded the checkpoint."""
        if self._trainer is None:
            raise UsageError("PolicyCallback has joined no trainer: call callback.join(trainer) before trainer.train()")
        trainer = self._trainer
        self._detach()  # auto_find_batch_size trains again after an attempt that ran out of memory
        self._began = self._logged = state.global_step
        engine, remove = self._attach(trainer, state.max_steps, trainer.optimizer)
        self._engine = engine
        self._undo.append(remove)
        if self._resumed is not None:
            engine.load_state_dict(self._resumed)
        accelerator, original = trainer.accelerator, trainer.accelerator.backward

        def backward(loss: Tensor, **kwargs: object) -> None:
            engine.backward(loss, lambda scaled: original(scaled, **kwargs))

        # Another library may have set this attribute on the instance, so restore exactly its state afterwards.
        own = accelerator.__dict__.get("backward")
        accelerator.backward = backward
        self._undo.append(lambda: _restore_backward(accelerator, own))

    @override
    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Decide whether to count the FLOPs of this step."""
        every = self.log_flops_every
        self._counts_next = every is not None and state.global_step % every == 0

    @property
    def engine(self) -> Engine | None:
        """The engine of the current ``train()``, or of the last one; None before the first."""
        return self._engine

    @property
    def _attached(self) -> Engine | None:
        """The engine while it is attached."""
        return self._engine if self._undo else None

    @property
    def _active(self) -> Engine | None:
        """The engine while it is attached and policies act."""
        return self._attached if self._attached is not None and self._attached.enabled else None

    def _attach(
        self, trainer: Trainer, num_steps: int, optimizer: torch.optim.Optimizer | None
    ) -> tuple[Engine, Callable[[], None]]:
        """Attach the policies; return the engine and a function that detaches it."""
        own, model = self._attach_options, trainer.model_wrapped
        given = AttachArguments(seed=trainer.args.seed) | own.given
        reference = find_reference(trainer, own.policies) if "reference" not in given else None
        if reference is not None:
            given["reference"] = reference
        return attach_inside(
            model_of(trainer),
            trainer.accelerator,
            lambda: attach(
                model,
                own.policies,
                optimizer=optimizer,
                num_steps=num_steps,
                **own.choices,
                **given,
            ),
            beside=reference,
        )

    def _detach(self) -> None:
        """Restore model and accelerator."""
        while self._undo:
            self._undo.pop()()
        self._counts_next, self._counted = False, {}

    def _train(
        self,
        train: Callable[..., T],
        resume_from_checkpoint: str | bool | None = None,
        *args: object,
        **kwargs: object,
    ) -> T:
        folder = resume_from_checkpoint
        if folder is True:
            folder = get_last_checkpoint(self._arguments.output_dir)
        self._resumed = None
        if folder:
            stored = load_state(Path(folder) / self._file_name, self._arguments.device)
            check_same(stored["choice"], self._attach_options.describe(), str(folder))
            self._resumed = stored["engine"]
        try:
            return train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self._detach()

    def _step(
        self,
        step: Callable[..., T],
        model: nn.Module,
        inputs: Mapping[str, object],
        *args: object,
        **kwargs: object,
    ) -> T:
        # A trainer that generates its micro-batches (trl's GRPOTrainer) gets prompts here, and counts steps inside.
        if self._counts_next and self.engine is not None and isinstance(inputs, Mapping):
            self._counts_next = False
            assert self._trainer is not None  # only its wrapped methods call this
            with restored_counters(self._trainer):
                found = count_step(model, self.engine, inputs, lambda copied: step(model, copied, *args, **kwargs))
            self._counted = found or self._counted
        return step(model, inputs, *args, **kwargs)

    def _compute_loss(
        self,
        compute_loss: Callable[..., T],
        model: nn.Module,
        inputs: Mapping[str, object],
        *args: object,
        **kwargs: object,
    ) -> T:
        if engine := self._active:
            removes = self._arguments.remove_unused_columns
            pass_columns(engine, self._policies, inputs, self._num_candidates, removes=removes)
            pass_advantages(engine, self._trainer, self._policies, inputs)
        return compute_loss(model, inputs, *args, **kwargs)

    def _prepare(self, prepare: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        inputs, engine = prepare(*args, **kwargs), self._active
        # A count of FLOPs runs one micro-batch, and evaluations have no update.
        if engine is not None and not engine.is_probing:
            assert self._coming is not None
            if made := self._coming.take(functools.partial(find_advantages, self._trainer, self._policies)):
                engine.expect(made)
        return inputs

    def _count_items(
        self,
        count: Callable[..., Tensor | int | None],
        batches: Sequence[Mapping[str, object]],
        *args: object,
        **kwargs: object,
    ) -> Tensor | int | None:
        if engine := self._active:
            assert self._coming is not None
            if drawn := self._coming.begin(batches):
                engine.expect(drawn)
            found = mask_noncandidates(self._policies, batches)
            self._num_candidates = None if found is None else count(found, *args, **kwargs)
        return count(batches, *args, **kwargs)

    def _evaluate(self, evaluate: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        engine, trainer = self._attached, self._trainer
        reads_loss = engine is not None and trainer is not None and reads_loss_alone(trainer)
        # Lossless policies skip rows here as well.
        with engine.scoring(reads="loss") if engine is not None and reads_loss else nullcontext():
            return self._dense(evaluate, *args, **kwargs)

    def _dense(self, evaluate: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        with nullcontext() if self._attached is None else self._attached.disabled():
            return evaluate(*args, **kwargs)

    def _log(self, log: Callable[..., T], logs: dict[str, float], *args: object, **kwargs: object) -> T:
        engine = self._attached
        if engine is not None and self._trainer is not None:
            step = self._trainer.state.global_step
            if "loss" in logs:
                logs |= self._counted | interval_values(engine, max(1, step - self._logged))
                self._logged = step
            elif "train_loss" in logs:  # the summary at the end of training
                logs |= total_values(engine, max(1, step - self._began))
        return log(logs, *args, **kwargs)

    def _save(self, save: Callable[..., object], output_dir: str) -> None:
        # _save_rng_state creates the folder, and runs before trainer_state.json marks the checkpoint as complete.
        save(output_dir)
        if engine := self._attached:
            state = {"engine": engine.state_dict(), "choice": self._attach_options.describe()}
            save_state(Path(output_dir) / self._file_name, state)

    @property
    def _arguments(self) -> TrainingArguments:
        assert self._trainer is not None  # only its wrapped methods ask
        return self._trainer.args

    @property
    def _file_name(self) -> str:
        return f"sparsebp-{self._arguments.process_index}.safetensors"


def _wrap_method(trainer: Trainer, name: str, wrapper: Callable[..., object]) -> None:
    inner = getattr(trainer, name)

    @functools.wraps(inner)
    def outer(*args: object, **kwargs: object) -> object:
        return wrapper(inner, *args, **kwargs)

    setattr(trainer, name, outer)


def _restore_backward(accelerator: Accelerator, own: Callable[..., None] | None) -> None:
    if own is None:
        del accelerator.backward
    else:
        accelerator.backward = own


class PolicyTrainer(Trainer):
    """A ``transformers.Trainer`` whose backward follows policies. It takes the arguments of ``Trainer`` and these.

    The engine is attached while ``train()`` runs. Afterwards, even after an error, the model is restored. Evaluation is
    dense. Without an approximating policy the trained weights are bit-identical to ``Trainer``'s.

    Args:
        *args: Positional arguments of ``Trainer``.
        policies: Each a policy, its name, or a mapping of ``name`` and its options. Without policies training is dense.
        backward: Options of the backward pass, such as ``{"exclude": ["lm_head"]}``. ``update="eager"`` and
            ``checkpointing="full"`` are refused: the trainer steps its optimizer itself, and checkpointing of whole
            layers is an option of ``TrainingArguments``.
        reference: A model with whose losses a policy compares, as for :func:`sparsebp_cli.attach`.
        policy_seed: Seed of random decisions; None: ``args.seed``.
        log_flops_every: Optimizer steps, at least 1, between counts of the FLOPs of one micro-batch, dense and with the
            policies. The trainer always counts the first step, and logs the newest counts. A count computes the loss
            twice more, on copies of the batch, and changes nothing else. None: never count.
        **kwargs: Named arguments of ``Trainer``.

    Raises:
        UsageError: A policy, an option or a pattern is wrong.
        UnsupportedError: A training argument is not supported: DeepSpeed, FSDP, Liger, and others.
    """

    def __init__(
        self,
        *args: Any,
        policies: PolicyLike | Sequence[PolicyLike] = (),
        backward: BackwardOptions | BackwardChoices | None = None,
        reference: nn.Module | Literal["batch"] | None = None,
        policy_seed: int | None = None,
        log_flops_every: int | None = 500,
        **kwargs: Any,
    ) -> None:
        for name in BackwardOptions.model_fields:
            if name in kwargs:
                raise UsageError(f"{name} is an option of the backward pass: give backward={{{name!r}: ...}}")
        callback = PolicyCallback(
            policies,
            backward=backward,
            reference=reference,
            seed=policy_seed,
            log_flops_every=log_flops_every,
        )
        super().__init__(*args, **kwargs)
        self.policy_callback: PolicyCallback = callback.join(self)

    @property
    def engine(self) -> Engine | None:
        """The engine of the current ``train()``, or of the last one; None before the first."""
        return self.policy_callback.engine
