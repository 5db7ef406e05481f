"""Conversions on two CPU threads: nothing breaks, and the result is that of one thread."""

from collections.abc import Iterator

import pytest
import torch
from tiny_families import make_rotary
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, BertModel

from collab_compress import Compression, Solver, compress, expand
from collab_compress.factorization import HeadTensor
from collab_compress.factorization.als import als
from collab_compress.report import make_report

pytestmark = pytest.mark.usefixtures("decomposed_anew")
RANK = 160  # PyTorch's batched LU fails with MKL and two threads from 151 rows on
FACTORIZED = {"_linalg_det", "_linalg_slogdet", "_linalg_solve_ex", "_lu_with_info", "linalg_inv_ex", "linalg_lu"}
FACTORIZED |= {"linalg_lu_factor_ex", "linalg_lu_solve", "lu_unpack"}
FAST = Solver(sweeps=2)


class NoBatchedLU(TorchDispatchMode):
    """Refuses LU factorizations of several matrices at once, in whatever function they are."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        batched = any(isinstance(part, torch.Tensor) and part.shape[:-2].numel() > 1 for part in args)
        assert not (name in FACTORIZED and batched), f"{name} of {args[0].shape}"
        return func(*args, **(kwargs or {}))


def wide(layers: int = 1) -> BertModel:
    """Return a model whose attention is wide enough for `RANK` shared channels."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 192, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": layers}
    return BertModel(BertConfig(vocab_size=61, max_position_embeddings=40, initializer_range=0.2, **sizes)).eval()


def test_the_library_factorizes_no_batch_by_lu(make_tiny, calibration):
    with NoBatchedLU():
        with pytest.raises(AssertionError, match="linalg_inv_ex"):
            torch.linalg.inv(torch.eye(3).expand(2, 3, 3))
        compress(wide(), Compression(dk=RANK, solver=FAST), calibration)
        model = make_tiny("bert")
        compress(model, Compression(dk=12, dv=12, dff=16, layers=1, solver=FAST), calibration)
        make_report(model, calibration[:2])
        expand(model)
        compress(make_tiny("albert"), Compression(keep=0.5, solver=FAST), calibration)
        compress(make_rotary("llama"), Compression(dk=8, dv=8, solver=FAST), calibration)


def test_more_than_150_shared_channels(set_threads):
    set_threads(2)
    report = compress(wide(layers=2), Compression(dk=RANK, solver=FAST), None)
    assert report.threads == torch.get_num_threads() == 2


def test_the_solver_finds_the_same_with_any_number_of_threads(set_threads):
    generator = torch.Generator().manual_seed(0)
    heads = HeadTensor(*torch.randn(2, 4, 192, 48, generator=generator, dtype=torch.float64))
    errors = []
    for number in (1, 2):
        set_threads(number)
        solution = als(heads, RANK, sweeps=3, reads=RANK // 2)
        assert int(solution.factors.mixing.count_nonzero(1).max()) <= RANK // 2
        errors.append(float(heads.relative_error(solution.factors)))
    assert errors[1] == pytest.approx(errors[0], rel=1e-6)


@pytest.mark.parametrize(
    "compression",
    [
        Compression(keep=0.5, solver=FAST),
        Compression(dk=12, dv=12, dff=16, solver=FAST),
        Compression(dff=16, layers=1),
    ],
    ids=["keep", "widths", "layers"],
)
def test_two_threads_choose_and_fit_what_one_does(make_tiny, calibration, set_threads, compression):
    models, reports = [], []
    for number in (1, 2):
        set_threads(number)
        models.append(make_tiny("bert"))
        reports.append(compress(models[-1], compression, calibration))
        assert reports[-1].threads == number
    compared = zip(flat(reports[1].to_dict()), flat(reports[0].to_dict()), strict=True)
    for (place, number), (_, expected) in compared:
        same = number == pytest.approx(expected, rel=1e-5) if isinstance(expected, float) else number == expected
        assert same, place
    assert models[0].state_dict().keys() == models[1].state_dict().keys()
    for weight, other in zip(models[0].parameters(), models[1].parameters(), strict=True):  # so the same neurons too
        torch.testing.assert_close(other, weight, rtol=1e-4, atol=1e-5)


def flat(value: object, place: str = "") -> Iterator[tuple[str, object]]:
    """Yield the entries of a report with their places, without times and threads."""
    if isinstance(value, dict | list | tuple):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for name, part in pairs:
            if name not in ("seconds", "threads"):
                yield from flat(part, f"{place}.{name}")
    else:
        yield place, value


@pytest.mark.slow
def test_commands_on_the_real_model(python, tmp_path):
    """At its width, with as few sweeps and modules as may be."""
    start = "import sys, torch; torch.set_num_threads(2); from collab_compress_cli import start; start.{}()"
    fast = ("--sweeps", 1, "--modules", "*layer.0*", "--calibration", "none")
    done = python(start.format("compress"), "minilm", "--dk", 192, *fast, "--output", "shared", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    done = python(start.format("expand"), "shared", "--output", "dense", folder=tmp_path)
    assert done.returncode == 0, done.stderr
