"""Fine-tune a classifier with methods that act on its heads, on a task of GLUE or on your own files: to copy from.

    python glue_runs/run_glue.py --model bert-base --task mrpc --drophead 0.2 --output_dir mrpc
    python glue_runs/run_glue.py --model minilm --train_file train.csv --validation_file dev.csv --output_dir out
    python glue_runs/run_glue.py --model mrpc --task mrpc --do_predict --output_dir test

It trains and evaluates; with any of --do_train, --do_eval and --do_predict it does only those. --do_predict writes a
file for the leaderboard of GLUE. With --dk, --dv, --dff or --keep the model is converted after its fine-tuning, then
evaluated again; predictions are the converted model's. All TrainingArguments of Transformers are options too. A head
of the checkpoint with as many classes is where training starts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite, isnan
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from collab_compress_cli.pretrained import find_directory
from collab_compress_glue_runs.metrics import load_metric
from collab_compress_glue_runs.tasks import TASKS, encode_classification, load_task
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value, load_dataset
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    EvalPrediction,
    HfArgumentParser,
    TrainingArguments,
    set_seed,
)

from collab_compress import Compression, compress
from collab_compress.calibration.files import read_table
from collab_compress.errors import DataError
from collab_compress.training import AlphasOptions, DropHeadOptions, HeadTrainer, HeadTraining, PenaltyOptions


@dataclass
class DataArguments:
    model: str = field(metadata={"help": "minilm, a model directory, or a name on the hub"})
    task: str | None = field(default=None, metadata={"help": "task of GLUE, or trec; or give files or a data set"})
    data_dir: str | None = field(default=None, metadata={"help": "folder of the task's TSV files (default: the hub)"})
    train_file: str | None = field(default=None, metadata={"help": ".csv, .tsv or .jsonl"})
    validation_file: str | None = field(default=None, metadata={"help": "file to evaluate on"})
    test_file: str | None = field(default=None, metadata={"help": "file to predict; labels may be missing"})
    dataset: str | None = field(default=None, metadata={"help": "data set on the hub, in place of files"})
    text_columns: list[str] = field(
        default_factory=lambda: ["text"], metadata={"help": "one column, or two of pairs"}
    )
    label_column: str = field(default="label", metadata={"help": "classes, or scores if they are decimal numbers"})
    max_length: int = field(default=128, metadata={"help": "tokens of a row; longer ones are cut"})
    max_train_samples: int | None = field(default=None, metadata={"help": "train on this many rows"})


@dataclass
class HeadArguments:
    drophead: float = field(default=0.0, metadata={"help": "probability of dropping a head"})
    penalty: str | None = field(default=None, metadata={"help": "loss over heads: hsic, orthogonality, agreement, …"})
    penalty_weight: float | None = field(default=None, metadata={"help": "its weight (default: the paper's)"})
    schedule: str = field(default="constant", metadata={"help": "of drophead and penalty: scheduled, curriculum, …"})
    alphas: bool = field(default=False, metadata={"help": "train matrices that mix the outputs of heads"})
    dk: int | None = field(default=None, metadata={"help": "convert: width of queries and keys, all heads together"})
    dv: int | None = field(default=None, metadata={"help": "convert: width of values, all heads together"})
    dff: int | None = field(default=None, metadata={"help": "convert: width of feed-forward blocks"})
    keep: float | None = field(default=None, metadata={"help": "convert: share of operations, in place of widths"})

    def training(self) -> HeadTraining:
        drophead, penalty = DropHeadOptions, PenaltyOptions
        return HeadTraining(
            drophead=(drophead(p=self.drophead, schedule=self.schedule),) if self.drophead else (),
            penalties=(penalty(self.penalty, self.penalty_weight, self.schedule),) if self.penalty else (),
            alphas=AlphasOptions() if self.alphas else None,
        )

    def compression(self) -> Compression | None:
        widths = {"dk": self.dk, "dv": self.dv, "dff": self.dff, "keep": self.keep}
        return Compression(**widths) if any(widths.values()) else None


Rows = list[tuple[str, Mapping[str, Any]]]
"""Where each row is, for messages, and its columns."""


def load_texts(data: DataArguments, model_labels: list[str]) -> tuple[DatasetDict, list[str]]:
    """Return splits with the columns text, text_pair (of pairs) and label, and the classes; none for scores."""
    files = {"train": data.train_file, "validation": data.validation_file, "test": data.test_file}
    if [bool(data.task), bool(data.dataset), any(files.values())].count(True) != 1:
        raise DataError("give one of --task, --dataset and files, such as --train_file")
    if data.task is not None:
        return load_task(data.task, data.data_dir), list(TASKS[data.task].labels)
    if data.dataset is not None:
        tables = {split: list(read_data_set(rows, split)) for split, rows in load_dataset(data.dataset).items()}
    else:
        tables = {
            split: [(f"{path}, line {line}", row) for line, row in read_table(path)]
            for split, path in files.items()
            if path
        }
    for split, rows in tables.items():
        check_rows(rows, split, data)
    labels = [row.get(data.label_column) for _, row in next(iter(tables.values()))]
    labels = [label for label in labels if not is_missing(label)]
    scores = any(map(is_decimal, labels)) if labels else len(model_labels) == 1
    classes = [] if scores else sorted({str(label) for label in labels})
    if not scores and ("train" not in tables or set(classes) == set(model_labels)):
        classes = model_labels  # in the order of the model's outputs
    numbers = {name: number for number, name in enumerate(classes)}
    names = ("text", "text_pair")[: len(data.text_columns)]
    features = Features({**dict.fromkeys(names, Value("string")), "label": Value("float64" if scores else "int64")})
    splits = DatasetDict()
    for split, rows in tables.items():
        columns = {
            name: [row[column] for _, row in rows] for name, column in zip(names, data.text_columns, strict=True)
        }
        columns["label"] = [
            -1 if is_missing(row.get(data.label_column)) else as_number(place, row[data.label_column], numbers)
            for place, row in rows
        ]
        splits[split] = Dataset.from_dict(columns, features)
    return splits, classes


def read_data_set(rows: Dataset, split: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    classes = {name: feature.names for name, feature in rows.features.items() if isinstance(feature, ClassLabel)}
    for number, row in enumerate(rows):
        labels = {
            name: names[row[name]] if row[name] is not None and row[name] >= 0 else None
            for name, names in classes.items()
        }
        yield f"row {number} of {split}", {**row, **labels}


def check_rows(rows: Rows, split: str, data: DataArguments) -> None:
    """Refuse a split without the columns, a row without a text, and without a label unless it is to be predicted."""
    if not rows:
        raise DataError(f"{split} has no rows")
    needed = [*data.text_columns, *([] if split == "test" else [data.label_column])]
    present = dict.fromkeys(name for _, row in rows for name in row)
    if missing := [name for name in needed if name not in present]:
        raise DataError(f"{split} has no column {missing[0]!r}; it has {', '.join(present)}; see --text_columns")
    if not 1 <= len(data.text_columns) <= 2:
        raise DataError(
            f"--text_columns names {len(data.text_columns)} columns; expected one of texts, or two of pairs"
        )
    for place, row in rows:
        for name in data.text_columns:
            if not isinstance(row.get(name), str):
                got = "nothing" if row.get(name) is None else f"a {type(row[name]).__name__}"
                raise DataError(f"{place}: {name} is {got}; expected a text")
        if split != "test" and is_missing(row.get(data.label_column)):
            raise DataError(f"{place}: {data.label_column} is missing; give it a label, or leave the row out")


def is_missing(label: Any) -> bool:
    return label is None or label == "" or (isinstance(label, float) and isnan(label))


def is_number(label: Any) -> bool:
    try:
        return not isinstance(label, bool) and isfinite(float(label))
    except (TypeError, ValueError):
        return False


def is_decimal(label: Any) -> bool:
    return is_number(label) and not str(label).strip("+-").isdecimal()


def as_number(place: str, label: Any, numbers: Mapping[str, int]) -> float | int:
    """Return the number of a class, or a score where there are no classes."""
    if numbers and str(label) not in numbers:
        raise DataError(f"{place} has the class {str(label)!r}; expected {', '.join(numbers)}")
    if not numbers and not is_number(label):
        raise DataError(
            f"{place} has the label {label!r} among decimal numbers; expected scores alone, or classes alone"
        )
    return numbers[str(label)] if numbers else float(label)


def main() -> None:
    parser = HfArgumentParser((TrainingArguments, DataArguments, HeadArguments), description=__doc__)
    args, data, heads = parser.parse_args_into_dataclasses()
    if not (args.do_train or args.do_eval or args.do_predict):
        args.do_train = args.do_eval = True
    set_seed(args.seed)
    source = find_directory(data.model)
    tokenizer = AutoTokenizer.from_pretrained(source)
    model_labels = [label for _, label in sorted(AutoConfig.from_pretrained(source).id2label.items())]
    texts, classes = load_texts(data, model_labels)
    if data.max_train_samples is not None and "train" in texts:
        texts["train"] = texts["train"].select(range(min(data.max_train_samples, len(texts["train"]))))
    task = TASKS[data.task] if data.task else None
    if task is not None and not args.do_train:
        task.check_classes(model_labels, data.model)
    named = {"id2label": dict(enumerate(classes)), "label2id": {name: number for number, name in enumerate(classes)}}
    labels = {**named, "problem_type": "single_label_classification"} if classes else {"num_labels": 1}
    model = AutoModelForSequenceClassification.from_pretrained(source, ignore_mismatched_sizes=True, **labels)
    metric = load_metric(task.metric if task else "accuracy" if classes else "correlation")

    def predicted(logits: np.ndarray) -> np.ndarray:
        return logits.argmax(-1) if classes else logits.squeeze(-1)

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        return metric.compute(predictions=predicted(prediction.predictions), references=prediction.label_ids)

    rows = encode_classification(texts, tokenizer, max_length=data.max_length)
    validation = [split for split in rows if split.startswith("validation")]
    trainer = HeadTrainer(
        model,
        args,
        train_dataset=rows.get("train"),
        eval_dataset=rows[validation[0]] if validation else None,
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=compute_metrics,
        head_training=heads.training(),
    )

    def evaluate(suffix: str = "") -> None:
        for split in validation if args.do_eval else ():
            metrics = trainer.evaluate(rows[split], metric_key_prefix=f"{split}{suffix}")
            trainer.log_metrics(f"{split}{suffix}", metrics)
            trainer.save_metrics(f"{split}{suffix}", metrics)

    if args.do_train:
        result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
        trainer.save_model()
        trainer.save_metrics("train", result.metrics)
    evaluate()
    if compression := heads.compression():
        calibration = "auto"
        if "train" in texts:
            columns = [texts["train"][name] for name in ("text", "text_pair") if name in texts["train"].column_names]
            calibration = list(zip(*columns, strict=True)) if len(columns) == 2 else list(columns[0])
        print(compress(model, compression, calibration, tokenizer))
        trainer.save_model(f"{args.output_dir}/converted")
        evaluate("_converted")
    for split in rows if args.do_predict else ():
        if split.startswith("test"):
            values = predicted(trainer.predict(rows[split]).predictions)
            if classes and (task is None or not task.layouts[0].numbered):  # else the leaderboard takes numbers
                values = [classes[value] for value in values]
            name = task.folders[0] if task else "test"
            ending = {"test_matched": "-m", "test_mismatched": "-mm"}.get(split, "")
            table = pd.DataFrame({"prediction": values}).rename_axis("index")
            if trainer.is_world_process_zero():
                table.to_csv(Path(args.output_dir, f"{name}{ending}.tsv"), sep="\t")


if __name__ == "__main__":
    main()
