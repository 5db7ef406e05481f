"""What the heads of each layer answer over many tokens, gathered in one pass: covariances, or a sample of tokens."""

from collections.abc import Collection

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collab_compress.analysis.covariance import JointCovariance, RunningCovariance
from collab_compress.analysis.stream import Batches, Progress, Shown, Use, by_name, observe, real_vectors
from collab_compress.architectures import KINDS, Kind
from collab_compress.errors import HeadError
from collab_compress.heads import Part


def head_covariances(
    model: PreTrainedModel,
    batches: Batches,
    *,
    part: Part = "outputs",
    kinds: Collection[Kind] = KINDS,
    modules: str = "*",
    progress: Progress = False,
) -> dict[str, JointCovariance]:
    """Gather the covariance of all heads of each layer, for `svcca` and `cka` between the heads of one layer.

    Memory is (H·d)² numbers and a few thousand tokens a layer, however many there are; padding does not count.

    Args:
        model: stock or edited; left in the mode it was in.
        batches: keyword arguments for the model; read once.
        part: what to compare: `outputs`, `queries`, `values` or `keys`.
        kinds: which kinds of attention.
        modules: glob on module paths.
        progress: True for a bar, or a function of how many batches are done and how many there are (or None).

    Returns:
        Module path → covariance, a block a head, labelled `0`, `1`, …. A module that serves several layers (ALBERT)
        has one for each use, `path[0]`, `path[1]`, ….

    Raises:
        HeadError: no batches, fewer than two tokens, keys of a collaborative module, or numbers that are not finite.
        CalibrationError: the model does not take such batches.
        UnsupportedModelError: the model's family is not known, or it has no attention of these kinds.
    """
    covariances = Covariances(part)
    observe(model, batches, covariances, kinds, modules, progress)
    return covariances.result()


def head_samples(
    model: PreTrainedModel,
    batches: Batches,
    tokens: int = 1000,
    *,
    seed: int = 0,
    part: Part = "outputs",
    kinds: Collection[Kind] = KINDS,
    modules: str = "*",
    progress: Progress = False,
) -> dict[str, Tensor]:
    """Draw tokens at random, without replacement and all as likely, and keep what heads answer at them.

    Args:
        model: as for `head_covariances`.
        batches: as for `head_covariances`.
        tokens: how many to draw; all where there are fewer.
        seed: of the draw. Layers that see the same tokens draw the same ones.
        part: as for `head_covariances`.
        kinds: as for `head_covariances`.
        modules: as for `head_covariances`.
        progress: as for `head_covariances`.

    Returns:
        Module path → (N, H, d), in the model's dtype, on the CPU; keys as for `head_covariances`.

    Raises:
        HeadError: as for `head_covariances`, or no tokens are asked for.
        CalibrationError: as for `head_covariances`.
        UnsupportedModelError: as for `head_covariances`.
    """
    samples = Samples(tokens, seed, part)
    observe(model, batches, samples, kinds, modules, progress)
    return samples.result()


class Covariances:
    """Gathers what `head_covariances` gives; an `Observer`.

    Args:
        part: as for `head_covariances`.
        kinds: which kinds of attention to take of what is shown.
    """

    def __init__(self, part: Part = "outputs", kinds: Collection[Kind] = KINDS) -> None:
        self.part, self.kinds = part, kinds
        self._running: dict[Use, RunningCovariance] = {}

    def take(self, shown: Shown) -> None:
        """Add one more batch."""
        for use, reading in shown:
            if reading.site.kind in self.kinds:
                vectors = real_vectors(reading, self.part)  # (N, H, d)
                if use not in self._running:
                    self._running[use] = RunningCovariance((vectors.shape[2],) * vectors.shape[1])
                self._running[use].add(vectors.flatten(1))

    def result(self) -> dict[str, JointCovariance]:
        """Give the covariance of each module's heads.

        Raises:
            HeadError: a module saw fewer than two real tokens, or numbers that are not finite.
        """
        labels = {use: tuple(map(str, range(len(found.widths)))) for use, found in self._running.items()}
        return by_name({use: found.result(labels[use], use.name) for use, found in self._running.items()})


class Samples:
    """What heads answer at tokens that are drawn as they come; an `Observer`.

    Args:
        tokens: as for `head_samples`.
        seed: as for `head_samples`.
        part: as for `head_samples`.

    Raises:
        HeadError: no tokens are asked for.
    """

    def __init__(self, tokens: int, seed: int = 0, part: Part = "outputs") -> None:
        if tokens < 1:
            raise HeadError(f"got {tokens} tokens to draw; expected at least 1")
        self.tokens, self.seed, self.part = tokens, seed, part
        self._draws: dict[Use, tuple[torch.Generator, Tensor, Tensor]] = {}

    def take(self, shown: Shown) -> None:
        """Draw from one more batch."""
        for use, reading in shown:
            found = real_vectors(reading, self.part).cpu()
            new = torch.Generator().manual_seed(self.seed), torch.empty(0), found[:0]
            generator, lots, kept = self._draws.get(use, new)
            lots = torch.cat([lots, torch.rand(len(found), generator=generator)])
            best = lots.argsort()[: self.tokens]
            self._draws[use] = generator, lots[best], torch.cat([kept, found])[best]

    def result(self) -> dict[str, Tensor]:
        """Give what was drawn, as `head_samples` does."""
        return by_name({use: kept for use, (_, _, kept) in self._draws.items()})
