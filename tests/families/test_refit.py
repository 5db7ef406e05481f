"""Refitting what layers write to the residual stream, in every family."""

import copy

import torch

from collab_compress import Compression, Solver, compress
from collab_compress.architectures import FAMILIES, find_attention
from collab_compress.conversion.drift import drift_of
from collab_compress.conversion.refit import install_refits, refit


def test_every_output_projection_is_refitted(kin, build, inputs, run, tmp_path):
    dense, batch = build(kin), inputs(kin)
    model = copy.deepcopy(dense)
    compress(model, Compression(dk=7, solver=Solver(sweeps=5)), calibration=None)
    results = refit(model, dense, [batch, batch], [batch])
    names = [result.report.name for result in results]
    outputs = {site.path(site.family.output) for site in find_attention(model, FAMILIES)}
    assert outputs < set(names)  # feed-forward blocks too
    assert all(each.report.error_after <= each.report.error_before * 1.001 for each in results)
    before = drift_of(model, dense, [batch])
    install_refits(model, results)
    after = drift_of(model, dense, [batch])
    assert after.relative_error < before.relative_error
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(run(type(model).from_pretrained(tmp_path), batch), run(model, batch))
