"""Signatures that newer versions may extend without any other test failing: what they add, ours would ignore."""

import importlib
import inspect

import transformers
from stock_classes import DESCRIBED, FILES
from transformers import Trainer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from collab_compress.transformers_parts import CACHE_NAME

VERSION = f"Transformers {transformers.__version__}"
READ = "hidden_states encoder_hidden_states key_value_states attention_mask position_bias output_attentions cache"
READ += " query_states relative_pos rel_embeddings"
IGNORED = f"encoder_attention_mask use_cache {CACHE_NAME}"


def test_our_forward_passes_know_the_arguments_of_the_stock_ones():
    unknown = {}
    for (folder, name), family in DESCRIBED.items():
        if family.forward != "stock" and not family.limits.feed_forward_only:
            class_ = getattr(importlib.import_module(FILES[folder, name]), name)
            _, first, *others = inspect.signature(class_.forward).parameters.values()
            names = {parameter.name for parameter in others if parameter.kind != parameter.VAR_KEYWORD}
            if first.name != "hidden_states" or not names <= {*READ.split(), *IGNORED.split()}:
                unknown[name] = [first.name, *sorted(names)]
    assert not unknown, VERSION


def test_our_attention_function_knows_the_arguments_of_the_stock_one():
    known = "module query key value attention_mask dropout scaling is_causal position_bias cache kwargs"
    assert inspect.signature(sdpa_attention_forward).parameters.keys() <= {*known.split()}, VERSION


def test_what_trainers_of_ours_override_is_there():
    """A method that is never called changes nothing."""
    for name in ("_load_from_checkpoint", "_get_train_sampler", "_get_eval_sampler"):
        assert hasattr(Trainer, name), VERSION
