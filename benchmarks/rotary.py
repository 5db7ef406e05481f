"""Perplexity against cache for the small rotary models of glue_runs/recipes: shared rotary heads and their rivals.

    collab-run llama-ptb.yaml output=LLAMA data_dir=DIR
    collab-run modernbert-ptb.yaml output=MODERNBERT data_dir=DIR
    python benchmarks/rotary.py --data-dir DIR --models LLAMA/tuned/model MODERNBERT/tuned/model [--recover 40]

On the validation text of the Penn Treebank, of every token, or of those that are masked (the same for all). Keys, or
keys and values, at 3/4, 1/2 and 1/4 of their width, each calibrated on 128 blocks of random tokens and of training
text, for every seed; recovery (`--recover STEPS`, 0 for none) is on training text drawn anew, after the first seed's
conversion:

- shared: ours; `equal` is the same, each frequency with equally many channels;
- dropped: of each layer's pairs of channels the strongest are kept, over all heads and frequencies, so that heads
  differ in width; dropped alike: equally many of each head;
- pooled: heads of keys are averaged in groups, and so are values, as grouped-query attention is made from a model
  without: a half and a quarter only.

A singular value decomposition of each head's scores is no rival here, for it does not commute with the turning; of
each head's values it is, so that it narrows them beside dropped pairs. Rivals are recovered on the divergence of what
the whole model predicts, with the same steps and texts, and where values are narrower by the better of two learning
rates.
"""

import argparse
import copy
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any, Literal
from unittest.mock import patch

import torch
from datasets import Dataset
from rivals import Batches, dropped, pooled, taught_
from timing import append_record, read_records
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    PreTrainedModel,
)
from transformers.utils import logging

from collab_compress import Compression, Solver, compress
from collab_compress.conversion import recover_
from collab_compress.factorization import rotary
from collab_compress.metrics import token_losses
from collab_compress.tasks import encode_language_model, encode_masked_language_model, load_task

LENGTH, BATCH, BLOCKS = 64, 16, 128
SHARES = (0.75, 0.5, 0.25)
RATES = (1e-3, 2e-4)
"""Learning rates of recovery: the library takes the second where values are narrower, rivals the better one there."""


def perplexity(model: PreTrainedModel, rows: Dataset, masked: bool) -> float:
    """Of all labels; blocks are of one length but for the last."""
    total = torch.zeros(2, dtype=torch.double)
    last = len(rows) - 1
    for start in (*range(0, last, 64), last):
        batch = rows.with_format("torch")[start : min(start + 64, last) if start < last else None]
        with torch.no_grad():
            logits = model(input_ids=batch["input_ids"]).logits
        total += token_losses(logits, batch["labels"], shift=not masked).sum(0)
    return float((total[0] / total[1]).exp())


def shared(
    dense: PreTrainedModel, share: float, values: bool, batches: Batches | Literal["synthetic"], **given: Any
) -> PreTrainedModel:
    """Convert a copy; `given` is a tokenizer and a seed for random tokens."""
    model, width = copy.deepcopy(dense), int(share * dense.config.hidden_size)
    solver = Solver(seed=given.pop("seed", 0))
    compression = Compression(dk=width, dv=width if values else None, solver=solver)
    compress(model, compression, calibration=batches, **given)
    return model


def equal(dense: PreTrainedModel, share: float, values: bool, batches: Batches) -> PreTrainedModel:
    """Convert a copy with equally many channels for each frequency, which is no choice of the library's."""
    with patch.object(rotary, "allocated", equally):
        return shared(dense, share, values, batches)


def equally(errors: Sequence[Tensor], channels: int) -> list[int]:
    """Divide channels among frequencies, some of which may have one tensor of errors together."""
    heads = min(map(len, errors)) - 1
    frequencies = [place for place, row in enumerate(errors) for _ in range((len(row) - 1) // heads)]
    counts = Counter(frequencies[channel % len(frequencies)] for channel in range(channels))
    return [counts[place] for place in range(len(errors))]


class Bench:
    """One model, and what is measured of it already.

    Args:
        folder: of the model and its tokenizer.
        data: folder of the data sets.
        records: file of what was measured.
    """

    def __init__(self, folder: Path, data: Path, records: Path) -> None:
        self.name, self.records = AutoConfig.from_pretrained(folder).model_type, records
        self.masked = self.name == "modernbert"
        model_class = AutoModelForMaskedLM if self.masked else AutoModelForCausalLM
        self.dense: PreTrainedModel = model_class.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = tokenizer = AutoTokenizer.from_pretrained(folder)
        text = load_task("ptb", data, splits=["train", "validation"])
        self.rows = (
            encode_masked_language_model(text["validation"], tokenizer, length=LENGTH, seed=0)
            if self.masked
            else encode_language_model(text["validation"], tokenizer, length=LENGTH)
        )
        self.train = torch.tensor(encode_language_model(text["train"], tokenizer, length=LENGTH)["input_ids"][:-1])
        self.done = read_records(records)

    def texts(self, seed: int, count: int = BLOCKS // BATCH) -> Batches:
        """Draw blocks of training text."""
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(seed))
        return [{"input_ids": each} for each in self.train[order[: count * BATCH]].split(BATCH)]

    def measure(self, make: Callable[[], PreTrainedModel], **case: Any) -> None:
        """Measure a case if that was not done, and note it."""
        case = {"model": self.name, **case}
        if any(case.items() <= each.items() for each in self.done):
            return
        found = {**case, "perplexity": round(perplexity(make(), self.rows, self.masked), 2)}
        self.done.append(found)
        print(json.dumps(found), flush=True)
        append_record(self.records, found)

    def run(self, seeds: list[int], steps: int) -> None:
        """Measure all, seed after seed."""
        self.measure(lambda: self.dense, way="dense")
        for seed, values, share in product(seeds, (False, True), SHARES):
            size = {"share": share, "values": values}
            self.calibrated(size, seed)
            if steps and seed == seeds[0]:
                self.recovered(size, seed, steps)

    def calibrated(self, size: dict[str, Any], seed: int) -> None:
        """Measure what is not trained."""
        case = {**size, "seed": seed, "steps": 0}
        text, tokens = self.texts(seed), {"batches": "synthetic", "tokenizer": self.tokenizer, "seed": seed}
        self.measure(lambda: shared(self.dense, **size, batches=text), way="shared", data="text", **case)
        self.measure(lambda: shared(self.dense, **size, **tokens), way="shared", data="random", **case)
        if not size["values"]:
            self.measure(lambda: equal(self.dense, **size, batches=text), way="equal", data="text", **case)
            alike = partial(dropped, self.dense, **size, batches=text, alike=True)
            self.measure(alike, way="dropped alike", data="text", **case)
        self.measure(lambda: dropped(self.dense, **size, batches=text), way="dropped", data="text", **case)
        if self.pools(size["share"]):
            self.measure(lambda: pooled(self.dense, **size), way="pooled", **size, steps=0)

    def recovered(self, size: dict[str, Any], seed: int, steps: int) -> None:
        """Measure what is trained on the dense model's answers."""
        text, more = self.texts(seed), self.texts(seed + 1000, steps)
        case = {**size, "data": "text", "seed": seed, "steps": steps}

        def ours() -> PreTrainedModel:
            model = shared(self.dense, **size, batches=text)
            recover_(model, self.dense, None, more, steps=steps, disable_tqdm=True)
            return model

        self.measure(ours, way="shared", **case)
        rivals = {"dropped": partial(dropped, self.dense, **size, batches=text)}
        if size["values"] and self.pools(size["share"]):
            rivals["pooled"] = partial(pooled, self.dense, **size)
        for rate, way in product(RATES if size["values"] else RATES[:1], rivals):
            self.measure(
                lambda rate=rate, make=rivals[way]: taught_(make(), self.dense, more, rate),
                way=way,
                rate=rate,
                **case,
            )

    def pools(self, share: float) -> bool:
        """Whether heads can be pooled in equal groups, in a family that has groups."""
        return not self.masked and self.dense.config.num_attention_heads % (share * 8) == 0


COLUMNS = (
    "shared, random tokens",
    "shared, text",
    "equal",
    "dropped",
    "dropped alike",
    "pooled",
    "shared, recovered",
    "dropped, recovered",
    "pooled, recovered",
)


def column_of(record: dict[str, Any]) -> str:
    """Return where in the table a record belongs."""
    if record.get("steps"):
        return f"{record['way']}, recovered"
    if record["way"] == "shared":
        return "shared, random tokens" if record["data"] == "random" else "shared, text"
    return str(record["way"])


def table(name: str, done: list[dict[str, Any]]) -> None:
    """Print a model's figures: the mean over seeds, with half their range; of rivals that recover, the best rate."""
    found: dict[tuple[bool, float, str], list[float]] = defaultdict(list)
    for record in done:
        if record["way"] != "dense":
            found[record["values"], record["share"], column_of(record)].append(record["perplexity"])
    print(f"{name}, dense {next(each for each in done if each['way'] == 'dense')['perplexity']:.2f}\n")
    print("| | " + " | ".join(COLUMNS) + " |\n" + "|---" * (1 + len(COLUMNS)) + "|")
    for values, share in product((False, True), SHARES):
        cells = []
        for column in COLUMNS:
            figures = found[values, share, column]
            if column.endswith("recovered"):
                figures = sorted(figures)[:1]
            spread = f" ± {(max(figures) - min(figures)) / 2:.2f}" if len(figures) > 1 else ""
            cells.append(f"{mean(figures):.2f}{spread}" if figures else "–")
        print(f"| {'keys and values' if values else 'keys'} {share} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--models", type=Path, nargs="+", required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--recover", type=int, default=40)
    parser.add_argument("--records", type=Path, default=Path(__file__).parent / "records" / "rotary.jsonl")
    given = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for folder in given.models:
        bench = Bench(folder, given.data_dir, given.records)
        bench.run(given.seeds, given.recover)
        table(bench.name, [each for each in bench.done if each["model"] == bench.name])


if __name__ == "__main__":
    main()
