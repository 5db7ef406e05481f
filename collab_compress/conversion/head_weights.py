r"""How much an error in a head's scores changes what its layer adds to the residual stream, to first order.

With attention probabilities $p_{ij}$, values $v_j$, head output $o_i = \sum_j p_{ij} v_j$ and the head's rows O of
the output projection, errors $\delta s_{ij}$ of the scores change what the head adds by
$\sum_j p_{ij} \delta s_{ij} (v_j - o_i) O$. Of independent errors with variance 1 the mean square is

$$w^2 = E_i \sum_j p_{ij}^2 \|(v_j - o_i) O\|^2$$

which is small where a head attends to tokens without content, and large where it picks few tokens and moves much.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from collab_compress.architectures import AttentionSite
from collab_compress.attention.install import HeadCall, add_head_hook_, for_each_head, remove_head_hook_
from collab_compress.calibration import Batch, evaluation_mode, run_batch
from collab_compress.calibration.batches import sequence_count
from collab_compress.calibration.gather import AttentionMasks, batch_masks, masks_of, resize_mask

ENOUGH = 128  # sequences: there is one number a head to measure
LEAST = 1e-3  # of the heads' mean square: no head's scores count for nothing


class _Watch:
    """The hook that adds up w² of one module's heads."""

    needs_probs = True

    def __init__(self, site: AttentionSite) -> None:
        self.site = site
        self.real = AttentionMasks(None, None)
        self.squares = torch.zeros(site.heads, dtype=torch.float64, device="cpu")

    def __call__(self, outputs: Tensor, call: HeadCall) -> Tensor:
        assert call.probs is not None
        values = for_each_head(call.value, self.site.heads)
        moved = _moved(call.probs, values, outputs.transpose(1, 2), self._gram(values.shape[-1]))
        for dim, mask in ((2, self.real.query), (3, self.real.key)):
            mask = resize_mask(mask, moved.shape[dim])
            if mask is not None and mask.shape == (moved.shape[0], moved.shape[dim]):
                moved = moved * mask.to(moved.device).unsqueeze(1).unsqueeze(5 - dim)
        self.squares += moved.sum((0, 2, 3)).double().cpu()
        return outputs

    def _gram(self, width: int) -> Tensor | None:
        """Return O·Oᵀ of each head, (H, s, s); None where the output projection is no plain layer."""
        output = self.site.part(self.site.family.output)
        if type(output) not in (nn.Linear, Conv1D):
            return None
        rows: Tensor = output.weight if isinstance(output, Conv1D) else output.weight.mT
        if len(rows) != self.site.heads * width:
            return None
        heads = rows.detach().reshape(self.site.heads, width, -1)
        return heads @ heads.mT

    def weights(self) -> Tensor | None:
        """Return w of each head, (H,), with mean square 1; None where no head moves anything."""
        mean = self.squares.mean()
        if not bool(torch.isfinite(mean)) or float(mean) <= 0:
            return None
        return (self.squares / mean + LEAST).sqrt()


def _moved(probs: Tensor, values: Tensor, outputs: Tensor, gram: Tensor | None) -> Tensor:
    """Return p² ‖(v − o) O‖² of each pair of query and key, (B, H, T, S).

    Args:
        probs: (B, H, T, S).
        values: (B, H, S, s).
        outputs: of heads, (B, H, T, s).
        gram: O·Oᵀ of each head, (H, s, s); None for the identity.
    """
    probs, values, outputs = probs.float(), values.float(), outputs.float()
    seen = values if gram is None else values @ gram.float()
    distance = (seen * values).sum(-1).unsqueeze(2) - 2 * outputs @ seen.mT
    distance = distance + ((outputs if gram is None else outputs @ gram.float()) * outputs).sum(-1, keepdim=True)
    return probs.square() * distance.clamp_min(0)


def head_weights(
    model: PreTrainedModel, sites: Sequence[AttentionSite], batches: Sequence[Batch]
) -> dict[str, Tensor | None]:
    """Return how much errors in the scores of each head count, by first-order effect on the residual stream.

    Args:
        model: dense; left in the mode it was in.
        sites: attention modules of `model`. One that serves several layers (ALBERT) pools them.
        batches: keyword arguments for the model, of which enough, evenly spaced, are run; padding does not count.

    Returns:
        Path of each module → w (H,) in float64 with mean square 1; None where all heads are to count alike, because
        none moves anything.

    Raises:
        CalibrationError: the model does not take such batches.
    """
    if not sites or not batches:
        return {}
    watches = [_Watch(site) for site in sites]
    with evaluation_mode(model):
        try:
            for watch in watches:
                add_head_hook_(watch.site.module, watch)
            for batch in batches[:: max(1, sum(map(sequence_count, batches)) // ENOUGH)]:
                real = batch_masks(model, batch)
                for watch in watches:
                    watch.real = masks_of(watch.site, real)
                run_batch(model, batch)
        finally:
            for watch in watches:
                remove_head_hook_(watch.site.module, watch)
    return {watch.site.name: watch.weights() for watch in watches}
