"""A job whose preprocessing is Python code: it cleans and counts words; storage and GPU are waits.

python benchmarks/python_job.py --log FILE --stop FILE --data DIR
"""

import argparse
import random
import time
from pathlib import Path

import muri

LOAD_S, PROPAGATE_S = 0.008, 0.008
SENTENCES, WORDS = 180, 40


def clean_and_count(sentences: list[str]) -> dict[str, int]:
    """What a tokenizer in Python does: nothing here leaves the interpreter."""
    counts: dict[str, int] = {}
    for sentence in sentences:
        with muri.stage("preprocess"):  # a yield point: between two sentences others may use the CPU
            for word in sentence.split():
                kept = "".join(sign for sign in word.lower() if sign.isalpha())
                counts[kept] = counts.get(kept, 0) + 1
    return counts


def main() -> None:
    """Work until told to stop, noting when each iteration ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--stop", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    options = parser.parse_args()
    generator = random.Random(0)
    words = ["".join(generator.choices("Aa bcdéfg-hij.", k=9)) for _ in range(SENTENCES * WORDS)]
    sentences = [" ".join(words[first : first + WORDS]) for first in range(0, len(words), WORDS)]
    with options.log.open("w", buffering=1) as log:
        while not options.stop.exists():
            with muri.stage("load"):
                time.sleep(LOAD_S)
            with muri.stage("preprocess"):
                clean_and_count(sentences)
            with muri.stage("propagate"):
                time.sleep(PROPAGATE_S)
            log.write(f"{time.monotonic()}\n")


if __name__ == "__main__":
    main()
