"""flash-attn 2.8's functions: the same names, arguments, defaults, layouts and results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ._call import UNBOUNDED, Extras, backend, dropout, flag, length, options
from ._probabilities import signed_probabilities


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Computes softmax(softmax_scale * q k^T) v.

    Args:
        q: [batch, q_len, q_heads, head_dim]; float16, bfloat16 or float32.
        k: [batch, kv_len, kv_heads, head_dim]. Query head h reads KV head
            h // (q_heads / kv_heads).
        v: [batch, kv_len, kv_heads, value_dim]. All three may have any strides as long as channels
            are contiguous; value_dim may differ from head_dim.
        dropout_p: probability that an attention weight is dropped, 0 to 1; the others are scaled
            up. Drawn from torch's default generator, or numpy's global state.
        softmax_scale: factor of every score; 1 / sqrt(head_dim) if None.
        causal: row i sees keys j <= i + kv_len - q_len, so that the last row sees every key.
        window_size: (left, right): keys before and after that diagonal which a row sees; -1 for
            all. With causal, right is 0.
        softcap: each scaled score s becomes softcap * tanh(s / softcap); 0 for none.
        alibi_slopes: float32 [q_heads] or [batch, q_heads]: each score loses
            slope * |i + kv_len - q_len - j|.
        deterministic: the backward pass gives the same bits every time, which may take longer;
            so does torch.use_deterministic_algorithms. The forward pass always does.
        return_attn_probs: also return the log-sum-exp.

    Returns:
        o, [batch, q_len, q_heads, value_dim], contiguous, of q's dtype and device. With
        return_attn_probs (o, softmax_lse, S_dmask): softmax_lse is the natural log-sum-exp of each
        row's scores, float32 [batch, q_heads, q_len], which has a gradient here. S_dmask is None
        without dropout; with it, [batch, q_heads, q_len, kv_len] of q's dtype: the attention
        weights before dropout, negative where dropped. It is for testing: its size is quadratic.
        A row that sees no key has o = 0 and softmax_lse = -inf (flash-attn: +inf).

    Raises:
        TypeError: an argument is of the wrong kind or dtype.
        ValueError: an argument does not fit the others, or is out of range.
        NotImplementedError: no kernel does this yet on the tensors' device.
        RuntimeError: there is no usable driver, or it failed.

    Under torch.autocast, q, k and v are cast to its dtype. float32 runs on a GPU
    too, up to 128 channels, by split products and never by TF32.
    """
    numbers = options(softmax_scale, causal, window_size, softcap, deterministic)
    return _result((q, k, v), numbers, _extras(alibi_slopes, dropout_p), return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of q, k and v in one array, whose gradient is one array too.

    qkv is [batch, len, 3, heads, head_dim]; the rest is as in `flash_attn_func`.
    """
    _check_packed(qkv, "qkv", 5, 3, "[batch, row, 3, head, channel]")
    numbers = options(softmax_scale, causal, window_size, softcap, deterministic)
    return _result((qkv,), numbers, _extras(alibi_slopes, dropout_p), return_attn_probs)


def flash_attn_kvpacked_func(
    q: Any,
    kv: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of k and v in one array, whose gradient is one array too.

    kv is [batch, kv_len, 2, kv_heads, head_dim]; the rest is as in `flash_attn_func`.
    """
    _check_packed(kv, "kv", 5, 2, "[batch, row, 2, head, channel]")
    numbers = options(softmax_scale, causal, window_size, softcap, deterministic)
    return _result((q, kv), numbers, _extras(alibi_slopes, dropout_p), return_attn_probs)


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
) -> Any:
    """`flash_attn_func` of sequences of several lengths that follow one another, without padding.

    Args:
        q: [q_tokens, q_heads, head_dim].
        k, v: [kv_tokens, kv_heads, head_dim or value_dim].
        cu_seqlens_q, cu_seqlens_k: int32 [batch + 1], on q's device, contiguous: sequence b is
            tokens cu_seqlens[b] to cu_seqlens[b + 1]; the first is 0, the last the tokens' number.
        max_seqlen_q, max_seqlen_k: the longest sequences' lengths, or more.
        block_table: refused: there is no paged cache.

    The rest is as in `flash_attn_func`, lengths being each sequence's own; softmax_lse is
    [q_heads, q_tokens], and S_dmask, with dropout, [batch, q_heads, max_seqlen_q, max_seqlen_k].
    """
    if block_table is not None:
        raise NotImplementedError("block_table: there is no paged cache; k and v must be dense")
    numbers = options(softmax_scale, causal, window_size, softcap, deterministic)
    extras = _packed(
        (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k), alibi_slopes, dropout_p
    )
    return _result((q, k, v), numbers, extras, return_attn_probs)


def flash_attn_varlen_qkvpacked_func(
    qkv: Any,
    cu_seqlens: Any,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` of q, k and v in one array, whose gradient is one array too.

    qkv is [tokens, 3, heads, head_dim]; cu_seqlens and max_seqlen are those of q and of k. The rest
    is as in `flash_attn_varlen_func` and `flash_attn_func`.
    """
    _check_packed(qkv, "qkv", 4, 3, "[token, 3, head, channel]")
    numbers = options(softmax_scale, causal, window_size, softcap, deterministic)
    extras = _packed((cu_seqlens,) * 2, (max_seqlen,) * 2, alibi_slopes, dropout_p)
    return _result((qkv,), numbers, extras, return_attn_probs)


def flash_attn_varlen_kvpacked_func(
    q: Any,
    kv: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` of k and v in one array, whose gradient is one array too.

    kv is [kv_tokens, 2, kv_heads, head_dim]; the rest is as in `flash_attn_varlen_func` and
    `flash_attn_func`.
    """
    _check_packed(kv, "kv", 4, 2, "[token, 2, head, channel]")
    numbers = options(softmax_scale, causal, window_size, softcap, deterministic)
    extras = _packed(
        (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k), alibi_slopes, dropout_p
    )
    return _result((q, kv), numbers, extras, return_attn_probs)


def flash_attn_with_kvcache(*args: Any, **kwargs: Any) -> Any:
    """Refused: there is no decoding with a cache yet."""
    raise NotImplementedError(
        "flash_attn_with_kvcache: there is no decoding with a cache yet; flash_attn_func takes the "
        "concatenated keys and values"
    )


def _result(tensors: tuple, numbers: tuple, extras: Extras | None, return_attn_probs: Any) -> Any:
    module = backend(tensors[0])
    if not flag(return_attn_probs, "return_attn_probs"):
        return module.attend(tensors, numbers, extras, False)[0]
    if extras is None or extras.dropout is None:
        return *module.attend(tensors, numbers, extras, True), None
    # The mask is made by a second call, so both need the same state.
    extras = module.with_state(extras, tensors[0])
    if extras.dropout_state is not None:
        raise NotImplementedError(
            "return_attn_probs: a captured CUDA graph keeps the dropout's state on the device, and "
            "the mask is made on the CPU"
        )
    o, lse = module.attend(tensors, numbers, extras, True)
    return o, lse, signed_probabilities(module, tensors, numbers, extras)


def _extras(slopes: Any, dropout_p: Any) -> Extras | None:
    dropped = dropout(dropout_p)
    if slopes is None and dropped is None:
        return None
    return Extras(alibi_slopes=slopes, dropout=dropped)


def _packed(cumulative: tuple, longest: tuple, slopes: Any, dropout_p: float) -> Extras:
    return Extras(
        alibi_slopes=slopes,
        cu_seqlens_q=cumulative[0],
        cu_seqlens_k=cumulative[1],
        longest=(length(longest[0], "max_seqlen_q"), length(longest[1], "max_seqlen_k")),
        dropout=dropout(dropout_p),
    )


def _check_packed(array: Any, name: str, axes: int, parts: int, words: str) -> None:
    shape = getattr(array, "shape", None)
    if shape is None:
        raise TypeError(f"{name}: is a {type(array).__name__}, but it must be an array or tensor")
    if len(shape) != axes or shape[axes - 3] != parts:
        raise ValueError(f"{name}: has dimensions {tuple(shape)}, but it must have {words}")
