"""A plan: what several widths of each part cost and lose."""

import pytest
import torch
from tiny_families import make_rotary

from collab_compress import Compression, compress
from collab_compress.analysis import plan


def tokens(count=4):
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(4, 9, dtype=torch.long)
    return [
        {"input_ids": torch.randint(3, 61, (4, 9), generator=generator), "attention_mask": mask} for _ in range(count)
    ]


def test_costs_are_those_of_conversions_of_one_part(make_tiny):
    model = make_tiny("bert")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    done = []
    result = plan(model, tokens(), shares=(1 / 4, 1 / 2), progress=lambda *args: done.append(args))
    widths = [("dk", 12), ("dk", 6), ("dv", 12), ("dv", 6), ("dff", 16), ("dff", 8)]
    assert [(row.part, row.width) for row in result.rows] == widths
    assert [step[1:] for step in done] == [(0, None), (0, None), *((count, 2) for count in range(3))]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    every = compress(make_tiny("bert"), Compression(dk=12, dv=12, dff=16), tokens())
    total = sum(part.macs_before for part in every.parts)
    for row in result.rows:
        report = compress(make_tiny("bert"), Compression(**{row.part: row.width}), tokens())
        parts = report.parts
        assert row.parameters == pytest.approx(report.parameters_after / report.parameters_before)
        saved = sum(part.macs_before - part.macs_after for part in parts)
        assert row.operations == pytest.approx(1 - saved / total)
    narrower = [result.rows[place + 1].loss > result.rows[place].loss > 0 for place in (0, 2, 4)]
    assert all(narrower)


def test_it_prints_and_becomes_a_table(make_tiny):
    result = plan(make_tiny("bert"), tokens(), shares=(1 / 2, 1 / 4))
    assert list(result.to_frame()["width"]) == [row.width for row in result.rows]
    lines = str(result).splitlines()
    assert len(lines) == 8
    assert lines[0] == "Parameters and operations (at 9 tokens) are those of the whole model."
    assert lines[2].split()[:2] == ["dk", "12"]


def test_parts_that_cannot_be_converted_are_left_out_with_the_reason(make_tiny):
    model = make_tiny("bert")
    compress(model, Compression(dk=8), calibration=None)
    result = plan(model, tokens(), shares=(1 / 2,))
    assert [row.part for row in result.rows] == ["dv", "dff"]
    assert "already converted" in result.left_out["dk"]
    assert "dk stays as it is: " in str(result)
    rotary = plan(make_rotary("llama"), tokens(), shares=(1 / 2,))
    assert [row.part for row in rotary.rows] == ["dv", "dff"]
    assert "rotary" in rotary.left_out["dk"]


def test_dense_widths_are_left_out(make_tiny):
    assert not plan(make_tiny("bert"), tokens(), shares=(1.0,)).rows
    assert [row.width for row in plan(make_tiny("bert"), tokens(), shares=(1.0, 0.5)).rows] == [12, 12, 16]
