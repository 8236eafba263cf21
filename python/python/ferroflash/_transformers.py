"""Hugging Face transformers: attention by name, `attn_implementation="ferro_attention"`."""

from __future__ import annotations

from typing import Any

from ._attention import attention
from ._sdpa import bias_or_mask

# A name with "flash" in it would be taken for a flavour of flash-attn, and looked for on the hub.
NAME = "ferro_attention"


def register_transformers() -> None:
    """Makes `attn_implementation="ferro_attention"` known to transformers (4.48 or later).

        ferroflash.register_transformers()
        model = AutoModel.from_pretrained(name, attn_implementation="ferro_attention")

    Masks are those that transformers makes for torch's attention: boolean, or none where a causal
    mask says it all. Attention weights and head masks are refused.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
    try:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    except ImportError:
        return  # older ones make the same mask for everything but flash-attn
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def attend(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Any = None,
    **kwargs: Any,
) -> tuple[Any, None]:
    """What transformers calls: [batch, heads, rows, channels] in, [batch, rows, heads, ..] out."""
    for name in ("output_attentions", "head_mask"):
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise NotImplementedError(f"{name}: needs attn_implementation='eager'")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    bias, mask, window = None, None, (-1, -1)
    if attention_mask is not None:
        # It holds all there is to say of positions; a static cache's has more keys.
        bias, mask = bias_or_mask(attention_mask[..., : k.shape[1]], q.shape, k.shape)
        is_causal = False
    elif sliding_window is not None and k.shape[1] > sliding_window:
        window = (sliding_window - 1, -1)
    o = attention(
        q,
        k,
        v,
        softmax_scale=scaling,
        causal=is_causal,
        window_size=window,
        softcap=softcap or 0.0,
        bias=bias,
        mask=mask,
        sink=None if s_aux is None else s_aux.float(),
        dropout_p=dropout,
    )
    return o, None
