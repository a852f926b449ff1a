"""Trains a small transformer: most of each iteration computes on the GPU (on the CPU where there is none)."""

import torch
from support import PacedFile, PacedLink, option_parser
from torch import nn

import muri

LENGTH, WIDTH, VOCABULARY, MICRO_BATCH = 64, 240, 256, 2


class Model(nn.Module):
    """Predicts the next byte."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        """Scores of the next byte at every place."""
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=tokens.device)
        return self.head(self.encoder(self.embed(tokens), mask=mask, is_causal=True))


def texts(file, batch_size, iterations):
    for _ in range(iterations):
        raw = torch.frombuffer(file.read(batch_size * (LENGTH + 1)), dtype=torch.uint8)
        yield raw.view(batch_size, LENGTH + 1)


def mask_tokens(batch, generator):
    """Replace some bytes by random ones, several times over."""
    for _ in range(170):
        noise = torch.randint(VOCABULARY, batch.shape, generator=generator)
        batch = torch.where(torch.rand(batch.shape, generator=generator) < 0.0002, noise, batch)
    return batch


def main():
    options = option_parser(__doc__, batch_size=4).parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    file, metrics = PacedFile(1 << 20, bytes_per_s=63e3), PacedLink(bytes_per_s=63e6)
    loader = texts(file, options.batch_size, options.iterations)
    for step, raw in enumerate(muri.batches(loader), start=1):
        with muri.stage("preprocess"):
            tokens = mask_tokens(raw.long(), generator)
        optimizer.zero_grad()
        for part in tokens.split(MICRO_BATCH):  # between the parts others may use the GPU
            with muri.stage("propagate"):
                logits = model(part[:, :-1].to(device)).flatten(0, 1)
                loss = nn.functional.cross_entropy(logits, part[:, 1:].flatten().to(device))
            with muri.stage("propagate"):
                (loss * len(part) / len(tokens)).backward()
        with muri.stage("propagate"):
            optimizer.step()
        with muri.stage("synchronize"):
            metrics.send(model.head.weight.detach().cpu().numpy().tobytes())
        if step % 10 == 0:
            print(f"iteration {step} loss {loss.item():.4f}")
    print(f"done: {options.iterations} iterations")


if __name__ == "__main__":
    main()
