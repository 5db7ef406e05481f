"""A training step of MiniLM, converted over dense: time in turns, and the memory that training takes.

A step is forward, backward and AdamW, with dropout, under a loss that is the mean square of the last hidden state.
Time is the median (and quartiles) of converted/dense, processor time of one thread unless said otherwise. Memory is
the peak of the resident size over three steps of a fresh process, beyond what it had before the model was loaded
(Linux): weights, gradients, AdamW's two moments and what is kept for backward.

    python benchmarks/training.py
    python benchmarks/training.py --threads 2 --wall --cells 128x8
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
from factorization import resident
from latency import dense_model, inputs, over_dense, paired_seconds, shown
from transformers import AutoModel
from transformers.utils.logging import disable_progress_bar

from collab_compress import Compression, compress

ROWS = {
    "shared dk=128": Compression(dk=128, sweeps=1),
    "shared dk=64": Compression(dk=64, sweeps=1),
    "shared dk=128 dv=192": Compression(dk=128, dv=192, sweeps=1),
    "per-head dk=192 dv=192": Compression(dk=192, dv=192, form="per-head", equal_heads=True),
}
CELLS = ("128x8", "512x2")


def step_of(model: Any) -> Callable[..., None]:
    """Make a function that trains on one batch."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def step(**batch: torch.Tensor) -> None:
        model(**batch).last_hidden_state.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def built(row: str) -> Any:
    model = dense_model()
    if row in ROWS:
        compress(model, ROWS[row], calibration=None)
    return model


def memory(row: str, cell: str, threads: int) -> float:
    """Peak of a fresh process that trains a model it has loaded, in MiB."""
    with tempfile.TemporaryDirectory() as folder:
        built(row).save_pretrained(folder)
        command = [sys.executable, __file__, "--child", folder, cell, "--threads", str(threads)]
        return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


def child(folder: str, cell: str) -> None:
    """Print the peak of three steps of one model."""
    torch.ones(2, 2) @ torch.ones(2, 2)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    step = step_of(AutoModel.from_pretrained(folder, attn_implementation="sdpa"))
    for _ in range(3):
        step(**batch_of(cell))
    print((resident("VmHWM") - before) / 2**20)


def batch_of(cell: str) -> dict[str, torch.Tensor]:
    length, batch = map(int, cell.split("x"))
    return inputs(batch, length, padded=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--cells", nargs="+", default=list(CELLS), help="tokens x sequences")
    parser.add_argument("--seconds", type=float, default=30, help="for each cell, all rows together")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--wall", action="store_true", help="wall time, for several threads on a quiet machine")
    parser.add_argument("--json", type=Path, help="also write the rows there")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    disable_progress_bar()
    if arguments.child:
        child(*arguments.child)
        return
    steps = {row: step_of(built(row)) for row in ("dense", *arguments.rows)}
    steps = {"dense": steps["dense"], "dense again": step_of(dense_model())} | steps
    clock = perf_counter if arguments.wall else process_time
    print(f"{arguments.threads} threads; a training step, converted / dense, median [quartiles]; below 1 is faster")
    rows = []
    for cell in arguments.cells:
        times = paired_seconds(steps, batch_of(cell), arguments.seconds, clock)
        for row in steps:
            peak = memory("dense" if row == "dense again" else row, cell, arguments.threads)
            rows.append({"cell": cell, "row": row, **over_dense(times, row), "mebibytes": peak})
            print(f"{cell:6} {row:24} {shown(rows[-1])} {rows[-1]['dense_ms']:7.1f} ms {peak:7.0f} MiB", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
