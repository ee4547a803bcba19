"""AdaShift with the Trainer of Hugging Face, which makes the parameter groups and the schedule.

pip install -r examples/requirements.txt
python examples/with_transformers.py
"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from adashift import AdaShift

WORDS, LENGTH = 32, 16


def sentences(count: int) -> list[dict[str, torch.Tensor]]:
    """Return sentences in which each word is three more than the one before it, modulo WORDS."""
    first = torch.randint(WORDS, (count, 1))
    words = (first + 3 * torch.arange(LENGTH)) % WORDS
    return [{"input_ids": sentence, "labels": sentence} for sentence in words]


def main() -> None:
    torch.manual_seed(0)
    sizes = dict(vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=1, n_head=2)
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=4,
            per_device_train_batch_size=16,
            lr_scheduler_type="cosine",
            logging_steps=32,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=sentences(1024),
            optimizer_cls_and_kwargs=(AdaShift, dict(lr=0.01)),  # ten times the rate of Adam
        )
        trainer.train()


if __name__ == "__main__":
    main()
