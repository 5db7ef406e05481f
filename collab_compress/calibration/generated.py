"""Texts that a language model writes itself: calibration data from its own distribution."""

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from collab_compress.calibration.batches import batch_size
from collab_compress.calibration.encode import ordinary_tokens, special_tokens, usable_length
from collab_compress.calibration.gather import Batch, evaluation_mode
from collab_compress.calibration.random_tokens import LONGEST, check_size, likelihoods
from collab_compress.devices import forked_rng
from collab_compress.errors import CalibrationError

TEXTS = 256  # if no number is given
TEXTS_AT_ONCE = 64  # of 128 tokens, that a decoder writes together
FILLING_STEPS = 16  # forward passes in which a masked language model fills a text


def generated_batches(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sequences: int | None, length: int | None, seed: int
) -> list[Batch]:
    """Sample texts from a language model, 256 of 128 tokens by default.

    A decoder continues the first special tokens and a random token; where a text ends, the next one follows
    ("LLM-QAT: Data-Free Quantization Aware Training for Large Language Models", Liu et al., 2023, section 3.1). A
    masked model fills masks in random order, a sixteenth at a time ("BERT has a Mouth, and It Must Speak", Wang
    and Cho, 2019; "Mask-Predict", Ghazvininejad et al., 2019).
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
    count, longest = sequences or TEXTS, usable_length(length or LONGEST, model, tokenizer) or LONGEST
    check_size(count * longest, f"{count} texts of {longest} tokens")
    write = _fill_masks if fills else _continue_prompts
    with forked_rng(model.device), evaluation_mode(model):
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
    first = torch.tensor(prefix, device="cpu").expand(count, -1)
    prompts = torch.cat([first, torch.tensor(ids, device="cpu")[drawn].unsqueeze(1)], 1).long()[:, :length]
    written = []
    size = max(1, min(TEXTS_AT_ONCE, TEXTS_AT_ONCE * LONGEST // length))
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
        for masks in order.tensor_split(min(FILLING_STEPS, inner), 1):
            logits = model(part.to(model.device), attention_mask=torch.ones_like(part, device=model.device)).logits
            chosen = logits.cpu().gather(1, masks.unsqueeze(2).expand(-1, -1, logits.shape[2]))[..., ordinary]
            draws = torch.multinomial(chosen.float().softmax(-1).flatten(0, 1), 1, generator=generator)
            part.scatter_(1, masks, ordinary[draws].view_as(masks))
    return texts
