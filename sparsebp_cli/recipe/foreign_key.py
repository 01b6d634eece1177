"""Map keys of other tools' configurations to the recipe key with the same effect.

The keys come from transformers' ``TrainingArguments`` (4 and 5), TRL's ``SFTConfig``, axolotl, LLaMA-Factory and
torchtune.
"""

from __future__ import annotations

# Keys that a recipe does not need, and why.
NOT_NEEDED = {
    "_component_": "recipes do not name Python classes",
    "also": "runs send their metrics to MLflow; version 0.5 was the last with other trackers",
    "code_diff": "plan.json of a run has the commit and a digest of uncommitted changes",
    "dataset_prepared_path": "a run tokenises its data at each start",
    "do_train": "every recipe trains",
    "logging_dir": "every run has its own folder; `sparsebp show` prints its path",
    "logging_steps": "every step is logged",
    "output_dir": "every run has its own folder, with the trained model; `sparsebp show` prints its path",
    "overwrite_output_dir": "every run has a folder of its own",
    "plot_loss": "every report plots the loss",
}
OF_TARGETS = {"qos"}  # former options of targets among the answers
ANSWERS = {
    # how long
    "epochs": "training.num_train_epochs",
    "num_epochs": "training.num_train_epochs",
    "early_stopping": "training.early_stopping_patience, with checkpoint.keep_best",
    "early_stopping_threshold": None,
    "steps": "training.max_steps",
    "num_steps": "training.max_steps",
    # the optimizer
    "lr": "training.learning_rate",
    "optimizer": "training.optim",
    "adam_beta1": "training.optim_args: {betas: [0.9, 0.999]}",
    "adam_beta2": "training.optim_args: {betas: [0.9, 0.999]}",
    "adam_epsilon": "training.optim_args: {eps: 1e-8}",
    "betas": "training.optim_args: {betas: [0.9, 0.999]}",
    "eps": "training.optim_args: {eps: 1e-8}",
    "momentum": "training.optim_args: {momentum: 0.9}",
    "scheduler": "training.lr_scheduler_type",
    "lr_scheduler": "training.lr_scheduler_type",
    "min_lr": "training.lr_scheduler_type: cosine_with_min_lr, with lr_scheduler_kwargs: {min_lr: 1e-6}",
    "warmup": "training.warmup_steps",
    "warmup_ratio": "training.warmup_steps (below 1: a fraction of the steps)",
    "clip_grad_norm": "training.max_grad_norm",
    "gradient_clipping": "training.max_grad_norm",
    # the batch
    "batch_size": "training.per_device_train_batch_size",
    "micro_batch_size": "training.per_device_train_batch_size",
    "train_batch_size": "training.per_device_train_batch_size",
    "eval_batch_size": "measure.per_device_eval_batch_size",
    "grad_accum": "training.gradient_accumulation_steps",
    "accumulation_steps": "training.gradient_accumulation_steps",
    "group_by_length": "training.group_by: length",
    "train_sampling_strategy": "training.group_by: length",
    "data_seed": "training.seed",
    # numbers, memory and speed
    "bf16": "training.mixed_precision: bf16 (autocast), or model.dtype: bfloat16 (weights too)",
    "fp16": "training.mixed_precision: bf16 (float16 needs a loss scaler, which recipes do not have)",
    "tf32": "training.mixed_precision: bf16",
    "torch_dtype": "model.dtype",
    "precision": "model.dtype, or training.mixed_precision",
    "gradient_checkpointing": "backward.checkpointing: full",
    "activation_checkpointing": "backward.checkpointing: full",
    "torch_compile": "training.compile",
    "attn_implementation": "model.attention",
    "fsdp": "target.sharding: fsdp2, with target.processes",
    "deepspeed": "target.sharding: fsdp2, with target.processes",
    "use_cpu": "target.device: cpu",
    "no_cuda": "target.device: cpu",
    "use_liger_kernel": "policy: lossless",
    "padding_free": "policy: lossless",
    "neftune_noise_alpha": None,
    "label_smoothing_factor": None,
    # measuring and keeping
    "eval_steps": "measure.eval_every",
    "eval_strategy": "measure.eval_every",
    "evaluation_strategy": "measure.eval_every",
    "save_steps": "checkpoint.every",
    "save_strategy": "checkpoint.every",
    "save_total_limit": "checkpoint.keep_last",
    "resume_from_checkpoint": "`sparsebp resume RUN` continues a run",
    "report_to": "tracking.uri",
    "run_name": "name",
    "load_best_model_at_end": "checkpoint.keep_best: eval/loss",
    "metric_for_best_model": "checkpoint.keep_best: eval/loss",
    "push_to_hub": None,
    "wandb_project": "tracking.uri",
    "evals_per_epoch": "measure.eval_every",
    "saves_per_epoch": "checkpoint.every",
    # the data
    "datasets": "dataset.name (only one dataset)",
    "dataset_name": "dataset.name",
    "dataset_config": "dataset.subset",
    "dataset_dir": "dataset.name (a path)",
    "dataset_train_split": "dataset.split",
    "dataset_test_split": "dataset.eval_split",
    "template": "dataset.chat_template",
    "max_length": "dataset.max_seq_length",
    "max_seq_len": "dataset.max_seq_length",
    "sequence_len": "dataset.max_seq_length",
    "cutoff_len": "dataset.max_seq_length",
    "block_size": "dataset.max_seq_length",
    "val_set_size": "dataset.eval_fraction",
    "val_size": "dataset.eval_fraction",
    "validation_split": "dataset.eval_split",
    "test_size": "dataset.eval_fraction",
    "packing": "dataset.format: text (packed into blocks), or policy: lossless (no padding)",
    "sample_packing": "dataset.format: text (packed into blocks), or policy: lossless (no padding)",
    "assistant_only_loss": "dataset.train_on: assistant",
    "completion_only_loss": "dataset.train_on: assistant (false: all)",
    "train_on_inputs": "dataset.train_on: all",
    "train_on_prompt": "dataset.train_on: all",
    "dataset_text_field": "dataset.columns: {text: NAME}",
    "chat_template_path": "dataset.chat_template",
    # the model
    "adapter": "model.lora for a new adapter, or model.adapter for a trained adapter",
    "checkpointer": "model.name",
    "do_eval": "measure.eval_every",
    "finetuning_type": "model.lora (without it, all weights are trained)",
    "flash_attention": "model.attention: flash_attention_2",
    "stage": "dataset.format",
    "use_peft": "model.lora",
    "model_name_or_path": "model.name",
    "base_model": "model.name",
    "tokenizer_name": "model.tokenizer",
    "lora_r": "model.lora.r",
    "lora_rank": "model.lora.r",
    "lora_alpha": "model.lora.lora_alpha",
    "lora_dropout": "model.lora.lora_dropout",
    "lora_target_modules": "model.lora.target_modules",
    "lora_target_linear": "model.lora.target_modules: all-linear",
    "lora_modules_to_save": "model.lora.modules_to_save",
    "peft_use_dora": "model.lora.use_dora",
    "peft_use_rslora": "model.lora.use_rslora",
    "load_in_4bit": "model.quantization: {type: nf4}",
    "load_in_8bit": "model.quantization: {type: int8}",
    "bnb_4bit_quant_type": "model.quantization: {type: nf4}, or {type: fp4}",
    "quantization_config": "model.quantization: {type: nf4}",
    # keys of our earlier versions
    "qos": "target.arguments: [--qos=NAME]",
    "policy_validation_examples": None,
    "eval_batches": "measure.eval_examples",
    "weight_column": "`weight: 0.5` in a message of the data weights this message",
    "independent_examples": None,
    "held_out": "dataset.eval_split",
    **{
        f"{part}_column": f"dataset.columns: {{{part}: NAME}}"
        for part in ("completion", "group", "label", "prompt", "text")
    },
    "text_pair_column": "dataset.columns: {text: [NAME, OTHER]}",
    "max_cost": "training.max_flops",
    "max_seconds": "training.max_flops",
    "bias": None,
    "bnb_4bit_compute_dtype": "model.dtype",
    "bnb_4bit_use_double_quant": None,
    "init_lora_weights": None,
    "trainable_token_indices": "model.peft: {type: trainable_tokens, token_indices: [3, 5]}",
    "exclude_modules": "model.lora.target_modules",
    "layers_to_transform": "model.lora.target_modules",
    "layers_pattern": "model.lora.target_modules",
    "rank_pattern": None,
    "alpha_pattern": None,
    "schedule": "`keep: {from: 1.0, to: 0.25}` gives an option a schedule; phases of policies were removed after 0.5: "
    "start two runs",
    "time_forms": "`backward: {exclude: [GLOB]}` keeps linear layers dense",
    "quantization_bit": "model.quantization: {type: nf4}, or {type: int8}",
}


def answer(key: str, *, is_at_top: bool = False) -> str | None:
    """Return what to write in a recipe instead of another tool's key; None if the key is unknown. ``is_at_top``:
    whether the key is in no section."""
    if key == "schedule" and not is_at_top:
        key = "scheduler"
    if key in NOT_NEEDED:
        return f"not needed: {NOT_NEEDED[key]}"
    if key not in ANSWERS:
        return None
    instead = ANSWERS[key]
    if instead is None:
        return "recipes have no equivalent key"
    return f"instead, {instead}" if instead.startswith("`") else f"in a recipe, write {instead}"
