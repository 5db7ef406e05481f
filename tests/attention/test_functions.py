"""Arguments of attention functions: ignored as by stock functions, refused where they change the scores."""

import copy

import pytest
import torch
from transformers import ContinuousBatchingConfig, GPT2Config, GPT2LMHeadModel

from collab_compress import Compression, UnsupportedModelError, compress
from collab_compress.attention.run import attend
from collab_compress.heads import HeadMask

ATTENTION = "encoder.layer.0.attention.self"


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("converted", [True, False])
def test_arguments_that_change_the_scores_are_refused(implementation, converted, make_tiny):
    model = make_tiny("bert")
    if converted:
        compress(model, Compression(dk=8), calibration=None)
    module = model.get_submodule(ATTENTION)
    query = key = value = torch.randn(1, 3, 4, 8)
    if converted:
        query, key, value = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 4, 11), torch.randn(1, 1, 4, 24)
    parts, options = (module, query, key, value, None, implementation), {"scaling": 1.0}
    attend(*parts, **options, position_ids=torch.arange(4), softcap=None, s_aux=None)
    changing = {"softcap": 50.0, "s_aux": torch.ones(3)}
    if implementation == "eager" and not converted:
        attend(*parts, **options, **changing)  # the family's own function takes or ignores them
        return
    with pytest.raises(UnsupportedModelError, match=r"BertSelfAttention passes s_aux, softcap to its attention"):
        attend(*parts, **options, **changing)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("converted", [True, False])
def test_unknown_arguments_are_ignored_as_in_stock_models(converted, implementation, make_tiny, batch):
    model = make_tiny("bert")
    model.set_attn_implementation(implementation)
    if converted:
        compress(model, Compression(dk=8), calibration=None)
    with torch.no_grad(), HeadMask(model, {} if converted else {ATTENTION: torch.ones(3)}):
        expected = model(**batch).last_hidden_state
        outputs = model(**batch, my_flag=True, seq_idx=torch.zeros(2, 8)).last_hidden_state
    assert torch.equal(outputs, expected)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_paged_cache_is_refused(implementation):
    config = GPT2Config(
        n_embd=24, n_head=3, n_layer=2, n_positions=80, vocab_size=61, bos_token_id=2, eos_token_id=1, pad_token_id=0
    )
    model = GPT2LMHeadModel(config).eval()
    model.set_attn_implementation(implementation)
    compress(model, Compression(dk=7), calibration=None)
    options = copy.deepcopy(model.generation_config)
    options.update(max_new_tokens=2, do_sample=False)
    small = ContinuousBatchingConfig(page_size=4, num_blocks=8, max_batch_tokens=8)  # the default takes all memory
    outputs = model.generate_batch([[5, 6]], generation_config=options, continuous_batching_config=small)
    for output in outputs.values():
        assert "paged cache" in output.error
        assert "use generate" in output.error


@pytest.mark.parametrize("causal", [False, True])
def test_a_position_bias_acts_where_the_stock_function_ignores_it(causal, make_tiny):
    module = make_tiny("bert").get_submodule(ATTENTION)
    query, key, value = torch.randn(3, 1, 3, 4, 8)
    bias = torch.randn(1, 3, 4, 4)
    outputs, _ = attend(module, query, key, value, None, scaling=1.0, position_bias=bias, is_causal=causal)
    scores = query @ key.mT + bias
    if causal:
        scores = scores.masked_fill(torch.ones(4, 4, dtype=torch.bool).triu(1), -torch.inf)
    torch.testing.assert_close(outputs, (scores.softmax(-1) @ value).transpose(1, 2))
