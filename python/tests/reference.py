"""Attention in float64, for reading: what every test compares with."""

import numpy as np


def attention(q, k, v, scale=None, causal=False, window=(-1, -1), softcap=0.0, slopes=None):
    """o [B, Sq, Hq, Dv] and lse [B, Hq, Sq] of q [B, Sq, Hq, D], k [B, Sk, Hkv, D] and v."""
    q, k, v = (np.asarray(x, np.float64).transpose(0, 2, 1, 3) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    rows, keys = q.shape[2], k.shape[2]
    scores = q @ k.swapaxes(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    # Distance of key j from the diagonal of row i, which ends at the last key.
    distance = np.arange(keys) - (np.arange(rows)[:, None] + keys - rows)
    if slopes is not None:
        scores = scores - np.atleast_2d(slopes)[..., None, None] * np.abs(distance)
    left, right = window
    right = 0 if causal else right
    visible = np.ones((rows, keys), bool)
    visible &= distance >= -left if left >= 0 else True
    visible &= distance <= right if right >= 0 else True
    scores = np.where(visible, scores, -np.inf)
    highest = scores.max(axis=3, keepdims=True, initial=-np.inf)
    p = np.exp(scores - np.where(np.isfinite(highest), highest, 0.0))
    total = p.sum(axis=3, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + np.where(np.isfinite(highest), highest, 0.0))[..., 0]
    o = p / np.where(total > 0.0, total, 1.0) @ v
    return o.transpose(0, 2, 1, 3), lse


def tensors(batch, q_len, kv_len, q_heads, kv_heads, dim, value_dim=None, seed=0):
    """Normal q, k and v of these sizes, float32."""
    random = np.random.default_rng(seed)
    dims = (
        (batch, q_len, q_heads, dim),
        (batch, kv_len, kv_heads, dim),
        (batch, kv_len, kv_heads, dim if value_dim is None else value_dim),
    )
    return [random.standard_normal(size, np.float32) for size in dims]
