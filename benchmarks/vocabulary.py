"""What a smaller vocabulary costs MiniLM: parameters, longer texts, STS-B.

    python benchmarks/vocabulary.py --data-dir DIR

DIR holds GLUE in its TSV layout. Tokens are counted in the built-in texts, in 1,024 sentences of STS-B's training
rows, or in all of them; the tokens that no counted text has follow in the tokenizer's order. STS-B is the Spearman
correlation (×100) of mean-pooled embeddings on the dev rows.
"""

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

from collab_compress_glue_runs.tasks import load_task
from quality import Embeddings

from collab_compress import trim_vocabulary_

SHARES = (1 / 2, 1 / 4)
SENTENCES = 1024


def measure(task: Embeddings, name: str, texts: str | Sequence[str], share: float | None) -> None:
    """Trim MiniLM, and print its row of the table."""
    model, tokenizer = task.load()
    sentences = sentences_of(task, "validation")
    parameters, tokens = model.num_parameters(), sum(map(len, tokenizer(sentences)["input_ids"]))
    if share is not None:
        trim_vocabulary_(model, tokenizer, texts, tokens=int(share * len(tokenizer)))
    smaller = model.num_parameters() / parameters - 1
    longer = sum(map(len, tokenizer(sentences)["input_ids"])) / tokens - 1
    score = task.score(model, tokenizer)
    print(f"| {len(tokenizer):,} | {name} | {smaller:+.1%} | {longer:+.1%} | {score:.2f} |", flush=True)


def sentences_of(task: Embeddings, split: str) -> list[str]:
    """Return the different sentences of some rows of STS-B, in order."""
    rows = load_task("stsb", task.data, splits=[split])[split]
    return list(dict.fromkeys([*rows["text"], *rows["text_pair"]]))


def main() -> None:
    """Measure all rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    task = Embeddings(parser.parse_args().data_dir)
    training = sentences_of(task, "train")
    random.Random(0).shuffle(training)
    print("| tokens | counted in | parameters | tokens of STS-B | STS-B |\n|---|---|---|---|---|")
    measure(task, "", "builtin", None)
    for share in SHARES:
        for name, texts in (
            ("built-in texts", "builtin"),
            ("1,024 sentences", training[:SENTENCES]),
            ("all", training),
        ):
            measure(task, name, texts, share)


if __name__ == "__main__":
    main()
