"""Masks on head outputs, against a hand-made output projection and against the stock model."""

import copy
import pickle

import pytest
import torch
from forms import COMPILED, converted, heads_of, in_pairs, in_turns

from collab_compress import HeadMask, UnsupportedModelError, prune_heads_
from collab_compress.architectures import find_attention
from collab_compress.attention.run import head_hooks
from collab_compress.errors import HeadError
from collab_compress.heads import DropHead, HeadGates, Recorder, masks_without


def hidden(model, batch):
    return model(**batch).last_hidden_state


def built(make_tiny, family, form, implementation="sdpa"):
    model = converted(make_tiny, family, form)
    model.set_attn_implementation(implementation)
    return model


def random_masks(model, batch_size=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = () if batch_size is None else (batch_size,)
    return {site.name: torch.rand(*shape, site.heads, generator=generator) for site in find_attention(model)}


def scaled_by_hand(model, masks):
    """Scale the inputs of the output projection, one head of one sample at a time."""
    handles = []
    for site in find_attention(model):

        def scale(module, args, site=site):
            x = args[0].clone()
            for sample in range(len(x)):
                mask = masks[site.name] if masks[site.name].dim() == 1 else masks[site.name][sample]
                for head in range(site.heads):
                    heads_of(site, x[sample])[:, head] *= mask[head]
            return (x,)

        handles.append(site.part(site.paths.output).register_forward_pre_hook(scale))
    return handles


@in_turns
def test_heads_are_scaled_before_the_output_projection(family, form, implementation, make_tiny, batch):
    model = built(make_tiny, family, form, implementation)
    masks = random_masks(model, 3)
    masks |= dict(list(random_masks(model).items())[::2])  # one mask a sample, or one for all
    with torch.no_grad():
        stock = hidden(model, batch)
        with HeadMask(model, masks):
            actual = hidden(model, batch)
        handles = scaled_by_hand(model, masks)
        expected = hidden(model, batch)
        for handle in handles:
            handle.remove()
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)
        assert not torch.allclose(actual, stock, atol=1e-2)
        assert torch.equal(hidden(model, batch), stock)
    assert not any(head_hooks(site.module) for site in find_attention(model))


@in_pairs
def test_gradients_of_masks_are_those_of_finite_differences(family, form, make_tiny, batch):
    model = built(make_tiny, family, form).double()
    masks = {name: mask.double().requires_grad_() for name, mask in random_masks(model, 3).items()}
    name = list(masks)[-1]
    with HeadMask(model, masks) as mask:

        def loss(values):
            mask.set({**masks, name: values})
            return hidden(model, batch)[:, 0].square().sum()

        actual = torch.autograd.grad(loss(masks[name]), masks[name])[0]
        for index in [(0, 0), (2, 1)]:
            step = torch.zeros_like(masks[name])
            step[index] = 1e-5
            with torch.no_grad():
                slope = (loss(masks[name] + step) - loss(masks[name] - step)) / 2e-5
            torch.testing.assert_close(actual[index], slope, atol=1e-6, rtol=1e-4)


def test_setting_replaces_all_masks(make_tiny, batch):
    model = make_tiny("bert")
    masks = random_masks(model)
    one, two = masks
    with torch.no_grad(), HeadMask(model, {one: masks[one]}) as mask:
        first = hidden(model, batch)
        mask.set({two: masks[two]})
        second = hidden(model, batch)
        with HeadMask(copy.deepcopy(model), {one: masks[one], two: masks[two]}) as both:
            assert not torch.equal(first, second)
            both.set({})
        mask.set({one: masks[one]})
        assert torch.equal(hidden(model, batch), first)
        mask.set({})
        unmasked = hidden(model, batch)
    assert torch.equal(unmasked, hidden(model, batch))
    mask.remove()
    with pytest.raises(HeadError, match="this HeadMask has been removed from the model; make a new one"):
        mask.set({})


def test_masks_multiply_and_leave_in_any_order(make_tiny, batch):
    model = make_tiny("bert")
    first, second = random_masks(model, seed=1), random_masks(model, seed=2)
    with torch.no_grad(), HeadMask(model, {name: first[name] * second[name] for name in first}):
        expected = hidden(model, batch)
    one, two = HeadMask(model, first), HeadMask(model, second)
    with torch.no_grad():
        torch.testing.assert_close(hidden(model, batch), expected, atol=1e-5, rtol=1e-4)
    one.remove()
    two.remove()
    assert not any(head_hooks(site.module) for site in find_attention(model))


def test_only_the_kinds_asked_for_can_be_masked(make_tiny):
    model = make_tiny("marian")
    with HeadMask(model, kinds=("cross",)) as mask:
        assert list(mask.heads) == ["decoder.layers.0.encoder_attn", "decoder.layers.1.encoder_attn"]
        with pytest.raises(HeadError, match=r"no attention module 'encoder\.layers\.0\.self_attn'"):
            mask.set({"encoder.layers.0.self_attn": torch.ones(3)})
    with pytest.raises(UnsupportedModelError, match="with kind cross"):
        HeadMask(make_tiny("bert"), kinds=("cross",))


def test_dtype_of_the_model_is_kept(make_tiny, batch):
    model = make_tiny("bert").to(torch.bfloat16)
    masks = random_masks(model)
    chosen = {name: mask > 0.5 for name, mask in masks.items()}  # masks may be boolean too
    with torch.no_grad(), HeadMask(model, masks) as mask:
        assert hidden(model, batch).dtype == torch.bfloat16
        mask.set(chosen)
        as_bool = hidden(model, batch)
        mask.set({name: chosen[name].float() for name in chosen})
        assert torch.equal(hidden(model, batch), as_bool)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "form"), COMPILED)
def test_compiles_without_graph_breaks_and_follows_new_masks(family, form, make_tiny, batch):
    model = built(make_tiny, family, form)
    with torch.no_grad(), HeadMask(model) as mask:
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(hidden(compiled, batch), hidden(model, batch), atol=1e-5, rtol=1e-4)
        for seed, stance in ((1, "default"), (2, "fail_on_recompile")):
            mask.set(random_masks(model, 3, seed=seed))
            expected = hidden(model, batch)
            with torch.compiler.set_stance(stance):
                torch.testing.assert_close(hidden(compiled, batch), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("form", [pytest.param("dense", marks=pytest.mark.slow), "both"])
def test_a_model_that_ran_compiled_follows_hooks_that_come_and_go(form, make_tiny, batch):
    model = converted(make_tiny, "bert", form)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        before = hidden(compiled, batch)
        with HeadMask(compiled, random_masks(model)):  # by what torch.compile returned, or by the model
            torch.testing.assert_close(hidden(compiled, batch), hidden(model, batch))
            assert not torch.allclose(hidden(compiled, batch), before, atol=1e-2)
        with Recorder(model) as recorder:
            assert torch.equal(hidden(compiled, batch), before)
            assert [record.site.name for record in recorder.take()] == list(random_masks(compiled))
        assert torch.equal(hidden(compiled, batch), before)


HOOKS = {
    "mask": lambda model: HeadMask(model, random_masks(model)),
    "recorder": lambda model: Recorder(model, ("outputs", "probs")),
    "drophead": lambda model: DropHead(model, 0.9),
    "gates": lambda model: HeadGates(model, start=-9.0),
}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("hooks", HOOKS)
def test_copies_have_no_hooks(hooks, copied, make_tiny, batch, set_dropout_):
    model = set_dropout_(make_tiny("bert"), 0.0).train()
    with torch.no_grad():
        expected = hidden(model, batch)
    with HOOKS[hooks](model) as present:
        hidden(model, batch)  # which a recorder records, with gradients
        twin = copied(model)
        assert not any(head_hooks(site.module) for site in find_attention(twin))
        assert torch.equal(hidden(twin, batch), expected)
        if hooks == "recorder":
            assert len(present.take()) == 2  # none of the copy
    twin(**batch, head_mask=torch.ones(2, 3))  # ignored, as in a stock model
    prune_heads_(twin, {"encoder.layer.0.attention.self": [0]})
    assert torch.equal(hidden(model, batch), expected)


def test_masks_without_heads(make_tiny):
    model = make_tiny("bert")
    name, other = random_masks(model)
    masks = masks_without(model, {name: {2, 0}, other: []})
    assert list(masks) == [name]
    assert masks[name].tolist() == [0, 1, 0]


@pytest.mark.parametrize("family", ["bert", "distilbert", "albert"])
def test_head_mask_in_a_call_is_refused_while_heads_are_masked(family, make_tiny, batch):
    """Transformers 5 takes and ignores it."""
    model = make_tiny(family)
    with HeadMask(model), pytest.raises(HeadError, match=f"{type(model).__name__} got head_mask=, which Trans"):
        model(**batch, head_mask=torch.zeros(2, 3))
    assert not model._forward_pre_hooks
    if family == "bert":
        model.config._attn_implementation = "flash_attention_2"
        with pytest.raises(UnsupportedModelError, match="has hooks on its heads"):
            HeadMask(model)
        assert not model._forward_pre_hooks  # of masks that could not be set up
