"""Attention in float64, for reading: what every test compares with."""

import numpy as np


def attention(q, k, v, factor=1.0, **options):
    """o [B, Sq, Hq, Dv] and lse [B, Hq, Sq] of q [B, Sq, Hq, D], k [B, Sk, Hkv, D] and v.

    `factor` is dropout's: what multiplies each weight, 0 or 1 / (1 - probability).
    """
    p, _, lse, _ = _weights(q, k, **options)
    v = _by_head(v, q.shape[2])
    return (p * factor @ v).transpose(0, 2, 1, 3), lse


def gradients(
    d_o,
    q,
    k,
    v,
    d_lse,
    bias=None,
    sink=None,
    softcap=0.0,
    softmax_scale=None,
    factor=1.0,
    **options,
):
    """dq, dk, dv, dbias and dsink, the last two None without bias and sink."""
    heads, kv_heads = q.shape[2], k.shape[2]
    options = dict(bias=bias, sink=sink, softcap=softcap, softmax_scale=softmax_scale, **options)
    p, p_sink, _, capped = _weights(q, k, **options)
    q64, k64, v64, d_o = (_by_head(x, heads) for x in (q, k, v, d_o))
    d_p = d_o @ v64.swapaxes(2, 3) * factor
    # The gradient of a row's scores less their weighted mean; lse adds its own to the mean.
    delta = (p * d_p).sum(3, keepdims=True) - np.asarray(d_lse, np.float64)[..., None]
    d_s = p * (d_p - delta)
    dbias = dsink = None
    if bias is not None:
        axes = tuple(axis for axis in range(3) if bias.shape[axis] == 1)
        dbias = d_s.sum(axes, keepdims=True)
    if sink is not None:
        dsink = -(p_sink * delta).sum((0, 2, 3))
    if softcap:
        d_s = d_s * (1.0 - (capped / softcap) ** 2)
    d_s = d_s * (q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale)
    grouped = lambda x: _of_groups(x, kv_heads).transpose(0, 2, 1, 3)
    dq = (d_s @ k64).transpose(0, 2, 1, 3)
    dk, dv = d_s.swapaxes(2, 3) @ q64, (p * factor).swapaxes(2, 3) @ d_o
    return dq, grouped(dk), grouped(dv), dbias, dsink


def _weights(
    q,
    k,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    align="bottom-right",
    softcap=0.0,
    alibi_slopes=None,
    bias=None,
    mask=None,
    sink=None,
    key_lengths=None,
):
    """Weights [B, Hq, Sq, Sk], the sink's, lse, and the scores after the cap."""
    q, k = _by_head(q, q.shape[2]), _by_head(k, q.shape[2])
    rows, keys = q.shape[2], k.shape[2]
    capped = q @ k.swapaxes(2, 3) * (q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        capped = softcap * np.tanh(capped / softcap)
    scores, row, key = capped, np.arange(rows)[:, None], np.arange(keys)
    # An item has as many keys as are said, and its diagonal ends at the last of them.
    lengths = np.full(q.shape[0], keys) if key_lengths is None else np.asarray(key_lengths)
    lengths = lengths[:, None, None, None]
    if alibi_slopes is not None:
        slopes = np.atleast_2d(alibi_slopes)[..., None, None]
        scores = scores - slopes * np.abs(row + lengths - rows - key)
    if bias is not None:
        scores = scores + bias
    # Distance of key j from the diagonal of row i, which ends at the last key or at key i.
    distance = key - row - (0 if align == "top-left" else lengths - rows)
    left, right = window_size
    right = 0 if causal else right
    visible = np.ones(scores.shape, bool)
    visible &= distance >= -left if left >= 0 else True
    visible &= distance <= right if right >= 0 else True
    if mask is not None:
        visible = visible & mask
    visible = visible & (key < lengths)
    scores = np.where(visible, scores, -np.inf)
    extra = np.full(q.shape[1], -np.inf) if sink is None else np.asarray(sink, np.float64)
    extra = np.broadcast_to(extra[None, :, None, None], (*scores.shape[:3], 1))
    highest = np.maximum(scores.max(axis=3, keepdims=True, initial=-np.inf), extra)
    highest = np.where(np.isfinite(highest), highest, 0.0)
    p, p_sink = np.exp(scores - highest), np.exp(extra - highest)
    total = p.sum(axis=3, keepdims=True) + p_sink
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + highest)[..., 0]
    total = np.where(total > 0.0, total, 1.0)
    return p / total, p_sink / total, lse, capped


def _by_head(x, heads):
    """[B, S, H, D] as float64 [B, heads, S, D], each head of x repeated for its group."""
    x = np.asarray(x, np.float64).transpose(0, 2, 1, 3)
    return np.repeat(x, heads // x.shape[1], axis=1)


def _of_groups(x, kv_heads):
    """[B, Hq, S, D] summed over the groups of query heads of each KV head."""
    batch, heads, *rest = x.shape
    return x.reshape(batch, kv_heads, heads // kv_heads, *rest).sum(2)


def tensors(batch, q_len, kv_len, q_heads, kv_heads, dim, value_dim=None, seed=0):
    """Normal q, k and v of these sizes, float32."""
    random = np.random.default_rng(seed)
    dims = (
        (batch, q_len, q_heads, dim),
        (batch, kv_len, kv_heads, dim),
        (batch, kv_len, kv_heads, dim if value_dim is None else value_dim),
    )
    return [random.standard_normal(size, np.float32) for size in dims]


def kept(probability, state, batch, heads, rows, keys):
    """Which weights [batch, heads, rows, keys] dropout keeps: Philox4x32 of 7 rounds, written anew.

    `kernels-core/src/dropout.rs` says which bits of which call an element takes.
    """
    seed, offset = state
    low = 2**32 - 1
    key = [seed & low, (seed >> 32) ^ (offset >> 32)]
    item = np.arange(batch * heads, dtype=np.uint64).reshape(batch, heads, 1, 1)
    row = np.arange(rows, dtype=np.uint64)[:, None]
    column = np.arange(keys, dtype=np.uint64)
    groups = (row // 16 * 8 + row % 8, column // 32 * 8 + column % 8)
    dims = (batch, heads, rows, keys)
    words = [np.broadcast_to(x, dims) for x in (*groups, item, np.uint64(offset & low))]
    for _ in range(7):
        even, odd = words[0] * np.uint64(0xD2511F53), words[2] * np.uint64(0xCD9E8D57)
        words = [
            (odd >> 32) ^ words[1] ^ np.uint64(key[0]),
            odd & low,
            (even >> 32) ^ words[3] ^ np.uint64(key[1]),
            even & low,
        ]
        key = [(key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low]
    chosen = np.choose(np.broadcast_to(column // 8 % 4, dims).astype(int), words)
    bits = (chosen >> (row // 8 % 2 * 16)) & np.uint64(2**16 - 1)
    return bits >= np.floor(probability * 2**16 + 0.5)
