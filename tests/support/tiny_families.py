"""The tiniest models: one of every family that can be converted, and one of each with a rotary embedding.

Families that are a `copy_of` another are described by the same paths, with modules that are copies of the other's.
"""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM, PreTrainedModel

from collab_compress import Compression, Solver, compress
from collab_compress.architectures import FAMILIES, find_attention, find_dense_attention
from collab_compress.calibration.stacks import find_stacks

VOCABULARY, WIDTH, HEADS, LAYERS, POSITIONS = 61, 24, 3, 2, 80
IDS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}


def sized(
    width: str, heads: str, layers: str, positions: str = "", init: str = "initializer_range"
) -> dict[str, Any]:
    """Return the settings of a model of tokens, under the names of its config."""
    sizes = {width: WIDTH, heads: HEADS, layers: LAYERS, init: 0.4} | ({positions: POSITIONS} if positions else {})
    return {"vocab_size": VOCABULARY, **sizes, **IDS}


ENCODER = sized("hidden_size", "num_attention_heads", "num_hidden_layers", "max_position_embeddings")
ENCODER["intermediate_size"] = 32
BOTTLENECKS = {**ENCODER, "hidden_size": 32, "initializer_range": 0.15, "num_feedforward_networks": 1}
BOTTLENECKS |= {"embedding_size": 12, "intra_bottleneck_size": WIDTH}
SOUNDS_AND_SHAPES = {**ENCODER, "pronunciation_vocab_size": 8, "pronunciation_embed_dim": 4}
SOUNDS_AND_SHAPES |= {"shape_vocab_size": 8, "shape_embed_dim": 4}
MUSIC = {**ENCODER, "ffn_dim": 32, "num_codebooks": 1, "initializer_factor": 0.4}
LLAMA = {**ENCODER, "num_key_value_heads": HEADS}
DEBERTA = {**ENCODER, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False}
DEBERTA_V3 = {**DEBERTA, "share_att_key": True, "position_buckets": 4, "norm_rel_ebd": "layer_norm"}
OPT = sized("hidden_size", "num_attention_heads", "num_hidden_layers", "max_position_embeddings", "init_std")
GPT2 = sized("n_embd", "n_head", "n_layer", "n_positions")
XGLM = sized("d_model", "attention_heads", "num_layers", "max_position_embeddings", "init_std")
TROCR = sized("d_model", "decoder_attention_heads", "decoder_layers", "max_position_embeddings", "init_std")
TROCR |= {"decoder_ffn_dim": 32, "cross_attention_hidden_size": WIDTH}
DISTILBERT = sized("dim", "n_heads", "n_layers", "max_position_embeddings")
T5 = {"d_kv": 8, "d_ff": 32, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
T5 |= {"vocab_size": VOCABULARY, "d_model": WIDTH, "num_heads": HEADS, "num_layers": LAYERS}
SWITCHES = {**T5, "num_experts": 2, "num_sparse_encoder_layers": 0, "num_sparse_decoder_layers": 0}
SWITCHES["num_decoder_layers"] = LAYERS
TWO_STACKS = {"d_model": WIDTH, "encoder_layers": 1, "decoder_layers": 1, "init_std": 0.4}
TWO_STACKS |= {f"{side}_attention_heads": HEADS for side in ("encoder", "decoder")}
TWO_STACKS |= {f"{side}_ffn_dim": 32 for side in ("encoder", "decoder")}
TRANSLATOR = {**TWO_STACKS, "vocab_size": VOCABULARY, "max_position_embeddings": POSITIONS, **IDS}
TRANSLATOR |= {"decoder_start_token_id": 2, "forced_eos_token_id": None}
TWO_EXPERTS = {**TRANSLATOR, "num_experts": 2, "expert_capacity": 64}
TWO_EXPERTS |= {"encoder_sparse_step": 0, "decoder_sparse_step": 0}
RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8] * 4, "depths": [1] * 4}
RESNET |= {"out_features": ["stage4"], "layer_type": "basic"}
DETECTOR = {**TWO_STACKS, "num_queries": 5, "init_xavier_std": 1.0, "backbone_config": RESNET}
DETECTOR |= {"use_timm_backbone": False, "use_pretrained_backbone": False}
SIZES = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS, "initializer_range": 0.4}
IMAGES = {**SIZES, "intermediate_size": 32, "image_size": 8, "patch_size": 4}
CLIPS = {**IMAGES, "num_frames": 4, "tubelet_size": 2}
BACKBONE = {**IMAGES, "model_type": "vitpose_backbone", "image_size": [16, 16], "patch_size": [8, 8]}
POSES = {"backbone_config": BACKBONE, "num_labels": 3}
SPECTROGRAMS = {**IMAGES, "num_mel_bins": 8, "max_length": 12, "time_stride": 4, "frequency_stride": 4}
SEGMENTS = {
    "num_encoder_blocks": 2,
    "hidden_sizes": [WIDTH] * 2,
    "num_attention_heads": [HEADS] * 2,
    "depths": [1, 1],
}
SEGMENTS |= {"sr_ratios": [2, 1], "patch_sizes": [3, 3], "strides": [2, 2], "mlp_ratios": [2, 2]}
WAVES = {**SIZES, "intermediate_size": 32, "vocab_size": VOCABULARY, "layerdrop": 0.0, "mask_time_prob": 0.0}
WAVES |= {"conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
WAVES |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
LISTENER = {**TRANSLATOR, "max_source_positions": 12, "max_target_positions": POSITIONS, "num_mel_bins": 8}
FRAMES = {**LISTENER, "max_source_positions": POSITIONS, "input_feat_per_channel": 8}
FRAMES |= {"conv_channels": 8, "conv_kernel_sizes": (3,), "num_conv_layers": 1}
AUDIO_TOWER = {**SIZES, "d_model": WIDTH, "encoder_attention_heads": HEADS, "encoder_layers": LAYERS}
AUDIO_TOWER |= {"encoder_ffn_dim": 32, "intermediate_size": 32, "max_source_positions": 12, "num_mel_bins": 8}
SERIES = {"d_model": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS, "ffn_dim": 32, "init_std": 0.1}
SERIES |= {"context_length": 16, "patch_length": 4, "patch_stride": 4, "num_input_channels": 1, "scaling": None}
TEXT_TOWER = {**ENCODER, "num_hidden_layers": 1, "projection_dim": 8}
IMAGE_TOWER = {**IMAGES, "num_hidden_layers": 1, "projection_dim": 8}
TOWERS = {"text_config": TEXT_TOWER, "vision_config": IMAGE_TOWER, "projection_dim": 8, "logit_scale_init_value": 0.0}

SELF, CAUSAL, CROSS = ("encoder",) * LAYERS, ("decoder",) * LAYERS, ("decoder", "cross") * LAYERS
ALL, T5_KINDS = ("encoder", "decoder", "cross"), SELF + CROSS
CLIP_KINDS, DETECTING, BLIP_KINDS = ("decoder", "encoder"), (*SELF, "cross"), ("encoder", "cross") * LAYERS
WITH_ROOM = WIDTH - HEADS  # exact rank of models made for it, whose heads have no room for content biases above it
SEQ2SEQ, LM, HEADED = "ForConditionalGeneration", "ForCausalLM", "LMHeadModel"

Batch = dict[str, torch.Tensor]
Reader = Callable[[torch.Generator], Batch]


def tokens(generator: torch.Generator) -> Batch:
    """Return padded tokens."""
    ids = torch.randint(5, VOCABULARY, (3, 9), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 7:], mask[2, 5:] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def pairs(generator: torch.Generator) -> Batch:
    """Return padded tokens of a source and a target."""
    batch = tokens(generator)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    return batch | {"decoder_input_ids": ids[:, :7].flip(0), "decoder_attention_mask": mask[:, :7]}


def with_states(generator: torch.Generator) -> Batch:
    """Return padded tokens, and the encoder's hidden states for cross-attention."""
    batch = tokens(generator)
    states = torch.randn(3, 5, WIDTH, generator=generator)
    encoder_mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0], [1, 1, 0, 0, 0]])
    return batch | {"encoder_hidden_states": states, "encoder_attention_mask": encoder_mask}


def noise(name: str, *shape: int) -> Reader:
    """Return what makes three inputs of this name and shape."""
    return lambda generator: {name: torch.randn(3, *shape, generator=generator)}


images, large_images = noise("pixel_values", 3, 8, 8), noise("pixel_values", 3, 16, 16)
scenes = noise("pixel_values", 3, 64, 96)  # of the size that a backbone needs
videos = noise("pixel_values", 4, 3, 8, 8)
spectrograms = noise("input_values", 12, 8)
mel = noise("input_features", 8, 24)  # log-mel features
series = noise("past_values", 16, 1)


def kept_images(generator: torch.Generator) -> Batch:
    """Return images, and the noise that decides which patches are left out."""
    return images(generator) | {"noise": torch.rand(3, 4, generator=generator)}


def waves(generator: torch.Generator) -> Batch:
    """Return padded sound."""
    sound, mask = torch.randn(3, 120, generator=generator), torch.ones(3, 120, dtype=torch.long)
    mask[1, 90:], mask[2, 60:] = 0, 0
    return {"input_values": sound * mask, "attention_mask": mask}


def heard(generator: torch.Generator) -> Batch:
    """Return log-mel features and a padded target."""
    target = pairs(generator)
    return mel(generator) | {name: target[name] for name in ("decoder_input_ids", "decoder_attention_mask")}


def flat_patches(generator: torch.Generator) -> Batch:
    """Return padded patches with their row and column."""
    patches = torch.randn(3, 6, 50, generator=generator)
    patches[..., :2] = torch.tensor([[1, 1], [1, 2], [1, 3], [2, 1], [2, 2], [2, 3]]).float()
    mask = torch.ones(3, 6)
    mask[1, 4:], mask[2, 3:] = 0, 0
    return {"flattened_patches": patches, "attention_mask": mask}


def heard_in_frames(generator: torch.Generator) -> Batch:
    """Return the same with frames first and padding."""
    batch = heard(generator)
    mask = torch.ones(3, 24, dtype=torch.long)
    mask[1, 16:], mask[2, 8:] = 0, 0
    return batch | {"input_features": batch["input_features"].mT.contiguous(), "attention_mask": mask}


def both_in_patches(generator: torch.Generator) -> Batch:
    """Return padded tokens, and images as SigLIP 2 reads them: padded patches and their numbers."""
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0]])
    shapes = torch.tensor([[2, 3], [2, 2], [1, 2]])
    patches = torch.randn(3, 6, 48, generator=generator)
    return both(generator) | {"pixel_values": patches, "pixel_attention_mask": mask, "spatial_shapes": shapes}


def both_texts(generator: torch.Generator) -> Batch:
    """Return the tokens of both towers."""
    return {name: part for name, part in both(generator).items() if name != "pixel_values"}


def both(generator: torch.Generator) -> Batch:
    """Return images, and padded tokens that end like texts for CLIP."""
    batch = images(generator) | tokens(generator)
    batch["input_ids"][torch.arange(3), batch["attention_mask"].sum(1) - 1] = 1
    return batch


class Tiny:
    """How to build one: the class `{name}Model` and its settings, its kinds of attention, what makes a batch for it.

    Its conversion is exact at rank `full`; `generates` ends the name of the class that generates.
    """

    def __init__(
        self,
        name: str,
        settings: dict[str, Any],
        kinds: tuple[str, ...],
        reads: Reader = tokens,
        *,
        generates: str = "",
        full: int = WIDTH,
        copy_of: str = "",
        model: str = "",
        **others: Any,
    ) -> None:
        self.name, self.settings, self.kinds, self.reads = name, settings | others, kinds, reads
        self.generates = generates and f"{name}{generates}"
        self.full, self.copy_of, self.model = full, copy_of, model or f"{name}Model"


SIGLIP2 = {**TOWERS, "text_config": {**TEXT_TOWER, "projection_size": WIDTH}}
SIGLIP2["vision_config"] = {**IMAGE_TOWER, "num_patches": 9}
TINIES = {
    "albert": Tiny("Albert", ENCODER, SELF[:1], embedding_size=12),
    "bart": Tiny("Bart", TRANSLATOR, ALL, pairs, generates=SEQ2SEQ, copy_of="marian"),
    "bert": Tiny("Bert", ENCODER, SELF),
    "bert-decoder": Tiny("Bert", ENCODER, CAUSAL, generates=HEADED, is_decoder=True),
    "bert-cross": Tiny(
        "Bert", ENCODER, CROSS, with_states, generates=HEADED, is_decoder=True, add_cross_attention=True
    ),
    "camembert": Tiny("Camembert", ENCODER, SELF, copy_of="roberta"),
    "deit": Tiny("DeiT", IMAGES, SELF, images, copy_of="vit"),
    "deberta-v2": Tiny("DebertaV2", DEBERTA_V3, SELF),
    "distilbert": Tiny("DistilBert", DISTILBERT, SELF, hidden_dim=32),
    "electra": Tiny("Electra", ENCODER, SELF, copy_of="bert", embedding_size=12),
    "gpt2": Tiny("GPT2", GPT2, CAUSAL, generates=HEADED),
    "m2m_100": Tiny("M2M100", TRANSLATOR, ALL, pairs, generates=SEQ2SEQ, copy_of="marian"),
    "marian": Tiny("Marian", TRANSLATOR, ALL, pairs, generates="MTModel"),
    "mbart": Tiny("MBart", TRANSLATOR, ALL, pairs, generates=SEQ2SEQ, copy_of="marian"),
    "megatron-bert": Tiny("MegatronBert", ENCODER, SELF),
    "mpnet": Tiny("MPNet", ENCODER, SELF),
    "opt": Tiny("OPT", OPT, CAUSAL, generates=LM, full=WITH_ROOM, ffn_dim=32, word_embed_proj_dim=WIDTH),
    "pegasus": Tiny("Pegasus", TRANSLATOR, ALL, pairs, generates=SEQ2SEQ, copy_of="marian"),
    "roberta": Tiny("Roberta", ENCODER, SELF),
    "t5": Tiny("T5", T5, T5_KINDS, pairs, generates=SEQ2SEQ),
    "vit": Tiny("ViT", IMAGES, SELF, images),
    "xlm-roberta": Tiny("XLMRoberta", ENCODER, SELF, copy_of="roberta"),
    # Encoders of text.
    "bert-generation": Tiny("BertGeneration", ENCODER, SELF, copy_of="bert", model="BertGenerationEncoder"),
    "data2vec-text": Tiny("Data2VecText", ENCODER, SELF, copy_of="roberta"),
    "dpr": Tiny("DPR", ENCODER, SELF, copy_of="bert", model="DPRQuestionEncoder"),
    "ernie": Tiny("Ernie", ENCODER, SELF, copy_of="bert"),
    "layoutlm": Tiny("LayoutLM", ENCODER, SELF, copy_of="bert", max_2d_position_embeddings=32),
    "markuplm": Tiny("MarkupLM", ENCODER, SELF, copy_of="bert", max_depth=4, xpath_unit_hidden_size=4),
    "mobilebert": Tiny("MobileBert", BOTTLENECKS, SELF),
    "roberta-prelayernorm": Tiny("RobertaPreLayerNorm", ENCODER, SELF, copy_of="roberta"),
    "roc_bert": Tiny("RoCBert", SOUNDS_AND_SHAPES, SELF, copy_of="bert"),
    "splinter": Tiny("Splinter", ENCODER, SELF, copy_of="bert"),
    "xmod": Tiny("Xmod", ENCODER, SELF, copy_of="roberta", default_language="en_XX"),
    "xlm-roberta-xl": Tiny("XLMRobertaXL", ENCODER, SELF, copy_of="roberta"),
    # Decoders of text.
    "biogpt": Tiny("BioGpt", ENCODER, CAUSAL, generates=LM),
    # Encoder and decoder.
    "blenderbot": Tiny("Blenderbot", TRANSLATOR, ALL, pairs, generates=SEQ2SEQ, copy_of="marian"),
    "blenderbot-small": Tiny("BlenderbotSmall", TRANSLATOR, ALL, pairs, generates=SEQ2SEQ, copy_of="marian"),
    "mt5": Tiny("MT5", T5, T5_KINDS, pairs, generates=SEQ2SEQ, copy_of="t5"),
    "nllb-moe": Tiny("NllbMoe", TWO_EXPERTS, ALL, pairs, generates=SEQ2SEQ, copy_of="marian"),
    "plbart": Tiny("PLBart", TRANSLATOR, ALL, pairs, generates=SEQ2SEQ, copy_of="marian"),
    "switch_transformers": Tiny("SwitchTransformers", SWITCHES, T5_KINDS, pairs, generates=SEQ2SEQ, copy_of="t5"),
    "umt5": Tiny("UMT5", T5, T5_KINDS, pairs, generates=SEQ2SEQ),
    # Images and videos.
    "detr": Tiny("Detr", DETECTOR, DETECTING, scenes),
    "beit": Tiny("Beit", IMAGES, SELF, images, use_relative_position_bias=True),
    "dinov2": Tiny("Dinov2", IMAGES, SELF, images, copy_of="vit"),
    "dinov2_with_registers": Tiny("Dinov2WithRegisters", IMAGES, SELF, images, copy_of="vit"),
    "dpt": Tiny("DPT", IMAGES, SELF, images, full=WITH_ROOM, backbone_out_indices=[0, 1, 1, 1]),
    "ijepa": Tiny("IJepa", IMAGES, SELF, images, copy_of="vit"),
    "pixio": Tiny("Pixio", IMAGES, SELF, images, copy_of="vit"),
    "segformer": Tiny("Segformer", SEGMENTS, SELF, large_images, initializer_range=0.4),
    "videomae": Tiny("VideoMAE", CLIPS, SELF, videos),
    "vit_mae": Tiny("ViTMAE", IMAGES, SELF, kept_images, copy_of="vit", mask_ratio=0.0),
    "vit_msn": Tiny("ViTMSN", IMAGES, SELF, images, copy_of="vit"),
    "vitpose": Tiny(
        "VitPose", POSES, SELF, large_images, full=WITH_ROOM, copy_of="dpt", model="VitPoseForPoseEstimation"
    ),
    "vivit": Tiny("Vivit", IMAGES, SELF, videos, copy_of="vit", num_frames=4, tubelet_size=[2, 4, 4]),
    "yolos": Tiny(
        "Yolos", IMAGES, SELF, images, full=WITH_ROOM, copy_of="dpt", image_size=[8, 8], num_detection_tokens=3
    ),
    # Sound.
    "audio-spectrogram-transformer": Tiny("AST", SPECTROGRAMS, SELF, spectrograms, copy_of="vit"),
    "data2vec-audio": Tiny(
        "Data2VecAudio", WAVES, SELF, waves, copy_of="wav2vec2", num_conv_pos_embeddings=2, conv_pos_kernel_size=3
    ),
    "hubert": Tiny("Hubert", WAVES, SELF, waves, copy_of="wav2vec2"),
    "musicgen_decoder": Tiny("MusicgenDecoder", MUSIC, CROSS, with_states, model="MusicgenModel"),
    "sew": Tiny("SEW", WAVES, SELF, waves, copy_of="wav2vec2", squeeze_factor=2),
    "speech_to_text": Tiny("Speech2Text", FRAMES, ALL, heard_in_frames, generates=SEQ2SEQ, copy_of="marian"),
    "unispeech": Tiny(
        "UniSpeech", WAVES, SELF, waves, copy_of="wav2vec2", num_codevector_groups=2, num_codevectors_per_group=4
    ),
    "unispeech-sat": Tiny("UniSpeechSat", WAVES, SELF, waves, copy_of="wav2vec2"),
    "wav2vec2": Tiny("Wav2Vec2", WAVES, SELF, waves),
    "whisper": Tiny("Whisper", LISTENER, ALL, heard, generates=SEQ2SEQ, full=WITH_ROOM),
    "musicgen_melody_decoder": Tiny(
        "MusicgenMelodyDecoder", MUSIC, CAUSAL, copy_of="musicgen_decoder", model="MusicgenMelodyModel"
    ),
    "qwen2_audio_encoder": Tiny(
        "Qwen2AudioEncoder", AUDIO_TOWER, SELF, mel, full=WITH_ROOM, copy_of="whisper", model="Qwen2AudioEncoder"
    ),
    "voxtral_encoder": Tiny(
        "VoxtralEncoder", AUDIO_TOWER, SELF, mel, full=WITH_ROOM, copy_of="whisper", model="VoxtralEncoder"
    ),
    # Time series.
    "patchtst": Tiny("PatchTST", SERIES, SELF, series, copy_of="wav2vec2"),
    # Models of two towers.
    "align_text_model": Tiny("AlignText", ENCODER, SELF, copy_of="bert"),
    "altclip": Tiny("AltCLIP", TOWERS, SELF, both, text_config={**TEXT_TOWER, "project_dim": 8}),
    "chinese_clip": Tiny("ChineseCLIP", TOWERS, SELF, both, copy_of="altclip"),
    "clap_text_model": Tiny("ClapText", ENCODER, SELF, copy_of="bert"),
    "clip": Tiny("CLIP", TOWERS, CLIP_KINDS, both),
    "clip_text_model": Tiny("CLIPText", TEXT_TOWER, CAUSAL[:1], both_texts, copy_of="clip"),
    "clip_vision_model": Tiny("CLIPVision", IMAGE_TOWER, SELF[:1], images, copy_of="clip"),
    "clipseg": Tiny("CLIPSeg", TOWERS, CLIP_KINDS, both, copy_of="clip"),
    "metaclip_2": Tiny("MetaClip2", TOWERS, CLIP_KINDS, both, copy_of="clip"),
    "owlv2": Tiny("Owlv2", TOWERS, CLIP_KINDS, both, copy_of="clip"),
    "owlvit": Tiny("OwlViT", TOWERS, CLIP_KINDS, both, copy_of="clip"),
    "idefics3_vision": Tiny(
        "Idefics3Vision", IMAGES, SELF, images, copy_of="clip", model="Idefics3VisionTransformer"
    ),
    "pix2struct_text_model": Tiny(
        "Pix2StructText", T5, CROSS, with_states, copy_of="t5", hidden_size=WIDTH, initializer_range=0.4
    ),
    "pix2struct_vision_model": Tiny(
        "Pix2StructVision", IMAGES, SELF, flat_patches, copy_of="vit", d_kv=8, d_ff=32, patch_embed_hidden_size=48
    ),
    "smolvlm_vision": Tiny("SmolVLMVision", IMAGES, SELF, images, copy_of="clip", model="SmolVLMVisionTransformer"),
    "siglip": Tiny("Siglip", TOWERS, SELF, both, copy_of="clip"),
    "siglip2": Tiny("Siglip2", SIGLIP2, SELF, both_in_patches, copy_of="clip"),
    "xclip_text_model": Tiny("XCLIPText", TEXT_TOWER, CAUSAL[:1], both_texts, copy_of="clip"),
    # Modules that compute scores themselves.
    "rembert": Tiny(
        "RemBert", ENCODER, SELF, copy_of="megatron-bert", input_embedding_size=12, output_embedding_size=12
    ),
    "visual_bert": Tiny("VisualBert", ENCODER, SELF, copy_of="megatron-bert", visual_embedding_dim=12),
    # Rotary embeddings.
    "esm": Tiny("Esm", ENCODER, SELF, position_embedding_type="rotary", mask_token_id=4, token_dropout=False),
    "llama": Tiny("Llama", LLAMA, CAUSAL, generates=LM),
    "phi": Tiny("Phi", ENCODER, CAUSAL, generates=LM),
}
BLOCKS_ALONE = {
    "blip_text_model": Tiny("BlipText", ENCODER, BLIP_KINDS, with_states, encoder_hidden_size=WIDTH, is_decoder=True),
    "blip_vision_model": Tiny("BlipVision", IMAGES, SELF, images),
    "deberta": Tiny("Deberta", DEBERTA, SELF),
    "mvp": Tiny("Mvp", TRANSLATOR, ALL, pairs),
    "table-transformer": Tiny("TableTransformer", DETECTOR, DETECTING, scenes),
    "tapas": Tiny("Tapas", ENCODER, SELF),
    "trocr": Tiny("TrOCR", TROCR, CROSS, with_states, model="TrOCRForCausalLM"),
    "xglm": Tiny("XGLM", XGLM, CAUSAL, ffn_dim=32),
}
"""Models whose attention cannot be edited."""
LED = {**TWO_STACKS, "vocab_size": VOCABULARY, "attention_window": 4, **IDS, "decoder_start_token_id": 2}
LED |= {"max_encoder_position_embeddings": POSITIONS, "max_decoder_position_embeddings": POSITIONS}
LED |= {"encoder_layers": LAYERS, "decoder_layers": LAYERS}
SWIN = {"image_size": 8, "patch_size": 2, "embed_dim": 12, "depths": [LAYERS] * 2, "num_heads": [HEADS] * 2}
INTERNVL = {**IMAGES, "image_size": [8, 8], "patch_size": [4, 4], "use_qk_norm": True}
GRIFFIN = {**ENCODER, "intermediate_size": 64, "lru_width": WIDTH, "num_hidden_layers": 4}
XLNET = sized("d_model", "n_head", "n_layer") | {"d_inner": 32}
NUMBERED = {
    "big_bird": Tiny("BigBird", ENCODER, (), attention_type="original_full"),
    "bloom": Tiny("Bloom", sized("hidden_size", "n_head", "n_layer"), ()),
    "convbert": Tiny("ConvBert", ENCODER, (), embedding_size=WIDTH),
    "ctrl": Tiny("CTRL", GPT2, (), dff=32),
    "falcon": Tiny("Falcon", ENCODER, (), ffn_hidden_size=32),
    "fnet": Tiny("FNet", ENCODER, ()),
    "gpt_bigcode": Tiny("GPTBigCode", GPT2, (), n_inner=32),
    "gptj": Tiny("GPTJ", GPT2, (), n_inner=32, rotary_dim=4),
    "internvl_vision": Tiny(
        "InternVLVision", IMAGES, (), images, image_size=[8, 8], patch_size=[4, 4], use_qk_norm=True
    ),
    "led": Tiny("LED", LED, (), pairs),
    "longformer": Tiny("Longformer", ENCODER, (), attention_window=4),
    "luke": Tiny("Luke", ENCODER, (), entity_vocab_size=10, entity_emb_size=8),
    "recurrent_gemma": Tiny(
        "RecurrentGemma", ENCODER, (), intermediate_size=64, lru_width=WIDTH, num_hidden_layers=4
    ),
    "swin": Tiny("Swin", SWIN, (), images, window_size=2),
    "xlnet": Tiny("XLNet", XLNET, ()),
}
"""Models of families without a description, which have numbered layers all the same."""


def skip_older(model_type: str) -> None:
    """Skip a test of a family that the installed Transformers does not have, or not as described."""
    since = FAMILIES[model_type].since if model_type in FAMILIES else ""
    if since and Version(transformers.__version__) < Version(since):
        pytest.skip(f"{model_type} needs Transformers {since}")


def build(name: str, class_name: str = "") -> PreTrainedModel:
    """Return a random model in evaluation mode with biases that are not zero."""
    tiny = (TINIES | BLOCKS_ALONE | NUMBERED)[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{tiny.name}Config")(**tiny.settings)
    for part in (config, *vars(config).values()):
        skip_older(getattr(part, "model_type", ""))
    model = getattr(transformers, class_name or tiny.model)(config)
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
            for site in find_dense_attention(model):
                site.query.weight.view(HEADS, -1, site.query.in_features)[:, -1] = 0
    return model.eval()


@cache
def _converted(name: str, class_name: str) -> PreTrainedModel:
    model = build(name, class_name)
    head_dim = None if find_attention(model)[0].family.rotary else 4
    compress(model, Compression(dk=7, head_dim=head_dim, solver=Solver(sweeps=3)), calibration=None)
    return model


def build_low(name: str, class_name: str = "") -> PreTrainedModel:
    """Return a model of a family converted to dk = 7, with heads 4 wide, which happens once."""
    return copy.deepcopy(_converted(name, class_name))


def inputs(name: str, seed: int = 0) -> Batch:
    """Return the inputs of a family, padded where possible."""
    return (TINIES | BLOCKS_ALONE | NUMBERED)[name].reads(torch.Generator().manual_seed(seed))


def numbered_layers(model: PreTrainedModel, batch: Batch) -> list[str]:
    """Return the paths of the numbered layers of a model."""
    return [layer for stack in find_stacks(model, batch) for layer in stack.layers]


def attend_by_(model: PreTrainedModel, implementation: str) -> None:
    """Set the attention implementation of a model in place; some have only eager attention."""
    model.set_attn_implementation(implementation if model._supports_sdpa else "eager")


def run(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """Return the first output, or those of two towers side by side; without padding if it has one per token."""
    with torch.no_grad():
        output = model(**batch)
    mask = batch.get("decoder_attention_mask", batch.get("attention_mask"))
    towers = [output[name][0] for name in ("text_model_output", "vision_model_output") if name in output]
    unpadded = []
    for states in towers or [output[0]]:
        has_mask = mask is not None and mask.shape == states.shape[:2]
        unpadded.append(states[mask.bool()] if has_mask else states)
    return torch.cat([states.flatten() for states in unpadded]) if towers else unpadded[0]


WAYS = {"greedy": {"do_sample": False}, "beams": {"do_sample": False, "num_beams": 3}, "sampled": {"do_sample": True}}


def generated(model: PreTrainedModel, batch: Batch, **options: Any) -> torch.Tensor:
    """Return what a model generates after the prompts of a batch, six tokens each, for one seed.

    Without an encoder they have no padding. Stock BERT cannot use a cache when it gets an encoder's states by hand.
    """
    prompt = {name: part for name, part in batch.items() if not name.startswith("decoder")}
    if not model.config.is_encoder_decoder:
        prompt["attention_mask"] = torch.ones_like(prompt["attention_mask"])
    if "encoder_hidden_states" in prompt:
        options["use_cache"] = False
    torch.manual_seed(5)
    return model.generate(**prompt, max_new_tokens=6, min_new_tokens=6, **options)


ROTARY_SIZES = {**ENCODER, "hidden_size": 32, "num_attention_heads": 4}
EXPERTS = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 2)
EXPERTS |= {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts_per_tok": 1}
LAYER_KINDS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
WITH_EXPERTS = ("ernie4_5_moe", "gpt_oss", "granitemoe", "granitemoeshared", "mixtral", "phimoe", "solar_open")
WITH_EXPERTS += ("qwen2_moe", "qwen3_moe")
WITH_LAYER_KINDS = ("cohere2", "exaone4", "gemma2", "gemma3_text", "gpt_oss", "olmo3")
ROTARY = sorted(name for name, family in FAMILIES.items() if family.rotary and not family.limits.no_dk)
KEEPING = sorted(name for name, family in FAMILIES.items() if family.limits.no_dk)


def make_rotary(name: str, grouped: bool = True) -> PreTrainedModel:
    """Return a random rotary model with a head that generates, and grouped queries where possible and wanted.

    Like those of `build`, it is in evaluation mode, and its biases are not zero.
    """
    skip_older(name)
    torch.manual_seed(0)
    groups = {"num_key_value_heads": 2} if grouped and FAMILIES[name].paths.key_value_heads else {}
    width = {} if name in ("esm", "gpt_neox", "modernbert") else {"head_dim": 8}
    others = (EXPERTS if name in WITH_EXPERTS else {}) | (LAYER_KINDS if name in WITH_LAYER_KINDS else {})
    if name == "esm":
        others = {"position_embedding_type": "rotary", "mask_token_id": 4, "token_dropout": False}
    if name == "mistral":
        others = {"sliding_window": 4}
    if name == "smollm3":
        others = {"no_rope_layers": [1, 0]}
    config = CONFIG_MAPPING[name](**ROTARY_SIZES, **groups, **width, **others)
    generates = type(config) in AutoModelForCausalLM._model_mapping
    model = (AutoModelForCausalLM if generates else AutoModel).from_config(config).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if path.endswith((".query.bias", ".key.bias", "q_proj.bias", "k_proj.bias", "query_key_value.bias")):
                parameter.normal_(std=0.5)
    return model
