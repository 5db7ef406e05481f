"""Families whose queries and keys stay as they are: values and feed-forward blocks become narrower all the same."""

import copy

import pytest
import torch
from tiny_families import KEEPING, WITH_EXPERTS, make_rotary
from transformers import AutoModel, AutoModelForCausalLM

from collab_compress import Compression, Solver, UnsupportedModelError, compress
from collab_compress.architectures import FAMILIES

DISTINCT = ("gemma2", "gpt_oss", "olmo2", "phi3", "qwen3")


def batch(seed=0):
    tokens = torch.randint(5, 61, (2, 11), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def outputs(model, seed=0):
    with torch.no_grad():
        return model(**batch(seed))[0][batch(seed)["attention_mask"].bool()]


@pytest.mark.parametrize("name", KEEPING)
def test_all_values_are_exact_and_queries_and_keys_are_refused(name):
    dense = make_rotary(name)
    converted = copy.deepcopy(dense)
    compress(converted, Compression(dv=16), calibration=None)
    for implementation in ("eager", "sdpa") if dense._supports_sdpa else ("eager",):
        for one in (dense, converted):
            one.set_attn_implementation(implementation)
        torch.testing.assert_close(outputs(converted), outputs(dense), atol=2e-5, rtol=1e-4)
    with pytest.raises(UnsupportedModelError) as error:
        compress(dense, Compression(dk=16), calibration=None)
    assert FAMILIES[name].limits.no_dk in str(error.value)
    assert "leave out dk" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name", [name if name in DISTINCT else pytest.param(name, marks=pytest.mark.slow) for name in KEEPING]
)
def test_narrow_values_are_saved_and_generated_with(name, tmp_path):
    model = make_rotary(name)
    dff = None if name in WITH_EXPERTS else 16
    compress(model, Compression(dv=8, dff=dff), [batch(1), batch(2)])
    model.save_pretrained(tmp_path)
    generates = model.can_generate()
    loaded = (AutoModelForCausalLM if generates else AutoModel).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(outputs(loaded), outputs(model))
    if generates:
        options = {**batch(), "max_new_tokens": 8, "do_sample": False}
        assert torch.equal(loaded.generate(**options), loaded.generate(**options, use_cache=False))


@pytest.mark.parametrize("name", ["gemma3_text", pytest.param("olmo2", marks=pytest.mark.slow)])
def test_layers_in_front_of_a_normalisation_are_refitted(name):
    """Their outputs come nearer to the dense ones, though the stream only gets them normalised."""
    dense = make_rotary(name)
    refitted, plain = copy.deepcopy(dense), copy.deepcopy(dense)
    data = [batch(seed) for seed in range(1, 33)]
    refits = compress(refitted, Compression(dv=8), data).refits
    compress(plain, Compression(dv=8, solver=Solver(refit=False)), data)
    assert [fit.name.rpartition(".")[2] for fit in refits] == ["o_proj", "down_proj"] * 2
    assert all(fit.error_after < fit.error_before for fit in refits)
    others = range(200, 232)  # not seen
    errors = [sum((outputs(m, seed) - outputs(dense, seed)).norm() for seed in others) for m in (refitted, plain)]
    assert errors[0] < errors[1]
