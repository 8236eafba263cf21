"""Attention in float64 with torch's autograd, for reading: what results and gradients must be.

A float32 result differs from it by more than its last roundings: its scores are sums of D products.
While D normal products are added one after another, the sum after i of them is about sqrt(i), and
each addition rounds by about 0.4 u of it (u = 2^-24). In quadrature that is 0.4 u D / sqrt(2), and
times 1 / sqrt(D) an error of 0.4 u sqrt(D / 2) a score: 1.4e-7 for D = 64, five times as much in
the worst of 10^5 scores. In o it is multiplied by p (1 - p) and differences of values, 0.25 times 4
where two keys share a row: up to 8e-7, which `4 * 2^-22` does not leave room for. How large it is
depends on q, k and v, so that it is measured: the same formula in float32, by torch, errs by
8.7e-7 on `tensors(2, 97, 161, 4, 2, 64)`, torch's own attention by 1.1e-6, ours by 1.06e-6; with
other seeds ours errs less than torch's as often as more. `close` takes it as `summation`.
"""

import torch

EPSILON = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-22}


def tensors(batch, q_len, kv_len, q_heads, kv_heads, dim, value_dim=None, **kind):
    """Normal q, k and v of these sizes."""
    generator = torch.Generator().manual_seed(0)
    kind = {"dtype": torch.bfloat16, "device": "cpu", **kind}
    dims = (
        (batch, q_len, q_heads, dim),
        (batch, kv_len, kv_heads, dim),
        (batch, kv_len, kv_heads, value_dim or dim),
    )
    return [torch.randn(size, generator=generator).to(**kind) for size in dims]


def reference(
    q,
    k,
    v,
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
    keep=None,
    dropout_p=0.0,
    dtype=torch.float64,
):
    """o [B, Sq, Hq, Dv] and lse [B, Hq, Sq] in `dtype`; `keep` is the dropout's mask."""
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    rows, keys = q.shape[2], k.shape[2]
    scores = (
        q @ k.transpose(2, 3) * (q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale)
    )
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    row = torch.arange(rows, device=q.device)[:, None]
    key = torch.arange(keys, device=q.device)
    if alibi_slopes is not None:
        slopes = alibi_slopes.to(dtype)
        slopes = slopes[None] if slopes.dim() == 1 else slopes
        scores = scores - slopes[..., None, None] * (row + keys - rows - key).abs()
    if bias is not None:
        scores = scores + bias.to(dtype)
    distance = key - row - (0 if align == "top-left" else keys - rows)
    seen = torch.ones_like(scores, dtype=torch.bool)
    left, right = window_size
    seen &= (distance >= -left) if left >= 0 else True
    seen &= (distance <= right) if right >= 0 else True
    seen &= (distance <= 0) if causal else True
    if mask is not None:
        seen = seen & mask
    if key_lengths is not None:
        seen = seen & (key < key_lengths[:, None, None, None])
    if sink is not None:
        column = sink.to(dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], 3)
        seen = torch.cat([seen, torch.ones_like(seen[..., :1])], 3)
    scores = scores.masked_fill(~seen, -torch.inf)
    empty = ~seen.any(3, keepdim=True)
    weights = scores.masked_fill(empty, 0.0).softmax(3).masked_fill(empty, 0.0)
    lse = scores.masked_fill(empty, 0.0).logsumexp(3).masked_fill(empty[..., 0], -torch.inf)
    weights = weights[..., :keys]
    if keep is not None:
        dropped = round(dropout_p * 65536) / 65536
        weights = weights * keep.to(dtype) / (1.0 - dropped)
    return (weights @ v).transpose(1, 2), lse


def close(had, want, dtype, factor=4.0, summation=0.0):
    """Whether `had` is `want` up to a few roundings of `dtype`, and the error of its sums."""
    assert had.shape == want.shape
    scale = max(1.0, want.abs().max().item() if want.numel() else 0.0)
    limit = factor * EPSILON[dtype] * scale + summation
    torch.testing.assert_close(had.double(), want.double(), rtol=0.0, atol=limit)


def summation(want_call, inputs, want, dtype):
    """What sums in float32 add to the error of o; 0 for types whose own roundings are larger."""
    if dtype != torch.float32 or not want.numel():
        return 0.0
    with torch.no_grad():
        plain, _ = want_call(**inputs, dtype=torch.float32)
    return (plain.double() - want.detach()).abs().max().item()


def check_gradients(call, want_call, inputs, dtype, factor=16.0):
    """Compares o, lse and the gradients of every input of two functions, lse's gradient included.

    `inputs` maps names to tensors; each function takes them and returns (o, lse).
    """
    ours = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    theirs = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    o, lse = call(**ours)
    want_o, want_lse = want_call(**theirs)
    close(o, want_o.detach(), dtype, summation=summation(want_call, inputs, want_o, dtype))
    torch.testing.assert_close(lse.double(), want_lse.detach(), rtol=1e-4, atol=1e-4)
    generator = torch.Generator().manual_seed(1)
    d_o = torch.randn(o.shape, generator=generator).to(o)
    d_lse = torch.randn(lse.shape, generator=generator).to(lse)
    got = torch.autograd.grad([o, lse], list(ours.values()), [d_o, d_lse])
    # An empty row's lse is a constant; torch's masked_fill says so too.
    want = torch.autograd.grad(
        [want_o, want_lse], list(theirs.values()), [d_o.double(), d_lse.double()]
    )
    for name, had, needs in zip(inputs, got, want):
        assert had.dtype == ours[name].dtype, name
        assert torch.isfinite(had).all(), name
        close(had, needs, dtype, factor)
