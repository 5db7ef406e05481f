"""Second half of `make demo`: reload the result in a new process and use it beside the dense model."""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel
from transformers.utils.logging import disable_progress_bar

from collab_compress.analysis import model_latency
from collab_compress.calibration.builtin import builtin_texts

from .pretrained import EMBEDDED, find_directory, load_tokenizer, load_weights

SHOWN = 4  # texts whose nearest neighbours are printed
BATCH = 64
WIDTH = 76  # characters of a printed text
TOKENS, SEQUENCES = 128, 8  # of the input that is timed


def embed(model: Any, tokenizer: Any, texts: list[str]) -> Tensor:
    """Return mean-pooled, normalised embeddings of texts, (texts, width)."""
    vectors = []
    for start in range(0, len(texts), BATCH):
        batch = tokenizer(texts[start : start + BATCH], padding=True, truncation=True, return_tensors="pt")
        with torch.no_grad():
            hidden = model(**batch).last_hidden_state
        mask = batch["attention_mask"].unsqueeze(-1)
        vectors.append(torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1))
    return torch.cat(vectors)


def neighbours(vectors: Tensor) -> Tensor:
    """Return the index of the nearest other text of each, (texts,)."""
    similarity = vectors @ vectors.mT
    return similarity.fill_diagonal_(-1).argmax(1)


def main() -> None:
    """Print the time of both models, and which texts are nearest to which."""
    disable_progress_bar()
    torch.set_num_threads(1)  # several wait for each other where the machine has other work
    path = Path(sys.argv[1])
    dense, converted = (load_weights(AutoModel, where)[0].eval() for where in (find_directory(EMBEDDED), path))
    tokenizer = load_tokenizer(path)
    texts = [side for pair in builtin_texts(pairs=True) if not isinstance(pair, str) for side in pair]
    before, after = (neighbours(embed(model, tokenizer, texts)) for model in (dense, converted))
    print(f"Reloaded {path} in a new process. The nearest of {len(texts):,} sentences, by both models:")
    for text in range(0, len(texts), len(texts) // SHOWN):
        print(f"\n    {texts[text]:.{WIDTH}}")
        for name, nearest in (("dense", before), ("converted", after)):
            print(f"        {name:>9}: {texts[nearest[text]]:.{WIDTH}}")
    same = float((before == after).double().mean())
    print(f"\nThe nearest sentence is the same for {same:.0%} of them.")
    latency = model_latency(dense, converted, TOKENS, batch_size=SEQUENCES)
    print(f"Time at {TOKENS} tokens, batch of {SEQUENCES}: {latency}.")


if __name__ == "__main__":
    main()
