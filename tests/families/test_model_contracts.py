"""What Transformers promises of every model, kept by converted ones; key caches alone have other shapes."""

import copy

import pytest
import torch
from tiny_families import TINIES, build, build_low, inputs, run
from torch.nn.utils import parametrize


@pytest.fixture
def dense(kin):
    return build(kin)


@pytest.fixture
def model(kin):
    return build_low(kin)


def parametrized(model):
    return any(parametrize.is_parametrized(module) for module in model.modules())


def shared_storages(model):
    """Return the groups of tensor names that share memory."""
    names = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault((tensor.data_ptr(), tensor.shape), []).append(name)
    return {tuple(sorted(group)) for group in names.values() if len(group) > 1}


@pytest.mark.structures
def test_only_what_the_stock_model_ties_is_tied(kin):
    for class_name in {"", TINIES[kin].generates}:
        stock, converted = build(kin, class_name), build_low(kin, class_name)
        assert converted.all_tied_weights_keys == stock.all_tied_weights_keys
        assert shared_storages(converted) == shared_storages(stock)
        before = {name: id(parameter) for name, parameter in converted.named_parameters()}
        converted.tie_weights()
        assert {name: id(parameter) for name, parameter in converted.named_parameters()} == before


@pytest.mark.structures
def test_it_survives_torch_save_and_state_dicts(kin, model, tmp_path):
    batch = inputs(kin)
    expected = run(model, batch)
    if not parametrized(model):  # which PyTorch does not save as a whole model
        torch.save(model, tmp_path / "model.pt")
        loaded = torch.load(tmp_path / "model.pt", weights_only=False)
        assert torch.equal(run(loaded, batch), expected)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    other = build_low(kin)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True), strict=True)
    assert torch.equal(run(other, batch), expected)


@pytest.mark.structures
def test_loading_initialises_nothing_anew(kin, model, tmp_path, load_cleanly):
    batch = inputs(kin)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    before = torch.get_rng_state()
    loaded = load_cleanly(type(model), tmp_path)
    if not parametrized(model):  # the stock model draws what it parametrizes
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(run(loaded, batch), run(model, batch))
    halved = load_cleanly(type(model), tmp_path, dtype=torch.bfloat16)
    for (name, one), (other, two) in zip(model.named_parameters(), halved.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(one.to(two.dtype), two), name
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.init_weights()  # as a model built around this one does
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


@pytest.mark.structures
def test_gradient_checkpointing_gives_the_same_gradients(kin, model, set_dropout_):
    if not model.supports_gradient_checkpointing:
        pytest.skip(f"stock {type(model).__name__} does not support it")
    saving = copy.deepcopy(set_dropout_(model, 0.0))
    newer = getattr(saving, "activation_checkpointing_enable", None)
    (newer or saving.gradient_checkpointing_enable)()
    assert any(getattr(module, "gradient_checkpointing", False) for module in saving.modules())
    for one in (model, saving):
        torch.manual_seed(0)
        one.train()(**inputs(kin))[0].square().sum().backward()
    for (name, one), (_, other) in zip(model.named_parameters(), saving.named_parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None:
            scale = float(one.grad.abs().max().clamp_min(1.0))
            torch.testing.assert_close(
                one.grad, other.grad, rtol=1e-4, atol=1e-5 * scale, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.structures
def test_half_precision_is_about_as_near_as_the_stock_models(kin, dense, model):
    """The error is a few times larger: low-rank factors are products, which round once more."""
    batch = inputs(kin)
    errors, dtype = [], torch.float16 if kin in ("bert", "gpt2", "t5") else torch.bfloat16
    for one in (dense, model):
        expected = run(one, batch)
        halved = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in batch.items()}
        outputs = run(one.to(dtype), halved)
        assert outputs.dtype == dtype
        assert outputs.isfinite().all()
        errors.append(float((outputs.float() - expected).norm() / expected.norm()))
    assert errors[1] < 5 * errors[0]
