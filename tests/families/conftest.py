"""The tiniest model of every family that can be converted, and what it reads."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

VOCABULARY, WIDTH, HEADS, LAYERS = 61, 24, 3, 2
ENCODER = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS,
    "intermediate_size": 32, "max_position_embeddings": 80, "initializer_range": 0.4, "pad_token_id": 0,
    "bos_token_id": 2, "eos_token_id": 1,
}  # fmt: skip
TRANSLATOR = {
    "vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
    "max_position_embeddings": 80, "init_std": 0.4, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1,
    "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
IMAGES = {
    "hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS, "intermediate_size": 32,
    "image_size": 8, "patch_size": 4, "initializer_range": 0.4,
}  # fmt: skip
ENDS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
SELF, CAUSAL, ALL = ("encoder",) * LAYERS, ("decoder",) * LAYERS, ("encoder", "decoder", "cross")


@dataclass(frozen=True)
class Tiny:
    """How to build one: class name before `Config` and `Model`, settings, kinds of its attention modules."""

    name: str
    settings: dict[str, Any]
    kinds: tuple[str, ...]
    generates: str = ""
    full: int = WIDTH


FAMILIES = {
    "albert": Tiny("Albert", {**ENCODER, "embedding_size": 12}, SELF[:1]),
    "bart": Tiny("Bart", TRANSLATOR, ALL, "BartForConditionalGeneration"),
    "bert": Tiny("Bert", ENCODER, SELF),
    "bert-decoder": Tiny("Bert", {**ENCODER, "is_decoder": True}, CAUSAL, "BertLMHeadModel"),
    "bert-cross": Tiny(
        "Bert", {**ENCODER, "is_decoder": True, "add_cross_attention": True}, ("decoder", "cross") * LAYERS,
        "BertLMHeadModel",
    ),
    "camembert": Tiny("Camembert", ENCODER, SELF),
    "deit": Tiny("DeiT", IMAGES, SELF),
    "distilbert": Tiny("DistilBert", {"vocab_size": VOCABULARY, "dim": WIDTH, "n_heads": HEADS, "n_layers": LAYERS,
                                      "hidden_dim": 32, "max_position_embeddings": 80, "initializer_range": 0.4},
                       SELF),
    "electra": Tiny("Electra", {**ENCODER, "embedding_size": 12}, SELF),
    "gpt2": Tiny("GPT2", {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_head": HEADS, "n_layer": LAYERS,
                          "n_positions": 80, "initializer_range": 0.4, **ENDS},
                 CAUSAL, "GPT2LMHeadModel"),
    "m2m_100": Tiny("M2M100", TRANSLATOR, ALL, "M2M100ForConditionalGeneration"),
    "marian": Tiny("Marian", TRANSLATOR, ALL, "MarianMTModel"),
    "mbart": Tiny("MBart", TRANSLATOR, ALL, "MBartForConditionalGeneration"),
    # heads of OPT have no room for content biases beyond this rank; its model is made to be exact there
    "opt": Tiny("OPT", {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_attention_heads": HEADS,
                        "num_hidden_layers": LAYERS, "ffn_dim": 32, "word_embed_proj_dim": WIDTH, "init_std": 0.4,
                        "max_position_embeddings": 80, **ENDS}, CAUSAL, "OPTForCausalLM",
                WIDTH - HEADS),
    "pegasus": Tiny("Pegasus", TRANSLATOR, ALL, "PegasusForConditionalGeneration"),
    "roberta": Tiny("Roberta", ENCODER, SELF),
    "t5": Tiny("T5", {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "num_heads": HEADS, "d_ff": 32,
                      "num_layers": LAYERS, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1},
               ("encoder",) * LAYERS + ("decoder", "cross") * LAYERS,
               "T5ForConditionalGeneration"),
    "vit": Tiny("ViT", IMAGES, SELF),
    "xlm-roberta": Tiny("XLMRoberta", ENCODER, SELF),
}  # fmt: skip

MANY = {**ENCODER, "num_key_value_heads": HEADS}
FAMILIES |= {
    "esm": Tiny("Esm", {**ENCODER, "position_embedding_type": "rotary", "mask_token_id": 4, "token_dropout": False},
                SELF),
    "gemma": Tiny("Gemma", {**MANY, "head_dim": 8}, CAUSAL, "GemmaForCausalLM"),
    "llama": Tiny("Llama", MANY, CAUSAL, "LlamaForCausalLM"),
    "mistral": Tiny("Mistral", {**MANY, "sliding_window": 4}, CAUSAL, "MistralForCausalLM"),
    "phi": Tiny("Phi", ENCODER, CAUSAL, "PhiForCausalLM"),
    "qwen2": Tiny("Qwen2", MANY, CAUSAL, "Qwen2ForCausalLM"),
}  # fmt: skip


@pytest.fixture(params=sorted(FAMILIES))
def kin(request: pytest.FixtureRequest) -> str:
    """Every family; those in `CONFIGS` of the conftest above have heavier tests too."""
    return request.param


@pytest.fixture(params=sorted(name for name, tiny in FAMILIES.items() if tiny.generates))
def generator(request: pytest.FixtureRequest) -> str:
    """Every family that generates."""
    return request.param


@pytest.fixture(scope="session")
def tinies() -> dict[str, Tiny]:
    return FAMILIES


@pytest.fixture(scope="session")
def build() -> Callable[..., PreTrainedModel]:
    def make(name: str, class_name: str = "") -> PreTrainedModel:
        """A random model in evaluation mode whose biases are not zero."""
        tiny = FAMILIES[name]
        torch.manual_seed(0)
        config = getattr(transformers, f"{tiny.name}Config")(**tiny.settings)
        model = getattr(transformers, class_name or f"{tiny.name}Model")(config)
        with torch.no_grad():
            for path, parameter in model.named_parameters():
                if path.endswith(".bias") and parameter.dim() == 1 and "orm" not in path and "ln_" not in path:
                    parameter.normal_(std=0.5)
                if name == "t5" and path.endswith(("SelfAttention.q.weight", "EncDecAttention.q.weight")):
                    parameter.mul_(3)
                if name == "opt" and path.endswith("q_proj.weight"):
                    parameter.view(HEADS, -1, WIDTH)[:, -1] = 0
        return model.eval()

    return make


@pytest.fixture(scope="session")
def inputs() -> Callable[..., dict[str, torch.Tensor]]:
    def make(name: str, seed: int = 0) -> dict[str, torch.Tensor]:
        """Padded tokens, or images."""
        tiny, generator = FAMILIES[name], torch.Generator().manual_seed(seed)
        if "image_size" in tiny.settings:
            return {"pixel_values": torch.randn(3, 3, 8, 8, generator=generator)}
        ids = torch.randint(5, VOCABULARY, (3, 9), generator=generator)
        mask = torch.ones_like(ids)
        mask[1, 7:], mask[2, 5:] = 0, 0
        batch = {"input_ids": ids, "attention_mask": mask}
        if "encoder" in tiny.kinds and "decoder" in tiny.kinds:
            batch |= {"decoder_input_ids": ids[:, :7].flip(0), "decoder_attention_mask": mask[:, :7]}
        if name == "bert-cross":
            states = torch.randn(3, 5, WIDTH, generator=generator)
            seen = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0], [1, 1, 0, 0, 0]])
            batch |= {"encoder_hidden_states": states, "encoder_attention_mask": seen}
        return batch

    return make


@pytest.fixture(scope="session")
def run() -> Callable[..., torch.Tensor]:
    def real_outputs(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """First output at real tokens."""
        with torch.no_grad():
            output = model(**batch)[0]
        mask = batch.get("decoder_attention_mask", batch.get("attention_mask"))
        return output if mask is None else output[mask.bool()]

    return real_outputs
