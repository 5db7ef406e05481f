"""The tiniest model of every family whose queries and keys a rotary embedding turns; grouped queries where it can.

Those of `KEEPING` keep their queries and keys in any conversion.
"""

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM, PreTrainedModel

from collab_compress.architectures import FAMILIES

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 32,
    "max_position_embeddings": 80, "initializer_range": 0.4, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1,
}  # fmt: skip
EXPERTS = {
    "num_experts": 2, "num_local_experts": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "num_experts_per_tok": 1, "n_routed_experts": 2, "moe_num_experts": 2,
}  # fmt: skip
LAYER_KINDS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
OWN = {
    "esm": {"position_embedding_type": "rotary", "mask_token_id": 4, "token_dropout": False},
    "smollm3": {"no_rope_layers": [1, 0]},
    **dict.fromkeys(
        (
            "ernie4_5_moe", "gpt_oss", "granitemoe", "granitemoeshared", "mixtral", "phimoe", "qwen2_moe",
            "qwen3_moe", "solar_open",
        ),
        EXPERTS,
    ),
    **dict.fromkeys(("cohere2", "exaone4", "gemma2", "gemma3_text", "gpt_oss", "olmo3"), LAYER_KINDS),
    "gpt_oss": {**EXPERTS, **LAYER_KINDS},
}  # fmt: skip
ROTARY = sorted(name for name, family in FAMILIES.items() if family.rotary and not family.keeps_scores)
KEEPING = sorted(name for name, family in FAMILIES.items() if family.keeps_scores)


def skip_older(model_type: str) -> None:
    """Skip a test of a family that the installed Transformers does not have, or not as described."""
    since = FAMILIES[model_type].since if model_type in FAMILIES else ""
    if since and Version(transformers.__version__) < Version(since):
        pytest.skip(f"{model_type} needs Transformers {since}")


def make_rotary(name: str) -> PreTrainedModel:
    """A random model in evaluation mode whose biases are not zero; one that generates where there is one."""
    skip_older(name)
    torch.manual_seed(0)
    groups = {"num_key_value_heads": 2} if FAMILIES[name].key_value_heads else {}
    width = {} if name in ("esm", "gpt_neox", "modernbert") else {"head_dim": 8}
    config = CONFIG_MAPPING[name](**SIZES, **groups, **width, **OWN.get(name, {}))
    generates = type(config) in AutoModelForCausalLM._model_mapping
    model = (AutoModelForCausalLM if generates else AutoModel).from_config(config).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if path.endswith((".query.bias", ".key.bias", "q_proj.bias", "k_proj.bias", "query_key_value.bias")):
                parameter.normal_(std=0.5)
    return model
