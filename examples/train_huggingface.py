"""Trains a tiny GPT-2 with the Trainer of Hugging Face: no word of Muri, its stages are found automatically."""

import argparse
import os
import tempfile
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

VOCABULARY, LENGTH = 128, 32


class Sentences(Dataset):
    """Counting sequences behind slow storage."""

    def __init__(self, count, read_s):
        starts = torch.randint(VOCABULARY, (count, 1), generator=torch.Generator().manual_seed(1))
        self.tokens = (starts + torch.arange(LENGTH)) % VOCABULARY
        self.read_s = read_s

    def __len__(self):
        """How many there are."""
        return len(self.tokens)

    def __getitem__(self, index):
        """One sample, as slowly as the storage is."""
        time.sleep(self.read_s)
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--read-ms", type=float, default=1.0, help="reading one sample takes that long")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=64, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=options.steps,
            per_device_train_batch_size=16,
            dataloader_num_workers=options.workers,
            seed=options.seed,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_strategy="no",
        )
        samples = Sentences(320, options.read_ms / 1000)
        trainer = Trainer(model=model, args=arguments, train_dataset=samples, eval_dataset=samples)
        trainer.train()
        print(f"evaluation loss {trainer.evaluate()['eval_loss']:.9g}", flush=True)


if __name__ == "__main__":
    main()
