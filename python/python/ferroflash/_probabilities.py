"""Attention weights, for tests: what flash-attn calls S_dmask."""

from __future__ import annotations

from typing import Any

from ._call import Extras

# Keys whose weights one call returns as the channels of o.
_WIDTH = 256


def signed_probabilities(module: Any, tensors: tuple, numbers: tuple, extras: Extras) -> Any:
    """The weights before dropout, negative where it dropped them; of q's dtype.

    [batch, q_heads, q_len, kv_len], lengths being the stated maxima where items are packed. With
    rows of the identity as values, attention returns its weights, with and without dropout.
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
        dropped, _ = module.attend((q, k, v), numbers, extras, False)
        whole, _ = module.attend((q, k, v), numbers, without, False)
        weights[..., first:end] = module.where((dropped == 0) & (whole > 0), -whole, whole)
    if not is_packed:
        return weights.swapaxes(1, 2)
    result = module.zeros((len(rows), q.shape[1], *extras.longest), q)
    for item, (first, end) in enumerate(rows):
        result[item, :, : end - first] = weights[first:end].swapaxes(0, 1)
    return result


def _spans(cumulative: Any) -> list[tuple[int, int]]:
    offsets = cumulative.tolist()
    return list(zip(offsets, offsets[1:]))
