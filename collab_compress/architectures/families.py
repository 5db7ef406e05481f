"""Where attention is in each family of models: one table.

Transformers' documentation names the paper of each family; docs/families.md lists what can be converted of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal


@dataclass(frozen=True)
class Paths:
    """Attribute paths of the parts of an attention module; a leading `..` starts at its parent, as in imports.

    Args:
        query: the `nn.Linear` projecting queries, D → H·d.
        key: the `nn.Linear` projecting keys, D → H·d, or Hkv·d where queries are grouped.
        value: the `nn.Linear` projecting values, as wide as the keys.
        output: the `nn.Linear` that reads all head outputs, H·dv → D.
        heads: integer attribute, number of heads H.
        head_width: integer attribute, width d of one head's keys.
        scaling: float attribute multiplying the scores; empty where there is none and the factor is 1/√d.
        key_value_heads: integer attribute, number of heads Hkv of keys and values; empty where it is H.
        cross: child name in the paths of cross-attention modules; empty where there are none.
        fused: the `nn.Linear` or `Conv1D` (D → (H + 2·Hkv)·d) that holds query, key and value of a stock model; in a
            converted one they are its children `query`, `key` and `value`. Empty where there are three layers.
        free_width: attribute of the config for the width of a head, independent of the model's width; empty where
            there is none.
    """

    query: str
    key: str
    value: str
    output: str
    heads: str
    head_width: str
    scaling: str = "scaling"
    key_value_heads: str = ""
    cross: str = ""
    fused: str = ""
    free_width: str = ""


@dataclass(frozen=True)
class Layout:
    """How an attention module views the outputs of its projections.

    Args:
        fixed_head_count: whether as exactly H heads, instead of as many as there are; shared projections are then
            padded to H·d with zeros, and save nothing in a key cache.
        head_count_attr: attribute of such a module that holds the number of viewed heads and has no other use; once
            queries, keys and values are all converted it becomes the number of key groups, so that a cache is
            smaller. Empty where it has other uses.
        interleaved: whether a fused layer holds each head's query, key and value together, instead of three blocks
            side by side.
        equal_widths: whether queries, keys and values are viewed as equally many heads, so that a cache holds as much
            of the narrower as of the widest.
    """

    fixed_head_count: bool = False
    head_count_attr: str = ""
    interleaved: bool = False
    equal_widths: bool = False


@dataclass(frozen=True)
class Rotary:
    """A rotary embedding of queries and keys.

    Args:
        pairs: how it pairs the channels of a head: "halves" (channel j with j + d/2), "neighbours" (2j with 2j + 1),
            or "neighbours, tables too" where cosines and sines come in that order as well.
        width: integer attribute, number of rotated channels of a head, its first; `partial_rotary_factor` where the
            config holds their share in its `rope_parameters`; empty where all are rotated.
        where: boolean attribute, whether a layer rotates queries and keys; empty where all do.
    """

    pairs: Literal["halves", "neighbours", "neighbours, tables too"] = "halves"
    width: str = ""
    where: str = ""


@dataclass(frozen=True)
class RelativePositions:
    """Relative embeddings whose products with contents are terms of the scores (`attention.relative`).

    Args:
        enabled: boolean attribute, whether a module has them.
        terms: attribute, a list with the terms that there are: "c2p" of queries of contents and keys of positions,
            "p2c" of queries of positions and keys of contents. Scores are divided by the root of their number, the
            term of contents included.
        shared: boolean attribute, whether positions have the projections of contents.
        span: integer attribute, half of the number of relative embeddings.
        dropout: the `nn.Dropout` of relative embeddings.
        projections: otherwise, where positions have projections of queries and keys of their own.
    """

    enabled: str
    terms: str
    shared: str
    span: str
    dropout: str
    projections: tuple[str, str]


@dataclass(frozen=True)
class Limits:
    """What cannot be done with a family.

    Args:
        no_pruning: why heads cannot be removed; empty where they can.
        no_dk: why queries and keys cannot be converted, though values can; empty where they can.
        feed_forward_only: why the forward pass of `attention.forward` cannot take over from a module that does not
            call Transformers' attention interface: only feed-forward blocks can be converted, and heads be neither
            read, masked nor removed. Empty where attention can be edited.
        undescribed: kind of attention that the paths do not fit → how it differs.
    """

    no_pruning: str = ""
    no_dk: str = ""
    feed_forward_only: str = ""
    undescribed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class AttentionFamily:
    """Where one family of Transformers models keeps the parts of its attention. Adding one is a row of `FAMILIES`.

    Args:
        name: its usual name, for messages.
        model_types: `config.model_type` values it covers.
        attention_classes: class names of the modules that project queries and keys and call Transformers' attention
            interface, or run the forward pass of `attention.forward`.
        paths: where the parts of a module are.
        forward: which forward pass a converted module runs. "plain": ours, with one product for queries, keys and
            values, because the stock one does no more than project, attend and project the outputs. "scores": ours,
            also while heads are only hooked, because the stock one computes its scores itself. "stock": its own,
            because it does more in between, such as scaling or rotating queries.
        layout: how a module views the outputs of its projections.
        rotary: its rotary embedding; None without one.
        relative: its relative embeddings that take part in products; None without.
        limits: what cannot be done with it.
        causal: whether self-attention is causal although its modules (`is_decoder` or `is_causal`) do not say so.
        key_bias: whether keys have a bias where queries have one.
        since: oldest tested version of Transformers that has the modules as described; empty where all tested have.

    Example:
        >>> paths = FAMILIES["bert"].paths
        >>> paths.query, paths.output
        ('query', '..output.dense')
    """

    name: str
    model_types: tuple[str, ...]
    attention_classes: tuple[str, ...]
    paths: Paths
    forward: Literal["stock", "plain", "scores"] = "stock"
    layout: Layout = Layout()
    rotary: Rotary | None = None
    relative: RelativePositions | None = None
    limits: Limits = Limits()
    causal: bool = False
    key_bias: bool = True
    since: str = ""


NORMALISED = "queries and keys are normalised after their projection (QK-norm)"
_ONE_BIAS = Limits(no_pruning="all layers share one position bias with a column for each head")
_OWN_BIAS = Limits(no_pruning="its position bias has a column for each head")
_ONE_COUNT = Limits(no_pruning="its config has one number of heads for all layers")
_BLOCKS_ALONE = Limits(feed_forward_only="it computes its scores itself")


def _base(paths: Paths, **fields: Any) -> AttentionFamily:
    """Return what several families have in common: a row without names."""
    return AttentionFamily("", (), (), paths, **fields)


def _paths(projections: str, heads: str, head_width: str, **others: str) -> Paths:
    """Return paths of query, key, value and output, or of the layer that holds the first three and of output."""
    *inputs, output = projections.split()
    if len(inputs) == 1:
        others["fused"] = inputs[0]
        inputs = [f"{inputs[0]}.{name}" for name in ("query", "key", "value")]
    query, key, value = inputs
    return Paths(query, key, value, output, heads, head_width, **others)


def _with_paths(base: AttentionFamily, **paths: str) -> AttentionFamily:
    """Return a base with some other paths."""
    return replace(base, paths=replace(base.paths, **paths))


_BERT = _base(
    _paths("query key value ..output.dense", "num_attention_heads", "attention_head_size", cross="crossattention"),
    forward="plain",
)
_OWN_BERT = replace(_with_paths(_BERT, scaling=""), forward="scores")
_BERT_ALONE = replace(_OWN_BERT, limits=_BLOCKS_ALONE)
# One module of ALBERT serves every layer of its group; a normalisation follows in it.
_ALBERT = replace(_with_paths(_BERT, output="dense", cross=""), forward="stock")
_DISTILBERT = _base(_paths("q_lin k_lin v_lin out_lin", "n_heads", "attention_head_size"), forward="plain")
_BART = _base(_paths("q_proj k_proj v_proj out_proj", "num_heads", "head_dim", cross="encoder_attn"), forward="plain")
_BART_ALONE = replace(_BART, limits=_BLOCKS_ALONE)
_NLLB_MOE = _with_paths(_BART, cross="cross_attention")
_WAV2VEC2 = _with_paths(_BART, cross="")
_COUNTED = Layout(fixed_head_count=True, head_count_attr="num_heads")
_OPT = replace(_WAV2VEC2, forward="stock", layout=_COUNTED)  # scales queries itself
_WHISPER = replace(_with_paths(_OPT, cross="encoder_attn"), key_bias=False)
_LISTENER = replace(_OPT, layout=Layout(fixed_head_count=True), key_bias=False)  # no cache to make smaller
_CLIP = _with_paths(_WAV2VEC2, scaling="scale")
_VIT = _base(
    _paths("q_proj k_proj v_proj o_proj", "num_attention_heads", "head_dim", free_width="head_dim"), forward="plain"
)
_SEGFORMER = replace(_with_paths(_VIT, free_width=""), forward="stock")
_BEIT = replace(_VIT, key_bias=False, limits=_OWN_BIAS)
_VIDEOMAE = replace(_with_paths(_BERT, cross=""), key_bias=False)
_DPT = replace(_VIDEOMAE, key_bias=True)
# Scores of T5 are not scaled, and a position bias is added to them.
_T5 = _base(
    _paths("q k v o", "n_heads", "key_value_proj_dim", cross="EncDecAttention", free_width="d_kv"), limits=_ONE_BIAS
)
_UMT5 = replace(_T5, layout=Layout(fixed_head_count=True), limits=_OWN_BIAS)
_PIX2STRUCT = _base(_paths("query key value output", "n_heads", "key_value_proj_dim", free_width="d_kv"))
_PIX2STRUCT_TEXT = replace(
    _with_paths(_PIX2STRUCT, cross="encoder_decoder_attention", free_width=""), limits=_ONE_BIAS
)
_GPT2 = _base(  # one transposed layer holds queries, keys and values
    _paths("c_attn c_proj", "num_heads", "head_dim", cross="crossattention"),
    limits=Limits(undescribed={"cross": "it keeps queries in one layer and keys and values together in another"}),
)
_DETR = _base(  # positions are added to the inputs of queries and keys, not to those of values
    _paths("q_proj k_proj v_proj o_proj", "config.encoder_attention_heads", "head_dim", cross="encoder_attn"),
    limits=Limits(no_pruning="its modules do not count them"),
)
_BLIP_VISION = _base(_paths("qkv projection", "num_heads", "head_dim", scaling="scale"), limits=_BLOCKS_ALONE)
_MPNET = _base(
    _paths("q k v o", "num_attention_heads", "attention_head_size", scaling=""), forward="scores", limits=_ONE_BIAS
)
_DEBERTA = _base(
    _paths("query_proj key_proj value_proj ..output.dense", "num_attention_heads", "attention_head_size", scaling=""),
    forward="scores",
    relative=RelativePositions(
        enabled="relative_attention",
        terms="pos_att_type",
        shared="share_att_key",
        span="pos_ebd_size",
        dropout="pos_dropout",
        projections=("pos_query_proj", "pos_key_proj"),
    ),
)
_DEBERTA_V1 = replace(
    _with_paths(_DEBERTA, fused="in_proj"),
    relative=None,
    limits=Limits(
        feed_forward_only="it computes its scores itself, adds biases of queries and values outside of its one layer "
        "for queries, keys and values, and projects positions by layers of their own"
    ),
)
_NOMIC = _base(
    _paths("q_proj k_proj v_proj o_proj", "config.num_attention_heads", "head_dim"),
    rotary=Rotary(),
    limits=_ONE_COUNT,
)
_LLAMA = _with_paths(_NOMIC, key_value_heads="config.num_key_value_heads")
_COHERE = replace(_LLAMA, rotary=Rotary("neighbours, tables too"))
_COHERE2 = replace(_LLAMA, rotary=Rotary("neighbours, tables too", where="sliding_window"))
_NEIGHBOURS = replace(_LLAMA, rotary=Rotary("neighbours"))
_NEMOTRON = replace(_LLAMA, rotary=Rotary(width="partial_rotary_factor"))
_GLM = replace(_LLAMA, rotary=Rotary("neighbours", width="partial_rotary_factor"))
_PHI = replace(_with_paths(_LLAMA, output="dense"), rotary=Rotary(width="rotary_ndims"))
_QK_NORM = replace(_LLAMA, limits=replace(_ONE_COUNT, no_dk=NORMALISED))
_SOFT_CAPPED = replace(_LLAMA, limits=replace(_ONE_COUNT, no_dk="its scores are soft-capped before the softmax"))
_GPT_OSS = replace(_LLAMA, limits=replace(_ONE_COUNT, no_dk="a learned sink takes part in its softmax"))
_PHI3 = replace(
    _with_paths(_LLAMA, query="qkv_proj.query", key="qkv_proj.key", value="qkv_proj.value", fused="qkv_proj"),
    limits=replace(_ONE_COUNT, no_dk="it cuts the output of one layer where queries and keys of full width end"),
)
_STABLELM = replace(
    _with_paths(_LLAMA, heads="num_heads"),
    layout=Layout(fixed_head_count=True),
    rotary=Rotary(width="rotary_ndims"),
    limits=replace(_ONE_COUNT, no_dk="it views queries and keys as exactly as many heads as its config says"),
)
# Scales queries itself, before they are rotated.
_ESM = replace(_with_paths(_BERT, cross=""), forward="stock", rotary=Rotary())
_GPT_NEOX = _base(
    _paths("query_key_value dense", "config.num_attention_heads", "head_size"),
    layout=Layout(interleaved=True, equal_widths=True),
    rotary=Rotary(width="rotary_ndims"),
    limits=_ONE_COUNT,
)
_MODERNBERT = _base(
    _paths("Wqkv Wo", "config.num_attention_heads", "head_dim", scaling=""),
    layout=Layout(equal_widths=True),
    rotary=Rotary(),
    limits=_ONE_COUNT,
)


def _row(name: str, model_types: str, classes: str, base: AttentionFamily, **others: Any) -> AttentionFamily:
    """Return the row of a family: what it shares with others, and fields of its own."""
    return replace(
        base, name=name, model_types=tuple(model_types.split()), attention_classes=tuple(classes.split()), **others
    )


_ROWS = (
    # Encoders of text; as decoders too, where they can be.
    _row("ALBERT", "albert", "AlbertAttention", _ALBERT),
    _row("BERT", "bert dpr", "BertSelfAttention BertCrossAttention", _BERT),
    _row("BertGeneration", "bert-generation", "BertGenerationSelfAttention BertGenerationCrossAttention", _BERT),
    _row("CamemBERT", "camembert", "CamembertSelfAttention CamembertCrossAttention", _BERT),
    _row("Data2Vec text", "data2vec-text", "Data2VecTextSelfAttention Data2VecTextCrossAttention", _BERT),
    _row("DETR", "detr", "DetrSelfAttention DetrCrossAttention", _DETR, since="5.5"),
    _row("DistilBERT", "distilbert", "DistilBertSelfAttention", _DISTILBERT),
    _row("ELECTRA", "electra", "ElectraSelfAttention ElectraCrossAttention", _BERT),
    _row("ERNIE", "ernie", "ErnieSelfAttention ErnieCrossAttention", _BERT),
    _row("LayoutLM", "layoutlm", "LayoutLMSelfAttention", _BERT),
    _row("MarkupLM", "markuplm", "MarkupLMSelfAttention", _BERT),
    _row("MobileBERT", "mobilebert", "MobileBertSelfAttention", _BERT, forward="stock"),  # three inputs
    _row("RoBERTa", "roberta", "RobertaSelfAttention RobertaCrossAttention", _BERT),
    _row(
        "RoBERTa-PreLayerNorm",
        "roberta-prelayernorm",
        "RobertaPreLayerNormSelfAttention RobertaPreLayerNormCrossAttention",
        _BERT,
    ),
    _row("RoCBert", "roc_bert", "RoCBertSelfAttention RoCBertCrossAttention", _BERT),
    _row("Splinter", "splinter", "SplinterSelfAttention", _BERT),
    _row("X-MOD", "xmod", "XmodSelfAttention XmodCrossAttention", _BERT),
    _row("XLM-RoBERTa", "xlm-roberta", "XLMRobertaSelfAttention XLMRobertaCrossAttention", _BERT),
    _row("XLM-RoBERTa-XL", "xlm-roberta-xl", "XLMRobertaXLSelfAttention XLMRobertaXLCrossAttention", _BERT),
    # Decoders of text.
    _row("BioGPT", "biogpt", "BioGptAttention", _WAV2VEC2),
    _row("GPT-2", "gpt2", "GPT2Attention", _GPT2, since="5.5"),
    _row("OPT", "opt", "OPTAttention", _OPT),
    # Encoder and decoder.
    _row("BART", "bart", "BartAttention", _BART),
    _row("Blenderbot", "blenderbot", "BlenderbotAttention", _BART),
    _row("Blenderbot Small", "blenderbot-small", "BlenderbotSmallAttention", _BART),
    _row("M2M100/NLLB", "m2m_100", "M2M100Attention", _BART),
    _row("Marian", "marian", "MarianAttention", _BART),
    _row("mBART", "mbart", "MBartAttention", _BART),
    _row("mT5", "mt5", "MT5Attention", _T5, since="5.15"),
    _row("NLLB-MoE", "nllb-moe", "NllbMoeAttention", _NLLB_MOE),
    _row("Pegasus", "pegasus", "PegasusAttention", _BART),
    _row("PLBart", "plbart", "PLBartAttention", _BART),
    _row("Switch Transformers", "switch_transformers", "SwitchTransformersAttention", _T5, since="5.15"),
    _row("T5", "t5", "T5Attention", _T5, since="5.15"),
    _row("UMT5", "umt5", "UMT5Attention", _UMT5, since="5.20"),
    # Images and videos.
    _row("BEiT", "beit", "BeitAttention", _BEIT, since="5.10"),
    _row("DeiT", "deit", "DeiTAttention", _VIT, since="5.10"),
    _row("DINOv2", "dinov2", "Dinov2Attention", _VIT, since="5.20"),
    _row("DINOv2 with registers", "dinov2_with_registers", "Dinov2WithRegistersAttention", _VIT, since="5.20"),
    _row("DPT", "dpt", "DPTSelfAttention", _DPT),
    _row("I-JEPA", "ijepa", "IJepaAttention", _VIT, since="5.10"),
    _row("Pixio", "pixio", "PixioAttention", _VIT, since="5.10"),
    _row("VideoMAE", "videomae", "VideoMAESelfAttention", _VIDEOMAE, since="5.20"),
    _row("SegFormer", "segformer", "SegformerAttention", _SEGFORMER, since="5.10"),
    _row("ViT", "vit", "ViTAttention", _VIT, since="5.10"),
    _row("ViTMAE", "vit_mae", "ViTMAEAttention", _VIT, since="5.10"),
    _row("ViTMSN", "vit_msn", "ViTMSNAttention", _VIT, since="5.10"),
    _row("ViTPose", "vitpose_backbone", "VitPoseBackboneSelfAttention", _DPT),
    _row("ViViT", "vivit", "VivitAttention", _VIT, since="5.10"),
    _row("YOLOS", "yolos", "YolosSelfAttention", _DPT),
    # Sound.
    _row("AST", "audio-spectrogram-transformer", "ASTAttention", _VIT, since="5.10"),
    _row("Data2Vec audio", "data2vec-audio", "Data2VecAudioAttention", _WAV2VEC2),
    _row("HuBERT", "hubert", "HubertAttention", _WAV2VEC2),
    _row("MusicGen decoder", "musicgen_decoder", "MusicgenAttention", _BART, since="5.5"),
    _row("MusicGen Melody decoder", "musicgen_melody_decoder", "MusicgenMelodyAttention", _WAV2VEC2, since="5.5"),
    _row("Qwen2-Audio encoder", "qwen2_audio_encoder", "Qwen2AudioAttention", _LISTENER),
    _row("SEW", "sew", "SEWAttention", _WAV2VEC2),
    _row("Speech2Text", "speech_to_text", "Speech2TextAttention", _BART),
    _row("UniSpeech", "unispeech", "UniSpeechAttention", _WAV2VEC2),
    _row("UniSpeechSat", "unispeech-sat", "UniSpeechSatAttention", _WAV2VEC2),
    _row("Voxtral encoder", "voxtral_encoder", "VoxtralAttention", _LISTENER),
    _row("Wav2Vec2", "wav2vec2", "Wav2Vec2Attention", _WAV2VEC2),
    _row("Whisper", "whisper", "WhisperAttention", _WHISPER),
    # Time series.
    _row("PatchTST", "patchtst", "PatchTSTAttention", _WAV2VEC2),
    # Towers of models that read two things.
    _row("ALIGN text", "align_text_model", "AlignTextSelfAttention", _BERT),
    _row("AltCLIP text", "altclip_text_model", "AltRobertaSelfAttention", _BERT, since="5.10"),
    _row("AltCLIP vision", "altclip_vision_model", "AltCLIPAttention", _CLIP, since="5.10"),
    _row("Chinese-CLIP text", "chinese_clip_text_model", "ChineseCLIPTextSelfAttention", _BERT, since="5.10"),
    _row("Chinese-CLIP vision", "chinese_clip_vision_model", "ChineseCLIPVisionAttention", _CLIP, since="5.10"),
    _row("CLAP text", "clap_text_model", "ClapTextSelfAttention", _BERT),
    _row("CLIP text", "clip_text_model", "CLIPAttention", _CLIP, causal=True, since="5.5"),
    _row("CLIP vision", "clip_vision_model", "CLIPAttention", _CLIP, since="5.5"),
    _row("CLIPSeg text", "clipseg_text_model", "CLIPSegAttention", _CLIP, causal=True, since="5.10"),
    _row("CLIPSeg vision", "clipseg_vision_model", "CLIPSegAttention", _CLIP, since="5.10"),
    _row("MetaCLIP 2 text", "metaclip_2_text_model", "MetaClip2Attention", _CLIP, causal=True, since="5.5"),
    _row("MetaCLIP 2 vision", "metaclip_2_vision_model", "MetaClip2Attention", _CLIP, since="5.5"),
    _row("OWLv2 text", "owlv2_text_model", "Owlv2Attention", _CLIP, causal=True, since="5.5"),
    _row("OWLv2 vision", "owlv2_vision_model", "Owlv2Attention", _CLIP, since="5.5"),
    _row("OWL-ViT text", "owlvit_text_model", "OwlViTAttention", _CLIP, causal=True, since="5.5"),
    _row("OWL-ViT vision", "owlvit_vision_model", "OwlViTAttention", _CLIP, since="5.5"),
    _row("Idefics3 vision", "idefics3_vision", "Idefics3VisionAttention", _CLIP, since="5.10"),
    _row("Pix2Struct text", "pix2struct_text_model", "Pix2StructTextAttention", _PIX2STRUCT_TEXT, since="5.15"),
    _row("Pix2Struct vision", "pix2struct_vision_model", "Pix2StructVisionAttention", _PIX2STRUCT, since="5.15"),
    _row("SigLIP text", "siglip_text_model", "SiglipAttention", _CLIP, since="5.10"),
    _row("SigLIP vision", "siglip_vision_model", "SiglipAttention", _CLIP, since="5.10"),
    _row("SigLIP 2 text", "siglip2_text_model", "Siglip2Attention", _CLIP, since="5.10"),
    _row("SigLIP 2 vision", "siglip2_vision_model", "Siglip2Attention", _CLIP, since="5.10"),
    _row("SmolVLM vision", "smolvlm_vision", "SmolVLMVisionAttention", _CLIP, since="5.10"),
    _row("X-CLIP text", "xclip_text_model", "XCLIPAttention", _CLIP, causal=True, since="5.10"),
    # Modules that compute scores themselves: once edited, with the forward pass of `attention.forward`.
    _row("DeBERTa v2", "deberta-v2", "DisentangledSelfAttention", _DEBERTA),
    _row("Megatron-BERT", "megatron-bert", "MegatronBertSelfAttention", _OWN_BERT),
    _row("MPNet", "mpnet", "MPNetSelfAttention", _MPNET, since="5.10"),
    _row("RemBERT", "rembert", "RemBertSelfAttention", _OWN_BERT),
    _row("VisualBERT", "visual_bert", "VisualBertSelfAttention", _with_paths(_OWN_BERT, cross="")),
    # Those that cannot be edited: only their feed-forward blocks are converted.
    _row("BLIP text", "blip_text_model", "BlipTextSelfAttention", _BERT_ALONE),
    _row("BLIP vision", "blip_vision_model", "BlipAttention", _BLIP_VISION),
    _row("DeBERTa", "deberta", "DisentangledSelfAttention", _DEBERTA_V1),
    _row("MVP", "mvp", "MvpAttention", _BART_ALONE, since="5.5"),
    _row("Table Transformer", "table-transformer", "TableTransformerAttention", _BART_ALONE),
    _row("TAPAS", "tapas", "TapasSelfAttention", _BERT_ALONE),
    _row("TrOCR", "trocr", "TrOCRAttention", _BART_ALONE, since="5.5"),
    _row("XGLM", "xglm", "XGLMAttention", _BART_ALONE, since="5.5"),
    # Models with a rotary embedding.
    _row("Apertus", "apertus", "ApertusAttention", _QK_NORM, since="5.5"),
    _row("Arcee", "arcee", "ArceeAttention", _LLAMA),
    _row("Cohere", "cohere", "CohereAttention", _COHERE),
    _row("Cohere 2", "cohere2", "Cohere2Attention", _COHERE2),
    _row("CWM", "cwm", "CwmAttention", _LLAMA),
    _row("ERNIE 4.5 MoE", "ernie4_5_moe", "Ernie4_5_MoeAttention", _NEIGHBOURS),
    _row("ERNIE 4.5", "ernie4_5", "Ernie4_5Attention", _NEIGHBOURS),
    _row("ESM", "esm", "EsmSelfAttention", _ESM, since="5.10"),
    _row("EuroBERT", "eurobert", "EuroBertAttention", _LLAMA, since="5.5"),
    _row("EXAONE 4", "exaone4", "Exaone4Attention", _QK_NORM),
    _row("Gemma", "gemma", "GemmaAttention", _LLAMA),
    _row("Gemma 2", "gemma2", "Gemma2Attention", _SOFT_CAPPED, since="5.23"),
    _row("Gemma 3", "gemma3_text", "Gemma3Attention", _QK_NORM),
    _row("GLM", "glm", "GlmAttention", _GLM),
    _row("GLM-4", "glm4", "Glm4Attention", _GLM),
    _row("Granite MoE shared", "granitemoeshared", "GraniteMoeSharedAttention", _LLAMA),
    _row("Granite MoE", "granitemoe", "GraniteMoeAttention", _LLAMA),
    _row("GPT-NeoX", "gpt_neox", "GPTNeoXAttention", _GPT_NEOX),
    _row("gpt-oss", "gpt_oss", "GptOssAttention", _GPT_OSS),
    _row("Granite", "granite", "GraniteAttention", _LLAMA),
    _row("GTE", "gte", "GteAttention", _NOMIC, since="5.20"),
    _row("Helium", "helium", "HeliumAttention", _NEIGHBOURS),
    _row("HunYuan dense", "hunyuan_v1_dense", "HunYuanDenseV1Attention", _QK_NORM),
    _row("HyperCLOVA X", "hyperclovax", "HyperCLOVAXAttention", _LLAMA, since="5.10"),
    _row("Jais 2", "jais2", "Jais2Attention", _LLAMA),
    _row("Jina embeddings 3", "jina_embeddings_v3", "JinaEmbeddingsV3Attention", _NOMIC, since="5.5"),
    _row("Llama", "llama", "LlamaAttention", _LLAMA),
    _row("Ministral", "ministral", "MinistralAttention", _LLAMA),
    _row("Mistral", "mistral", "MistralAttention", _LLAMA),
    _row("Mixtral", "mixtral", "MixtralAttention", _LLAMA),
    _row("ModernBERT", "modernbert", "ModernBertAttention", _MODERNBERT, since="5.5"),
    _row("ModernBERT decoder", "modernbert-decoder", "ModernBertDecoderAttention", _with_paths(_NOMIC, output="Wo")),
    _row("Nemotron", "nemotron", "NemotronAttention", _NEMOTRON, since="5.15"),
    _row("nomic-bert", "nomic_bert", "NomicBertAttention", _NOMIC, since="5.5"),
    _row("OLMo 2", "olmo2", "Olmo2Attention", _QK_NORM),
    _row("OLMo 3", "olmo3", "Olmo3Attention", _QK_NORM),
    _row("Phi", "phi", "PhiAttention", _PHI),
    _row("Phi-3", "phi3", "Phi3Attention", _PHI3),
    _row("PhiMoE", "phimoe", "PhimoeAttention", _LLAMA),
    _row("Qwen2 MoE", "qwen2_moe", "Qwen2MoeAttention", _LLAMA),
    _row("Qwen2", "qwen2", "Qwen2Attention", _LLAMA),
    _row("Qwen3 MoE", "qwen3_moe", "Qwen3MoeAttention", _QK_NORM),
    _row("Qwen3-VL text", "qwen3_vl_text", "Qwen3VLTextAttention", _QK_NORM),
    _row("Qwen3", "qwen3", "Qwen3Attention", _QK_NORM),
    _row("Seed-OSS", "seed_oss", "SeedOssAttention", _LLAMA),
    _row("SmolLM3", "smollm3", "SmolLM3Attention", _LLAMA, rotary=Rotary(where="use_rope")),
    _row("SOLAR Open", "solar_open", "SolarOpenAttention", _LLAMA),
    _row("StableLM", "stablelm", "StableLmAttention", _STABLELM),
    _row("StarCoder2", "starcoder2", "Starcoder2Attention", _LLAMA),
    _row("UltraBERT", "ultrabert", "UltrabertAttention", _LLAMA, since="5.20"),
    _row("VaultGemma", "vaultgemma", "VaultGemmaAttention", _SOFT_CAPPED, since="5.23"),
)

FAMILIES: dict[str, AttentionFamily] = {model_type: row for row in _ROWS for model_type in row.model_types}
"""`config.model_type` of a model, or of one inside a model, → family. Adding one is a row."""
