"""What dropout drops, and the attention weights that flash-attn calls S_dmask: for tests."""

from __future__ import annotations

from typing import Any

from . import _native
from ._call import Extras, backend, dropout, length

# Keys whose weights one call returns as the channels of o.
_WIDTH = 256


def dropout_mask(
    q: Any,
    k: Any,
    *,
    dropout_p: float,
    dropout_state: Any,
    cu_seqlens_q: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> Any:
    """Which attention weights a call keeps, for tests: its size is quadratic in the lengths.

    The mask depends on the state and on each weight's place alone: it is the one that forward and
    backward passes apply on every device. It is computed on the CPU.

    Args:
        q, k: the call's arrays, of which only dimensions and library matter.
        dropout_p, dropout_state: as in `attention`. A state on a CUDA device is waited for.
        cu_seqlens_q, max_seqlen_q, max_seqlen_k: the call's, if its sequences are packed.

    Returns:
        bool [batch, q_heads, q_len, kv_len], True where a weight is kept, of q's library and on its
        device; lengths are the stated maxima where sequences are packed, rows and keys being
        counted from their sequence's first.
    """
    if dropout_state is None:
        raise ValueError("dropout_state: must be given; a mask drawn anew would be of no call")
    probability, _ = dropout(dropout_p) or (0.0, None)
    if cu_seqlens_q is None:
        batch, q_len, heads = q.shape[:3]
        kv_len = k.shape[1]
    else:
        batch, heads = cu_seqlens_q.shape[0] - 1, q.shape[1]
        q_len = length(max_seqlen_q, "max_seqlen_q")
        kv_len = length(max_seqlen_k, "max_seqlen_k")
    module, dims = backend(q), (batch, heads, q_len, kv_len)
    kept = _native.dropout_mask(probability, module.read_state(dropout_state), dims)
    return module.as_mask(kept, dims, q)


def signed_probabilities(module: Any, tensors: tuple, numbers: tuple, extras: Extras) -> Any:
    """The weights before dropout, negative where it dropped them; of q's dtype.

    [batch, q_heads, q_len, kv_len], lengths being the stated maxima where items are packed. With
    rows of the identity as values, attention returns its weights.
    """
    q, k, _ = (module.detached(x) for x in module.split(tensors))
    without = extras._replace(dropout=None)
    is_packed = extras.cu_seqlens_k is not None
    if is_packed:
        rows = _spans(extras.cu_seqlens_q)
        columns = [i for first, end in _spans(extras.cu_seqlens_k) for i in range(end - first)]
    else:
        columns = list(range(k.shape[1]))
    width = extras.longest[1] if is_packed else len(columns)
    weights = module.zeros((*q.shape[:-1], width), q)
    for first in range(0, width, _WIDTH):
        end = min(first + _WIDTH, width)
        v = module.one_hot(columns, first, end, k)
        weights[..., first:end], _ = module.attend((q, k, v), numbers, without, False)
    if is_packed:
        result = module.zeros((len(rows), q.shape[1], *extras.longest), q)
        for item, (first, end) in enumerate(rows):
            result[item, :, : end - first] = weights[first:end].swapaxes(0, 1)
    else:
        result = weights.swapaxes(1, 2)
    probability, state = extras.dropout or (0.0, (0, 0))
    dims = tuple(result.shape)
    kept = module.as_mask(_native.dropout_mask(probability, state, dims), dims, q)
    return module.where(kept, result, 0 - result)  # a zero has no sign


def _spans(cumulative: Any) -> list[tuple[int, int]]:
    offsets = cumulative.tolist()
    return list(zip(offsets, offsets[1:]))
