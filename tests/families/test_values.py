"""What every family must keep when its values become narrower."""

import copy

import pytest
import torch
from tiny_families import TINIES, attend_by_, build, build_low, inputs, run
from transformers import T5Config, T5Model
from transformers.pytorch_utils import Conv1D

from collab_compress import Compression, Solver, compress
from collab_compress.architectures import find_attention, find_dense_values
from collab_compress.errors import CompressionError

STRADDLING = 9  # channels of three heads, one of which lies in two key groups of 8 channels


def dense_twin(dense, converted):
    """Return a stock model equal to the narrow one, whose output projection ignores the lost values."""
    twin = copy.deepcopy(dense)
    narrow = find_attention(converted)
    with torch.no_grad():
        for site, small in zip(find_dense_values(twin), narrow, strict=True):
            form = small.module.ov.config
            value = small.part(small.paths.value).weight.double()  # (dv, D)
            value_weight = site.value.weight.detach().double()  # (H·d, D)
            maps = torch.zeros(site.key_value_width, form.dv, dtype=torch.float64)
            for head in range(form.key_value_heads):  # V_i = Wv_i P_i, so P_i by least squares
                rows, columns = slice(head * 8, head * 8 + 8), slice(head * form.size, (head + 1) * form.size)
                maps[rows, columns] = torch.linalg.lstsq(value_weight[rows].T, value[columns].T).solution
            output = small.part(small.paths.output)
            small_weight = output.weight.double() if isinstance(output, Conv1D) else output.weight.double().T
            full_weight = (maps @ small_weight).float()  # (H·d, D)
            site.output.weight.copy_(full_weight if isinstance(output, Conv1D) else full_weight.T)
            if output.bias is not None:
                site.output.bias.copy_(output.bias)
    return twin


def test_values_equal_their_dense_twin(kin):
    dense, batch = build_low(kin), inputs(kin)
    converted = copy.deepcopy(dense)
    report = compress(converted, Compression(dv=STRADDLING, solver=Solver(refit=False)), calibration=[batch, batch])
    twin = dense_twin(dense, converted)
    for implementation in ("eager", "sdpa"):
        for model in (converted, twin):
            attend_by_(model, implementation)
        torch.testing.assert_close(run(converted, batch), run(twin, batch), atol=5e-5, rtol=1e-3)
    assert all(0 < module.data_error < 1 and module.width == STRADDLING for module in report.of("dv"))


@pytest.mark.parametrize(("dv", "rounded"), [(10, 9), (2, 3)])
def test_heads_of_values_are_equally_wide(dv, rounded):
    model = build("bert")
    report = compress(model, Compression(dv=dv), calibration=None)
    assert {module.width for module in report.of("dv")} == {rounded}
    note = f"dv {dv} was rounded to {rounded}: its 3 heads of values have {rounded // 3} channels each"
    assert note in report.warnings


def test_heads_wider_than_what_they_read_have_no_more_channels_than_that():
    torch.manual_seed(0)
    dense = T5Model(T5Config(**{**TINIES["t5"].settings, "d_model": 8, "d_kv": 16})).eval()
    batch = inputs("t5")
    report = compress(copy.deepcopy(dense), Compression(keep=0.5, solver=Solver(sweeps=2)), [batch] * 4)
    assert max(values.width for values in report.of("dv")) <= 24
    for name in ("dk", "dv"):
        with pytest.raises(CompressionError, match=rf"{name} is 28, but 3 heads × 8 = 24 is exact already"):
            compress(dense, Compression(**{name: 28}), calibration=None)
        for width in (24, 48):  # 48 as before
            model = copy.deepcopy(dense)
            compress(model, Compression(**{name: width}), calibration=None)
            torch.testing.assert_close(run(model, batch), run(dense, batch), atol=5e-5, rtol=1e-4)
