"""DropHead: drop whole heads in training."""

from collections.abc import Collection

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_compress.architectures import KINDS, AttentionSite, Kind, find_attention
from collab_compress.attention.run import HeadCall
from collab_compress.errors import check_number
from collab_compress.heads.hooks import HeadHooks


class DropHead(HeadHooks):
    """Drop each head of each sample with probability p in training ("Scheduled DropHead", Zhou et al., 2020, §2).

    With ξ_h ∈ {0, 1} kept heads, head outputs become Z_h · ξ_h · H/Σξ. Where all heads of a sample would drop, a
    random one stays, so the expectation of each head's output is unchanged. Evaluation is not affected.

    Draws come from torch's global generator of the model's device and differ between processes. Heads are dropped
    before they are mixed by alphas.

    Args:
        model: stock or edited.
        p: probability of dropping a head, in [0, 1); may be set between steps.
        rescale: whether kept heads are scaled up and one always stays. Without, heads are only set to zero, possibly
            all of them: the "naive" DropHead of "Analyzing and Controlling Inter-Head Diversity in Multi-Head
            Attention", §4.3.

    Example:
        >>> with DropHead(model.train(), p=0.5):
        ...     outputs = model(**batch)
        >>> outputs.last_hidden_state.shape
        torch.Size([2, 6, 24])

    Raises:
        HeadError: p is not in [0, 1).
        UnsupportedModelError: the model's family is not known.
    """

    def __init__(
        self, model: PreTrainedModel, p: float = 0.0, kinds: Collection[Kind] = KINDS, rescale: bool = True
    ) -> None:
        # A tensor, so that a schedule does not make `torch.compile` recompile; on the CPU it goes with all devices.
        self._tensor = torch.zeros((), device="cpu")
        self.p, self.rescale = p, rescale
        super().__init__(find_attention(model, kinds=kinds))

    @property
    def p(self) -> float:
        """Probability of dropping a head."""
        return self._p

    @p.setter
    def p(self, p: float) -> None:
        check_number("DropHead's p", p, 0, below=1)
        self._p = p
        self._tensor.fill_(p)

    def act(self, site: AttentionSite, outputs: Tensor, call: HeadCall) -> Tensor:
        """Drop heads of outputs (B, T, H, dv)."""
        if not call.module.training:
            return outputs
        draws = self._draw(outputs)
        scales = head_scales(draws, self._tensor) if self.rescale else draws >= self._tensor
        return outputs * scales.to(outputs.dtype)[:, None, :, None]


def head_scales(draws: Tensor, p: Tensor) -> Tensor:
    """Return the factors of heads, 0 or H/kept, from uniform draws (B, H); the head of the largest draw stays."""
    kept = (draws >= p) | (draws == draws.amax(1, keepdim=True))
    return kept * (draws.shape[1] / kept.sum(1, keepdim=True))
