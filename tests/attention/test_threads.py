"""Threads may share a converted model: a forward pass keeps nothing on its modules between two calls."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from collab_compress import Compression, HeadMask, Solver, compress, mix_heads_
from collab_compress.architectures import find_attention
from collab_compress.heads import DropHead

IDS = {"vocab_size": 61, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def gpt2():
    sizes = {"n_embd": 24, "n_head": 3, "n_layer": 2, "n_positions": 80, "initializer_range": 0.4}
    return GPT2LMHeadModel(GPT2Config(**sizes, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0, **IDS))


def llama():
    return LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.4, **IDS))


RANDOM = threading.local()
CASES = {
    "shared": (gpt2, Compression(dk=8, dv=12, solver=Solver(sweeps=3))),
    "some channels": (gpt2, Compression(dk=11, solver=Solver(sweeps=3))),
    "rotary": (llama, Compression(dk=16, dv=16, solver=Solver(sweeps=3))),
}


def run(model, number):
    """Return the logits of a prompt, and of two more tokens read from a cache."""
    RANDOM.generator = torch.Generator().manual_seed(number)
    ids = torch.randint(5, 61, (1, 20), generator=torch.Generator().manual_seed(number))
    places = torch.arange(20)[None] + 15 * number
    outputs = model(ids[:, :18], position_ids=places[:, :18], use_cache=True)
    steps = [outputs.logits]
    for place in (18, 19):
        at = slice(place, place + 1)
        outputs = model(ids[:, at], position_ids=places[:, at], past_key_values=outputs.past_key_values)
        steps.append(outputs.logits)
    return torch.cat(steps, 1)


def converted(case, implementation):
    build, compression = CASES[case]
    torch.manual_seed(0)
    model = build().eval()
    model.set_attn_implementation(implementation)
    compress(model, compression, calibration=None)
    return model


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("case", sorted(CASES))
def test_threads_get_what_one_thread_gets(case, implementation):
    compare_threads(converted(case, implementation).requires_grad_(False))


def test_threads_get_what_one_thread_gets_with_mixed_and_masked_heads():
    model = converted("some channels", "sdpa")
    mix_heads_(model)
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith("alphas"):
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.2)
    masks = {site.name: torch.tensor([1.0, 0.5, 0.0]) for site in find_attention(model)}
    with HeadMask(model, masks):
        compare_threads(model)


def test_threads_get_what_one_thread_gets_with_dropped_heads(monkeypatch):
    def draws(*shape, device):
        return torch.empty(shape, device=device).uniform_(generator=RANDOM.generator)

    model = converted("some channels", "sdpa").train().requires_grad_(False)
    monkeypatch.setattr(torch, "rand", draws)  # threads share the global generator
    drophead = DropHead(model, 0.4)
    compare_threads(model)
    drophead.remove()


def compare_threads(model):
    expected = [run(model, number) for number in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as threads:
            results = list(threads.map(lambda number: run(model, number % 4), range(60)))
    finally:
        sys.setswitchinterval(interval)
    for number, logits in enumerate(results):
        torch.testing.assert_close(logits, expected[number % 4], atol=1e-5, rtol=1e-4)
