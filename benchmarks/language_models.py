"""Perplexity of small language models, narrowed in ways that cost different parts of them, and of their rivals.

    collab-run llama-ptb.yaml output=LLAMA data_dir=DIR
    collab-run modernbert-ptb.yaml output=MODERNBERT data_dir=DIR
    python benchmarks/language_models.py cache --data-dir DIR --models LLAMA/tuned/model MODERNBERT/tuned/model
    python benchmarks/language_models.py blocks --data-dir DIR --models LLAMA/tuned/model
    python benchmarks/language_models.py pretrained --data-dir DIR --models SMOLLM2 --rows "shared dff=768"

The first two measure on the validation text of the Penn Treebank.

cache: shared rotary heads and their rivals. Perplexity of every token, or of masked ones (the same for all). Keys, or
keys and values, at 3/4, 1/2 and 1/4 of their width, each calibrated on 128 blocks of random tokens and of training
text, for every seed:

- shared: ours; `equal` is the same, with equally many channels for each frequency;
- dropped: a layer keeps its strongest pairs of channels over all heads and frequencies, so that heads differ in
  width; dropped alike: equally many in each head;
- pooled: heads of keys, and of values, are averaged in groups, as grouped-query attention is made from a model
  without: at a half and a quarter only.

A singular value decomposition of each head's scores is no rival here, because it does not commute with the rotation;
for each head's values it is, and narrows them beside dropped pairs.

blocks: blocks keep 3/4, 1/2 and 1/3 of their neurons, alone or with half of the values. They are calibrated on 512
chunks of 64 tokens: of the training texts, random, or written by the model itself. Perplexity is that of the first
1,000 chunks of the validation text, or of its masked words.

pretrained: a model as it was published (`models.py` makes the folder SMOLLM2), with the widths or the layers of each
row, as "shared dff=768 dv=96" or "shared layers=24", calibrated on 64 stretches of 256 tokens of the training text
(text), on what the library takes by itself (default), or on texts that the model writes (generated). Perplexity of
10,240 tokens of held-out text in stretches of 512, of the Penn Treebank or of the news in RTE (`--task rte`), and
with `--prompts` how the model goes on. With "distilled" in a row the conversion is then trained towards the dense
model for an epoch on 128 stretches of the training text, four in a step. Rivals: "wanda dff=768" and "random dff=768"
choose neurons otherwise and are refitted as ours is; "dropped share=0.5", "dropped alike share=0.5" and "pooled
share=0.33" are those of `cache`, for keys, and with "values" at the end for values too.
"""

import argparse
import copy
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any, Literal
from unittest.mock import patch

import pandas as pd
import torch
from collab_compress_glue_runs.metrics import token_losses
from collab_compress_glue_runs.tasks import encode_language_model, encode_masked_language_model, load_task
from datasets import Dataset
from feed_forward_rivals import chosen_by
from rivals import Batches, dropped, pooled
from speed import parse_row
from timing import make_parser, measure_new, read_records
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    PreTrainedModel,
    TrainingArguments,
)

from collab_compress import Compression, Solver, compress
from collab_compress.calibration import Batch, calibration_batches
from collab_compress.factorization import rotary
from collab_compress.training import DistillationTrainer

LENGTH, BATCH, BLOCKS = 64, 16, 128
PROMPTS = (
    "The capital of France is",
    "Water boils when",
    "To make an omelette, first",
    "The old man looked at the sea and",
    "A company that makes a loss every year",
)
CALIBRATIONS = ("text", "default", "generated")
SHARES = (0.75, 0.5, 0.25)
NEURONS = {"3/4": 3 / 4, "1/2": 1 / 2, "1/3": 1 / 3}
CALIBRATED, SCORED = 512, 1000  # chunks


def load(folder: Path) -> tuple[PreTrainedModel, Any, bool]:
    """Return a model, its tokenizer, and whether it fills in masked words."""
    masked = AutoConfig.from_pretrained(folder).model_type == "modernbert"
    model_class = AutoModelForMaskedLM if masked else AutoModelForCausalLM
    model = model_class.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder), masked


def perplexity(model: PreTrainedModel, batches: Iterable[Batch], masked: bool = False) -> float:
    """Return the perplexity of all labels; without labels, of all tokens but the first of each row."""
    total = torch.zeros(2, dtype=torch.double)
    for batch in batches:
        tokens = batch["input_ids"]
        with torch.no_grad():
            logits = model(input_ids=tokens).logits
        total += token_losses(logits, batch.get("labels", tokens), shift=not masked).sum(0)
    return float((total[0] / total[1]).exp())


def batches_of(rows: Dataset) -> Iterator[Batch]:
    """Yield batches of encoded text; the last row, which may be shorter than the others, has its own."""
    last, tensors = len(rows) - 1, rows.with_format("torch")
    for start in (*range(0, last, 64), last):
        yield tensors[start : min(start + 64, last) if start < last else None]


def shared(
    dense: PreTrainedModel,
    share: float,
    values: bool,
    batches: Batches | Literal["synthetic"],
    tokenizer: Any = None,
    seed: int = 0,
) -> PreTrainedModel:
    """Convert a copy; random tokens need the tokenizer and the seed."""
    model, width = copy.deepcopy(dense), int(share * dense.config.hidden_size)
    compression = Compression(dk=width, dv=width if values else None, solver=Solver(seed=seed))
    compress(model, compression, calibration=batches, tokenizer=tokenizer)
    return model


def equal(dense: PreTrainedModel, share: float, values: bool, batches: Batches) -> PreTrainedModel:
    """Convert a copy with equally many channels for each frequency, which the library does not offer."""
    with patch.object(rotary, "allocate_channels", equally):
        return shared(dense, share, values, batches)


def equally(errors: Sequence[Tensor], channels: int) -> list[int]:
    """Divide channels among frequencies, some of which may have one tensor of errors together."""
    heads = min(map(len, errors)) - 1
    frequencies = [index for index, row in enumerate(errors) for _ in range((len(row) - 1) // heads)]
    counts = Counter(frequencies[channel % len(frequencies)] for channel in range(channels))
    return [counts[index] for index in range(len(errors))]


class Bench:
    """One model in a folder, the folder of the data sets, and the file of cases that are measured already."""

    def __init__(self, folder: Path, data: Path, records: Path) -> None:
        self.dense, self.tokenizer, self.masked = load(folder)
        self.name, self.records, tokenizer = self.dense.config.model_type, records, self.tokenizer
        text = load_task("ptb", data, splits=["train", "validation"])
        self.rows = (
            encode_masked_language_model(text["validation"], tokenizer, length=LENGTH, seed=0)
            if self.masked
            else encode_language_model(text["validation"], tokenizer, length=LENGTH)
        )
        self.train = torch.tensor(encode_language_model(text["train"], tokenizer, length=LENGTH)["input_ids"][:-1])

    def texts(self, seed: int) -> Batches:
        """Draw blocks of training text."""
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(seed))
        return [{"input_ids": ids} for ids in self.train[order[:BLOCKS]].split(BATCH)]

    def measure(self, make: Callable[[], PreTrainedModel], **case: Any) -> None:
        """Measure a case that is not in the records, and append it."""

        def figures(_: dict[str, Any]) -> dict[str, Any]:
            return {"perplexity": round(perplexity(make(), batches_of(self.rows), self.masked), 2)}

        measure_new(self.records, [{"model": self.name, **case}], figures)

    def run(self, seeds: list[int]) -> None:
        """Measure all cases, seed after seed."""
        self.measure(lambda: self.dense, way="dense")
        for seed, values, share in product(seeds, (False, True), SHARES):
            self.calibrated({"share": share, "values": values}, seed)

    def calibrated(self, size: dict[str, Any], seed: int) -> None:
        """Measure conversions of one size."""
        case = {**size, "seed": seed}
        text, tokens = self.texts(seed), {"batches": "synthetic", "tokenizer": self.tokenizer, "seed": seed}
        self.measure(lambda: shared(self.dense, **size, batches=text), way="shared", data="text", **case)
        self.measure(lambda: shared(self.dense, **size, **tokens), way="shared", data="random", **case)
        if not size["values"]:
            self.measure(lambda: equal(self.dense, **size, batches=text), way="equal", data="text", **case)
            alike = partial(dropped, self.dense, **size, batches=text, alike=True)
            self.measure(alike, way="dropped alike", data="text", **case)
        self.measure(lambda: dropped(self.dense, **size, batches=text), way="dropped", data="text", **case)
        if self.pools(size["share"]):
            self.measure(lambda: pooled(self.dense, **size), way="pooled", **size)

    def pools(self, share: float) -> bool:
        """Return whether heads can be pooled in equal groups, in a family with grouped queries."""
        return not self.masked and self.dense.config.num_attention_heads % (share * 8) == 0


COLUMNS = ("shared, random tokens", "shared, text", "equal", "dropped", "dropped alike", "pooled")


def column_of(record: dict[str, Any]) -> str:
    """Return the column of the table to which a record belongs."""
    if record["way"] == "shared":
        return "shared, random tokens" if record["data"] == "random" else "shared, text"
    return str(record["way"])


def print_table(name: str, done: list[dict[str, Any]]) -> None:
    """Print a model's figures: means over seeds with half of their range."""
    perplexities: dict[tuple[bool, float, str], list[float]] = defaultdict(list)
    for record in done:
        if record["way"] != "dense":
            perplexities[record["values"], record["share"], column_of(record)].append(record["perplexity"])
    dense = next(record["perplexity"] for record in done if record["way"] == "dense")
    print(f"{name}, dense {dense:.2f}\n")
    print("| | " + " | ".join(COLUMNS) + " |\n" + "|---" * (1 + len(COLUMNS)) + "|")
    for values, share in product((False, True), SHARES):
        cells = []
        for column in COLUMNS:
            figures = perplexities[values, share, column]
            spread = f" ± {(max(figures) - min(figures)) / 2:.2f}" if len(figures) > 1 else ""
            cells.append(f"{mean(figures):.2f}{spread}" if figures else "–")
        print(f"| {'keys and values' if values else 'keys'} {share} | " + " | ".join(cells) + " |")


def chunks(data: Path, split: str, tokenizer: Any, count: int) -> list[Batch]:
    """Return the first chunks of the concatenated texts of a split."""
    texts = load_task("ptb", data, splits=[split])[split]["text"]
    tokens = torch.cat([torch.tensor(ids) for ids in tokenizer(list(texts))["input_ids"]])
    rows = tokens[: count * LENGTH].view(-1, LENGTH)
    return [{"input_ids": ids} for ids in rows.split(BATCH)]


def blocks(folder: Path, args: argparse.Namespace) -> None:
    """Measure one model with narrower feed-forward blocks and values."""
    dense, tokenizer, masked = load(folder)
    if masked:
        texts = load_task("ptb", args.data_dir, splits=["validation"])["validation"]
        rows = encode_masked_language_model(texts, tokenizer, length=LENGTH, seed=0)
        scored = list(batches_of(rows))
    else:
        scored = chunks(args.data_dir, "validation", tokenizer, SCORED)
    score = partial(perplexity, batches=scored, masked=masked)
    options: dict[str, int] = {"sequences": CALIBRATED, "length": LENGTH}
    data = {
        "texts": chunks(args.data_dir, "train", tokenizer, CALIBRATED),
        "random tokens": calibration_batches("synthetic", dense, tokenizer, **options),
        "its own texts": calibration_batches("generated", dense, tokenizer, **options),
    }
    print(f"dense: {score(dense):.2f}")
    config = dense.config
    neurons = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * config.hidden_size
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    half = heads * (config.hidden_size // config.num_attention_heads) // 2
    results = []
    for (kind, batches), (name, share), dv in product(data.items(), NEURONS.items(), (None, half)):
        model = copy.deepcopy(dense)
        compress(model, Compression(dff=int(share * neurons), dv=dv), batches)
        row = {"calibrated on": kind, "neurons": name, "values": "all" if dv is None else "1/2"}
        results.append({**row, "perplexity": score(model)})
        print(results[-1], flush=True)
    table = pd.DataFrame(results).pivot(index="calibrated on", columns=["values", "neurons"], values="perplexity")
    print(table.round(2).to_string())


def cache(folder: Path, args: argparse.Namespace) -> None:
    """Measure one rotary model with smaller caches."""
    bench = Bench(folder, args.data_dir, args.records)
    bench.run(args.seeds)
    print_table(bench.name, [record for record in read_records(args.records) if record["model"] == bench.name])


def pretrained(folder: Path, args: argparse.Namespace) -> None:
    """Measure a published model with narrower or fewer layers, and append the rows to the records."""
    dense, tokenizer, _ = load(folder)
    scored_split = "test" if args.task == "ptb" else "validation"
    texts = load_task(args.task, args.data_dir, splits=["train", scored_split])

    def stretches(split: str, count: int, length: int) -> list[Batch]:
        ids = tokenizer("\n".join(texts[split]["text"][: 2 * count * length // 10]))["input_ids"][: count * length]
        return [{"input_ids": rows} for rows in torch.tensor(ids).view(count, length).split(8)]

    test = stretches(scored_split, 20, 512)
    data: dict[str, Any] = {"text": stretches("train", 64, 256), "default": "auto", "generated": "generated"}

    def measure(case: dict[str, Any]) -> dict[str, Any]:
        model = smaller(dense, case["row"], data[case["calibration"]], tokenizer)
        if "distilled" in case["row"]:
            distil_(model, dense, stretches("train", 128, 256))
        for prompt in PROMPTS if args.prompts else ():
            ids = tokenizer(prompt, return_tensors="pt")
            print("   ", repr(tokenizer.decode(model.generate(**ids, max_new_tokens=24, do_sample=False)[0])))
        return {"perplexity": round(perplexity(model, test), 2)}

    of_model = {"model": folder.name, "task": args.task}
    cases = [{**of_model, "row": row, "calibration": kind} for row, kind in product(args.rows, args.calibrations)]
    measure_new(args.records, cases, measure)


def smaller(dense: PreTrainedModel, row: str, batches: Any, tokenizer: Any) -> PreTrainedModel:
    """Return a copy of a model, made smaller as a row says."""
    if row == "dense":
        return dense
    kind, sizes = parse_row(row)
    if kind == "dropped":
        return dropped(dense, sizes["share"], "values" in row, batches, alike="alike" in row)
    if kind == "pooled":
        return pooled(dense, sizes["share"], "values" in row)
    model = copy.deepcopy(dense)
    with nullcontext() if kind == "shared" else chosen_by(kind):
        compress(model, Compression(**sizes), batches, tokenizer)
    return model


def distil_(model: PreTrainedModel, dense: PreTrainedModel, batches: list[Batch]) -> None:
    """Train a model for an epoch towards the dense one, in place."""
    rows = [
        {"input_ids": row, "attention_mask": torch.ones_like(row)} for batch in batches for row in batch["input_ids"]
    ]
    quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, num_train_epochs=1, per_device_train_batch_size=4, warmup_steps=0.06, use_cpu=True, **quiet
        )
        DistillationTrainer(model, arguments, teacher=dense, train_dataset=rows).train()
    model.eval()


def main() -> None:
    parser = make_parser(__doc__, ["cache", "blocks", "pretrained"])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--models", type=Path, nargs="+", required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="cache")
    parser.add_argument("--rows", nargs="+", default=["dense"], help="pretrained: widths or layers")
    parser.add_argument("--task", choices=["ptb", "rte"], default="ptb", help="pretrained: whose texts")
    parser.add_argument("--calibrations", nargs="+", choices=CALIBRATIONS, default=["text"], help="pretrained")
    parser.add_argument("--prompts", action="store_true", help="pretrained: print how the model goes on")
    parser.add_argument("--records", type=Path, default=Path(__file__).parent / "records" / "rotary.jsonl")
    args = parser.parse_args()
    for folder in args.models:
        {"cache": cache, "blocks": blocks, "pretrained": pretrained}[args.command](folder, args)


if __name__ == "__main__":
    main()
