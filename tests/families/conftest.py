"""The tiniest model of every family that can be converted, and what it reads."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModel, PreTrainedModel

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
SENTENCES = {
    "vocab_size": VOCABULARY, "emb_dim": WIDTH, "n_heads": HEADS, "n_layers": LAYERS, "max_position_embeddings": 80,
    "embed_init_std": 0.4, "init_std": 0.4, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1,
}  # fmt: skip
DETECTOR = {
    "d_model": WIDTH, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_queries": 5, "init_std": 0.4,
    "init_xavier_std": 1.0, "use_timm_backbone": False, "use_pretrained_backbone": False,
    "backbone_config": {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 8, 8, 8],
                        "depths": [1, 1, 1, 1], "out_features": ["stage4"], "layer_type": "basic"},
}  # fmt: skip
ENDS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
SELF, CAUSAL, ALL = ("encoder",) * LAYERS, ("decoder",) * LAYERS, ("encoder", "decoder", "cross")


@dataclass(frozen=True)
class Tiny:
    """How to build one: class name before `Config` and `Model`, settings, kinds of its attention modules.

    Args:
        model: class of the model, where it is not called like the config.
    """

    name: str
    settings: dict[str, Any]
    kinds: tuple[str, ...]
    generates: str = ""
    full: int = WIDTH
    model: str = ""


FAMILIES = {
    "albert": Tiny("Albert", {**ENCODER, "embedding_size": 12}, SELF[:1]),
    "bart": Tiny("Bart", TRANSLATOR, ALL, "BartForConditionalGeneration"),
    "bert": Tiny("Bert", ENCODER, SELF),
    "bert-decoder": Tiny("Bert", {**ENCODER, "is_decoder": True}, CAUSAL, "BertLMHeadModel"),
    "bert-cross": Tiny(
        "Bert", {**ENCODER, "is_decoder": True, "add_cross_attention": True}, ("decoder", "cross") * LAYERS,
        "BertLMHeadModel",
    ),
    "blip_text_model": Tiny("BlipText", {**ENCODER, "encoder_hidden_size": WIDTH, "is_decoder": True},
                            ("encoder", "cross") * LAYERS),
    "blip_vision_model": Tiny("BlipVision", IMAGES, SELF),
    "bloom": Tiny("Bloom", {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "n_head": HEADS, "n_layer": LAYERS,
                            "initializer_range": 0.4, **ENDS}, CAUSAL, "BloomForCausalLM"),
    "camembert": Tiny("Camembert", ENCODER, SELF),
    "deit": Tiny("DeiT", IMAGES, SELF),
    "detr": Tiny("Detr", DETECTOR, ("encoder", "encoder", "cross")),
    "distilbert": Tiny("DistilBert", {"vocab_size": VOCABULARY, "dim": WIDTH, "n_heads": HEADS, "n_layers": LAYERS,
                                      "hidden_dim": 32, "max_position_embeddings": 80, "initializer_range": 0.4},
                       SELF),
    "electra": Tiny("Electra", {**ENCODER, "embedding_size": 12}, SELF),
    "flaubert": Tiny("Flaubert", SENTENCES, SELF),
    "gpt2": Tiny("GPT2", {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_head": HEADS, "n_layer": LAYERS,
                          "n_positions": 80, "initializer_range": 0.4, **ENDS},
                 CAUSAL, "GPT2LMHeadModel"),
    "m2m_100": Tiny("M2M100", TRANSLATOR, ALL, "M2M100ForConditionalGeneration"),
    "marian": Tiny("Marian", TRANSLATOR, ALL, "MarianMTModel"),
    "mbart": Tiny("MBart", TRANSLATOR, ALL, "MBartForConditionalGeneration"),
    "megatron-bert": Tiny("MegatronBert", ENCODER, SELF),
    "mpnet": Tiny("MPNet", ENCODER, SELF),
    "mpt": Tiny("Mpt", {"vocab_size": VOCABULARY, "d_model": WIDTH, "n_heads": HEADS, "n_layers": LAYERS,
                        "max_seq_len": 80, "initializer_range": 0.4, **ENDS}, CAUSAL, "MptForCausalLM"),
    # heads of OPT have no room for content biases beyond this rank; its model is made to be exact there
    "opt": Tiny("OPT", {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_attention_heads": HEADS,
                        "num_hidden_layers": LAYERS, "ffn_dim": 32, "word_embed_proj_dim": WIDTH, "init_std": 0.4,
                        "max_position_embeddings": 80, **ENDS}, CAUSAL, "OPTForCausalLM",
                WIDTH - HEADS),
    "mvp": Tiny("Mvp", TRANSLATOR, ALL, "MvpForConditionalGeneration"),
    "pegasus": Tiny("Pegasus", TRANSLATOR, ALL, "PegasusForConditionalGeneration"),
    "rembert": Tiny("RemBert", {**ENCODER, "input_embedding_size": 12, "output_embedding_size": 12}, SELF),
    "roberta": Tiny("Roberta", ENCODER, SELF),
    "t5": Tiny("T5", {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "num_heads": HEADS, "d_ff": 32,
                      "num_layers": LAYERS, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1},
               ("encoder",) * LAYERS + ("decoder", "cross") * LAYERS,
               "T5ForConditionalGeneration"),
    "visual_bert": Tiny("VisualBert", {**ENCODER, "visual_embedding_dim": 12}, SELF),
    "table-transformer": Tiny("TableTransformer", DETECTOR, ("encoder", "encoder", "cross")),
    "tapas": Tiny("Tapas", ENCODER, SELF),
    "trocr": Tiny("TrOCR", {"vocab_size": VOCABULARY, "d_model": WIDTH, "decoder_layers": LAYERS,
                            "decoder_attention_heads": HEADS, "decoder_ffn_dim": 32, "max_position_embeddings": 80,
                            "cross_attention_hidden_size": WIDTH, "init_std": 0.4, **ENDS},
                  ("decoder", "cross") * LAYERS, "TrOCRForCausalLM", model="TrOCRForCausalLM"),
    "vit": Tiny("ViT", IMAGES, SELF),
    "xglm": Tiny("XGLM", {"vocab_size": VOCABULARY, "d_model": WIDTH, "attention_heads": HEADS, "num_layers": LAYERS,
                          "ffn_dim": 32, "max_position_embeddings": 80, "init_std": 0.4, **ENDS}, CAUSAL,
                 "XGLMForCausalLM"),
    "xlm": Tiny("XLM", SENTENCES, SELF),
    "xlm-roberta": Tiny("XLMRoberta", ENCODER, SELF),
}  # fmt: skip


@pytest.fixture(params=sorted(FAMILIES))
def kin(request: pytest.FixtureRequest) -> str:
    """Every family; those in `CONFIGS` of the conftest above have heavier tests too."""
    return request.param


@pytest.fixture(params=sorted(name for name, tiny in FAMILIES.items() if tiny.generates))
def generator(request: pytest.FixtureRequest) -> str:
    """Every family that generates."""
    return request.param


@pytest.fixture
def auto(kin: str, build: Callable[..., PreTrainedModel]) -> Any:
    """`AutoModel`, or the model's own class where that knows none."""
    model = build(kin)
    return AutoModel if type(model.config) in AutoModel._model_mapping else type(model)


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
        model = getattr(transformers, class_name or tiny.model or f"{tiny.name}Model")(config)
        for part in model.modules():
            if type(part).__name__ == "ResNetBackbone":
                part._supports_sdpa = True  # it has no attention, and Transformers would refuse to set any
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
        if "num_queries" in tiny.settings:
            return {"pixel_values": torch.randn(3, 3, 64, 96, generator=generator)}
        ids = torch.randint(5, VOCABULARY, (3, 9), generator=generator)
        mask = torch.ones_like(ids)
        mask[1, 7:], mask[2, 5:] = 0, 0
        batch = {"input_ids": ids, "attention_mask": mask}
        if "encoder" in tiny.kinds and "decoder" in tiny.kinds:
            batch |= {"decoder_input_ids": ids[:, :7].flip(0), "decoder_attention_mask": mask[:, :7]}
        if name in ("bert-cross", "trocr", "blip_text_model"):
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
