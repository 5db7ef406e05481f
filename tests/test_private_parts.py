"""Signatures that newer versions may extend without any other test failing: what they add, ours would ignore."""

import importlib
import inspect

import pytest
import transformers
from transformers import Trainer

KNOWN = {  # stock functions that ours stand for, and the parameters that ours read or may ignore
    "integrations.sdpa_attention.sdpa_attention_forward": (
        "module query key value attention_mask dropout scaling is_causal position_bias cache kwargs"
    ),
    **dict.fromkeys(
        (
            "models.megatron_bert.modeling_megatron_bert.MegatronBertSelfAttention",
            "models.mpnet.modeling_mpnet.MPNetSelfAttention",
            "models.rembert.modeling_rembert.RemBertSelfAttention",
            "models.visual_bert.modeling_visual_bert.VisualBertSelfAttention",
        ),
        "self hidden_states attention_mask position_bias encoder_hidden_states encoder_attention_mask "
        "cache past_key_values cache_position use_cache output_attentions kwargs",
    ),
}


@pytest.mark.parametrize("path", KNOWN)
def test_what_ours_stand_for_takes_no_more_than_ours(path):
    module, _, name = path.rpartition(".")
    stock = getattr(importlib.import_module(f"transformers.{module}"), name)
    parameters = set(inspect.signature(getattr(stock, "forward", stock)).parameters)
    assert parameters <= set(KNOWN[path].split()), f"Transformers {transformers.__version__}"


def test_what_trainers_of_ours_override_is_there():
    """A method that is never called changes nothing."""
    for name in ("_load_from_checkpoint", "_get_train_sampler", "_get_eval_sampler"):
        assert hasattr(Trainer, name), f"Transformers {transformers.__version__}"
