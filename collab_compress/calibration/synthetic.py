"""Calibration data that are made for a model: random tokens, noise, and texts that it writes itself.

Of random tokens the frequent ones are drawn more often. Noise replaces images, video clips and sounds, beside random
tokens where a model reads those too.
"""

import re
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from collab_compress.calibration.gather import Batch, evaluation_mode
from collab_compress.calibration.tokenization import (
    BATCH_SIZE,
    batch_size,
    check_size,
    ordinary_tokens,
    pad,
    pair_separator,
    sampled,
    special_tokens,
    start_token,
    usable_length,
)
from collab_compress.errors import CalibrationError

SHORTEST, LONGEST = 8, 128  # tokens of a random sequence when no length is given
VARIED, EQUAL = 384, 128  # random sequences of varied and of equal length: 16,000 and 8,000 tokens
RANK_SHIFT = 2.7  # Mandelbrot's for English
PLACEHOLDER = re.compile(r"[\[<].+[\]>]")  # [unused7], <extra_id_3>, <0x0A>
IMAGES = 128  # images, clips or sounds
POSITIONS = 64  # of a sound, and tokens beside noise
SPECTROGRAM_STD = 0.5  # of what feature extractors return
GENERATED = 256  # generated texts
GENERATED_BATCH = 64  # texts of 128 tokens that are written together
FILLING_STEPS = 16  # forward passes in which a masked language model fills a text


def synthetic_batches(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sequences: int | None = None,
    length: int | None = None,
    seed: int = 0,
    source: bool = True,
) -> list[Batch]:
    """Draw token ids between the special tokens that the tokenizer adds, frequent ones more often (`likelihoods`).

    Without a length, sequences have 8 to 128 tokens, as often 8 to 16 as 64 to 128. For an encoder whose tokenizer
    tells pairs of texts apart, half of them are pairs.

    The decoder of an encoder–decoder starts with its start token and what the tokenizer puts before a target (a
    language code for NLLB, M2M100 and mBART-50). Without `source` there are tokens for the decoder only.
    """
    longest = usable_length(length or LONGEST, model, tokenizer) or LONGEST
    ids = ordinary_tokens(model, tokenizer)
    prefix, suffix = special_tokens(tokenizer, ids)
    generator = torch.Generator().manual_seed(seed)
    shortest = min(SHORTEST, longest) if length is None else longest
    if longest <= len(prefix) + len(suffix):
        raise CalibrationError(f"no room for random tokens in sequences of {longest}; pass a larger length")
    count = sequences or (VARIED if length is None else EQUAL)
    check_size(count * longest, f"{count} random sequences of up to {longest} tokens")
    shortest = max(shortest, len(prefix) + len(suffix) + 1)
    uniform = torch.rand(count, generator=generator, dtype=torch.float64, device="cpu").sort().values
    lengths = (shortest * ((longest + 1) / shortest) ** uniform).long().clamp(shortest, longest)  # ascending
    between = pair_separator(model, tokenizer) if length is None else None

    def draw(ids: list[int]) -> list[Tensor]:
        tokens, probabilities = torch.tensor(ids, device="cpu"), likelihoods(tokenizer, ids)
        places = torch.multinomial(probabilities, int(lengths.sum()), replacement=True, generator=generator)
        return list(torch.split(tokens[places], lengths.tolist()))

    rows = enumerate(draw(ids))
    drawn = [_with_special(row, prefix, between if place % 2 else None, suffix) for place, row in rows]
    columns = {"input_ids": [row for row, _ in drawn]}
    if between is not None and "token_type_ids" in tokenizer.model_input_names:
        columns["token_type_ids"] = [types for _, types in drawn]
    batches = pad(columns, "attention_mask", tokenizer)
    if not source:
        batches = [{} for _ in batches]
    if model.config.is_encoder_decoder:
        ids = ordinary_tokens(model, tokenizer, target=True)
        prefix, suffix = special_tokens(tokenizer, ids, target=True)
        start = torch.tensor([start_token(model.config, suffix), *prefix], device="cpu")[:longest]
        targets = draw(ids)
        for target in targets:
            target[: len(start)] = start[: len(target)]
        decoder_batches = pad({"decoder_input_ids": targets}, "decoder_attention_mask", tokenizer)
        batches = [{**batch, **target} for batch, target in zip(batches, decoder_batches, strict=True)]
    return sampled(batches, None, seed)


def likelihoods(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> Tensor:
    """Estimate how often tokens occur in texts, from the vocabulary alone.

    WordPiece, BPE and unigram vocabularies list their tokens nearly from the most frequent to the rarest, and
    frequencies of words fall as 1 / (rank + 2.7) (Zipf; Mandelbrot, "An informational theory of the statistical
    structure of language", 1953). Half of the weight is spread so over tokens of two characters and more; the other
    half is uniform over all, so that each is seen. Single characters are in alphabetical order, so they get the
    uniform half only, and a vocabulary of nothing else is uniform.

    Returns:
        Probabilities (N,) of the tokens `ids`, which are in ascending order, in float64.
    """
    tokens = [str(token) for token in tokenizer.convert_ids_to_tokens(list(ids))]
    is_word = torch.tensor(
        [len(re.sub(r"\W|_", "", token)) > 1 and not PLACEHOLDER.fullmatch(token) for token in tokens], device="cpu"
    )
    uniform = torch.full((len(tokens),), 1 / len(tokens), dtype=torch.float64, device="cpu")
    if not bool(is_word.any()):
        return uniform
    zipf = torch.where(is_word, 1 / (is_word.cumsum(0) + RANK_SHIFT), 0.0).double()
    return (uniform + zipf / zipf.sum()) / 2


def _with_special(
    drawn: Tensor, prefix: Sequence[int], between: Sequence[int] | None, suffix: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Overwrite drawn tokens with special tokens where those belong, and return the token type ids too."""
    ids, types = drawn.clone(), torch.zeros_like(drawn)
    ids[: len(prefix)] = torch.tensor(prefix, dtype=ids.dtype, device="cpu")
    ids[len(ids) - len(suffix) :] = torch.tensor(suffix, dtype=ids.dtype, device="cpu")
    free = len(ids) - len(prefix) - len(suffix) - len(between or ())
    if between is not None and free > 1:
        middle = len(prefix) + free // 2
        ids[middle : middle + len(between)] = torch.tensor(between, dtype=ids.dtype, device="cpu")
        types[middle + len(between) :] = 1
    return ids, types


def noise_batches(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    sequences: int | None = None,
    length: int | None = None,
    seed: int = 0,
) -> list[Batch]:
    """Draw noise for a model of images, clips or sounds, and random tokens if it reads those too.

    Args:
        model: one that `reads_noise`.
        tokenizer: needed where the model reads tokens too.
        sequences: number of images, clips or sounds, 128 by default.
        length: tokens, and positions of a sound that may have any length, 64 by default.
        seed: of noise and tokens.

    Returns:
        Batches of keyword arguments; none if it is unknown what the model reads.
    """
    length = length or POSITIONS
    generator = torch.Generator().manual_seed(seed)
    parts = [getattr(model.config, name, None) for name in ("vision_config", "encoder", "backbone_config")]
    configs: list[PretrainedConfig] = [config for config in (model.config, *parts) if config is not None]
    inputs: dict[str, Tensor] = {}
    if model.main_input_name == "pixel_values" or reads_images_too(model):
        inputs = _draw_pixels(model, configs, sequences or IMAGES, generator)
    elif model.main_input_name in ("input_values", "input_features", "inputs"):
        inputs = _draw_sounds(model, configs, sequences or IMAGES, length, generator)
    count = min((len(part) for part in inputs.values()), default=0)
    if inputs and (reads_images_too(model) or model.config.is_encoder_decoder):
        if tokenizer is None:
            raise CalibrationError(
                f"{type(model).__name__} reads tokens beside {', '.join(inputs)}, and there is no tokenizer; save "
                "its processor beside the model's files, or, in Python, pass tokenizer=… or ready batches"
            )
        limit = usable_length(length, model, tokenizer) or length
        drawn = synthetic_batches(model, tokenizer, count, limit, seed, source=reads_images_too(model))
        inputs = {**{name: torch.cat([batch[name] for batch in drawn]) for name in drawn[0]}, **inputs}
    starts = range(0, count, BATCH_SIZE)
    return [{name: part[start : start + BATCH_SIZE] for name, part in inputs.items()} for start in starts]


def reads_noise(model: PreTrainedModel) -> bool:
    """Return whether a model reads something else than tokens, alone or beside them."""
    return model.main_input_name != "input_ids" or reads_images_too(model)


def reads_images_too(model: PreTrainedModel) -> bool:
    """Return whether a model has a tower for texts and one for images."""
    return model.main_input_name == "input_ids" and all(
        hasattr(model.config, name) for name in ("text_config", "vision_config")
    )


def what_it_reads(model: PreTrainedModel) -> str:
    """Return the main inputs of a model that `reads_noise`, in words."""
    return f"{model.main_input_name} and images" if reads_images_too(model) else model.main_input_name


def _noise(count: int, channels: int, sizes: Sequence[int], generator: torch.Generator) -> Tensor:
    """Draw noise (N, C, *sizes) with mean 0 and variance 1: a sum of noise on grids of 1, 2, 4, … cells a side.

    The coarse grids keep the means of patches and windows from vanishing.
    """
    check_size(count * channels * prod(sizes), f"{count} images or sounds of noise")
    noise = torch.zeros(count, channels, *sizes, device="cpu")
    for power in range(max(sizes).bit_length()):
        grid = torch.randn(
            count, channels, *(min(2**power, size) for size in sizes), generator=generator, device="cpu"
        )
        noise += nn.functional.interpolate(grid, tuple(sizes))
    return noise / noise.std()


def _draw_pixels(
    model: PreTrainedModel, configs: Sequence[PretrainedConfig], count: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Draw images (N, C, height, width), clips (N, frames, C, height, width), or patches and their number."""
    config = next((config for config in configs if hasattr(config, "num_channels")), None)
    if config is not None and hasattr(config, "num_patches"):
        patches, columns = config.num_patches, int(config.num_patches**0.5)
        rows = patches // columns
        sizes = (rows * config.patch_size, columns * config.patch_size)
        images = _noise(count, config.num_channels, sizes, generator)
        cut = nn.functional.unfold(images, config.patch_size, stride=config.patch_size).mT  # (N, patches, C·p²)
        mask = torch.ones(count, patches, dtype=torch.long, device="cpu")
        mask[:, rows * columns :] = 0
        return {
            "pixel_values": nn.functional.pad(cut, (0, 0, 0, patches - rows * columns)),
            "pixel_attention_mask": mask,
            "spatial_shapes": torch.tensor([[rows, columns]] * count, device="cpu"),
        }
    if config is not None and getattr(config, "image_size", None) is not None:
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        frames = getattr(config, "num_frames", None)
        clip = (height, width) if frames is None else (frames, height, width)
        pixels = _noise(count, config.num_channels, clip, generator)
        return {"pixel_values": pixels if frames is None else pixels.transpose(1, 2)}
    raise CalibrationError(
        f"the config of {type(model).__name__} does not say image_size and num_channels; pass batches of pixel_values"
    )


def _draw_sounds(
    model: PreTrainedModel, configs: Sequence[PretrainedConfig], count: int, length: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Draw raw sounds (N, samples), or spectrograms (N, frames, bins) or (N, bins, frames)."""
    sizes: tuple[int, ...]
    for config in configs:
        bins = getattr(config, "num_mel_bins", None)
        if getattr(config, "inputs_to_logits_ratio", None):
            name, sizes, std = "input_values", (length * config.inputs_to_logits_ratio,), 1.0
        elif bins is not None and hasattr(config, "max_length"):  # AST
            name, sizes, std = "input_values", (config.max_length, bins), SPECTROGRAM_STD
        elif hasattr(config, "input_feat_per_channel"):  # Speech2Text, whose features are normalised
            frames = length * 2**config.num_conv_layers
            name, sizes, std = "input_features", (frames, config.input_feat_per_channel), 1.0
        elif bins is not None and hasattr(config, "max_source_positions"):  # Whisper, which halves the frames
            name, sizes, std = "input_features", (bins, 2 * config.max_source_positions), SPECTROGRAM_STD
        else:
            continue
        return {name: std * _noise(count, 1, sizes, generator)[:, 0]}
    raise CalibrationError(
        f"the config of {type(model).__name__} does not say how long its {model.main_input_name} are; pass batches "
        "of them as its processor makes them"
    )


def generated_batches(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sequences: int | None = None,
    length: int | None = None,
    seed: int = 0,
) -> list[Batch]:
    """Sample texts from a language model: calibration data from its own distribution.

    A decoder's text begins with the tokenizer's first special tokens and a random token, and continues with tokens
    sampled from the model ("LLM-QAT: Data-Free Quantization Aware Training for Large Language Models", Liu et al.,
    2023, section 3.1). Where the model ends a text, the next one follows, as in pretraining. A masked language model
    fills a text of masks in random order, a sixteenth of it at a time ("BERT has a Mouth, and It Must Speak", Wang
    and Cho, 2019; "Mask-Predict", Ghazvininejad et al., 2019). 256 texts of 128 tokens take about four minutes of one
    core for a decoder of 135 million parameters.

    Args:
        model: with a language-model head; left in the mode it was in.
        tokenizer: of the model.
        sequences: number of texts, 256 by default.
        length: tokens of each, 128 by default; fewer if the model takes no more.
        seed: of all draws.
    """
    fills = type(model).__name__ in MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()
    if fills and tokenizer.mask_token_id is None and not model.can_generate():
        raise CalibrationError(
            f"{type(model).__name__} writes texts by filling masks, and its tokenizer has no mask token; set "
            "tokenizer.mask_token, or pass texts"
        )
    fills = fills and tokenizer.mask_token_id is not None
    if model.config.is_encoder_decoder or not (fills or model.can_generate()):
        raise CalibrationError(
            f"{type(model).__name__} writes no texts by itself, which calibration 'generated' takes; pass texts, or "
            "load a decoder or a masked language model with its head"
        )
    count, longest = sequences or GENERATED, usable_length(length or LONGEST, model, tokenizer) or LONGEST
    check_size(count * longest, f"{count} texts of {longest} tokens")
    write = _fill_masks if fills else _continue_prompts
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices), evaluation_mode(model):
        torch.manual_seed(seed)
        tokens = write(model, tokenizer, count, longest, torch.Generator().manual_seed(seed))
    return [
        {"input_ids": part, "attention_mask": torch.ones_like(part)} for part in tokens.split(batch_size(longest))
    ]


def _continue_prompts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, count: int, length: int, generator: torch.Generator
) -> Tensor:
    """Return texts (count, length) that a decoder writes after the first special tokens and a random token."""
    ids = ordinary_tokens(model, tokenizer)
    prefix, _ = special_tokens(tokenizer, ids)
    drawn = torch.multinomial(likelihoods(tokenizer, ids), count, replacement=True, generator=generator)
    prompts = torch.cat(
        [torch.tensor(prefix, device="cpu").expand(count, -1), torch.tensor(ids, device="cpu")[drawn].unsqueeze(1)], 1
    ).long()
    prompts = prompts[:, :length]
    written = []
    size = max(1, min(GENERATED_BATCH, GENERATED_BATCH * LONGEST // length))
    for part in prompts.to(model.device).split(size) if prompts.shape[1] < length else ():
        texts = model.generate(
            part,
            attention_mask=torch.ones_like(part),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            num_beams=1,
            repetition_penalty=1.0,
            eos_token_id=None,
            max_length=length,
            pad_token_id=tokenizer.pad_token_id or 0,
        )
        written.append(texts.cpu())
    return torch.cat(written) if written else prompts


@torch.no_grad()
def _fill_masks(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, count: int, length: int, generator: torch.Generator
) -> Tensor:
    """Return texts (count, length) of a masked language model: ordinary tokens between the special ones."""
    ids = ordinary_tokens(model, tokenizer)
    prefix, suffix = special_tokens(tokenizer, ids)
    inner = length - len(prefix) - len(suffix)
    frame = torch.tensor([*prefix, *[tokenizer.mask_token_id] * inner, *suffix], device="cpu")
    texts, ordinary = frame.repeat(count, 1), torch.tensor(ids, device="cpu")
    for part in texts.split(batch_size(length)):  # views of the texts
        order = len(prefix) + torch.rand(len(part), inner, generator=generator, device="cpu").argsort(1)
        for places in order.tensor_split(min(FILLING_STEPS, inner), 1):
            logits = model(part.to(model.device), attention_mask=torch.ones_like(part, device=model.device)).logits
            chosen = logits.cpu().gather(1, places.unsqueeze(2).expand(-1, -1, logits.shape[2]))[..., ordinary]
            draws = torch.multinomial(chosen.float().softmax(-1).flatten(0, 1), 1, generator=generator)
            part.scatter_(1, places, ordinary[draws].view_as(places))
    return texts
