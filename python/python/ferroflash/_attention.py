"""`attention`, which has every option, its explicit backward pass, and torch's own contract."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ._call import UNBOUNDED, Extras, backend, dropout, flag, length, options


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = UNBOUNDED,
    align: str = "bottom-right",
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    bias: Any = None,
    mask: Any = None,
    mask_bits: Any = None,
    sink: Any = None,
    key_lengths: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    dropout_p: float = 0.0,
    dropout_state: Any = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Any:
    """Computes attention with any of its options.

    A score is softmax_scale * <q_i, k_j>, capped by softcap, less the ALiBi term, plus the bias; a
    key that the window, the mask or a length hides is left out. Rows, keys and lengths are of one
    sequence; off is kv_len - q_len, or 0 with align "top-left".

    Args:
        q: [batch, q_len, q_heads, head_dim]; float16, bfloat16 or float32. Packed sequences, which
            cu_seqlens_q and cu_seqlens_k delimit: [q_tokens, q_heads, head_dim].
        k, v: as q, with kv_len, kv_heads, and v with value_dim. Query head h reads KV head
            h // (q_heads / kv_heads). Any strides with contiguous channels.
        softmax_scale: 1 / sqrt(head_dim) if None.
        causal: row i sees keys j <= i + off.
        window_size: (left, right): row i sees keys i + off - left to i + off + right; -1 for all.
        align: "bottom-right", or "top-left" for off = 0.
        softcap: each scaled score s becomes softcap * tanh(s / softcap); 0 for none.
        alibi_slopes: float32 [q_heads] or [batch, q_heads]: each score loses
            slope * |i + kv_len - q_len - j|.
        bias: float32 [batch, q_heads, q_len, kv_len], each axis but the last may be 1; has a
            gradient. Lengths are the longest where sequences are packed. -inf hides a key.
        mask: bool, dimensions as bias: True where a key may be seen.
        mask_bits: a mask in an eighth of the memory: uint8, dimensions as bias but for the last, which
            is ceil(kv_len / 8); key j is bit j % 8 of byte j // 8, as numpy.packbits makes it with
            bitorder="little". Not together with mask.
        sink: float32 [q_heads]: one more logit a row, which takes weight and has no value; has a
            gradient.
        key_lengths: int32 [batch]: keys of each item, the first ones, if they are not all there.
            They are the kv_len of its diagonal and of its ALiBi term.
        cu_seqlens_q, cu_seqlens_k: int32 [batch + 1]: sequence b is tokens cu_seqlens[b] to
            cu_seqlens[b + 1].
        max_seqlen_q, max_seqlen_k: the longest packed sequences' lengths, or more.
        seqused_q, seqused_k: int32 [batch]: rows really used of each packed sequence.
        dropout_p: probability that an attention weight is dropped, 0 to 1.
        dropout_state: (seed, offset), which name the mask: two integers from 0 to 2^64 - 1, or an
            int64 or uint64 [2] tensor, on the CPU or on q's CUDA device, where kernels read it as
            they run; it must not change before the backward pass has run. Drawn if None, from
            torch's default generator or numpy's global state; in a captured CUDA graph every replay
            draws anew, and integers, which are part of the graph, drop the same every time.
        deterministic: the backward pass gives the same bits every time.
        return_lse: also return the log-sum-exp.

    Returns:
        o, [batch, q_len, q_heads, value_dim] or [q_tokens, q_heads, value_dim], contiguous, of q's
        dtype and device; with return_lse (o, lse), the natural log-sum-exp of each row's final
        scores, float32 [batch, q_heads, q_len] or [q_heads, q_tokens]. Both have gradients. A row
        that sees no key has o = 0 and lse = -inf, or the sink.

    Raises: as `flash_attn_func`.
    """
    numbers = options(
        softmax_scale, causal, window_size, softcap, deterministic, _is_top_left(align)
    )
    extras = Extras(
        alibi_slopes=alibi_slopes,
        bias=bias,
        mask=mask,
        mask_bits=mask_bits,
        sink=sink,
        key_lengths=key_lengths,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        longest=_longest(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        dropout=dropout(dropout_p, dropout_state),
    )
    _check_layout(extras)
    wants_lse = flag(return_lse, "return_lse")
    o, lse = backend(q).attend((q, k, v), numbers, extras, wants_lse)
    return (o, lse) if wants_lse else o


class Gradients(NamedTuple):
    """What `attention_backward` returns; None where the call has no such argument."""

    dq: Any
    dk: Any
    dv: Any
    dbias: Any
    dsink: Any


def attention_backward(
    d_o: Any,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    *,
    d_lse: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = UNBOUNDED,
    align: str = "bottom-right",
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    bias: Any = None,
    mask: Any = None,
    mask_bits: Any = None,
    sink: Any = None,
    key_lengths: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    dropout_p: float = 0.0,
    dropout_state: Any = None,
    deterministic: bool = False,
) -> Gradients:
    """The gradients of `attention`, for arrays that no library differentiates.

    Args:
        d_o: the gradient of o, of its dimensions and dtype, channels contiguous.
        o, lse: what `attention` returned, lse contiguous.
        d_lse: the gradient of lse, if it has one: float32, of its dimensions, contiguous.
        dropout_state: the forward call's, which must have been given one if it drops anything.

    The rest is what `attention` was called with. torch tensors need no call of this.
    """
    numbers = options(
        softmax_scale, causal, window_size, softcap, deterministic, _is_top_left(align)
    )
    dropped = dropout(dropout_p, dropout_state)
    if dropped is not None and dropout_state is None:
        raise ValueError("dropout_state: must be the forward call's, since dropout_p is not 0")
    extras = Extras(
        alibi_slopes=alibi_slopes,
        bias=bias,
        mask=mask,
        mask_bits=mask_bits,
        sink=sink,
        key_lengths=key_lengths,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        longest=_longest(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        dropout=dropped,
    )
    _check_layout(extras)
    results = backend(q).gradients(d_o, (q, k, v), o, lse, d_lse, numbers, extras)
    return Gradients(*results)


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """`torch.nn.functional.scaled_dot_product_attention`: its arguments, layout and alignment.

    Args:
        query: [batch, q_heads, q_len, head_dim], or without batch, or without batch and heads.
        key: [batch, kv_heads, kv_len, head_dim].
        value: [batch, kv_heads, kv_len, value_dim].
        attn_mask: broadcastable to [batch, q_heads, q_len, kv_len]: bool, True where a key may be
            seen; or a floating-point bias, which is converted to float32 and has a gradient. One
            whose last axis is not contiguous is copied.
        dropout_p: as in `flash_attn_func`; it is applied whenever it is not 0.
        is_causal: row i sees keys j <= i, whatever the lengths. Not together with attn_mask.
        scale: factor of every score; 1 / sqrt(head_dim) if None.
        enable_gqa: kv_heads may divide q_heads; they must be equal otherwise.

    Returns:
        [batch, q_heads, q_len, value_dim], of query's dtype: a view of [batch, q_len, q_heads,
        value_dim]. A row that sees no key is 0.
    """
    from . import _sdpa

    return _sdpa.attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _is_top_left(align: str) -> bool:
    if not isinstance(align, str):
        raise TypeError(f"align: is a {type(align).__name__}, but it must be a str")
    if align not in ("top-left", "bottom-right"):
        raise ValueError(f'align: {align!r}, but it must be "top-left" or "bottom-right"')
    return align == "top-left"


def _longest(cu_q: Any, cu_k: Any, longest_q: Any, longest_k: Any) -> tuple[int, int]:
    """The stated maxima of packed items; all four arguments are there or none is."""
    given = {
        "cu_seqlens_q": cu_q,
        "cu_seqlens_k": cu_k,
        "max_seqlen_q": longest_q,
        "max_seqlen_k": longest_k,
    }
    absent = [name for name, value in given.items() if value is None]
    if len(absent) == 4:
        return 0, 0
    if absent:
        raise ValueError(f"{absent[0]}: must be given, since {given.keys() - set(absent)} are")
    return length(longest_q, "max_seqlen_q"), length(longest_k, "max_seqlen_k")


def _check_layout(extras: Extras) -> None:
    """Refuses arguments that another leaves without a meaning."""
    if extras.mask_bits is not None and extras.mask is not None:
        raise ValueError("mask_bits: must be None where mask is given")
    is_packed = extras.cu_seqlens_q is not None
    if is_packed and extras.key_lengths is not None:
        raise ValueError("key_lengths: packed sequences have seqused_k instead")
    for name in ("seqused_q", "seqused_k"):
        if not is_packed and getattr(extras, name) is not None:
            raise ValueError(f"{name}: only packed sequences, with cu_seqlens_q, have it")
