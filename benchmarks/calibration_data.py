"""What to calibrate on: random tokens, the task's own texts as the model reads them, or both.

    python benchmarks/calibration_data.py run --data-dir DIR [--classifiers FOLDER] [--seeds 0 1 2] [--widths 192+252]
    python benchmarks/calibration_data.py table

DIR holds GLUE tasks in their original TSV layout, FOLDER classifiers as `gains.py` takes them. Widths are dk+dv;
128+0 leaves values alone. Every seed draws its own tokens and its own 512 rows of the training set, whose labels are
not read. Nothing is retrained. What the records hold already is not measured again.

* random: 8,192 random tokens, in sequences of 64 as is the default;
* varied: as many, in sequences of 8 to 128, half of them pairs;
* text: the rows, pairs where the task has pairs;
* both: the rows, and as many random tokens, but 8,192 at most.
"""

import argparse
import copy
import math
from pathlib import Path
from typing import Any

import torch
from gains import Classifier, Embeddings, quality_table, read, write
from transformers.utils.logging import disable_progress_bar

from collab_compress import Compression, compress
from collab_compress.calibration import Batch, calibration_batches
from collab_compress.tasks import load_task

RECORDS = Path(__file__).parent / "records" / "calibration.jsonl"
KINDS = ("random", "varied", "text", "both")
WIDTHS = ("192+252", "192+192", "128+0", "64+0")
ROWS, TOKENS = 512, 8192


def texts_of(task: Any, seed: int) -> list[Any]:
    """Rows of the training set; both sentences of each by themselves for embeddings."""
    name = "stsb" if isinstance(task, Embeddings) else task.task
    rows = load_task(name, task.data, splits=["train"])["train"]
    chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:ROWS].tolist()
    columns = [list(rows.select(chosen)[name]) for name in ("text", "text_pair") if name in rows.column_names]
    if isinstance(task, Embeddings):
        return [text for column in columns for text in column]
    return columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))


def count(batches: list[Batch]) -> int:
    return sum(int(batch["attention_mask"].sum()) for batch in batches)


def varied(model: Any, tokenizer: Any, seed: int) -> list[Batch]:
    """Random tokens of BERT in sequences of log-uniform lengths from 8 to 128, half of them pairs."""
    generator = torch.Generator().manual_seed(seed)
    special = set(tokenizer.all_special_ids)
    ordinary = torch.tensor([token for token in range(len(tokenizer)) if token not in special])
    first, last = tokenizer.cls_token_id, tokenizer.sep_token_id
    sequences: list[dict[str, list[int]]] = []
    while sum(len(each["input_ids"]) for each in sequences) < TOKENS:
        length = int(math.exp(math.log(8) + float(torch.rand((), generator=generator)) * math.log(16)))
        pair = bool(torch.rand((), generator=generator) < 0.5)
        drawn = ordinary[torch.randint(len(ordinary), (length - 2 - pair,), generator=generator)].tolist()
        middle = len(drawn) // 2 if pair else len(drawn)
        ids = [first, *drawn[:middle], last]
        ids += [*drawn[middle:], last] if pair else []
        types = [int(place > middle + 1) for place in range(length)]
        sequences.append({"input_ids": ids, "attention_mask": [1] * length, "token_type_ids": types})
    sequences.sort(key=lambda each: len(each["input_ids"]))
    parts = (sequences[start : start + 16] for start in range(0, len(sequences), 16))
    return [dict(tokenizer.pad(part, return_tensors="pt")) for part in parts]


def drawn(kind: str, task: Any, model: Any, tokenizer: Any, seed: int) -> list[Batch]:
    """Draw batches, in random order."""
    if kind == "random":
        return calibration_batches("synthetic", model, tokenizer, seed=seed)
    found = varied(model, tokenizer, seed) if kind == "varied" else []
    if kind in ("text", "both"):
        found = calibration_batches(texts_of(task, seed), model, tokenizer, length=128, seed=seed)
    if kind == "both":
        sequences = math.ceil(min(count(found), TOKENS) / 64)
        found = found + calibration_batches("synthetic", model, tokenizer, sequences=sequences, seed=seed)
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(seed)).tolist()
    return [found[place] for place in order]


def run(args: argparse.Namespace) -> None:
    places = sorted(args.classifiers.glob("*-*/tuned/model")) if args.classifiers else []
    names = [(path, *path.parents[1].name.rpartition("-")[::2]) for path in places]
    tasks: list[Any] = [Embeddings(args.data_dir)]
    tasks += [Classifier(args.data_dir, task, int(seed), path) for path, task, seed in names]
    done = {(each["task"], each["tuned"], each["row"], each["seed"]) for each in read(args.records)}
    for seed in args.seeds:
        for task in tasks:
            dense, tokenizer = task.load()
            for name in ("dense", *(f"{width} {kind}" for width in args.widths for kind in KINDS)):
                if (task.task, task.tuned_seed, name, seed) in done:
                    continue
                model = copy.deepcopy(dense)
                if name != "dense":
                    width, kind = name.split()
                    dk, dv = (int(each) or None for each in width.split("+"))
                    batches = drawn(kind, task, dense, tokenizer, seed)
                    compress(model, Compression(dk=dk, dv=dv, seed=seed), batches, tokenizer)
                record = {"task": task.task, "tuned": task.tuned_seed, "row": name, "seed": seed}
                write(args.records, {**record, "score": task.score(model, tokenizer)})
                print(*quality_table([each for each in read(args.records) if each["task"] == task.task],
                                     [name])[-1:], seed, flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--classifiers", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--widths", nargs="+", default=list(WIDTHS))
    parser.add_argument("--records", type=Path, default=RECORDS)
    args = parser.parse_args()
    disable_progress_bar()
    if args.what == "run":
        run(args)
    else:
        print(*quality_table(read(args.records), ["dense", *(f"{w} {k}" for w in WIDTHS for k in KINDS)]), sep="\n")


if __name__ == "__main__":
    main()
