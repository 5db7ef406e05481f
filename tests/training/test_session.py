import copy
import logging
import math
from itertools import product

import pytest
import torch
from transformers import BertForSequenceClassification, MarianMTModel

from collab_compress import Compression, compress
from collab_compress.attention import run
from collab_compress.errors import HeadError, UnsupportedModelError
from collab_compress.heads import Recorder, RotationOptions, alphas_of, mix_heads_
from collab_compress.training import LOSSES, AlphasOptions, DropHeadOptions, HeadSession, HeadTraining, PenaltyOptions

OTHERS = ["albert", "distilbert", "marian"]
ONE_A_PART = ["agreement-probs", "bhattacharyya", "hsic", "orthogonality"]


@pytest.fixture
def make_undropped(make_tiny, set_dropout_):
    """Return a function that makes tiny models in training mode, without dropout."""
    return lambda *arguments: set_dropout_(make_tiny(*arguments), 0.0).train()


@pytest.mark.parametrize(
    ("family", "loss"),
    [*(("bert", loss) for loss in sorted(LOSSES)), *product(OTHERS, ONE_A_PART)],
)
def test_a_penalty_is_its_loss_over_modules(loss, family, make_undropped, batch):
    """Also of a converted model, whose parameters get its gradient."""
    model = make_undropped(family)
    chosen = LOSSES[loss]
    training = HeadTraining(penalties=(PenaltyOptions(loss, weight=3.0),))
    for compression in (None, Compression(dk=13, dv=9)):
        if compression is not None:
            compress(model, compression, calibration=None)
        with Recorder(model, (chosen.part,)) as recorder:
            model(**batch)
            values = [
                chosen.function(
                    getattr(record, chosen.part),
                    record.masks.key if chosen.part in ("values", "keys") else record.masks.query,
                )
                for record in recorder.take()
                if record.site.kind in chosen.kinds
            ]
        expected = (torch.stack(values).mean() if chosen.reduction == "mean" else sum(values)).detach()
        with HeadSession(model, training) as session:
            model(**batch)
            penalty = session.penalty()
            torch.testing.assert_close(penalty.detach(), 3 * expected, atol=1e-5, rtol=1e-4)
            assert session.logs()[loss] == pytest.approx(float(expected), rel=1e-4)
            model.zero_grad()
            penalty.backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        assert any(gradient.any() for gradient in gradients)
        assert all(torch.isfinite(gradient).all() for gradient in gradients)


def test_penalties_combine_and_are_logged_one_by_one(make_undropped, batch):
    model = make_undropped("bert")
    penalties = (
        PenaltyOptions("agreement", 0.5),
        PenaltyOptions("bhattacharyya", 2.0),
        PenaltyOptions("orthogonality", 0.1),
    )
    session = HeadSession(model, HeadTraining(penalties=penalties))
    totals = []
    for seed in range(2):
        torch.manual_seed(seed)
        model(**{**batch, "input_ids": torch.randint(5, 61, (3, 9))})
        totals.append(session.penalty(torch.tensor(2.0)).item())
    logs = session.logs()
    weighted = sum(penalty.weight * logs[penalty.name] for penalty in penalties)
    assert weighted == pytest.approx(sum(totals) / 2, rel=1e-5)
    assert logs["agreement/share"] == pytest.approx(abs(0.5 * logs["agreement"]) / 2, rel=1e-4)
    assert not {name for name in session.logs() if not name.startswith("drophead")}


def test_a_penalty_weighs_by_kind(make_undropped, make_batch):
    model, batch = make_undropped("marian"), make_batch("marian")
    weights = {"encoder": 1.0, "cross": 3.0}
    with Recorder(model, ("probs",)) as recorder:
        model(**batch)
        sums = dict.fromkeys(weights, 0.0)
        for record in recorder.take():
            if record.site.kind in weights:
                sums[record.site.kind] += LOSSES["bhattacharyya"].function(record.probs, record.masks.query)
    penalties = tuple(PenaltyOptions("bhattacharyya", weight, kinds=(kind,)) for kind, weight in weights.items())
    session = HeadSession(model, HeadTraining(penalties=penalties))
    model(**batch)
    torch.testing.assert_close(session.penalty(torch.tensor(2.5)), sums["encoder"] + 3 * sums["cross"])
    logs = session.logs()
    assert logs["task_loss"] == 2.5
    assert logs["bhattacharyya"] == pytest.approx(sums["encoder"].item(), rel=1e-5)  # of the paper's kind
    assert logs["bhattacharyya/cross"] == pytest.approx(sums["cross"].item(), rel=1e-5)


def test_attention_is_named_where_penalties_and_drophead_act_on_some_kinds(make_undropped):
    drops = (DropHeadOptions(0.1, kinds=("cross", "encoder")), DropHeadOptions(0.2, kinds=("decoder",)))
    with HeadSession(make_undropped("marian"), HeadTraining(drophead=drops)) as session:
        assert session.logs() == {"drophead/encoder+cross": 0.1, "drophead/decoder": 0.2}
    model = make_undropped("bert")
    penalties = (PenaltyOptions("agreement"), PenaltyOptions("bhattacharyya", kinds=("cross",)))
    with pytest.raises(UnsupportedModelError, match="with kind cross"):
        HeadSession(model, HeadTraining(penalties=penalties))
    assert not any("head_hooks" in vars(module) for module in model.modules())


def test_schedules_move_with_progress(make_undropped, batch):
    model = make_undropped("bert")
    training = HeadTraining(
        drophead=(DropHeadOptions(0.4, "scheduled"),),
        penalties=(PenaltyOptions("agreement", 2.0, "curriculum"),),
    )
    session = HeadSession(model, training, warmup=0.5)
    for progress, p, weight in ((0.0, 0.4, 0.0), (0.25, 0.2, 0.5), (0.5, 0.0, 1.0), (1.0, 0.4, 2.0)):
        session.step(progress)
        model(**batch)
        penalty = session.penalty().item()
        logs = session.logs()
        assert logs["drophead"] == pytest.approx(p)
        assert penalty == pytest.approx(weight * logs["agreement"])


@pytest.mark.parametrize("progress", [-0.1, 1.5, None, "0.5", float("nan")])
def test_a_step_outside_the_training_is_refused(progress, make_undropped):
    """A schedule has no value there: anti-curriculum would give a negative weight."""
    model = make_undropped("bert")
    training = HeadTraining(
        drophead=(DropHeadOptions(0.4, "curriculum"),),
        penalties=(PenaltyOptions("agreement", 1.0, "anti-curriculum"),),
    )
    message = f"progress of the training is {progress!r}; expected 0 to 1"
    with HeadSession(model, training) as session, pytest.raises(HeadError, match=message):
        session.step(progress)


def test_only_the_schedule_that_needs_a_warmup_refuses_one_as_long_as_the_training(make_undropped):
    model = make_undropped("bert")
    with pytest.raises(HeadError, match="warmup of the schedule 'scheduled' is 1; expected 0 to below 1"):
        HeadSession(model, HeadTraining(drophead=(DropHeadOptions(0.4, "scheduled"),)), warmup=1)
    HeadSession(model, HeadTraining(drophead=(DropHeadOptions(0.4, "curriculum"),)), warmup=1).close()


def test_a_penalty_of_weight_0_is_measured_and_does_not_touch_the_loss(make_undropped, batch):
    model = make_undropped("bert")
    session = HeadSession(model, HeadTraining(penalties=(PenaltyOptions("agreement", 0.0),)))
    model(**batch)
    penalty = session.penalty(torch.tensor(2.0))
    assert not penalty.requires_grad  # nothing to run backward through
    logs = session.logs()
    assert logs["agreement"] != 0
    assert logs["agreement/share"] == 0
    with torch.no_grad():
        model.encoder.layer[0].attention.self.value.weight.fill_(float("nan"))
    model(**batch)
    assert session.penalty().item() == 0
    assert math.isnan(session.logs()["agreement"])


@pytest.mark.parametrize("mode", ["training", "evaluation"])
def test_probabilities_are_computed_only_where_penalties_act(mode, make_undropped, batch, monkeypatch):
    """Evaluation runs the fused attention of the stock model."""
    model = make_undropped("bert").train(mode == "training")
    calls, fused = [], run.functional.scaled_dot_product_attention

    def counted(*args, **kwargs):
        calls.append(1)
        return fused(*args, **kwargs)

    monkeypatch.setattr(run.functional, "scaled_dot_product_attention", counted)
    with HeadSession(model, HeadTraining(penalties=(PenaltyOptions("bhattacharyya", 1.0),))):
        model(**batch)
    assert len(calls) == (0 if mode == "training" else 2)


def test_a_faint_penalty_is_warned_of(make_undropped, batch, caplog):
    model = make_undropped("bert")
    session = HeadSession(model, HeadTraining(penalties=(PenaltyOptions("hsic", 1e-12),)))
    model(**batch)
    session.penalty(torch.tensor(1.0))
    with caplog.at_level(logging.WARNING):
        session.logs()
    assert "penalty hsic is" in caplog.text
    assert "if it began so low, raise its weight" in caplog.text


def test_alphas_are_frozen_then_train(make_undropped, batch):
    """Frozen ones are exact, and have a gradient of zeros, because distributed training waits for it."""
    model = make_undropped("bert")
    mix_heads_(model)
    with torch.no_grad():
        for matrix in alphas_of(model).values():
            matrix.normal_()
    expected = model(**batch)[0]
    for frozen_ratio, progress, frozen in ((0.3, 0.29, True), (0.3, 0.3, False), (1.0, 1.0, True)):
        other = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(other.parameters(), lr=0.01, weight_decay=0.1)
        alphas = alphas_of(other).values()
        with HeadSession(other, HeadTraining(alphas=AlphasOptions(frozen_ratio=frozen_ratio)), optimizer) as session:
            session.step(progress)
            outputs = other(**batch)[0]
            assert torch.equal(outputs, expected)
            loss = outputs.square().mean()
            (loss + session.penalty(loss)).backward()
            assert all((not matrix.grad.any()) == frozen for matrix in alphas)  # so that clipping does not see them
            optimizer.step()
        for name, matrix in alphas_of(other).items():
            assert torch.equal(matrix, alphas_of(model)[name]) == frozen  # weight decay included
            assert (matrix in optimizer.state) != frozen


@pytest.mark.parametrize(
    ("options", "labels", "divisor", "rtol"),
    [
        ({}, None, 4096, 0.05),
        ({"growth_weight": 40.0, "growth_beside": "sum"}, [[1, 2, -100], [3, -100, -100]], 3, 1e-5),
    ],
)
def test_growth_is_in_the_unit_of_the_authors(options, labels, divisor, rtol, make_undropped):
    """Their step: 40 times the growth loss, added to a loss summed over 4,096 tokens, all divided by these."""
    model = make_undropped("bert")
    mix_heads_(model)
    matrices = list(alphas_of(model).values())
    training = HeadTraining(alphas=AlphasOptions(frozen_ratio=0, **options))
    with HeadSession(model, training, torch.optim.SGD(matrices)) as session:
        session.penalty(labels=None if labels is None else torch.tensor(labels)).backward()
        for matrix in matrices:
            left, _, right = torch.linalg.svd(matrix.detach())
            torch.testing.assert_close(matrix.grad, -40 / divisor * left @ right, rtol=rtol, atol=0)
        if labels is not None:
            with pytest.raises(HeadError, match="divides by the number of labels; pass labels="):
                session.penalty()


def test_alphas_of_some_kinds(make_undropped, make_batch):
    """Other alphas of the model train as in a stock training, and count towards no norm."""
    model = make_undropped("marian", MarianMTModel)
    mix_heads_(model)
    options = AlphasOptions(frozen_ratio=0.5, growth_weight=1.0, growth=0.1, kinds=("cross",))
    session = HeadSession(model, HeadTraining(alphas=options), torch.optim.SGD(model.parameters()))
    ids = make_batch("marian")["input_ids"]
    model(ids, labels=ids).loss.backward()
    cross = alphas_of(model, kinds=("cross",))
    assert cross.keys() < alphas_of(model).keys()
    for name, matrix in alphas_of(model).items():
        assert matrix.grad.any() == (name not in cross), name
    session.step(0.5)
    assert session.penalty().item() == pytest.approx(len(cross) * 0.1)
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    assert all(matrix.grad.any() for matrix in alphas_of(model).values())


def test_alphas_must_be_there_and_trained(make_tiny):
    model, training = make_tiny("bert"), HeadTraining(alphas=AlphasOptions())
    early = torch.optim.SGD(model.parameters())
    with pytest.raises(HeadError, match=r"has no alphas to train; call mix_heads_\(model\) before"):
        HeadSession(model, training, early)
    mix_heads_(model)
    with pytest.raises(HeadError, match="the optimizer does not step the alphas"):
        HeadSession(model, training, early)
    with pytest.raises(HeadError, match="pass optimizer="):
        HeadSession(model, training)
    next(iter(alphas_of(model).values())).requires_grad_(False)
    with pytest.raises(HeadError, match="set requires_grad"):
        HeadSession(model, training, torch.optim.SGD(model.parameters()))


def test_a_session_that_cannot_open_leaves_nothing_behind(make_undropped):
    model = make_undropped("bert")
    mix_heads_(model)
    optimizer = torch.optim.SGD(model.parameters())
    rotation = RotationOptions("soft", (0,), t_max=9)
    with pytest.raises(HeadError, match="t_max"):
        HeadSession(model, HeadTraining(alphas=AlphasOptions(frozen_ratio=0.5), rotation=rotation), optimizer)
    assert not any(getattr(module, "frozen", False) for module in model.modules())
    with pytest.raises(HeadError, match="act on the optimizer's state; pass optimizer="):
        HeadSession(model, HeadTraining(rotation=RotationOptions("random", (0,))))


def test_one_session_at_a_time(make_tiny):
    model = make_tiny("bert", BertForSequenceClassification)
    training = HeadTraining(drophead=(DropHeadOptions(0.2),))
    with HeadSession(model, training):
        HeadSession(model, HeadTraining()).close()  # which does nothing
        for same in (model, model.bert, torch.compile(model, backend="eager")):
            with pytest.raises(HeadError, match=r"another session acts on the heads of this .*; close\(\) that one"):
                HeadSession(same, training)
        HeadSession(copy.deepcopy(model), training).close()
    with pytest.raises(HeadError, match="optimizer"):  # which leaves none open
        HeadSession(model, HeadTraining(rotation=RotationOptions("random", (0,))))
    HeadSession(model, training).close()


def test_a_penalty_is_the_mean_over_the_passes_since_the_last(make_undropped, batch):
    """A contrastive loss has a pass for each of its texts."""
    model = make_undropped("bert")
    other = {**batch, "input_ids": batch["input_ids"].flip(0)}
    training = HeadTraining(penalties=(PenaltyOptions("agreement", 1.0), PenaltyOptions("bhattacharyya", 1.0)))
    with HeadSession(model, training) as session:
        alone = []
        for inputs in (batch, other):
            model.forward(**inputs)
            alone.append(session.penalty())
        for inputs in (batch, other):
            model.forward(**inputs)
        torch.testing.assert_close(session.penalty(), sum(alone) / 2)
        model(**batch)
        session.step(0.5)  # forgets a pass whose penalty nobody took
        model(**other)
        torch.testing.assert_close(session.penalty(), alone[1])


def test_a_copy_has_alphas_that_train(make_undropped, batch):
    model = make_undropped("bert")
    mix_heads_(model)
    training = HeadTraining(alphas=AlphasOptions(frozen_ratio=1))
    with HeadSession(model, training, torch.optim.SGD(model.parameters())):
        twin = copy.deepcopy(model)
    twin(**batch)[0].square().mean().backward()
    assert all(alphas.grad.any() for alphas in alphas_of(twin).values())


def test_a_closed_session_does_not_go_on(make_tiny):
    with HeadSession(make_tiny("bert"), HeadTraining()) as session:
        session.step(0.5)
    for go_on in (session.step, session.epoch, session.penalty):
        with pytest.raises(HeadError, match="the session is closed"):
            go_on(1)


def test_a_pass_without_gradients_in_between_changes_nothing(make_undropped, batch):
    model = make_undropped("bert")
    with HeadSession(model, HeadTraining(penalties=(PenaltyOptions("agreement", 1.0),))) as session:
        model(**batch)
        with torch.no_grad():
            model(**{**batch, "input_ids": batch["input_ids"].flip(0)})
        between = session.penalty()
        model(**batch)
        assert between.requires_grad
        torch.testing.assert_close(between, session.penalty())


def test_reading_nothing_is_warned_of_once(make_tiny, batch, caplog):
    model = make_tiny("bert").eval()
    with HeadSession(model, HeadTraining(penalties=(PenaltyOptions("agreement"),))) as session:
        for _ in range(2):
            model(**batch)
            assert session.penalty().item() == 0
    assert caplog.text.count("is the model in train()?") == 1


def test_a_closed_session_leaves_the_model_as_it_was(make_undropped, batch):
    model = make_undropped("marian", MarianMTModel)
    stock = copy.deepcopy(model)
    training = HeadTraining(
        drophead=(DropHeadOptions(0.5, kinds=("encoder",)), DropHeadOptions(0.3, kinds=("cross",))),
        penalties=tuple(PenaltyOptions(loss) for loss in LOSSES),
        rotation=RotationOptions("random", (1,)),
    )
    HeadSession(model, training, torch.optim.SGD(model.parameters())).close()
    for module, other in zip(model.modules(), stock.modules(), strict=True):
        assert set(vars(module)) == set(vars(other))
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PenaltyOptions("diversity"), "unknown loss 'diversity'; expected one of agreement, agr"),
        (lambda: PenaltyOptions("hsic", -1.0), "weight of hsic is -1.0; expected 0 or more"),
        (lambda: PenaltyOptions("hsic", schedule="cosine"), "unknown schedule 'cosine'"),
        (lambda: DropHeadOptions(1.0), "DropHead's p is 1.0; expected 0 to below 1"),
        (lambda: AlphasOptions(frozen_ratio=31), "frozen_ratio of alphas is 31; expected 0 to 1"),
        (lambda: AlphasOptions(growth=float("nan")), "growth of alphas is nan; expected 0 or more"),
        (
            lambda: HeadTraining(drophead=DropHeadOptions()),
            r"drophead is DropHeadOptions\(.*; expected a tuple, as in drophead=\(DropHeadOptions\(…\),\)",
        ),
        (lambda: HeadTraining(drophead=(DropHeadOptions(), DropHeadOptions())), "give each kind once"),
        (
            lambda: HeadTraining(penalties=(PenaltyOptions("hsic"), PenaltyOptions("hsic", kinds=("cross",)))),
            "penalty hsic acts 2 times on cross attention; give each kind once",
        ),
        (lambda: HeadTraining(loss_normalization="sum"), "unknown loss normalization 'sum'"),
        (lambda: PenaltyOptions("hsic", kinds=("self",)), "unknown kind of attention for penalty hsic 'self'"),
        (lambda: DropHeadOptions(kinds=()), "DropHead: kinds are .*; expected some of encoder"),
        (lambda: AlphasOptions(kinds="cross"), "alphas: kinds are 'cross'; expected some of encoder"),
    ],
)
def test_bad_options_are_refused(make, message):
    with pytest.raises(HeadError, match=message):
        make()


def test_what_deepspeed_holds_is_refused(make_undropped):
    model = make_undropped("bert")
    copies = type("DeepSpeedZeroOptimizer", (), {"__module__": "deepspeed.runtime.zero.stage_1_and_2"})()
    wrapper = type("Wrapper", (), {"optimizer": copies})()
    acting = HeadTraining(drophead=(DropHeadOptions(0.2),))
    for optimizer in (copies, wrapper):
        with pytest.raises(HeadError, match=r"DeepSpeed is not supported.* shard the model with FSDP2 instead"):
            HeadSession(model, acting, optimizer)
        HeadSession(model, HeadTraining(), optimizer).close()
    next(model.parameters()).ds_id = 0
    with pytest.raises(HeadError, match="DeepSpeed is not supported"):
        HeadSession(model, acting)
