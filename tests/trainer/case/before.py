"""Fine-tune a small Phi so that it ends its answers: only the first end-of-sequence tokens are trained."""

from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import PhiConfig, PhiForCausalLM, TrainingArguments
from transformers.trainer import Trainer

LENGTH, EOS = 512, 2


class MaskedTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss_mask = inputs.pop("loss_mask")
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        kept = loss_mask[:, 1:].bool()
        loss = cross_entropy(outputs.logits[:, :-1][kept], labels[:, 1:][kept])
        return (loss, outputs) if return_outputs else loss

    def get_train_dataloader(self):
        size = self.args.per_device_train_batch_size
        return DataLoader(self.train_dataset, batch_size=size, collate_fn=self.data_collator)


def collate(texts):
    """Pad with the end-of-sequence token, and train the first two of those."""
    shape = (len(texts), LENGTH)
    ids, attended, loss_mask = torch.full(shape, EOS), torch.zeros(shape, dtype=torch.long), torch.zeros(shape)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = text
        attended[row, : len(text) + 2] = 1
        loss_mask[row, len(text) : len(text) + 2] = 1
    return {"input_ids": ids, "attention_mask": attended, "labels": ids.clone(), "loss_mask": loss_mask}


def make_texts(number, vocabulary):
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(LENGTH * 3 // 4, LENGTH - 2, (number,), generator=generator).tolist()
    return [torch.randint(3, vocabulary, (length,), generator=generator) for length in lengths]


def make_trainer(folder, vocabulary=51_200, hidden=512, layers=6, steps=100, **options):
    torch.manual_seed(0)
    config = PhiConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        bos_token_id=1,
        eos_token_id=EOS,
    )
    return MaskedTrainer(
        model=PhiForCausalLM(config),
        args=TrainingArguments(
            output_dir=str(folder),
            max_steps=steps,
            per_device_train_batch_size=2,
            learning_rate=1e-4,
            remove_unused_columns=False,
            report_to=[],
            **options,
        ),
        data_collator=collate,
        train_dataset=make_texts(4 * steps, vocabulary),
    )


if __name__ == "__main__":
    make_trainer(Path("phi")).train()
