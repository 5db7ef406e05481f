"""The tiniest model of every family that can be converted, and what it reads.

One rule says which tests run for which: tests marked `every_family` are the contracts, and run for all. The others
are heavier and run for one family of each kind only, which leaves out those that are a `copy_of` another: described
by the same paths, with modules that are copies of the other's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from rotary_models import skip_older
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from collab_compress.architectures import FAMILIES as DESCRIBED
from collab_compress.architectures import find_dense_attention

VOCABULARY, WIDTH, HEADS, LAYERS = 61, 24, 3, 2
IDS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
ENCODER = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS,
    "intermediate_size": 32, "max_position_embeddings": 80, "initializer_range": 0.4, **IDS,
}  # fmt: skip
TRANSLATOR = {
    "vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
    "max_position_embeddings": 80, "init_std": 0.4, "decoder_start_token_id": 2, "forced_eos_token_id": None, **IDS,
}  # fmt: skip
T5 = {
    "vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "num_heads": HEADS, "d_ff": 32, "num_layers": LAYERS,
    "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
SENTENCES = {
    "vocab_size": VOCABULARY, "emb_dim": WIDTH, "n_heads": HEADS, "n_layers": LAYERS, "max_position_embeddings": 80,
    "embed_init_std": 0.4, "init_std": 0.4, **IDS,
}  # fmt: skip
DETECTOR = {
    "d_model": WIDTH, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_queries": 5, "init_std": 0.4,
    "init_xavier_std": 1.0, "use_timm_backbone": False, "use_pretrained_backbone": False,
    "backbone_config": {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 8, 8, 8],
                        "depths": [1, 1, 1, 1], "out_features": ["stage4"], "layer_type": "basic"},
}  # fmt: skip
ENDS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
IMAGES = {
    "hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS, "intermediate_size": 32,
    "image_size": 8, "patch_size": 4, "initializer_range": 0.4,
}  # fmt: skip
CLIPS = {**IMAGES, "num_frames": 4, "tubelet_size": 2}
WAVES = {
    "hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS, "intermediate_size": 32,
    "conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "initializer_range": 0.4, "layerdrop": 0.0,
    "mask_time_prob": 0.0, "vocab_size": VOCABULARY,
}  # fmt: skip
LISTENER = {**TRANSLATOR, "max_source_positions": 12, "max_target_positions": 80, "num_mel_bins": 8}
AUDIO_TOWER = {
    "d_model": WIDTH, "hidden_size": WIDTH, "num_attention_heads": HEADS, "encoder_attention_heads": HEADS,
    "num_hidden_layers": LAYERS, "encoder_layers": LAYERS, "encoder_ffn_dim": 32, "intermediate_size": 32,
    "max_source_positions": 12, "num_mel_bins": 8, "initializer_range": 0.4,
}  # fmt: skip
SELF, CAUSAL, ALL = ("encoder",) * LAYERS, ("decoder",) * LAYERS, ("encoder", "decoder", "cross")
T5_KINDS = ("encoder",) * LAYERS + ("decoder", "cross") * LAYERS
BOTH = ("encoder", "encoder")
TEXT_TOWER = {**ENCODER, "num_hidden_layers": 1, "projection_dim": 8}
IMAGE_TOWER = {**IMAGES, "num_hidden_layers": 1, "projection_dim": 8}
TOWERS = {"text_config": TEXT_TOWER, "vision_config": IMAGE_TOWER, "projection_dim": 8, "logit_scale_init_value": 0.0}

Batch = dict[str, torch.Tensor]
Reader = Callable[[torch.Generator], Batch]


def tokens(generator: torch.Generator) -> Batch:
    """Padded tokens."""
    ids = torch.randint(5, VOCABULARY, (3, 9), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 7:], mask[2, 5:] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def pairs(generator: torch.Generator) -> Batch:
    """Padded tokens of a source and a target."""
    batch = tokens(generator)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    return batch | {"decoder_input_ids": ids[:, :7].flip(0), "decoder_attention_mask": mask[:, :7]}


def with_states(generator: torch.Generator) -> Batch:
    """Padded tokens, and what cross-attention reads."""
    batch = tokens(generator)
    states = torch.randn(3, 5, WIDTH, generator=generator)
    seen = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0], [1, 1, 0, 0, 0]])
    return batch | {"encoder_hidden_states": states, "encoder_attention_mask": seen}


def images(generator: torch.Generator) -> Batch:
    return {"pixel_values": torch.randn(3, 3, 8, 8, generator=generator)}


def kept_images(generator: torch.Generator) -> Batch:
    """Images, and the noise by which patches would be left out."""
    return images(generator) | {"noise": torch.rand(3, 4, generator=generator)}


def large_images(generator: torch.Generator) -> Batch:
    return {"pixel_values": torch.randn(3, 3, 16, 16, generator=generator)}


def scenes(generator: torch.Generator) -> Batch:
    """Images as large as a backbone asks for."""
    return {"pixel_values": torch.randn(3, 3, 64, 96, generator=generator)}


def videos(generator: torch.Generator) -> Batch:
    return {"pixel_values": torch.randn(3, 4, 3, 8, 8, generator=generator)}


def waves(generator: torch.Generator) -> Batch:
    """Sound, padded."""
    sound, mask = torch.randn(3, 120, generator=generator), torch.ones(3, 120, dtype=torch.long)
    mask[1, 90:], mask[2, 60:] = 0, 0
    return {"input_values": sound * mask, "attention_mask": mask}


def spectrograms(generator: torch.Generator) -> Batch:
    return {"input_values": torch.randn(3, 12, 8, generator=generator)}


def heard(generator: torch.Generator) -> Batch:
    """Log-mel features, and a padded target."""
    target = pairs(generator)
    return {
        "input_features": torch.randn(3, 8, 24, generator=generator),
        **{name: target[name] for name in ("decoder_input_ids", "decoder_attention_mask")},
    }


def mel(generator: torch.Generator) -> Batch:
    """Log-mel features by themselves."""
    return {"input_features": heard(generator)["input_features"]}


def flat_patches(generator: torch.Generator) -> Batch:
    """Patches with their row and column, padded."""
    patches = torch.randn(3, 6, 50, generator=generator)
    patches[..., :2] = torch.tensor([[1, 1], [1, 2], [1, 3], [2, 1], [2, 2], [2, 3]]).float()
    mask = torch.ones(3, 6)
    mask[1, 4:], mask[2, 3:] = 0, 0
    return {"flattened_patches": patches, "attention_mask": mask}


def heard_in_frames(generator: torch.Generator) -> Batch:
    """The same, frames first, and padded."""
    batch = heard(generator)
    mask = torch.ones(3, 24, dtype=torch.long)
    mask[1, 16:], mask[2, 8:] = 0, 0
    return batch | {"input_features": batch["input_features"].mT.contiguous(), "attention_mask": mask}


def both_in_patches(generator: torch.Generator) -> Batch:
    """Padded tokens, and images as SigLIP 2 reads them: patches, padded, and how many there are."""
    seen = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0]])
    shapes = torch.tensor([[2, 3], [2, 2], [1, 2]])
    patches = torch.randn(3, 6, 48, generator=generator)
    return both(generator) | {"pixel_values": patches, "pixel_attention_mask": seen, "spatial_shapes": shapes}


def both_texts(generator: torch.Generator) -> Batch:
    """The tokens of both."""
    batch = both(generator)
    del batch["pixel_values"]
    return batch


def series(generator: torch.Generator) -> Batch:
    return {"past_values": torch.randn(3, 16, 1, generator=generator)}


def both(generator: torch.Generator) -> Batch:
    """Images, and padded tokens that end as texts for CLIP do."""
    batch = images(generator) | tokens(generator)
    batch["input_ids"][torch.arange(3), batch["attention_mask"].sum(1) - 1] = 1
    return batch


@dataclass(frozen=True)
class Tiny:
    """How to build one.

    Args:
        name: class name before `Config` and `Model`.
        settings: of its config.
        kinds: of its attention modules.
        generates: class that generates, if there is one.
        full: rank at which its conversion is exact.
        reads: what makes a batch for it.
        copy_of: the family that stands for it in heavier tests.
        model: class of the model, where it is not called like the config.
        modules: pattern of those modules that can be converted.
    """

    name: str
    settings: dict[str, Any]
    kinds: tuple[str, ...]
    generates: str = ""
    full: int = WIDTH
    reads: Reader = tokens
    copy_of: str = ""
    model: str = ""
    modules: str = "*"


FAMILIES = {
    "albert": Tiny("Albert", {**ENCODER, "embedding_size": 12}, SELF[:1]),
    "bart": Tiny("Bart", TRANSLATOR, ALL, "BartForConditionalGeneration", reads=pairs, copy_of="marian"),
    "bert": Tiny("Bert", ENCODER, SELF),
    "bert-decoder": Tiny("Bert", {**ENCODER, "is_decoder": True}, CAUSAL, "BertLMHeadModel"),
    "bert-cross": Tiny(
        "Bert", {**ENCODER, "is_decoder": True, "add_cross_attention": True}, ("decoder", "cross") * LAYERS,
        "BertLMHeadModel", reads=with_states,
    ),
    "bloom": Tiny("Bloom", {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "n_head": HEADS, "n_layer": LAYERS,
                            "initializer_range": 0.4, **ENDS}, CAUSAL, "BloomForCausalLM"),
    "camembert": Tiny("Camembert", ENCODER, SELF, copy_of="roberta"),
    "deit": Tiny("DeiT", IMAGES, SELF, reads=images, copy_of="vit"),
    "distilbert": Tiny("DistilBert", {"vocab_size": VOCABULARY, "dim": WIDTH, "n_heads": HEADS, "n_layers": LAYERS,
                                      "hidden_dim": 32, "max_position_embeddings": 80, "initializer_range": 0.4},
                       SELF),
    "electra": Tiny("Electra", {**ENCODER, "embedding_size": 12}, SELF, copy_of="bert"),
    "gpt2": Tiny("GPT2", {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_head": HEADS, "n_layer": LAYERS,
                          "n_positions": 80, "initializer_range": 0.4, **IDS},
                 CAUSAL, "GPT2LMHeadModel"),
    "m2m_100": Tiny("M2M100", TRANSLATOR, ALL, "M2M100ForConditionalGeneration", reads=pairs, copy_of="marian"),
    "marian": Tiny("Marian", TRANSLATOR, ALL, "MarianMTModel", reads=pairs),
    "mbart": Tiny("MBart", TRANSLATOR, ALL, "MBartForConditionalGeneration", reads=pairs, copy_of="marian"),
    "megatron-bert": Tiny("MegatronBert", ENCODER, SELF),
    "mpnet": Tiny("MPNet", ENCODER, SELF),
    "mpt": Tiny("Mpt", {"vocab_size": VOCABULARY, "d_model": WIDTH, "n_heads": HEADS, "n_layers": LAYERS,
                        "max_seq_len": 80, "initializer_range": 0.4, **ENDS}, CAUSAL, "MptForCausalLM"),
    # heads of OPT have no room for content biases beyond this rank; its model is made to be exact there
    "opt": Tiny("OPT", {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_attention_heads": HEADS,
                        "num_hidden_layers": LAYERS, "ffn_dim": 32, "word_embed_proj_dim": WIDTH, "init_std": 0.4,
                        "max_position_embeddings": 80, **IDS}, CAUSAL, "OPTForCausalLM",
                WIDTH - HEADS),
    "pegasus": Tiny("Pegasus", TRANSLATOR, ALL, "PegasusForConditionalGeneration", reads=pairs, copy_of="marian"),
    "roberta": Tiny("Roberta", ENCODER, SELF),
    "t5": Tiny("T5", T5, T5_KINDS, "T5ForConditionalGeneration", reads=pairs),
    "vit": Tiny("ViT", IMAGES, SELF, reads=images),
    "xlm-roberta": Tiny("XLMRoberta", ENCODER, SELF, copy_of="roberta"),
    # Encoders of text.
    "bert-generation": Tiny("BertGeneration", ENCODER, SELF, copy_of="bert", model="BertGenerationEncoder"),
    "data2vec-text": Tiny("Data2VecText", ENCODER, SELF, copy_of="roberta"),
    "dpr": Tiny("DPR", ENCODER, SELF, copy_of="bert", model="DPRQuestionEncoder"),
    "ernie": Tiny("Ernie", ENCODER, SELF, copy_of="bert"),
    "layoutlm": Tiny("LayoutLM", {**ENCODER, "max_2d_position_embeddings": 32}, SELF, copy_of="bert"),
    "markuplm": Tiny("MarkupLM", {**ENCODER, "max_depth": 4, "xpath_unit_hidden_size": 4}, SELF, copy_of="bert"),
    "mobilebert": Tiny("MobileBert", {**ENCODER, "embedding_size": 12, "intra_bottleneck_size": WIDTH,
                                      "hidden_size": 32, "initializer_range": 0.15, "num_feedforward_networks": 1},
                       SELF),
    "roberta-prelayernorm": Tiny("RobertaPreLayerNorm", ENCODER, SELF, copy_of="roberta"),
    "roc_bert": Tiny("RoCBert", {**ENCODER, "pronunciation_vocab_size": 8, "shape_vocab_size": 8,
                                 "pronunciation_embed_dim": 4, "shape_embed_dim": 4}, SELF, copy_of="bert"),
    "splinter": Tiny("Splinter", ENCODER, SELF, copy_of="bert"),
    "xmod": Tiny("Xmod", {**ENCODER, "default_language": "en_XX"}, SELF, copy_of="roberta"),
    "xlm-roberta-xl": Tiny("XLMRobertaXL", ENCODER, SELF, copy_of="roberta"),
    # Decoders of text.
    "biogpt": Tiny("BioGpt", ENCODER, CAUSAL, "BioGptForCausalLM"),
    # Encoder and decoder.
    "blenderbot": Tiny("Blenderbot", TRANSLATOR, ALL, "BlenderbotForConditionalGeneration", reads=pairs,
                       copy_of="marian"),
    "blenderbot-small": Tiny("BlenderbotSmall", TRANSLATOR, ALL, "BlenderbotSmallForConditionalGeneration",
                             reads=pairs, copy_of="marian"),
    "mt5": Tiny("MT5", T5, T5_KINDS, "MT5ForConditionalGeneration", reads=pairs, copy_of="t5"),
    "nllb-moe": Tiny("NllbMoe", {**TRANSLATOR, "num_experts": 2, "expert_capacity": 64, "encoder_sparse_step": 0,
                                 "decoder_sparse_step": 0}, ALL, "NllbMoeForConditionalGeneration", reads=pairs,
                     copy_of="marian"),
    "plbart": Tiny("PLBart", TRANSLATOR, ALL, "PLBartForConditionalGeneration", reads=pairs, copy_of="marian"),
    "switch_transformers": Tiny("SwitchTransformers", {**T5, "num_experts": 2, "num_sparse_encoder_layers": 0,
                                                       "num_sparse_decoder_layers": 0, "num_decoder_layers": LAYERS},
                                T5_KINDS, "SwitchTransformersForConditionalGeneration", reads=pairs, copy_of="t5"),
    "umt5": Tiny("UMT5", T5, T5_KINDS, "UMT5ForConditionalGeneration", reads=pairs),
    # Images and videos.
    "detr": Tiny("Detr", DETECTOR, ("encoder", "encoder", "cross"), reads=scenes),
    "beit": Tiny("Beit", {**IMAGES, "use_relative_position_bias": True}, SELF, reads=images),
    "dinov2": Tiny("Dinov2", IMAGES, SELF, reads=images, copy_of="vit"),
    "dinov2_with_registers": Tiny("Dinov2WithRegisters", IMAGES, SELF, reads=images, copy_of="vit"),
    "dpt": Tiny("DPT", {**IMAGES, "backbone_out_indices": [0, 1, 1, 1]}, SELF, full=WIDTH - HEADS, reads=images),
    "ijepa": Tiny("IJepa", IMAGES, SELF, reads=images, copy_of="vit"),
    "pixio": Tiny("Pixio", IMAGES, SELF, reads=images, copy_of="vit"),
    "segformer": Tiny("Segformer", {"num_encoder_blocks": 2, "depths": [1, 1], "hidden_sizes": [WIDTH, WIDTH],
                                    "num_attention_heads": [HEADS, HEADS], "sr_ratios": [2, 1], "patch_sizes": [3, 3],
                                    "strides": [2, 2], "mlp_ratios": [2, 2], "initializer_range": 0.4},
                      SELF, reads=large_images),
    "videomae": Tiny("VideoMAE", CLIPS, SELF, reads=videos),
    "vit_mae": Tiny("ViTMAE", {**IMAGES, "mask_ratio": 0.0}, SELF, reads=kept_images, copy_of="vit"),
    "vit_msn": Tiny("ViTMSN", IMAGES, SELF, reads=images, copy_of="vit"),
    "vitpose": Tiny("VitPose", {"backbone_config": {**IMAGES, "model_type": "vitpose_backbone",
                                                    "image_size": [16, 16], "patch_size": [8, 8]}, "num_labels": 3},
                    SELF, full=WIDTH - HEADS, reads=large_images, copy_of="dpt", model="VitPoseForPoseEstimation"),
    "vivit": Tiny("Vivit", {**CLIPS, "tubelet_size": [2, 4, 4]}, SELF, reads=videos, copy_of="vit"),
    "yolos": Tiny("Yolos", {**IMAGES, "image_size": [8, 8], "num_detection_tokens": 3}, SELF, full=WIDTH - HEADS,
                  reads=images, copy_of="dpt"),
    # Sound.
    "audio-spectrogram-transformer": Tiny("AST", {**IMAGES, "patch_size": 4, "num_mel_bins": 8, "max_length": 12,
                                                  "time_stride": 4, "frequency_stride": 4},
                                          SELF, reads=spectrograms, copy_of="vit"),
    "data2vec-audio": Tiny("Data2VecAudio", {**WAVES, "num_conv_pos_embeddings": 2, "conv_pos_kernel_size": 3}, SELF,
                           reads=waves, copy_of="wav2vec2"),
    "hubert": Tiny("Hubert", WAVES, SELF, reads=waves, copy_of="wav2vec2"),
    "musicgen_decoder": Tiny("MusicgenDecoder", {**ENCODER, "ffn_dim": 32, "num_codebooks": 1,
                                                 "initializer_factor": 0.4},
                             ("decoder", "cross") * LAYERS, reads=with_states, model="MusicgenModel"),
    "sew": Tiny("SEW", {**WAVES, "squeeze_factor": 2}, SELF, reads=waves, copy_of="wav2vec2"),
    "speech_to_text": Tiny("Speech2Text", {**LISTENER, "max_source_positions": 80, "conv_channels": 8,
                                           "conv_kernel_sizes": (3,), "num_conv_layers": 1,
                                           "input_feat_per_channel": 8},
                           ALL, "Speech2TextForConditionalGeneration", reads=heard_in_frames, copy_of="marian"),
    "unispeech": Tiny("UniSpeech", {**WAVES, "num_codevector_groups": 2, "num_codevectors_per_group": 4}, SELF,
                      reads=waves, copy_of="wav2vec2"),
    "unispeech-sat": Tiny("UniSpeechSat", WAVES, SELF, reads=waves, copy_of="wav2vec2"),
    "wav2vec2": Tiny("Wav2Vec2", WAVES, SELF, reads=waves),
    "whisper": Tiny("Whisper", LISTENER, ALL, "WhisperForConditionalGeneration", WIDTH - HEADS, reads=heard),
    "musicgen_melody_decoder": Tiny("MusicgenMelodyDecoder", {**ENCODER, "ffn_dim": 32, "num_codebooks": 1,
                                                              "initializer_factor": 0.4},
                                    CAUSAL, model="MusicgenMelodyModel", copy_of="musicgen_decoder"),
    "qwen2_audio_encoder": Tiny("Qwen2AudioEncoder", AUDIO_TOWER, SELF, full=WIDTH - HEADS, reads=mel,
                                copy_of="whisper", model="Qwen2AudioEncoder"),
    "voxtral_encoder": Tiny("VoxtralEncoder", AUDIO_TOWER, SELF, full=WIDTH - HEADS, reads=mel, copy_of="whisper",
                            model="VoxtralEncoder"),
    # Time series.
    "patchtst": Tiny("PatchTST", {"d_model": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS,
                                  "ffn_dim": 32, "context_length": 16, "patch_length": 4, "patch_stride": 4,
                                  "num_input_channels": 1, "init_std": 0.1, "scaling": None}, SELF, reads=series,
                     copy_of="wav2vec2"),
    # Models of two towers.
    "align_text_model": Tiny("AlignText", ENCODER, SELF, copy_of="bert"),
    "altclip": Tiny("AltCLIP", {**TOWERS, "text_config": {**TEXT_TOWER, "project_dim": 8}}, BOTH, reads=both),
    "chinese_clip": Tiny("ChineseCLIP", TOWERS, BOTH, reads=both, copy_of="altclip"),
    "clap_text_model": Tiny("ClapText", ENCODER, SELF, copy_of="bert"),
    "clip": Tiny("CLIP", TOWERS, ("decoder", "encoder"), reads=both),
    "clip_text_model": Tiny("CLIPText", TEXT_TOWER, ("decoder",), reads=both_texts, copy_of="clip"),
    "clip_vision_model": Tiny("CLIPVision", IMAGE_TOWER, ("encoder",), reads=images, copy_of="clip"),
    "clipseg": Tiny("CLIPSeg", TOWERS, ("decoder", "encoder"), reads=both, copy_of="clip"),
    "metaclip_2": Tiny("MetaClip2", TOWERS, ("decoder", "encoder"), reads=both, copy_of="clip"),
    "owlv2": Tiny("Owlv2", TOWERS, ("decoder", "encoder"), reads=both, copy_of="clip"),
    "owlvit": Tiny("OwlViT", TOWERS, ("decoder", "encoder"), reads=both, copy_of="clip"),
    "idefics3_vision": Tiny("Idefics3Vision", IMAGES, SELF, reads=images, copy_of="clip",
                            model="Idefics3VisionTransformer"),
    "pix2struct_text_model": Tiny("Pix2StructText", {**T5, "hidden_size": WIDTH, "initializer_range": 0.4},
                                  ("decoder", "cross") * LAYERS, reads=with_states, copy_of="t5"),
    "pix2struct_vision_model": Tiny("Pix2StructVision", {**IMAGES, "d_kv": 8, "d_ff": 32,
                                                         "patch_embed_hidden_size": 48},
                                    SELF, reads=flat_patches, copy_of="vit"),
    "smolvlm_vision": Tiny("SmolVLMVision", IMAGES, SELF, reads=images, copy_of="clip",
                           model="SmolVLMVisionTransformer"),
    "siglip": Tiny("Siglip", TOWERS, BOTH, reads=both, copy_of="clip"),
    "siglip2": Tiny("Siglip2", {**TOWERS, "text_config": {**TEXT_TOWER, "projection_size": WIDTH},
                                "vision_config": {**IMAGE_TOWER, "num_patches": 9}}, BOTH, reads=both_in_patches,
                    copy_of="clip"),
    "xclip_text_model": Tiny("XCLIPText", TEXT_TOWER, ("decoder",), reads=both_texts, copy_of="clip"),
    # Those that compute scores themselves.
    "blip_text_model": Tiny("BlipText", {**ENCODER, "encoder_hidden_size": WIDTH, "is_decoder": True},
                            ("encoder", "cross") * LAYERS, reads=with_states),
    "blip_vision_model": Tiny("BlipVision", IMAGES, SELF, reads=images),
    "flaubert": Tiny("Flaubert", SENTENCES, SELF, copy_of="xlm"),
    "mvp": Tiny("Mvp", TRANSLATOR, ALL, "MvpForConditionalGeneration", reads=pairs, copy_of="trocr"),
    "rembert": Tiny("RemBert", {**ENCODER, "input_embedding_size": 12, "output_embedding_size": 12}, SELF,
                    copy_of="megatron-bert"),
    "table-transformer": Tiny("TableTransformer", DETECTOR, ("encoder", "encoder", "cross"), reads=scenes),
    "tapas": Tiny("Tapas", ENCODER, SELF, copy_of="megatron-bert"),
    "visual_bert": Tiny("VisualBert", {**ENCODER, "visual_embedding_dim": 12}, SELF, copy_of="megatron-bert"),
    "trocr": Tiny("TrOCR", {"vocab_size": VOCABULARY, "d_model": WIDTH, "decoder_layers": LAYERS,
                            "decoder_attention_heads": HEADS, "decoder_ffn_dim": 32, "max_position_embeddings": 80,
                            "cross_attention_hidden_size": WIDTH, "init_std": 0.4, **ENDS},
                  ("decoder", "cross") * LAYERS, "TrOCRForCausalLM", reads=with_states, model="TrOCRForCausalLM"),
    "xlm": Tiny("XLM", SENTENCES, SELF),
    "xglm": Tiny("XGLM", {"vocab_size": VOCABULARY, "d_model": WIDTH, "attention_heads": HEADS, "num_layers": LAYERS,
                          "ffn_dim": 32, "max_position_embeddings": 80, "init_std": 0.4, **ENDS}, CAUSAL,
                 "XGLMForCausalLM"),
}  # fmt: skip

MANY = {**ENCODER, "num_key_value_heads": HEADS}
FAMILIES |= {
    "esm": Tiny("Esm", {**ENCODER, "position_embedding_type": "rotary", "mask_token_id": 4, "token_dropout": False},
                SELF),
    "gemma": Tiny("Gemma", {**MANY, "head_dim": 8}, CAUSAL, "GemmaForCausalLM", copy_of="llama"),
    "llama": Tiny("Llama", MANY, CAUSAL, "LlamaForCausalLM"),
    "mistral": Tiny("Mistral", {**MANY, "sliding_window": 4}, CAUSAL, "MistralForCausalLM", copy_of="llama"),
    "phi": Tiny("Phi", ENCODER, CAUSAL, "PhiForCausalLM"),
    "qwen2": Tiny("Qwen2", MANY, CAUSAL, "Qwen2ForCausalLM", copy_of="llama"),
}  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "every_family: a contract, which families that are copies of another keep too")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give `kin` every family, or one of each kind, and `generator` those of them that generate."""
    every = metafunc.definition.get_closest_marker("every_family") is not None
    names = sorted(name for name, tiny in FAMILIES.items() if every or not tiny.copy_of)
    if "kin" in metafunc.fixturenames:
        metafunc.parametrize("kin", names)
    if "generator" in metafunc.fixturenames:
        metafunc.parametrize("generator", [name for name in names if FAMILIES[name].generates])


@pytest.fixture(scope="session")
def tinies() -> dict[str, Tiny]:
    return FAMILIES


def make_tiny(name: str, class_name: str = "") -> PreTrainedModel:
    """A random model in evaluation mode whose biases are not zero."""
    tiny = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{tiny.name}Config")(**tiny.settings)
    for part in (config, *vars(config).values()):
        skip_older(getattr(part, "model_type", ""))
    model = getattr(transformers, class_name or tiny.model or f"{tiny.name}Model")(config)
    for part in model.modules():
        if type(part).__name__ == "ResNetBackbone":
            part._supports_sdpa = True  # it has no attention, and Transformers would refuse to set any
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if path.endswith(".bias") and parameter.dim() == 1 and "orm" not in path and "ln_" not in path:
                parameter.normal_(std=0.5)
            if path.endswith(("SelfAttention.q.weight", "EncDecAttention.q.weight")):
                parameter.mul_(3)
            if path.endswith("relative_position_bias_table"):
                parameter.normal_()
        if tiny.full < WIDTH:
            for site in find_dense_attention(model, DESCRIBED):
                site.query.weight.view(HEADS, -1, site.query.in_features)[:, -1] = 0
    return model.eval()


@pytest.fixture(scope="session")
def build() -> Callable[..., PreTrainedModel]:
    return make_tiny


@pytest.fixture(scope="session")
def attend_by_() -> Callable[[PreTrainedModel, str], None]:
    def set_(model: PreTrainedModel, implementation: str) -> None:
        """Set how a model attends; some know nothing but eager attention."""
        model.set_attn_implementation(implementation if model._supports_sdpa else "eager")

    return set_


@pytest.fixture(scope="session")
def inputs() -> Callable[..., Batch]:
    def make(name: str, seed: int = 0) -> Batch:
        """What the family reads, padded where it can be."""
        return FAMILIES[name].reads(torch.Generator().manual_seed(seed))

    return make


@pytest.fixture(scope="session")
def run() -> Callable[..., torch.Tensor]:
    def real_outputs(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        """First output, or those of two towers side by side; at real tokens where there is one for each."""
        with torch.no_grad():
            output = model(**batch)
        mask = batch.get("decoder_attention_mask", batch.get("attention_mask"))
        towers = [output[name][0] for name in ("text_model_output", "vision_model_output") if name in output]
        real = [
            each if mask is None or mask.shape != each.shape[:2] else each[mask.bool()]
            for each in towers or [output[0]]
        ]
        return torch.cat([each.flatten() for each in real]) if towers else real[0]

    return real_outputs


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    words = {"[PAD]": 0, "</s>": 1, "<s>": 2, "[UNK]": 3, **{f"w{number}": number for number in range(4, 61)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", eos_token="</s>", bos_token="<s>", unk_token="[UNK]"
    )
