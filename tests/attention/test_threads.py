"""Threads may share a converted model: a forward pass keeps nothing on its modules between two calls."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiny_families import build, make_rotary

from collab_compress import Compression, HeadMask, Solver, compress, mix_heads_
from collab_compress.architectures import find_attention
from collab_compress.transformers_parts import CACHE_NAME

CASES = {
    "shared": Compression(dk=8, dv=12, solver=Solver(sweeps=3)),
    "some channels": Compression(dk=11, solver=Solver(sweeps=3)),
    "rotary": Compression(dk=8, dv=8, solver=Solver(sweeps=3)),
}


def run(model, number):
    """Return the logits of a prompt, and of two more tokens read from a cache."""
    ids = torch.randint(5, 61, (1, 20), generator=torch.Generator().manual_seed(number))
    places = torch.arange(20)[None] + 15 * number
    outputs = model(ids[:, :18], position_ids=places[:, :18], use_cache=True)
    steps = [outputs.logits]
    for place in (18, 19):
        at = slice(place, place + 1)
        outputs = model(ids[:, at], position_ids=places[:, at], **{CACHE_NAME: getattr(outputs, CACHE_NAME)})
        steps.append(outputs.logits)
    return torch.cat(steps, 1)


def converted(case, implementation):
    model = make_rotary("llama") if case == "rotary" else build("gpt2", "GPT2LMHeadModel")
    model.set_attn_implementation(implementation)
    compress(model, CASES[case], calibration=None)
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
