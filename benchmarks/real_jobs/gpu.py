"""Trains a transformer: bound by forward and backward, on all cores: the stand-in for a GPU."""

import random

import torch
from common import DirectFile, job_options, train
from torch import nn

import muri

LENGTH, WIDTH, VOCABULARY, BATCH, MICRO_BATCH = 64, 256, 256, 8, 2
DOCUMENTS = 16


class Model(nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.mask = nn.Transformer.generate_square_subsequent_mask(LENGTH - 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scores of the next byte at every place."""
        return self.head(self.encoder(self.embed(tokens), mask=self.mask, is_causal=True))  # type: ignore[no-any-return]


def main() -> None:
    """Train until told to stop."""
    options = job_options(__doc__)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = random.Random(options.seed)  # noqa: S311 (sampling, no secret)
    corpus = DirectFile(options.data / "samples.bin")

    def fetch() -> torch.Tensor:
        """Each sequence is packed from the beginnings of many documents."""
        size = LENGTH // DOCUMENTS
        documents = [corpus.read_blocks(1, generator)[:size] for _ in range(BATCH * DOCUMENTS)]
        tokens = torch.frombuffer(bytearray(b"".join(documents)), dtype=torch.uint8)
        return tokens.view(BATCH, LENGTH).long()

    def step(batch: object) -> None:
        with muri.stage("propagate"):
            optimizer.zero_grad()
            for part in batch.split(MICRO_BATCH):  # type: ignore[attr-defined]
                with muri.stage("propagate"):  # yield points: between these parts others may use the GPU
                    scores = model(part[:, :-1]).flatten(0, 1)
                    loss = nn.functional.cross_entropy(scores, part[:, 1:].flatten())
                with muri.stage("propagate"):
                    loss.backward()
            optimizer.step()

    train(options, fetch, step)


if __name__ == "__main__":
    main()
