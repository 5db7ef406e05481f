"""DropHead: structured dropout of whole attention heads ("Scheduled DropHead", Zhou et al., 2020, §2)."""

from collections.abc import Collection

import torch
from torch import Tensor, distributed
from transformers import PreTrainedModel

from collab_compress.architectures import FAMILIES, KINDS, Kind, find_attention
from collab_compress.attention.install import HeadCall, add_head_hook_, remove_head_hook_
from collab_compress.errors import HeadError


class DropHead:
    """Drop each head of each sample with probability p while the model trains, and scale the others up.

    With ξ_h ∈ {0, 1} kept heads, head outputs become Z_h · ξ_h · H/Σξ. Where all heads of a sample would drop, one
    chosen at random stays, so the expectation of every head's output is what it was. Evaluation is not touched.
    Draws come from torch's global generator of the model's device. Trainers seed all processes alike, so each process
    draws for all of them and takes its own share. The heads are those that attention computes: with alphas mixing,
    what is dropped is what would be mixed.

    Args:
        model: stock or edited.
        p: probability of dropping a head, in [0, 1); may be set anew between steps.
        kinds: which kinds of attention.
        rescale: whether the heads that stay are scaled up and one always stays. Without, heads are set to zero and
            nothing else, all of them if so drawn: the "naive" DropHead of "Analyzing and Controlling Inter-Head
            Diversity in Multi-Head Attention", §4.3.

    Raises:
        HeadError: p is no such probability.
        UnsupportedModelError: the model's family is not known.
    """

    needs_probs = False

    def __init__(
        self, model: PreTrainedModel, p: float = 0.0, kinds: Collection[Kind] = KINDS, rescale: bool = True
    ) -> None:
        self._modules = [site.module for site in find_attention(model, FAMILIES, kinds=kinds)]
        # Tensors, so that a schedule does not make `torch.compile` start anew; on each device, for none to be copied.
        devices = {parameter.device for module in self._modules for parameter in module.parameters()}
        self._tensors = {device: torch.zeros((), device=device) for device in devices}
        self._tensors.setdefault(torch.device("cpu"), torch.zeros(()))
        self.p, self.rescale = p, rescale
        self.rank, self.processes = _process()
        for module in self._modules:
            add_head_hook_(module, self)

    @property
    def p(self) -> float:
        """Probability of dropping a head."""
        return self._p

    @p.setter
    def p(self, p: float) -> None:
        if not 0 <= p < 1:
            raise HeadError(f"DropHead's p is {p}; expected a probability of dropping, from 0 to below 1")
        self._p = p
        for tensor in self._tensors.values():
            tensor.fill_(p)

    def __call__(self, outputs: Tensor, call: HeadCall) -> Tensor:
        """Drop heads of outputs (B, T, H, dv)."""
        if not call.module.training:
            return outputs
        drawn = torch.rand(self.processes, outputs.shape[0], outputs.shape[2], device=outputs.device)[self.rank]
        p = self._tensors.get(outputs.device)
        if p is None:  # the model has moved since
            p = self._tensors[torch.device("cpu")].to(outputs.device)
        scales = head_scales(drawn, p) if self.rescale else drawn >= p
        return outputs * scales.to(outputs.dtype)[:, None, :, None]

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for module in self._modules:
            remove_head_hook_(module, self)
        self._modules = []


def _process() -> tuple[int, int]:
    """Return the rank of this process and the number of processes."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def head_scales(drawn: Tensor, p: Tensor) -> Tensor:
    """Turn uniform draws (B, H) into what heads are multiplied by: 0 or H/kept.

    The largest draw always stays. Where any head stays, that one does; where none would, it is a random one.
    """
    kept = (drawn >= p) | (drawn == drawn.amax(1, keepdim=True))
    return kept * (drawn.shape[1] / kept.sum(1, keepdim=True))
