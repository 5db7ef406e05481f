r"""Shared channels, of which each head reads a few: W̃q and W̃k serve all heads.

    score_i(x, y) = s · [ Σ_{r ∈ S_i} m_ir (x · w̃q_r)(y · w̃k_r) + v_i · y ],   |S_i| = k

where s is the model's own scale, S_i the channels that head i reads, m_i their weights, and v_i its content bias. If
every head reads all R channels, k = R, this is the collaborative form of "Multi-Head Attention: Collaborate Instead
of Concatenate" (eqs. 7 and 13; costs as in section 3.4). Its scores then take T²·H·R multiplications, where with
k = d they take as many as those of dense heads.

The channels that a head reads are gathered and weighted, and are then an ordinary head, for any attention function.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from collab_compress.attention.form import ScoreForm, ScoreParts, plain_weight, scaling_of
from collab_compress.errors import CheckpointError, CompressionError


@dataclass(frozen=True)
class SharedScores(ScoreForm):
    """The shared form: R channels, of which each head reads `reads`, weighted by its row of `mixing` (H, k).

    The module also holds `mixing_channels` (H, k), the indices of the channels in ascending order.

    Example:
        >>> from collab_compress.architectures import find_dense_attention
        >>> form = SharedScores.of(find_dense_attention(model)[0], rank=12, head_dim=8, content_bias=True)
        >>> form.reads, form.width, form.parameters((24, 24))  # the dense map has 1,152, and 48 in biases
        (7, 8, 669)
    """

    reads: int = field(kw_only=True)

    kind: ClassVar[str] = "collaborative"
    title: ClassVar[str] = "shared attention"
    space: ClassVar[str] = "a shared query/key space"

    @classmethod
    def of(cls, site: Any, rank: int, head_dim: int | None, content_bias: bool) -> Self:
        """Return the form that replaces the scores of a module.

        A content bias takes one of the channels of a head, except where `head_dim` lets heads read all R (the paper's
        form), or where d of H·d channels are exact.

        Args:
            site: the module, as `architectures` finds it.
            rank: channels R.
            head_dim: width of a head, content bias included; None for that of the dense heads, d.
            content_bias: whether there will be content biases.

        Raises:
            CompressionError: the content bias leaves no channel to read.
        """
        paths = {"query": site.paths.query, "key": site.paths.key}
        dense = site.head_width
        if head_dim is not None and head_dim >= rank:
            reads = rank
        elif rank >= site.heads * dense and (head_dim is None or head_dim >= dense):
            reads = dense
        else:
            reads = min(rank, (dense if head_dim is None else head_dim) - content_bias)
        if reads < 1:
            raise CompressionError(f"{site.name}: head_dim is 1, which the content bias takes; pass at least 2")
        return cls.for_site(site, **paths, rank=rank, content_bias=content_bias, reads=reads)

    def rules(self) -> Iterator[tuple[str, bool, str]]:
        """Yield what stored fields must hold, as `MapForm.rules`."""
        yield from super().rules()
        yield "reads", 1 <= self.reads <= self.rank, f"1 to {self.rank}"

    @property
    def width(self) -> int:
        """Width w of a head: the channels that it reads, and one for its content bias."""
        return self.reads + self.content_bias

    # Parameters.

    @property
    def mixing_shape(self) -> tuple[int, int]:
        """Shape (H, k) of the mixing weights."""
        return self.heads, self.reads

    def build(self, module: Any, parent: Any) -> ScoreParts:
        """Return uninitialised parameters, as `MapForm.build`."""
        parts = super().build(module, parent)
        first = torch.arange(self.reads, device=parts.mixing.device)
        return replace(parts, channels=first.repeat(self.heads, 1))

    def load_(self, parts: ScoreParts, query: Tensor, mixing: Tensor, key: Tensor, content: Tensor | None) -> None:
        """Copy W̃q (D, R), M (H, R), W̃k (D, R) and v (H, D) or None into `parts`, in place, in their dtype.

        Of each row of M the k largest entries are taken; the others should be zero.
        """
        assert parts.channels is not None
        with torch.no_grad():
            channels = mixing.abs().topk(self.reads, 1).indices.sort(1).values
            parts.channels.copy_(channels)
            parts.mixing.copy_(mixing.gather(1, channels))
            parts.query.proj.weight.copy_(query.T)
            parts.key.proj.weight.copy_(key.T)
            if parts.key.content_bias is not None and content is not None:
                parts.key.content_bias.copy_(content)

    def read(self, name: str, module: Any) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return W̃q (D, R), M (H, R), W̃k (D, R) and v (H, D) or None of the module called `name`.

        Raises:
            UnsupportedModelError: a projection carries an adapter, is quantized, or is offloaded.
        """
        query, key = (
            plain_weight(f"{name}.{path}.proj", module.get_submodule(path).proj) for path in (self.query, self.key)
        )
        content = module.get_submodule(self.key).content_bias
        return query.T, self.mixing_matrix(module).detach(), key.T, None if content is None else content.detach()

    def finish_(self, module: Any) -> None:
        """Freeze the mixing weights if they are not trained, and check the channels that a checkpoint holds.

        Raises:
            CheckpointError: a head reads a channel that there is not.
        """
        super().finish_(module)
        channels = module.mixing_channels
        if not channels.is_meta and not bool(((channels >= 0) & (channels < self.rank)).all()):
            raise CheckpointError(
                f"mixing_channels of a converted module has numbers from {int(channels.min())} to "
                f"{int(channels.max())}; expected 0 to {self.rank - 1}; the checkpoint is damaged"
            )

    def mixing_matrix(self, module: Any) -> Tensor:
        """Return M (H, R): the mixing weights, and zeros where a head does not read a channel."""
        zeros = module.mixing.new_zeros(self.heads, self.rank)
        matrix: Tensor = zeros.scatter(1, module.mixing_channels, module.mixing)
        return matrix

    # Attention.

    def heads_of(self, module: Any, query: Tensor, key: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        """Return queries (B, H, T, w) and keys (B, H, S, w), as `ScoreForm.heads_of`."""
        channels = module.mixing_channels
        query = _gathered(query, channels) * module.mixing.to(query.dtype)  # (B, T, H, k)
        if self.content_bias:
            # Content biases lie behind the R channels of the keys; heads read them with a query of 1. A module that
            # scales its queries itself calls with another factor than its own; the 1 then gets the quotient.
            query = pad(query, (0, 1), value=scaling_of(module) / scaling)
            behind = torch.arange(self.rank, self.rank + self.heads, device=key.device)
            channels = torch.cat([channels, behind[:, None]], 1)
        return query.transpose(1, 2), _gathered(key, channels).transpose(1, 2)

    def head_queries(self, module: Any, query: Tensor) -> Tensor:
        """Return what each head multiplies the R channels of the keys by, (B, T, H, R)."""
        query = query.transpose(1, 2).flatten(2)[..., : self.rank]  # (B, T, R)
        return query[..., None, :] * self.mixing_matrix(module)

    # Heads.

    def head_rows(self) -> dict[str, int]:
        """Return each head's row of the mixing weights, of their channels, and its content bias."""
        rows = {"mixing": 1, "mixing_channels": 1}
        return rows | {f"{self.key}.content_bias": 1} if self.content_bias else rows

    def without(self, kept: Sequence[int]) -> Self:
        """Return the form of the kept heads, with all shared channels."""
        return replace(self, heads=len(kept))

    # Costs: Dq and Dk input widths of queries and keys, H heads, R channels, k read by a head, T tokens.

    def parameters(self, widths: tuple[int, int]) -> int:
        """(Dq + Dk)·R + H·k, and H·Dk for content biases."""
        return sum(widths) * self.rank + self.heads * self.reads + widths[1] * self.content_channels

    def macs(self, widths: tuple[int, int], length: int) -> int:
        """T·(Dq + Dk)·R + T·H·k + T²·H·k, and T·Dk·H for v·y."""
        projected = length * sum(widths) * self.rank + length * widths[1] * self.content_channels
        return projected + (length + length**2) * self.heads * self.reads


def _gathered(projected: Tensor, channels: Tensor) -> Tensor:
    """Gather the channels (H, w) of each head, from (B, n, L, d) as a module lays them out, to (B, L, H, w)."""
    joined = projected.transpose(1, 2).flatten(2)  # (B, L, n·d)
    indices = channels.flatten().expand(*joined.shape[:2], -1)
    # Twice as fast as `index_select` on CPUs.
    gathered: Tensor = joined.gather(2, indices).unflatten(-1, channels.shape)
    return gathered
