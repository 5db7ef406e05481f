import copy

import pytest
import torch
from datasets import Dataset
from tiny_families import build
from tiny_words import word_tokenizer
from transformers import TrainingArguments

from collab_compress import Compression, compress, prune_heads_
from collab_compress.architectures import find_attention
from collab_compress.calibration import calibration_batches
from collab_compress.conversion import distil_, recover_, recovery, with_copies
from collab_compress.errors import CalibrationError, CollabCompressError, HeadError
from collab_compress.heads import Tap
from collab_compress.losses import kl_divergence


def arguments(folder):
    return TrainingArguments(
        str(folder),
        num_train_epochs=4,
        learning_rate=1e-2,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )


def apart(model, dense, batch):
    with torch.no_grad(), Tap(model, "probs") as tap, Tap(dense, "probs") as target:
        model(**batch)
        dense(**batch)
        pairs = zip(tap.take(), target.take(), strict=True)
        return sum(kl_divergence(one.probs, other.probs, one.masks.query) for one, other in pairs).item()


@pytest.mark.parametrize(("family", "head_dim"), [("bert", 6), ("bert", 4), ("albert", 4), ("marian", 4)])
def test_attention_approaches_the_dense_one_and_nothing_else_changes(
    family, head_dim, make_tiny, batch, calibration, tmp_path
):
    dense = make_tiny(family).train()
    model = copy.deepcopy(dense)
    compress(model, Compression(dk=6, head_dim=head_dim), calibration=None)
    next(iter(model.parameters())).requires_grad_(False)
    trainable = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    before, distance = copy.deepcopy(model.state_dict()), apart(model.eval(), dense.eval(), batch)
    model.train()
    dense.train().encoder.eval() if hasattr(dense, "encoder") else dense.train()
    modes = [module.training for network in (model, dense) for module in network.modules()]
    config = copy.deepcopy(model.config)
    done = distil_(model, dense, calibration, arguments(tmp_path))
    assert model.config.to_dict() == config.to_dict()
    assert done.global_step == 4 * len(calibration)
    assert [module.training for network in (model, dense) for module in network.modules()] == modes
    dense.eval()
    assert apart(model.eval(), dense, batch) < 0.9 * distance
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {name for name in before if name.endswith((".proj.weight", ".content_bias", ".mixing"))}
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == trainable


def added(model, dense, batch):
    """Return the mean relative squared error of the attention outputs of each layer."""
    taken = []
    for network in (model, dense):
        outputs, sites = [], find_attention(network)
        handles = [
            site.part(site.family.output).register_forward_hook(lambda _, __, out, to=outputs: to.append(out))
            for site in sites
        ]
        with torch.no_grad():
            network(**batch)
        for handle in handles:
            handle.remove()
        taken.append(outputs)
    errors = [float((one - other).square().sum() / other.var(0).sum()) for one, other in zip(*taken, strict=True)]
    return sum(errors) / len(errors)


@pytest.mark.parametrize(
    ("family", "dk"), [("bert", None), ("bert", 6), ("albert", None), ("distilbert", 6), ("marian", 6)]
)
def test_values_and_outputs_approach_the_dense_ones(family, dk, make_tiny, batch, calibration, tmp_path):
    dense = make_tiny(family)
    model = copy.deepcopy(dense)
    compress(model, Compression(dk=dk, dv=6), calibration=None)
    before, distance = copy.deepcopy(model.state_dict()), added(model, dense, batch)
    distil_(model, dense, calibration, arguments(tmp_path))
    assert added(model, dense, batch) < 0.9 * distance
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    sites = find_attention(model)
    outputs = {f"{site.path(site.family.output)}.{name}" for site in sites for name in ("weight", "bias")}
    put_in = {name for name in before if name.endswith((".proj.weight", ".proj.bias", ".content_bias", ".mixing"))}
    assert moved == (put_in | outputs) & set(before)


def test_what_cannot_be_distilled(make_tiny, calibration, tmp_path):
    dense, model = make_tiny("bert"), make_tiny("bert")
    with pytest.raises(HeadError, match="BertModel is not converted, so there is nothing to recover"):
        distil_(model, dense, calibration, arguments(tmp_path))
    compress(model, Compression(dk=6), calibration=None)
    with pytest.raises(HeadError, match="AlbertModel has other attention modules than BertModel; pass the dense"):
        distil_(model, make_tiny("albert"), calibration, arguments(tmp_path))
    prune_heads_(model, {"encoder.layer.1.attention.self": [0]})
    with pytest.raises(HeadError, match=r"^encoder\.layer\.1\.attention\.self has 2 heads, and 3 in the dense model"):
        distil_(model, dense, calibration, arguments(tmp_path))


def test_copies():
    ids = torch.arange(4 * 32).view(4, 32)
    (batch,) = with_copies([{"input_ids": ids, "attention_mask": torch.ones_like(ids)}], 999, True)
    copied, types = batch["input_ids"], batch["token_type_ids"]
    assert torch.equal(copied[:, :16], ids[:, :16])
    assert (copied[:, 16] == 999).all()
    assert torch.equal(copied[:, -1], ids[:, -1])
    repeated = [set(row[17:31].tolist()) & set(row[1:16].tolist()) for row in copied]
    assert len({len(positions) for positions in repeated}) > 1
    for row, same, before in zip(copied, repeated, ids, strict=True):
        others = set(row[17:31].tolist()) - same
        assert others <= set(before[17:31].tolist())
        assert len(others) + len(same) == 14  # no token is repeated twice
    assert types.tolist() == [[0] * 17 + [1] * 15] * 4


def test_copies_without_separator_and_beside_targets():
    ids = torch.arange(32)[None]
    (batch,) = with_copies([{"input_ids": ids}], None, False, seed=1)
    assert batch.keys() == {"input_ids", "attention_mask"}
    assert batch["input_ids"][0, 16] == 16
    pair = {"input_ids": ids, "decoder_input_ids": ids}
    assert with_copies([pair], None, False) == [pair]


def test_recovery_from_random_tokens_that_repeat(minilm, minilm_tokenizer, monkeypatch):
    """Tokens differ from those of the conversion and repeat behind a separator; the rate decays to 0."""
    calls = []
    monkeypatch.setattr("collab_compress.conversion.recovery.distil_", lambda *arguments: calls.append(arguments))
    recover_(copy.deepcopy(minilm), minilm, minilm_tokenizer, steps=2, logging_steps=7)
    _, _, batches, settings, *_ = calls[0]
    assert (settings.lr_scheduler_type, settings.warmup_steps, settings.logging_steps) == ("cosine", 0.125, 7)
    assert [batch["input_ids"].shape for batch in batches] == [(16, 64)] * 2
    used = calibration_batches("synthetic", minilm, minilm_tokenizer)
    assert not set(batches[0]["input_ids"][0, 1:32].tolist()) & set(used[0]["input_ids"][0, 1:32].tolist())
    for row, types in zip(batches[0]["input_ids"], batches[0]["token_type_ids"], strict=True):
        assert row[32] == minilm_tokenizer.sep_token_id
        assert types.tolist() == [0] * 33 + [1] * 31
    again = [len(set(row[1:32].tolist()) & set(row[33:63].tolist())) for row in batches[0]["input_ids"]]
    assert max(again) > 20
    assert min(again) < 10


def test_recovery_on_texts(minilm, minilm_tokenizer):
    minilm.encoder.layer = minilm.encoder.layer[:1]
    model = copy.deepcopy(minilm)
    compress(model, Compression(dk=48), calibration=None)
    texts = ["one text", "another text"]
    assert recover_(model, minilm, minilm_tokenizer, texts, steps=3, disable_tqdm=True, use_cpu=True).global_step == 1
    for nothing in (None, "none"):
        with pytest.raises(CalibrationError, match="no batches to train on; pass 'synthetic', texts or batches"):
            recover_(model, minilm, minilm_tokenizer, nothing)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": -1}, "steps is -1; expected a whole number, at least 1"),
        ({"seed": -1}, "seed is -1; expected at least 0"),
        ({"steps": 1.5}, r"steps is 1\.5; expected a whole number"),
        ({"learning_rate": 1e30}, r"learning_rate is 1e\+30; expected a number above 0, up to 1\.0"),
        ({"learning_rate": float("nan")}, "learning_rate is nan; expected a number above 0"),
        ({"learning_rate": -1e-3}, r"learning_rate is -0\.001; expected a number above 0"),
        ({"learning_rate": "fast"}, "learning_rate is .fast.; expected a number above 0"),
        ({"speed": 2}, "recover_ got an unexpected keyword argument 'speed'; expected arguments of Training"),
        ({"dense": None}, "NoneType is no Transformers model"),
        ({"length": "64"}, "length is '64'; expected a whole number"),
        (
            {"calibration": Dataset.from_dict({"text": ["a dog"] * 4, "label": [0] * 4})},
            r"got a data set with columns \['text', 'label'\]; pass the one with the texts",
        ),
    ],
)
def test_what_recovery_refuses(options, message, make_tiny, calibration):
    model = make_tiny("bert")
    compress(model, Compression(dk=6), calibration=None)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CollabCompressError, match=message):
        recover_(
            **{"model": model, "dense": make_tiny("bert"), "tokenizer": None, "calibration": calibration, **options}
        )
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_models_that_recovery_refuses(make_tiny, calibration):
    dense, model = make_tiny("bert"), make_tiny("bert")
    compress(model, Compression(dk=6), calibration=None)
    with pytest.raises(HeadError, match="the converted and the dense model share parameters; pass the dense model"):
        recover_(model, model, None, calibration)
    dense.encoder.layer[0].output.dense.weight.data[0, 0] = float("nan")
    with pytest.raises(HeadError, match=r"layer\.0\.output\.dense\.weight of the dense model holds NaN or infinite"):
        recover_(model, dense, None, calibration)


def test_a_recovery_that_diverges_is_undone(make_tiny, calibration, monkeypatch):
    dense, model = make_tiny("bert"), make_tiny("bert")
    compress(model, Compression(dk=6), calibration=None)
    before = copy.deepcopy(model.state_dict())
    monkeypatch.setattr(
        "collab_compress.conversion.recovery._loss",
        lambda model, *_: model.encoder.layer[0].attention.self.mixing.sum() / 0,
    )
    with pytest.raises(HeadError, match="ended in values that are not finite, and was undone; pass a lower"):
        recover_(model, dense, None, calibration, use_cpu=True, disable_tqdm=True)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("disabled", [torch.no_grad, torch.inference_mode])
def test_half_precision_recovers_in_float32(disabled, make_tiny, batch, calibration):
    """Recovery works even where the caller has switched gradients off."""
    dense, model = make_tiny("bert"), make_tiny("bert")
    compress(model, Compression(dk=6), calibration=None)
    distance = apart(model, dense, batch)
    dense.half()
    model.half()
    weights = copy.deepcopy(dense.state_dict())
    with disabled():
        recover_(model, dense, None, calibration * 5, learning_rate=2e-2, use_cpu=True, disable_tqdm=True)
    for part in (model, dense):
        assert all(parameter.dtype == torch.float16 for parameter in part.parameters())
    for name, tensor in dense.state_dict().items():
        assert torch.equal(tensor, weights[name])
    assert apart(model.float(), dense.float(), batch) < 0.9 * distance


def test_only_the_sequences_of_the_steps_are_read(make_tiny, calibration):
    dense, model = make_tiny("bert"), make_tiny("bert")
    compress(model, Compression(dk=6), calibration=None)
    batches = iter(calibration * 2)
    assert recover_(model, dense, None, batches, steps=2, use_cpu=True, disable_tqdm=True).global_step == 2
    assert len(list(batches)) == len(calibration)  # 16 sequences a step, in batches of 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_in_half_precision_are_trained_in_float32(dtype, make_tiny, calibration, monkeypatch):
    dense, model = make_tiny("bert").to(dtype), make_tiny("bert").to(dtype)
    compress(model, Compression(dk=6), calibration=None)
    seen, loss = set(), recovery._loss

    def watched(model, *arguments):
        seen.add(model.dtype)
        return loss(model, *arguments)

    monkeypatch.setattr(recovery, "_loss", watched)
    recover_(model, dense, None, calibration, steps=2, use_cpu=True, disable_tqdm=True)
    assert seen == {torch.float32}
    assert {parameter.dtype for part in (model, dense) for parameter in part.parameters()} == {dtype}


def test_images_stay_beside_repeated_tokens():
    dense, model = build("clip"), build("clip")
    compress(model, Compression(dk=8), calibration=None)
    assert recover_(model, dense, word_tokenizer(), steps=2, use_cpu=True, disable_tqdm=True).global_step == 2
