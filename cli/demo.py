"""Second half of `make demo`: reload the result in a new process and use it beside the dense model."""

import sys
from pathlib import Path

import torch
from transformers import AutoModel
from transformers.utils.logging import disable_progress_bar

from collab_compress.checkpoint.pretrained import EMBEDDED, find_directory, load_model, load_tokenizer

SENTENCES = (
    "A man is playing a guitar on stage.",
    "Someone performs music in front of an audience.",
    "The stock market fell sharply on Monday.",
)


def embed(path: Path) -> torch.Tensor:
    """Return mean-pooled, normalised sentence embeddings, (sentences, width)."""
    tokenizer, (model, _) = load_tokenizer(path), load_model(AutoModel, path)
    batch = tokenizer(list(SENTENCES), padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def main() -> None:
    """Print the similarities of three sentences under the dense and the converted model."""
    disable_progress_bar()
    converted = Path(sys.argv[1])
    dense_vectors, vectors = embed(find_directory(EMBEDDED)), embed(converted)
    print(f"Reloaded {converted} in a new process. Cosine similarities, dense → converted:")
    for one, other in ((0, 1), (0, 2), (1, 2)):
        before, after = (float(v[one] @ v[other]) for v in (dense_vectors, vectors))
        print(f"    {before:.3f} → {after:.3f}   {SENTENCES[one]!r} / {SENTENCES[other]!r}")


if __name__ == "__main__":
    main()
