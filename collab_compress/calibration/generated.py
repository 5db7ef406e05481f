"""Texts that a language model writes itself: calibration data for decoders, without any data.

A text begins with what the tokenizer puts before one and a random token. It goes on with tokens drawn from the
model's own distribution ("LLM-QAT: Data-Free Quantization Aware Training for Large Language Models", Liu et al.,
2023, section 3.1). Where the model ends a text, it goes on with the next one, as in training.
"""

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from collab_compress.calibration.gather import evaluation_mode
from collab_compress.calibration.noise import refuse_too_many
from collab_compress.calibration.random_tokens import (
    BATCH_SIZE,
    LONGEST,
    Batch,
    fitting,
    likelihoods,
    ordinary_tokens,
    special_tokens,
)
from collab_compress.errors import CalibrationError

SEQUENCES = 256
TOGETHER = 64  # sequences that are written at once


def generated_batches(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sequences: int | None = None,
    length: int | None = None,
    seed: int = 0,
) -> list[Batch]:
    """Let a decoder write texts.

    Args:
        model: with a language-model head; left in the mode it was in.
        tokenizer: of the model.
        sequences: number of texts, 256 if not given.
        length: tokens of each, 128 if not given; fewer where the model takes no more.
        seed: of all that is drawn.

    Raises:
        CalibrationError: the model does not generate texts by itself.
    """
    if not model.can_generate() or model.config.is_encoder_decoder:
        raise CalibrationError(
            f"{type(model).__name__} writes no texts by itself, which calibration 'generated' takes; pass texts, or "
            "load a decoder with its language-model head"
        )
    count, longest = sequences or SEQUENCES, fitting(length or LONGEST, model, tokenizer) or LONGEST
    refuse_too_many(count * longest, f"{count} texts of {longest} tokens")
    ordinary = ordinary_tokens(model, tokenizer)
    first, _ = special_tokens(tokenizer, ordinary)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.multinomial(likelihoods(tokenizer, ordinary), count, replacement=True, generator=generator)
    begin = torch.cat([torch.tensor(first).expand(count, -1), torch.tensor(ordinary)[drawn].unsqueeze(1)], 1).long()
    begin = begin[:, :longest]
    devices = [model.device] if model.device.type == "cuda" else []
    written = []
    with torch.random.fork_rng(devices), evaluation_mode(model):
        torch.manual_seed(seed)
        for part in begin.to(model.device).split(TOGETHER) if begin.shape[1] < longest else ():
            written.append(
                model.generate(
                    part, attention_mask=torch.ones_like(part), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                    num_beams=1, repetition_penalty=1.0, eos_token_id=None, max_length=longest,
                    pad_token_id=tokenizer.pad_token_id or 0,
                ).cpu()
            )  # fmt: skip
    tokens = torch.cat(written) if written else begin
    return [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in tokens.split(BATCH_SIZE)]
