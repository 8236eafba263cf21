"""torch's scaled_dot_product_attention on ours: other layout, other names, other defaults."""

from __future__ import annotations

from typing import Any

from ._attention import attention
from ._call import flag

# How this function spells the arguments of `attention`.
_NAMES = {
    "q": "query",
    "k": "key",
    "v": "value",
    "q, k, v": "query, key, value",
    "bias": "attn_mask",
    "mask": "attn_mask",
    "softmax_scale": "scale",
    "causal": "is_causal",
}


def attend(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Any:
    """As `scaled_dot_product_attention` says."""
    axes = _axes(query, "query")
    for name, tensor in (("key", key), ("value", value)):
        if _axes(tensor, name) != axes:
            raise ValueError(f"{name}: has {tensor.ndim} axes, but query has {axes}")
    if flag(is_causal, "is_causal") and attn_mask is not None:
        raise ValueError("attn_mask: must be None where is_causal is set")
    # Leading axes that are left out, as axes of size 1.
    added = (None,) * (4 - axes)
    q, k, v = (x[added].swapaxes(1, 2) for x in (query, key, value))
    if not flag(enable_gqa, "enable_gqa") and k.shape[2] != q.shape[2]:
        had, needs = k.shape[2], q.shape[2]
        raise ValueError(f"key: has {had} heads and query {needs}; that needs enable_gqa=True")
    bias, mask = (None, None) if attn_mask is None else bias_or_mask(attn_mask, q.shape, k.shape)
    try:
        o = attention(
            q,
            k,
            v,
            softmax_scale=scale,
            causal=is_causal,
            align="top-left",
            bias=bias,
            mask=mask,
            dropout_p=dropout_p,
        )
    except (TypeError, ValueError, NotImplementedError) as error:
        raise _respelled(error) from None
    return o.swapaxes(1, 2)[(0,) * len(added)]


def _axes(tensor: Any, name: str) -> int:
    axes = getattr(tensor, "ndim", None)
    if axes is None:
        raise TypeError(f"{name}: is a {type(tensor).__name__}, but it must be a tensor or array")
    if not 2 <= axes <= 4:
        raise ValueError(f"{name}: has {axes} axes, but it must have 2 to 4")
    return axes


def bias_or_mask(attn_mask: Any, q: tuple, k: tuple) -> tuple[Any, Any]:
    """The mask as (bias, None) or (None, mask), as `attention` takes it with q and k of these sizes."""
    axes = _axes(attn_mask, "attn_mask") if getattr(attn_mask, "ndim", 2) != 1 else 1
    attn_mask = attn_mask[(None,) * (4 - axes)]
    needs = (q[0], q[2], q[1], k[1])
    if any(had not in (1, size) for had, size in zip(attn_mask.shape, needs)):
        had = tuple(attn_mask.shape)
        raise ValueError(f"attn_mask: has dimensions {had}, but it must broadcast to {needs}")
    is_bool = str(attn_mask.dtype).rpartition(".")[2] == "bool"
    attn_mask = _with_keys(attn_mask, needs[3], is_bool)
    return (None, attn_mask) if is_bool else (attn_mask, None)


def _with_keys(attn_mask: Any, keys: int, is_bool: bool) -> Any:
    """The mask with all its keys, contiguous along them; a bias in float32."""
    if hasattr(attn_mask, "data_ptr"):
        attn_mask = attn_mask if is_bool else attn_mask.float()
        attn_mask = attn_mask.expand(*attn_mask.shape[:3], keys)
        return attn_mask if keys == 1 or attn_mask.stride(3) == 1 else attn_mask.contiguous()
    import numpy as np

    attn_mask = attn_mask if is_bool else attn_mask.astype(np.float32, copy=False)
    attn_mask = np.broadcast_to(attn_mask, (*attn_mask.shape[:3], keys))
    if keys == 1 or attn_mask.strides[3] == attn_mask.itemsize:
        return attn_mask
    return np.ascontiguousarray(attn_mask)


def _respelled(error: Exception) -> Exception:
    """The error under the names of this function's arguments."""
    argument, colon, rest = str(error).partition(":")
    return type(error)(_NAMES.get(argument, argument) + colon + rest)
