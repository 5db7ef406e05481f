"""What an attention's scores cost, dense and collaborative: parameters, multiply-accumulates, break-even length.

Queries and keys only: values and the output projection are the same in both forms ("Multi-Head Attention:
Collaborate Instead of Concatenate", section 3.4). D input width, H heads, d head width, R shared width, T tokens.
"""

from math import inf


def dense_parameters(width: int, heads: int, head_width: int, bias: bool) -> int:
    """Count parameters of the dense query and key projections: 2·D·H·d, and 2·H·d for biases."""
    return 2 * heads * head_width * (width + bias)


def collaborative_parameters(width: int, heads: int, rank: int, content_bias: bool) -> int:
    """Count parameters of the collaborative form: (2D + H)·R, and H·D for content biases."""
    return (2 * width + heads) * rank + heads * width * content_bias


def dense_macs(width: int, heads: int, head_width: int, length: int) -> int:
    """Count multiply-accumulates of dense scores over T tokens: 2·T·D·H·d + T²·H·d."""
    return (2 * length * width + length**2) * heads * head_width


def collaborative_macs(width: int, heads: int, rank: int, length: int, content_bias: bool) -> int:
    """Count multiply-accumulates of collaborative scores: 2·T·D·R + T·H·R + T²·H·R, and T·D·H for v·y."""
    return (2 * length * width + length * heads + length**2 * heads) * rank + length * width * heads * content_bias


def break_even_length(width: int, heads: int, head_width: int, rank: int, content_bias: bool) -> float:
    """Give T*: up to this many tokens the collaborative scores take fewer multiply-accumulates, beyond it more.

    T* = [2D(H·d − R) − H·R − (H·D if content biases)] / (H·R − H·d); infinite for R ≤ d, 0 where it never pays.
    """
    saved = 2 * width * (heads * head_width - rank) - heads * rank - heads * width * content_bias
    growth = heads * rank - heads * head_width
    if growth <= 0:
        return inf if saved >= 0 else 0.0
    return max(0.0, saved / growth)


def per_head_parameters(width: int, heads: int, rank: int, content_bias: bool) -> int:
    """Count parameters of heads that share no channels: 2D·R, and H·D for content biases."""
    return 2 * width * rank + heads * width * content_bias


def per_head_macs(width: int, heads: int, rank: int, length: int, content_bias: bool) -> int:
    """Count multiply-accumulates of the scores of heads that share no channels: 2·T·D·R + T²·R, and T·D·H for v·y."""
    return (2 * length * width + length**2) * rank + length * width * heads * content_bias


def per_head_break_even_length(width: int, heads: int, head_width: int, rank: int, content_bias: bool) -> float:
    """Give T* of heads that share no channels: infinite, for they have fewer channels than the dense ones; else 0.

    0 where content biases outweigh what short inputs save: 2D(H·d − R) < H·D.
    """
    return inf if 2 * width * (heads * head_width - rank) >= heads * width * content_bias else 0.0
