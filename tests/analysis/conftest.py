"""Stock and converted models of every family with batches for them, and responses to measure."""

import copy
from collections.abc import Callable

import pytest
import torch
from recorded import recorded_inputs
from torch import Tensor
from transformers import PreTrainedModel

from collab_compress import Compression, Solver, compress
from collab_compress.architectures import find_attention

CONVERTED: dict[str, PreTrainedModel] = {}  # each family is converted once


@pytest.fixture
def either(family: str, make_tiny: Callable, calibration: list) -> tuple[PreTrainedModel, list]:
    """A stock or a converted model of each family, and two batches with padding."""
    if family in ("albert", "distilbert"):
        return make_tiny(family), calibration[:2]
    if family not in CONVERTED:
        CONVERTED[family] = make_tiny(family)
        compress(CONVERTED[family], Compression(dk=9, solver=Solver(sweeps=3, refit=False)), calibration[2:])
    return copy.deepcopy(CONVERTED[family]), calibration[:2]


@pytest.fixture
def bert(make_tiny: Callable) -> PreTrainedModel:
    return make_tiny("bert")


@pytest.fixture(scope="session")
def draw() -> Callable[..., Tensor]:
    def draw_(tokens: int = 200, heads: int = 3, width: int = 5, seed: int = 0, dtype=torch.float64) -> Tensor:
        """Return heads (N, H, d) that share part of their inputs, with directions of different variance."""
        generator = torch.Generator().manual_seed(seed)
        options = {"generator": generator, "dtype": torch.float64}
        shared = torch.randn(tokens, width, **options) @ torch.randn(heads, width, width, **options)  # (H, N, d)
        private = torch.randn(tokens, heads, width, **options) * torch.logspace(0, -1, width, dtype=torch.float64)
        return (shared.transpose(0, 1) * 0.5 + private + 3).to(dtype)

    return draw_


@pytest.fixture(scope="session")
def real_responses() -> Callable[..., dict[str, Tensor]]:
    def read(model: PreTrainedModel, batches: list) -> dict[str, Tensor]:
        """Return the inputs (N, H, d) of output projections without padding, by the keys of the measures."""
        outputs: dict[str, list[Tensor]] = {}
        sites = find_attention(model)
        for batch in batches:
            calls = recorded_inputs(model, batch, {site.name: site.part(site.paths.output) for site in sites})
            for site in sites:
                mask = batch["attention_mask"]
                if site.kind != "encoder":
                    mask = batch.get("decoder_attention_mask", mask)
                for use, call in enumerate(calls[site.name]):
                    name = site.name if len(calls[site.name]) == 1 else f"{site.name}[{use}]"
                    outputs.setdefault(name, []).append(call.unflatten(-1, (site.heads, -1))[mask.bool()])
        return {name: torch.cat(parts) for name, parts in outputs.items()}

    return read
