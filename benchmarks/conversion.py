"""Whole conversions, from the checkpoint's folder to the converted one, of this revision and, in turns, of another.

Each conversion runs in a process of its own: load, `compress`, `save_pretrained`. Both revisions get the same model
and the same calibration batches, 8,192 tokens. BERT-base's and BERT-large's shapes have random weights but for
queries and keys, whose heads have the singular values of MiniLM's. Printed are seconds from load to save without
imports, processor seconds of the same, the peak of the resident size beyond that after imports (Linux), and the mean
score error of all modules; and ratios to the other revision. On a GPU memory is that which is allocated there;
`--one-by-one` compares with this revision where no two modules are solved at a time.

    python benchmarks/conversion.py
    python benchmarks/conversion.py --shapes minilm base --rounds 3 --against PATH_OF_OTHER_CHECKOUT
    python benchmarks/conversion.py --options '{"effort": "fast"}'
    python benchmarks/conversion.py --device cuda --one-by-one --rounds 3
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from factorization import minilm, minilm_heads, resident, spectrum_heads

HERE = Path(__file__).resolve().parents[1]
DK = {"minilm": 128, "base": 384, "large": 384}
SHAPES = {"base": (12, 768, 12), "large": (24, 1024, 16)}


def prepare(shape: str, folder: Path, layers: int | None) -> None:
    """Write a model and its calibration batches into a folder."""
    torch.manual_seed(0)
    depth, width, heads = SHAPES.get(shape, (0, 0, 0))
    model = minilm() if shape == "minilm" else shaped(layers or depth, width, heads)
    model.save_pretrained(folder)
    ids = torch.randint(1000, 30000, (128, 64), generator=torch.Generator().manual_seed(0))
    torch.save(
        [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in ids.split(16)], folder / "ids.pt"
    )


def shaped(layers: int, width: int, heads: int) -> Any:
    """A model whose queries and keys can be shared about as well as MiniLM's."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4 * width
    )
    model = BertModel(config)
    query, key = spectrum_heads(minilm_heads(), heads, width, width // heads)
    for layer in model.encoder.layer:
        for projection, parts in ((layer.attention.self.query, query), (layer.attention.self.key, key)):
            projection.weight.data.copy_(parts.transpose(1, 2).flatten(0, 1))
    return model


def convert(folder: Path, dk: int, options: dict[str, Any], device: str, at_once: str) -> None:
    """Convert once and print what it took; in a process of its own."""
    from transformers import AutoModel
    from transformers.utils.logging import disable_progress_bar

    from collab_compress import Compression, compress

    if at_once:
        from collab_compress.conversion import plan

        plan.AT_ONCE = int(at_once)
    disable_progress_bar()
    batches = torch.load(folder / "ids.pt")
    some = torch.eye(2, device=device, dtype=torch.float64)  # libraries take their time to begin
    torch.linalg.svd(torch.linalg.qr(some @ torch.linalg.cholesky(some)).R)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    begin, used = time.perf_counter(), time.process_time()
    model = AutoModel.from_pretrained(folder).to(device).eval()
    width = "dk" if "dk" in Compression.__dataclass_fields__ else "rank"  # its name in early revisions
    report = compress(model, Compression(**{width: dk}, **options), batches)
    with tempfile.TemporaryDirectory() as output:
        model.save_pretrained(output)
    seconds, used = time.perf_counter() - begin, time.process_time() - used
    errors = [module.data_error for module in report.modules]
    peak = torch.cuda.max_memory_allocated() if device.startswith("cuda") else resident("VmHWM") - before
    print(json.dumps({
        "seconds": seconds, "processor": used, "bytes": peak,
        "error": sum(errors) / len(errors), "errors": errors,
    }))  # fmt: skip


def measure(
    checkout: Path, folder: Path, dk: int, options: dict[str, Any], device: str, at_once: str = ""
) -> dict[str, Any]:
    """Run a conversion by one revision."""
    paths = os.pathsep.join([str(checkout), str(HERE / "benchmarks")])
    command = [sys.executable, __file__, "--child", str(folder), str(dk), json.dumps(options), device, at_once]
    environment = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment, cwd=folder)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def line(shape: str, name: str, runs: list[dict[str, Any]]) -> None:
    """Print the median of some runs."""
    seconds, processor, size, error = (
        median(run[key] for run in runs) for key in ("seconds", "processor", "bytes", "error")
    )
    print(
        f"{shape:7} {name:8} {seconds:7.1f} s  {processor:7.1f} s of processors  {size / 2**20:6,.0f} MiB  "
        f"mean score error {error:.5f}",
        flush=True,
    )


def main() -> None:
    """Convert each shape by each revision in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(DK), default=["minilm", "base"])
    parser.add_argument("--device", default="cpu")
    others = parser.add_mutually_exclusive_group()
    others.add_argument("--against", type=Path, help="another checkout of this repository")
    others.add_argument("--one-by-one", action="store_true", help="this revision, one module after another")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--layers", type=int, help="of base and large, in place of 12 and 24")
    parser.add_argument(
        "--options", type=json.loads, default={}, help="further fields of Compression, of this revision"
    )
    parser.add_argument("--json", type=Path, help="also write the records here")
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        folder, dk, options, device, at_once = arguments.child
        convert(Path(folder), int(dk), json.loads(options), device, at_once)
        return
    records = {}
    for shape in arguments.shapes:
        with tempfile.TemporaryDirectory() as folder:
            prepare(shape, Path(folder), arguments.layers)
            runs: dict[str, list[dict[str, Any]]] = {"this": [], "other": []}
            given = Path(folder), DK[shape]
            for _ in range(arguments.rounds):
                runs["this"].append(measure(HERE, *given, arguments.options, arguments.device))
                if arguments.against:
                    runs["other"].append(measure(arguments.against.resolve(), *given, {}, arguments.device))
                if arguments.one_by_one:
                    runs["other"].append(measure(HERE, *given, arguments.options, arguments.device, "1"))
        for name, found in runs.items():
            if found:
                line(shape, name, found)
        if runs["other"]:
            ratios = {
                key: median(b[key] / a[key] for a, b in zip(runs["this"], runs["other"], strict=True))
                for key in ("seconds", "processor", "bytes", "error")
            }
            print(
                f"{shape:7} other/this: time {ratios['seconds']:.2f}, processors {ratios['processor']:.2f}, "
                f"memory {ratios['bytes']:.2f}, error {ratios['error']:.4f}",
                flush=True,
            )
        records[shape] = runs
    if arguments.json:
        versions = {"torch": torch.__version__, "threads": torch.get_num_threads()}
        arguments.json.write_text(json.dumps({**versions, "shapes": records}, indent=2) + "\n")


if __name__ == "__main__":
    main()
