"""Learned head gates: training finds out which heads a task needs ("Analyzing Multi-Head Self-Attention", 2019)."""

from __future__ import annotations

from collections.abc import Collection
from math import log

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from collab_compress.architectures import KINDS, AttentionSite, Kind, find_attention, transformers_model
from collab_compress.attention.run import HeadCall
from collab_compress.checkpoint import all_or_nothing
from collab_compress.errors import check_number
from collab_compress.heads.alphas import output_weights
from collab_compress.heads.hooks import HeadHooks
from collab_compress.heads.sharding import refuse_unwritable

STRETCH = (-0.1, 1.1)  # γ and ζ, so that a gate is 0 or 1 with a probability above 0
TEMPERATURE = 0.33  # β


class HeadGates(HeadHooks):
    r"""Multiply each head's output by a learned gate; a penalty closes those of heads that the task does not need.

    In training each gate is drawn from the hard concrete distribution for each sequence, with u uniform,

    $$g = \operatorname{clamp}\Big((\zeta - \gamma) \, \sigma\Big(\frac{\ln u - \ln(1 - u) + \ln\alpha}{\beta}\Big)
      + \gamma, \; 0, \; 1\Big)$$

    (Louizos et al., "Learning Sparse Neural Networks through L0 Regularization", 2018, equations 10–13; Voita et
    al., "Analyzing Multi-Head Self-Attention", 2019, section 5.1). In evaluation u is 1/2 and β is 1. A module that
    serves several layers (ALBERT) has one gate a head for all of them.

    Args:
        model: stock or edited; attention runs as `eager` or `sdpa`.
        kinds: kinds of attention.
        start: ln α at the beginning; at 2 a gate is open with a probability of 0.94.

    Raises:
        UnsupportedModelError: the model's family is not known, or it has no attention of these kinds.
        HeadError: an output projection is wrapped or quantized, or shares its weight with another, or the model is
            sharded, so that gates could not be folded into it; or `start` is no finite number.

    Example:
        >>> gates = HeadGates(model.train())
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> optimizer.add_param_group({"params": gates.parameters(), "lr": 0.05})
        >>> (model(**batch)[0].square().mean() + 0.01 * gates.penalty()).backward()
        >>> optimizer.step()  # and so on
        >>> closed = gates.closed(keep_one=True)  # heads to remove afterwards, by prune_heads_
        >>> gates.fold_()  # the model now computes without gates what it computed with them
    """

    def __init__(self, model: PreTrainedModel, kinds: Collection[Kind] = KINDS, start: float = 2.0) -> None:
        check_number("start of head gates", start)
        self._model = transformers_model(model)
        sites = find_attention(model, kinds=kinds)
        refuse_unwritable(self._model, "head gates")
        output_weights(self._model, sites)
        self.log_alphas = {
            site.name: nn.Parameter(
                torch.full((site.heads,), start, device=site.part(site.paths.output).weight.device)
            )
            for site in sites
        }
        super().__init__(sites)

    def parameters(self) -> list[nn.Parameter]:
        """Return ln α of each module, (H,), for an optimizer; they are not parameters of the model."""
        return list(self.log_alphas.values())

    def act(self, site: AttentionSite, outputs: Tensor, call: HeadCall) -> Tensor:
        """Gate the heads of outputs (B, T, H, dv)."""
        log_alpha = self.log_alphas[site.name].to(outputs.device)
        if not call.module.training:
            return outputs * _gate(log_alpha).to(outputs.dtype)[:, None]
        draws = self._draw(outputs).clamp(1e-6, 1 - 1e-6)
        gates = _gate((draws.logit() + log_alpha) / TEMPERATURE)  # (B, H)
        return outputs * gates.to(outputs.dtype)[:, None, :, None]

    def penalty(self) -> Tensor:
        """Return the expected number of heads whose gate is not 0 in training, Σ σ(ln α − β ln(−γ/ζ))."""
        shift = TEMPERATURE * log(-STRETCH[0] / STRETCH[1])
        probabilities = [(log_alpha - shift).sigmoid().sum() for log_alpha in self.parameters()]
        return torch.stack([value.to(probabilities[0].device) for value in probabilities]).sum()

    def values(self) -> dict[str, Tensor]:
        """Return the gates of evaluation: module path → (H,), from 0 to 1."""
        return {name: _gate(log_alpha.detach()) for name, log_alpha in self.log_alphas.items()}

    def closed(self, *, keep_one: bool = False) -> dict[str, list[int]]:
        """Return the heads whose gate is 0 in evaluation: module path → heads; modules without any are left out.

        Args:
            keep_one: where all heads of a module are closed, leave out the one with the largest ln α, as removal
                must. `fold_` makes its output 0, so the outputs of the model are the same with it.
        """
        closed = {name: (gates == 0).nonzero().flatten().tolist() for name, gates in self.values().items()}
        if keep_one:
            for name, heads in closed.items():
                if len(heads) == len(self.log_alphas[name]):
                    heads.remove(int(self.log_alphas[name].argmax()))
        return {name: heads for name, heads in closed.items() if heads}

    def fold_(self) -> None:
        """Multiply the gates of evaluation into the output projections, in place, and remove them from the model.

        Raises:
            HeadError: as for the class, or the gates have been removed; nothing has changed then.
        """
        self._check_present()
        refuse_unwritable(self._model, "head gates")
        folded: list[tuple[nn.Parameter, Tensor]] = []  # weights, and what replaces their data
        for gates, (weight, dim) in zip(self.values().values(), output_weights(self._model, self.sites), strict=True):
            factors = gates.to(weight.device, weight.dtype).repeat_interleave(weight.shape[dim] // len(gates))
            folded.append((weight, weight.detach() * (factors if dim == 1 else factors[:, None])))
        with all_or_nothing(self._model, [weight for weight, _ in folded]):
            for weight, product in folded:
                weight.data = product
            self.remove()


def _gate(logits: Tensor) -> Tensor:
    low, high = STRETCH
    return (logits.sigmoid() * (high - low) + low).clamp(0, 1)
