"""Where attention is in each family of models: one table.

Papers: ALBERT (Lan et al., 2020), BART (Lewis et al., 2020), BERT (Devlin et al., 2019), CamemBERT (Martin et al.,
2020), DeiT (Touvron et al., 2021), DistilBERT (Sanh et al., 2019), ELECTRA (Clark et al., 2020), GPT-2 (Radford et
al., 2019), M2M100 (Fan et al., 2021) and NLLB (NLLB Team, 2022), Marian (Junczys-Dowmunt et al., 2018), mBART (Liu et
al., 2020), OPT (Zhang et al., 2022), Pegasus (Zhang et al., 2020), RoBERTa (Liu et al., 2019), T5 (Raffel et al.,
2020), ViT (Dosovitskiy et al., 2021), XLM-RoBERTa (Conneau et al., 2020); of the others Transformers' documentation
names them.
Those that compute scores themselves: BLIP (Li et al., 2022), BLOOM (BigScience, 2022), Megatron-BERT (Shoeybi et al.,
2019), MPNet (Song et al., 2020), MPT (MosaicML, 2023), MVP (Tang et al., 2023), RemBERT (Chung et al., 2021), Table
Transformer (Smock et al., 2022), TAPAS (Herzig et al., 2020), TrOCR (Li et al., 2023), VisualBERT (Li et al., 2019),
XGLM (Lin et al., 2022), XLM (Conneau and Lample, 2019) and FlauBERT (Le et al., 2020). DETR (Carion et al., 2020)
does not any more.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class AttentionFamily:
    """Where one family of Transformers models keeps the parts of its attention.

    Attribute paths are relative to the attention module; a leading `..` starts at its parent, as in relative imports.
    Adding a family is one row of `FAMILIES`.

    Args:
        name: what people call it, for messages.
        model_types: `config.model_type` values it covers.
        attention_classes: class names of the modules that project queries and keys and call Transformers' attention
            interface, or have a forward pass in `attention.forwards`.
        query: the `nn.Linear` projecting queries, D → H·d.
        key: the `nn.Linear` projecting keys, D → H·d, or Hkv·d where queries are grouped.
        value: the `nn.Linear` projecting values, as wide.
        output: the `nn.Linear` that reads all head outputs, H·dv → D.
        heads: integer attribute, number of heads H.
        head_width: integer attribute, width d of one head's keys.
        key_value_heads: integer attribute, number of heads of keys and values where several heads of queries share
            one; empty where each has its own.
        scaling: float attribute multiplying the scores (usually 1/√d); empty where that is 1/√d and no attribute.
        cross: name of the child that holds cross-attention, in the path of such a module; empty where there is none.
        causal: whether self-attention sees earlier tokens only, though its modules do not say so by `is_decoder` or
            `is_causal`.
        fused: the `nn.Linear` or `Conv1D` (D → 3·H·d) that holds query, key and value in a stock model; in a
            converted one it has them as children, at the paths `query`, `key` and `value`. Empty where there are
            three layers to begin with.
        interleaved: whether that layer holds each head's query, key and value together, instead of three blocks side
            by side.
        even: whether the module views queries, keys and values of that layer as equally many heads, so that a cache
            holds as much of the narrower as of the widest.
        fixed_heads: whether the module views what its projections return as exactly H heads, instead of as many as
            there are; shared projections are then H·d wide, zeros included, and save nothing in a key cache.
        pieces: attribute of such a module that says how many heads it views, and nothing else; where queries, keys
            and values are all converted it becomes the number of pieces that they need, so that a cache is smaller.
            Empty where it has other uses.
        key_bias: whether keys have a bias where queries have one.
        free_width: attribute of the config that sets the width of a head, whatever the model's width; empty where a
            stock model has none.
        keeps_heads: why heads cannot be removed from it; empty where they can.
        keeps_scores: why queries and keys cannot be converted, though values can; empty where they can.
        rotary: how the channels of a head that a rotary embedding turns are paired: "halves" (channel j with the one
            half of them further), "neighbours" (2j with 2j + 1), or "neighbours, tables too" where cosines and sines
            come in that order as well; empty where there is no rotary embedding.
        rotary_width: integer attribute, how many channels of a head are turned, its first; `partial_rotary_factor`
            where the config says their share among its `rope_parameters`; empty where all are.
        rotary_where: boolean attribute, whether a layer turns queries and keys; empty where all do.
        must_lack: attribute of the module → why a module in which it is true cannot be converted.
        undescribed: kind of attention that these paths do not fit → how it differs.
    """

    name: str
    model_types: tuple[str, ...]
    attention_classes: tuple[str, ...]
    query: str
    key: str
    value: str
    output: str
    heads: str
    head_width: str
    scaling: str = "scaling"
    key_value_heads: str = ""
    cross: str = ""
    causal: bool = False
    fused: str = ""
    interleaved: bool = False
    even: bool = False
    fixed_heads: bool = False
    pieces: str = ""
    key_bias: bool = True
    free_width: str = ""
    keeps_heads: str = ""
    keeps_scores: str = ""
    rotary: Literal["", "halves", "neighbours", "neighbours, tables too"] = ""
    rotary_width: str = ""
    rotary_where: str = ""
    must_lack: Mapping[str, str] = field(default_factory=dict)
    undescribed: Mapping[str, str] = field(default_factory=dict)


NORMALISED = "queries and keys are normalised after their projection (QK-norm)"

# What several families have in common: attribute paths in the attention module.
_BERT: dict[str, Any] = {
    "query": "query", "key": "key", "value": "value", "output": "..output.dense", "heads": "num_attention_heads",
    "head_width": "attention_head_size", "cross": "crossattention",
}  # fmt: skip
_ALBERT = {**_BERT, "output": "dense", "cross": ""}  # one module serves every layer of its group
_DISTILBERT: dict[str, Any] = {
    "query": "q_lin", "key": "k_lin", "value": "v_lin", "output": "out_lin", "heads": "n_heads",
    "head_width": "attention_head_size",
}  # fmt: skip
_BART: dict[str, Any] = {
    "query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "out_proj", "heads": "num_heads",
    "head_width": "head_dim", "cross": "encoder_attn",
}  # fmt: skip
_OPT = {**_BART, "cross": "", "fixed_heads": True, "pieces": "num_heads"}  # scales queries itself
_WHISPER = {**_OPT, "cross": "encoder_attn", "key_bias": False}
_LISTENER = {**_WHISPER, "cross": "", "pieces": ""}  # no cache to make smaller
_WAV2VEC2 = {**_BART, "cross": ""}
_NLLB_MOE = {**_BART, "cross": "cross_attention"}
_CLIP = {**_BART, "cross": "", "scaling": "scale"}
_VIT: dict[str, Any] = {
    "query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj", "heads": "num_attention_heads",
    "head_width": "head_dim", "free_width": "head_dim",
}  # fmt: skip
_T5: dict[str, Any] = {  # scores are not scaled, and a position bias is added to them
    "query": "q", "key": "k", "value": "v", "output": "o", "heads": "n_heads", "head_width": "key_value_proj_dim",
    "cross": "EncDecAttention", "free_width": "d_kv",
    "keeps_heads": "all layers share one position bias with a column for each head",
}  # fmt: skip
_OWN_BIAS = "its position bias has a column for each head"
_UMT5 = {**_T5, "fixed_heads": True, "keeps_heads": _OWN_BIAS}
_BEIT = {**_VIT, "key_bias": False, "keeps_heads": _OWN_BIAS}
_VIDEOMAE = {**_BERT, "cross": "", "key_bias": False}
_DPT = {**_VIDEOMAE, "key_bias": True, "fixed_heads": True}
_PIX2STRUCT_VISION: dict[str, Any] = {
    "query": "query", "key": "key", "value": "value", "output": "output", "heads": "n_heads",
    "head_width": "key_value_proj_dim", "free_width": "d_kv",
}  # fmt: skip
_PIX2STRUCT_TEXT = {
    **_PIX2STRUCT_VISION, "free_width": "", "cross": "encoder_decoder_attention", "keeps_heads": _T5["keeps_heads"],
}  # fmt: skip
_GPT2: dict[str, Any] = {  # queries, keys and values come out of one transposed layer
    "query": "c_attn.query", "key": "c_attn.key", "value": "c_attn.value", "output": "c_proj", "heads": "num_heads",
    "head_width": "head_dim", "cross": "crossattention", "fused": "c_attn",
    "keeps_heads": "it keeps queries, keys and values in one layer, c_attn",
    "undescribed": {"cross": "it keeps queries in one layer and keys and values together in another"},
}  # fmt: skip
_LLAMA: dict[str, Any] = {
    "query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj", "heads": "config.num_attention_heads",
    "key_value_heads": "config.num_key_value_heads", "head_width": "head_dim", "rotary": "halves",
    "keeps_heads": "its config has one number of heads for all layers",
}  # fmt: skip
_PHI = {**_LLAMA, "output": "dense", "rotary_width": "rotary_ndims"}
_GPT_NEOX: dict[str, Any] = {  # one layer holds each head's queries, keys and values together
    "query": "query_key_value.query", "key": "query_key_value.key", "value": "query_key_value.value",
    "output": "dense", "heads": "config.num_attention_heads", "head_width": "head_size", "rotary": "halves",
    "rotary_width": "rotary_ndims", "fused": "query_key_value", "interleaved": True, "even": True,
    "keeps_heads": "its config has one number of heads for all layers",
}  # fmt: skip
_MODERNBERT: dict[str, Any] = {  # one layer holds queries, keys and values, in three blocks
    "query": "Wqkv.query", "key": "Wqkv.key", "value": "Wqkv.value", "output": "Wo",
    "heads": "config.num_attention_heads", "head_width": "head_dim", "scaling": "", "rotary": "halves",
    "fused": "Wqkv", "even": True, "keeps_heads": "its config has one number of heads for all layers",
}  # fmt: skip
_QK_NORM = {**_LLAMA, "keeps_scores": NORMALISED}
_SOFT_CAPPED = {**_LLAMA, "keeps_scores": "its scores are soft-capped before the softmax"}
_PHI3: dict[str, Any] = {  # one layer holds queries, keys and values, in three blocks
    **_LLAMA, "query": "qkv_proj.query", "key": "qkv_proj.key", "value": "qkv_proj.value", "fused": "qkv_proj",
    "keeps_scores": "it cuts what one layer makes where queries and keys of full width end",
}  # fmt: skip
_STABLELM: dict[str, Any] = {
    **_LLAMA, "heads": "num_heads", "rotary_width": "rotary_ndims", "fixed_heads": True,
    "keeps_scores": "it views queries and keys as exactly as many heads as its config says",
}  # fmt: skip
_SHARE = {"rotary_width": "partial_rotary_factor"}
_NEIGHBOURS: dict[str, Any] = {**_LLAMA, "rotary": "neighbours"}
_NOMIC = {**_LLAMA, "key_value_heads": ""}
_ESM = {**_BERT, "cross": "", "rotary": "halves"}  # scales queries itself, before they are turned
_MPNET: dict[str, Any] = {  # computes scores itself
    "query": "q", "key": "k", "value": "v", "output": "o", "heads": "num_attention_heads",
    "head_width": "attention_head_size", "scaling": "",
    "keeps_heads": "all layers share one position bias with a column for each head",
}  # fmt: skip
_BLOOM: dict[str, Any] = {  # computes scores itself; one layer holds each head's queries, keys and values together
    "query": "query_key_value.query", "key": "query_key_value.key", "value": "query_key_value.value",
    "output": "dense", "heads": "num_heads", "head_width": "head_dim", "scaling": "inv_norm_factor", "causal": True,
    "fused": "query_key_value", "interleaved": True,
    "keeps_heads": "it keeps queries, keys and values in one layer, query_key_value",
}  # fmt: skip
_MPT: dict[str, Any] = {  # computes scores itself
    "query": "Wqkv.query", "key": "Wqkv.key", "value": "Wqkv.value", "output": "out_proj", "heads": "n_heads",
    "head_width": "head_dim", "scaling": "softmax_scale", "causal": True, "fused": "Wqkv",
    "keeps_heads": "it keeps queries, keys and values in one layer, Wqkv",
    "must_lack": {"clip_qkv": "queries and keys are clipped after their projection"},
}  # fmt: skip
_TROCR = {**_BART, "keeps_heads": "its modules view outputs as wide as their inputs are"}  # computes scores itself
_BLIP_VISION: dict[str, Any] = {  # computes scores itself
    "query": "qkv.query", "key": "qkv.key", "value": "qkv.value", "output": "projection", "heads": "num_heads",
    "head_width": "head_dim", "scaling": "scale", "fused": "qkv",
    "keeps_heads": "it keeps queries, keys and values in one layer, qkv",
}  # fmt: skip
_TABLES = {**_TROCR, "cross": "encoder_attn"}
_DETR: dict[str, Any] = {  # positions are added to what queries and keys read, not to what values do
    "query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj",
    "heads": "config.encoder_attention_heads", "head_width": "head_dim", "cross": "encoder_attn",
    "keeps_heads": "its modules do not count them",
}  # fmt: skip
_XLM = {**_DISTILBERT, "head_width": "head_dim", "scaling": ""}
_OWN_BERT = {**_BERT, "scaling": ""}  # computes scores itself


def _family(name: str, model_types: str, classes: str, paths: Mapping[str, Any], **more: Any) -> AttentionFamily:
    return AttentionFamily(name, tuple(model_types.split()), tuple(classes.split()), **paths, **more)


_ROWS = (
    # Encoders of text; as decoders too, where they can be.
    _family("ALBERT", "albert", "AlbertAttention", _ALBERT),
    _family("BERT", "bert dpr", "BertSelfAttention BertCrossAttention", _BERT),
    _family("BertGeneration", "bert-generation", "BertGenerationSelfAttention BertGenerationCrossAttention", _BERT),
    _family("CamemBERT", "camembert", "CamembertSelfAttention CamembertCrossAttention", _BERT),
    _family("Data2Vec text", "data2vec-text", "Data2VecTextSelfAttention Data2VecTextCrossAttention", _BERT),
    _family("DETR", "detr", "DetrSelfAttention DetrCrossAttention", _DETR),
    _family("DistilBERT", "distilbert", "DistilBertSelfAttention", _DISTILBERT),
    _family("ELECTRA", "electra", "ElectraSelfAttention ElectraCrossAttention", _BERT),
    _family("ERNIE", "ernie", "ErnieSelfAttention ErnieCrossAttention", _BERT),
    _family("LayoutLM", "layoutlm", "LayoutLMSelfAttention", _BERT),
    _family("MarkupLM", "markuplm", "MarkupLMSelfAttention", _BERT),
    _family("MobileBERT", "mobilebert", "MobileBertSelfAttention", _BERT),
    _family("RoBERTa", "roberta", "RobertaSelfAttention RobertaCrossAttention", _BERT),
    _family("RoBERTa-PreLayerNorm", "roberta-prelayernorm",
            "RobertaPreLayerNormSelfAttention RobertaPreLayerNormCrossAttention", _BERT),
    _family("RoCBert", "roc_bert", "RoCBertSelfAttention RoCBertCrossAttention", _BERT),
    _family("Splinter", "splinter", "SplinterSelfAttention", _BERT),
    _family("X-MOD", "xmod", "XmodSelfAttention XmodCrossAttention", _BERT),
    _family("XLM-RoBERTa", "xlm-roberta", "XLMRobertaSelfAttention XLMRobertaCrossAttention", _BERT),
    _family("XLM-RoBERTa-XL", "xlm-roberta-xl", "XLMRobertaXLSelfAttention XLMRobertaXLCrossAttention", _BERT),
    # Decoders of text.
    _family("BioGPT", "biogpt", "BioGptAttention", _WAV2VEC2),
    _family("GPT-2", "gpt2", "GPT2Attention", _GPT2),
    _family("OPT", "opt", "OPTAttention", _OPT),
    # Encoder and decoder.
    _family("BART", "bart", "BartAttention", _BART),
    _family("Blenderbot", "blenderbot", "BlenderbotAttention", _BART),
    _family("Blenderbot Small", "blenderbot-small", "BlenderbotSmallAttention", _BART),
    _family("M2M100/NLLB", "m2m_100", "M2M100Attention", _BART),
    _family("Marian", "marian", "MarianAttention", _BART),
    _family("mBART", "mbart", "MBartAttention", _BART),
    _family("mT5", "mt5", "MT5Attention", _T5),
    _family("NLLB-MoE", "nllb-moe", "NllbMoeAttention", _NLLB_MOE),
    _family("Pegasus", "pegasus", "PegasusAttention", _BART),
    _family("PLBart", "plbart", "PLBartAttention", _BART),
    _family("Switch Transformers", "switch_transformers", "SwitchTransformersAttention", _T5),
    _family("T5", "t5", "T5Attention", _T5),
    _family("UMT5", "umt5", "UMT5Attention", _UMT5),
    # Images and videos.
    _family("BEiT", "beit", "BeitAttention", _BEIT),
    _family("DeiT", "deit", "DeiTAttention", _VIT),
    _family("DINOv2", "dinov2", "Dinov2Attention", _VIT),
    _family("DINOv2 with registers", "dinov2_with_registers", "Dinov2WithRegistersAttention", _VIT),
    _family("DPT", "dpt", "DPTSelfAttention", _DPT),
    _family("I-JEPA", "ijepa", "IJepaAttention", _VIT),
    _family("Pixio", "pixio", "PixioAttention", _VIT),
    _family("VideoMAE", "videomae", "VideoMAESelfAttention", _VIDEOMAE),
    _family("SegFormer", "segformer", "SegformerAttention", {**_VIT, "free_width": ""}),
    _family("ViT", "vit", "ViTAttention", _VIT),
    _family("ViTMAE", "vit_mae", "ViTMAEAttention", _VIT),
    _family("ViTMSN", "vit_msn", "ViTMSNAttention", _VIT),
    _family("ViTPose", "vitpose_backbone", "VitPoseBackboneSelfAttention", _DPT),
    _family("ViViT", "vivit", "VivitAttention", _VIT),
    _family("YOLOS", "yolos", "YolosSelfAttention", _DPT),
    # Sound.
    _family("AST", "audio-spectrogram-transformer", "ASTAttention", _VIT),
    _family("Data2Vec audio", "data2vec-audio", "Data2VecAudioAttention", _WAV2VEC2),
    _family("HuBERT", "hubert", "HubertAttention", _WAV2VEC2),
    _family("MusicGen decoder", "musicgen_decoder", "MusicgenAttention", _BART),
    _family("MusicGen Melody decoder", "musicgen_melody_decoder", "MusicgenMelodyAttention", _WAV2VEC2),
    _family("Qwen2-Audio encoder", "qwen2_audio_encoder", "Qwen2AudioAttention", _LISTENER),
    _family("SEW", "sew", "SEWAttention", _WAV2VEC2),
    _family("Speech2Text", "speech_to_text", "Speech2TextAttention", _BART),
    _family("UniSpeech", "unispeech", "UniSpeechAttention", _WAV2VEC2),
    _family("UniSpeechSat", "unispeech-sat", "UniSpeechSatAttention", _WAV2VEC2),
    _family("Voxtral encoder", "voxtral_encoder", "VoxtralAttention", _LISTENER),
    _family("Wav2Vec2", "wav2vec2", "Wav2Vec2Attention", _WAV2VEC2),
    _family("Whisper", "whisper", "WhisperAttention", _WHISPER),
    # Time series.
    _family("PatchTST", "patchtst", "PatchTSTAttention", _WAV2VEC2),
    # Towers of models that read two things.
    _family("ALIGN text", "align_text_model", "AlignTextSelfAttention", _BERT),
    _family("AltCLIP text", "altclip_text_model", "AltRobertaSelfAttention", _BERT),
    _family("AltCLIP vision", "altclip_vision_model", "AltCLIPAttention", _CLIP),
    _family("Chinese-CLIP text", "chinese_clip_text_model", "ChineseCLIPTextSelfAttention", _BERT),
    _family("Chinese-CLIP vision", "chinese_clip_vision_model", "ChineseCLIPVisionAttention", _CLIP),
    _family("CLAP text", "clap_text_model", "ClapTextSelfAttention", _BERT),
    _family("CLIP text", "clip_text_model", "CLIPAttention", _CLIP, causal=True),
    _family("CLIP vision", "clip_vision_model", "CLIPAttention", _CLIP),
    _family("CLIPSeg text", "clipseg_text_model", "CLIPSegAttention", _CLIP, causal=True),
    _family("CLIPSeg vision", "clipseg_vision_model", "CLIPSegAttention", _CLIP),
    _family("MetaCLIP 2 text", "metaclip_2_text_model", "MetaClip2Attention", _CLIP, causal=True),
    _family("MetaCLIP 2 vision", "metaclip_2_vision_model", "MetaClip2Attention", _CLIP),
    _family("OWLv2 text", "owlv2_text_model", "Owlv2Attention", _CLIP, causal=True),
    _family("OWLv2 vision", "owlv2_vision_model", "Owlv2Attention", _CLIP),
    _family("OWL-ViT text", "owlvit_text_model", "OwlViTAttention", _CLIP, causal=True),
    _family("OWL-ViT vision", "owlvit_vision_model", "OwlViTAttention", _CLIP),
    _family("Idefics3 vision", "idefics3_vision", "Idefics3VisionAttention", _CLIP),
    _family("Pix2Struct text", "pix2struct_text_model", "Pix2StructTextAttention", _PIX2STRUCT_TEXT),
    _family("Pix2Struct vision", "pix2struct_vision_model", "Pix2StructVisionAttention", _PIX2STRUCT_VISION),
    _family("SigLIP text", "siglip_text_model", "SiglipAttention", _CLIP),
    _family("SigLIP vision", "siglip_vision_model", "SiglipAttention", _CLIP),
    _family("SigLIP 2 text", "siglip2_text_model", "Siglip2Attention", _CLIP),
    _family("SigLIP 2 vision", "siglip2_vision_model", "Siglip2Attention", _CLIP),
    _family("SmolVLM vision", "smolvlm_vision", "SmolVLMVisionAttention", _CLIP),
    _family("X-CLIP text", "xclip_text_model", "XCLIPAttention", _CLIP, causal=True),
)  # fmt: skip

# Those whose modules compute scores themselves, by the forward passes of `attention.forwards` once they are edited.
_OWN_ROWS = (
    _family("BLIP text", "blip_text_model", "BlipTextSelfAttention", _OWN_BERT),
    _family("BLIP vision", "blip_vision_model", "BlipAttention", _BLIP_VISION),
    _family("BLOOM", "bloom", "BloomAttention", _BLOOM),
    _family("Megatron-BERT", "megatron-bert", "MegatronBertSelfAttention", _OWN_BERT),
    _family("MPNet", "mpnet", "MPNetSelfAttention", _MPNET),
    _family("MPT", "mpt", "MptAttention", _MPT),
    _family("MVP", "mvp", "MvpAttention", _BART),
    _family("RemBERT", "rembert", "RemBertSelfAttention", _OWN_BERT),
    _family("Table Transformer", "table-transformer", "TableTransformerAttention", _TABLES),
    _family("TAPAS", "tapas", "TapasSelfAttention", _OWN_BERT),
    _family("TrOCR", "trocr", "TrOCRAttention", _TROCR),
    _family("VisualBERT", "visual_bert", "VisualBertSelfAttention", {**_OWN_BERT, "cross": ""}),
    _family("XLM", "xlm", "MultiHeadAttention", _XLM),
    _family("FlauBERT", "flaubert", "MultiHeadAttention", _XLM),
    _family("XGLM", "xglm", "XGLMAttention", _BART),
)

# Those whose queries and keys a rotary embedding turns.
_ROTARY_ROWS = (
    _family("Apertus", "apertus", "ApertusAttention", _QK_NORM),
    _family("Arcee", "arcee", "ArceeAttention", _LLAMA),
    _family("Cohere", "cohere", "CohereAttention", {**_LLAMA, "rotary": "neighbours, tables too"}),
    _family(
        "Cohere 2",
        "cohere2",
        "Cohere2Attention",
        {**_LLAMA, "rotary": "neighbours, tables too", "rotary_where": "sliding_window"},
    ),
    _family("CWM", "cwm", "CwmAttention", _LLAMA),
    _family("ERNIE 4.5 MoE", "ernie4_5_moe", "Ernie4_5_MoeAttention", _NEIGHBOURS),
    _family("ERNIE 4.5", "ernie4_5", "Ernie4_5Attention", _NEIGHBOURS),
    _family("ESM", "esm", "EsmSelfAttention", _ESM),
    _family("EuroBERT", "eurobert", "EuroBertAttention", _LLAMA),
    _family("EXAONE 4", "exaone4", "Exaone4Attention", _QK_NORM),
    _family("Gemma", "gemma", "GemmaAttention", _LLAMA),
    _family("Gemma 2", "gemma2", "Gemma2Attention", _SOFT_CAPPED),
    _family("Gemma 3", "gemma3_text", "Gemma3Attention", _QK_NORM),
    _family("GLM", "glm", "GlmAttention", {**_NEIGHBOURS, **_SHARE}),
    _family("GLM-4", "glm4", "Glm4Attention", {**_NEIGHBOURS, **_SHARE}),
    _family("Granite MoE shared", "granitemoeshared", "GraniteMoeSharedAttention", _LLAMA),
    _family("Granite MoE", "granitemoe", "GraniteMoeAttention", _LLAMA),
    _family("GPT-NeoX", "gpt_neox", "GPTNeoXAttention", _GPT_NEOX),
    _family(
        "gpt-oss",
        "gpt_oss",
        "GptOssAttention",
        {**_LLAMA, "keeps_scores": "a learned sink takes part in its softmax"},
    ),
    _family("Granite", "granite", "GraniteAttention", _LLAMA),
    _family("GTE", "gte", "GteAttention", _NOMIC),
    _family("Helium", "helium", "HeliumAttention", _NEIGHBOURS),
    _family("HunYuan dense", "hunyuan_v1_dense", "HunYuanDenseV1Attention", _QK_NORM),
    _family("HyperCLOVA X", "hyperclovax", "HyperCLOVAXAttention", _LLAMA),
    _family("Jais 2", "jais2", "Jais2Attention", _LLAMA),
    _family("Jina embeddings 3", "jina_embeddings_v3", "JinaEmbeddingsV3Attention", _NOMIC),
    _family("Llama", "llama", "LlamaAttention", _LLAMA),
    _family("Ministral", "ministral", "MinistralAttention", _LLAMA),
    _family("Mistral", "mistral", "MistralAttention", _LLAMA),
    _family("Mixtral", "mixtral", "MixtralAttention", _LLAMA),
    _family("ModernBERT", "modernbert", "ModernBertAttention", _MODERNBERT),
    _family("ModernBERT decoder", "modernbert-decoder", "ModernBertDecoderAttention", {**_NOMIC, "output": "Wo"}),
    _family("Nemotron", "nemotron", "NemotronAttention", {**_LLAMA, **_SHARE}),
    _family("nomic-bert", "nomic_bert", "NomicBertAttention", _NOMIC),
    _family("OLMo 2", "olmo2", "Olmo2Attention", _QK_NORM),
    _family("OLMo 3", "olmo3", "Olmo3Attention", _QK_NORM),
    _family("Phi", "phi", "PhiAttention", _PHI),
    _family("Phi-3", "phi3", "Phi3Attention", _PHI3),
    _family("PhiMoE", "phimoe", "PhimoeAttention", _LLAMA),
    _family("Qwen2 MoE", "qwen2_moe", "Qwen2MoeAttention", _LLAMA),
    _family("Qwen2", "qwen2", "Qwen2Attention", _LLAMA),
    _family("Qwen3 MoE", "qwen3_moe", "Qwen3MoeAttention", _QK_NORM),
    _family("Qwen3-VL text", "qwen3_vl_text", "Qwen3VLTextAttention", _QK_NORM),
    _family("Qwen3", "qwen3", "Qwen3Attention", _QK_NORM),
    _family("Seed-OSS", "seed_oss", "SeedOssAttention", _LLAMA),
    _family("SmolLM3", "smollm3", "SmolLM3Attention", {**_LLAMA, "rotary_where": "use_rope"}),
    _family("SOLAR Open", "solar_open", "SolarOpenAttention", _LLAMA),
    _family("StableLM", "stablelm", "StableLmAttention", _STABLELM),
    _family("StarCoder2", "starcoder2", "Starcoder2Attention", _LLAMA),
    _family("UltraBERT", "ultrabert", "UltrabertAttention", _LLAMA),
    _family("VaultGemma", "vaultgemma", "VaultGemmaAttention", _SOFT_CAPPED),
)

FAMILIES: dict[str, AttentionFamily] = {
    model_type: row for row in (*_ROWS, *_OWN_ROWS, *_ROTARY_ROWS) for model_type in row.model_types
}
"""`config.model_type` of a model, or of one inside a model, → family. Adding one is a row."""

_SINCE = {
    "5.5": (
        "apertus clip_text_model clip_vision_model detr eurobert gpt2 jina_embeddings_v3 metaclip_2_text_model "
        "metaclip_2_vision_model modernbert mpt musicgen_decoder musicgen_melody_decoder mvp nomic_bert "
        "owlv2_text_model owlv2_vision_model owlvit_text_model owlvit_vision_model trocr xglm"
    ),
    "5.10": (
        "altclip_text_model altclip_vision_model audio-spectrogram-transformer beit bloom chinese_clip_text_model "
        "chinese_clip_vision_model clipseg_text_model clipseg_vision_model deit esm hyperclovax idefics3_vision "
        "ijepa mpnet pixio segformer siglip2_text_model siglip2_vision_model siglip_text_model siglip_vision_model "
        "smolvlm_vision vit vit_mae vit_msn vivit xclip_text_model"
    ),
    "5.15": "mt5 nemotron pix2struct_text_model pix2struct_vision_model switch_transformers t5",
    "5.20": "dinov2 dinov2_with_registers gte ultrabert umt5 videomae",
    "5.23": "gemma2 vaultgemma",
}
SINCE: dict[str, str] = {
    model_type: version for version, model_types in _SINCE.items() for model_type in model_types.split()
}
"""`config.model_type` → the oldest tried version of Transformers that has the modules as described; else all have."""
