"""A plan: several widths of each part, tried on copies."""

import pytest
import torch

from collab_compress import CalibrationError, CalibrationOptions, Compression, compress
from collab_compress.analysis import Latency, Plan, Trial, plan
from collab_compress.analysis.plan import _with_knee


def tokens(count=4):
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(4, 9, dtype=torch.long)
    return [
        {"input_ids": torch.randint(3, 61, (4, 9), generator=generator), "attention_mask": mask} for _ in range(count)
    ]


def test_trials_are_conversions_of_one_part(make_tiny):
    model = make_tiny("bert")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    done = []
    result = plan(model, tokens(), shares=(1 / 2, 1 / 4), timed=False, progress=lambda *args: done.append(args))
    assert [(trial.part, trial.width) for trial in result.trials] == [
        ("dk", 12),
        ("dk", 6),
        ("dv", 12),
        ("dv", 6),
        ("dff", 16),
        ("dff", 8),
    ]
    assert [step[1:] for step in done] == [(count, 6) for count in range(7)]
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    report = compress(model, Compression(dv=12), tokens())
    trial = result.trials[2]
    assert report.drift is not None
    assert trial.drift == pytest.approx(report.drift.relative_error)
    assert trial.parameters == report.parameters_after / report.parameters_before
    assert trial.operations == report.values[0].macs_after / report.values[0].macs_before
    assert result.length == report.length


def test_it_prints_and_becomes_a_table(make_tiny, monkeypatch):
    monkeypatch.setattr(Latency, "is_steady", True)
    result = plan(make_tiny("bert"), tokens(), shares=(1 / 2, 1 / 4))
    frame = result.to_frame()
    assert list(frame["width"]) == [trial.width for trial in result.trials]
    assert (frame["time"] > 0).all()
    lines = str(result).splitlines()
    assert len(lines) == 7
    assert lines[1].split()[:2] == ["dk", "12"]


def test_parts_that_cannot_be_converted_are_left_out_with_the_reason(make_tiny):
    model = make_tiny("bert")
    compress(model, Compression(dk=8), calibration=None)
    result = plan(model, tokens(), shares=(1 / 2,), timed=False)
    assert [trial.part for trial in result.trials] == ["dv", "dff"]
    assert "already converted" in result.left_out["dk"]
    assert "dk stays as it is: " in str(result)


def test_the_knee_is_where_the_loss_begins_to_rise():
    def trial(share, drift):
        return Trial("dv", round(24 * share), share, drift, 1.0, share, None)

    trials = _with_knee([trial(0.75, 0.05), trial(0.5, 0.1), trial(0.25, 0.6)])
    assert Plan(tuple(trials), 9, {}).knees == {"dv": 12}
    straight = _with_knee([trial(0.75, 1.0), trial(0.5, 2**0.5), trial(0.25, 3**0.5)])
    assert Plan(tuple(straight), 9, {}).knees == {}


def test_too_little_data_is_refused(make_tiny):
    with pytest.raises(CalibrationError, match="at least two sequences"):
        plan(make_tiny("bert"), [{"input_ids": torch.ones(1, 4, dtype=torch.long)}])
    with pytest.raises(CalibrationError, match="at least two sequences"):
        plan(make_tiny("bert"), tokens(), calibration_options=CalibrationOptions(sequences=1))


def test_widths_that_round_to_the_dense_one_are_left_out(make_tiny):
    result = plan(make_tiny("bert"), tokens(), shares=(1.0,), timed=False)
    assert not result.trials
    assert "rounds up to all of them; pass smaller" in result.left_out["dv"]
    assert [trial.width for trial in plan(make_tiny("bert"), tokens(), shares=(1.0, 0.5), timed=False).trials] == [
        12,
        12,
        16,
    ]
