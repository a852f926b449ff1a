"""Trains with Lightning's Trainer: no word of Muri, its stages are found automatically."""

import argparse
import logging
import warnings

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader
from train_plain import CLASSES, FEATURES, Samples, augment


class Classifier(lightning.LightningModule):
    """Two layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, CLASSES))

    def training_step(self, batch, _index):
        """Loss of a batch."""
        inputs, labels = batch
        return nn.functional.cross_entropy(self.layers(inputs), labels)

    def validation_step(self, batch, _index):
        """Logs the loss of a batch."""
        inputs, labels = batch
        self.log("validation_loss", nn.functional.cross_entropy(self.layers(inputs), labels))

    def configure_optimizers(self):
        """Plain AdamW."""
        return torch.optim.AdamW(self.parameters())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=320)
    parser.add_argument("--read-ms", type=float, default=1.0, help="reading one sample takes that long")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    lightning.seed_everything(options.seed, verbose=False)
    read_s = options.read_ms / 1000
    training = DataLoader(
        Samples(options.samples, read_s, augment), batch_size=32, shuffle=True, num_workers=options.workers
    )
    validation = DataLoader(Samples(options.samples // 4, read_s), batch_size=64, num_workers=options.workers)
    trainer = lightning.Trainer(
        max_epochs=options.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), training, validation)
    print(f"validation loss {trainer.callback_metrics['validation_loss'].item():.9g}", flush=True)


if __name__ == "__main__":
    main()
