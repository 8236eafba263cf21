"""Random calls on numpy arrays: sizes, types, strides and options together, against float64.

Every draw is named by its seed. `FERROFLASH_DRAWS=N` makes N of each kind in place of a few.
"""

import os

import ferroflash
import numpy as np
import pytest
from reference import attention, gradients, kept

DRAWS = int(os.environ.get("FERROFLASH_DRAWS", "60"))
TYPES = ["float32", "float16", "bfloat16"]
# How far a result may be off, of 1 or of the largest value if that is more.
TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
LENGTHS = [0, 1, 2, 3, 7, 16, 17, 31, 33, 64, 65, 97]
CHANNELS = [1, 2, 3, 7, 8, 16, 24, 33, 64, 80]


class Draw:
    """A random call's sizes and arrays."""

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)

    def one_of(self, values):
        return values[self.random.integers(len(values))]

    def often(self, probability):
        return bool(self.random.random() < probability)

    def dtype(self):
        name = self.one_of(TYPES)
        return np.dtype(getattr(pytest.importorskip("ml_dtypes"), name) if name[0] == "b" else name)

    def normal(self, dims, dtype=np.float32):
        """A normal array in memory of its own, however it lies there."""
        return self.laid_out(self.random.standard_normal(dims, np.float32).astype(dtype))

    def laid_out(self, x):
        """The numbers of `x`, possibly fewer of them more often, in another place and order."""
        kept_last = x.ndim - 1
        for axis in range(kept_last):
            if x.shape[axis] > 1 and self.often(0.08):
                x = np.broadcast_to(x.take([0], axis), x.shape)
                return x  # a stride of 0
        order = [*self.random.permutation(kept_last), kept_last]
        steps = [int(self.one_of([1, 1, 2, 3])) for _ in range(kept_last)]
        sizes = [size * step for size, step in zip(x.shape, [*steps, 1])]
        padding = int(self.one_of([0, 0, 1, 5]))
        sizes[-1] += padding
        memory = np.full([sizes[axis] for axis in order], np.nan, x.dtype)
        there = memory.transpose(np.argsort(order))
        signs = [int(self.one_of([1, 1, -1])) for _ in range(kept_last)]
        places = [slice(None, None, step * sign) for step, sign in zip(steps, signs)]
        view = there[(*places, slice(0, x.shape[-1]))]
        view[...] = x
        view.flags.writeable = self.often(0.5)
        return view

    def options(self, q, k):
        """Options of a dense call, as `attention` takes them."""
        (batch, rows, heads, _), keys = q.shape, k.shape[1]
        full = (batch, heads, rows, keys)
        broadcast = lambda: [size if self.often(0.6) else 1 for size in full[:3]] + [keys]
        made = {
            "softmax_scale": lambda: float(self.random.uniform(-0.5, 0.8)),
            "causal": lambda: True,
            "align": lambda: self.one_of(["top-left", "bottom-right"]),
            "window_size": lambda: tuple(int(x) for x in self.random.integers(-1, 40, 2)),
            "softcap": lambda: float(self.random.uniform(0.5, 20.0)),
            "alibi_slopes": lambda: np.abs(
                self.random.standard_normal(self.one_of([(heads,), (batch, heads)]), np.float32)
            ),
            "bias": lambda: self.normal(broadcast()),
            "mask": lambda: self.laid_out(self.random.random(broadcast()) < 0.7),
            "sink": lambda: self.random.standard_normal(heads, np.float32),
            "key_lengths": lambda: self.random.integers(0, keys + 1, batch).astype(np.int32),
        }
        return {name: make() for name, make in made.items() if self.often(0.25)}


def close(had, want, tolerance, name):
    assert had.shape == want.shape, name
    finite = np.abs(want[np.isfinite(want)])
    most = tolerance * max(1.0, finite.max(initial=0.0))
    np.testing.assert_allclose(had.astype(np.float64), want, rtol=0, atol=most, err_msg=name)


@pytest.mark.parametrize("seed", range(DRAWS))
def test_dense(seed):
    draw = Draw(seed)
    batch, kv_heads, group = (
        draw.one_of([0, 1, 1, 2, 3]),
        draw.one_of([1, 2, 3]),
        draw.one_of([1, 2]),
    )
    rows, keys = draw.one_of(LENGTHS), draw.one_of(LENGTHS)
    dim, value_dim, dtype = draw.one_of(CHANNELS), draw.one_of(CHANNELS), draw.dtype()
    heads = kv_heads * group
    q = draw.normal((batch, rows, heads, dim), dtype)
    k = draw.normal((batch, keys, kv_heads, dim), dtype)
    v = draw.normal((batch, keys, kv_heads, value_dim), dtype)
    options, more = draw.options(q, k), {}
    factor = 1.0
    if draw.often(0.2):
        more = dict(dropout_p=draw.one_of([0.1, 0.5, 1.0]), dropout_state=(seed, 7))
        keeps = kept(more["dropout_p"], more["dropout_state"], batch, heads, rows, keys)
        share = 1.0 - round(more["dropout_p"] * 65536) / 65536
        factor = keeps / share if share else 0.0
    tolerance = TOLERANCE[dtype.name]
    o, lse = ferroflash.attention(q, k, v, **options, **more, return_lse=True)
    assert o.dtype == dtype and o.flags.c_contiguous and lse.dtype == np.float32
    want_o, want_lse = attention(q, k, v, factor, **options)
    close(o, want_o, tolerance, "o")
    close(lse, want_lse, 2e-5, "lse")
    d_o = draw.normal(o.shape, dtype)
    d_lse = draw.random.standard_normal(lse.shape, np.float32) if draw.often(0.3) else None
    got = ferroflash.attention_backward(d_o, q, k, v, o, lse, d_lse=d_lse, **options, **more)
    rate = np.zeros(lse.shape) if d_lse is None else d_lse
    want = gradients(d_o, q, k, v, rate, factor=factor, **options)
    for name, had, needs in zip(got._fields, got, want):
        if needs is None:
            assert had is None, name
        else:
            close(had, needs, 4 * tolerance, name)


@pytest.mark.parametrize("seed", range(DRAWS // 3))
def test_packed(seed):
    draw = Draw(1000 + seed)
    items, kv_heads, group = draw.one_of([1, 2, 4]), draw.one_of([1, 2]), draw.one_of([1, 2, 3])
    dim, value_dim, dtype = draw.one_of(CHANNELS), draw.one_of(CHANNELS), draw.dtype()
    offsets = []
    for _ in "qk":
        lengths = [draw.one_of(LENGTHS) for _ in range(items)]
        offsets.append(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    cu_q, cu_k = offsets
    q = draw.normal((int(cu_q[-1]), kv_heads * group, dim), dtype)
    k = draw.normal((int(cu_k[-1]), kv_heads, dim), dtype)
    v = draw.normal((int(cu_k[-1]), kv_heads, value_dim), dtype)
    longest = [int(np.diff(cu).max()) for cu in offsets]
    options = dict(causal=draw.often(0.5), softcap=draw.one_of([0.0, 3.0]))
    packed = dict(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    packed.update(max_seqlen_q=longest[0], max_seqlen_k=longest[1])
    o, lse = ferroflash.attention(q, k, v, **packed, **options, return_lse=True)
    d_o = draw.normal(o.shape, dtype)
    got = ferroflash.attention_backward(d_o, q, k, v, o, lse, **packed, **options)
    tolerance = TOLERANCE[dtype.name]
    for item in range(items):
        rows, keys = (slice(cu[item], cu[item + 1]) for cu in offsets)
        own = (q[None, rows], k[None, keys], v[None, keys])
        want_o, want_lse = attention(*own, **options)
        close(o[rows], want_o[0], tolerance, "o")
        close(lse[:, rows], want_lse[0], 2e-5, "lse")
        want = gradients(d_o[None, rows], *own, np.zeros(want_lse.shape), **options)
        for name, had, needs, there in zip(got._fields, got, want, (rows, keys, keys)):
            close(had[there], needs[0], 4 * tolerance, name)


@pytest.mark.parametrize("seed", range(DRAWS // 3))
def test_scaled_dot_product_attention(seed):
    draw = Draw(2000 + seed)
    axes, heads, group = draw.one_of([2, 3, 4]), draw.one_of([1, 2]), draw.one_of([1, 2])
    batch = draw.one_of([1, 2]) if axes == 4 else 1
    heads, group = (heads, group) if axes > 2 else (1, 1)
    rows, keys, dim = draw.one_of(LENGTHS), draw.one_of(LENGTHS), draw.one_of(CHANNELS)
    full = (batch, heads * group, rows, keys)
    left_out = (0,) * (4 - axes)
    query, key, value = (
        draw.normal((batch, n, s, dim))[left_out]
        for n, s in ((heads * group, rows), (heads, keys), (heads, keys))
    )
    mask = None
    if draw.often(0.7):
        sizes = [size if draw.often(0.6) else 1 for size in full][draw.one_of([0, 1, 2, 3]) :]
        mask = draw.normal(sizes)
        mask = mask > -0.7 if draw.often(0.5) else mask
    causal = mask is None and draw.often(0.5)
    o = ferroflash.scaled_dot_product_attention(
        query, key, value, mask, is_causal=causal, enable_gqa=True
    )
    added = (None,) * (4 - axes)
    q, k, v = (x[added].swapaxes(1, 2) for x in (query, key, value))
    options = dict(causal=causal, align="top-left")
    if mask is not None:
        options["mask" if mask.dtype == bool else "bias"] = np.broadcast_to(mask, full)
    want, _ = attention(q, k, v, **options)
    close(o, want.swapaxes(1, 2)[left_out], 2e-5, "o")


@pytest.mark.parametrize("seed", range(DRAWS))
def test_channels_that_are_apart_are_refused(seed):
    draw = Draw(3000 + seed)
    arrays = {name: np.zeros((2, 3, 2, 8), draw.dtype()) for name in "q"}
    arrays.update({name: arrays["q"].copy() for name in "kv"})
    name = draw.one_of("qkv")
    wide = np.zeros((2, 3, 2, 16), arrays["q"].dtype)
    arrays[name] = draw.one_of(
        [
            wide[..., ::2],
            wide[..., 8::-1][..., :8],
            np.broadcast_to(wide[..., :1], (2, 3, 2, 8)),
            np.asfortranarray(wide[..., :8]),
        ]
    )
    with pytest.raises(ValueError, match=rf"^{name}: "):
        ferroflash.attention(**arrays)


Q = np.zeros((2, 6, 4, 8), np.float32)
CU = np.array([0, 2, 6], np.int32)
STRANGE = [
    None, 1, -1, 2**70, 0.5, float("nan"), float("inf"), True, "word", b"bytes", [], [1, 2], (), {},
    object(), 1j, np.float32(2.0), np.int64(3), np.zeros(()), np.zeros(3), np.zeros((2, 6, 4, 8)),
    np.zeros((2, 6, 4, 8), np.int32), np.zeros((2, 6, 4, 8), complex), np.zeros(2, "M8[s]"),
    np.array(["a"]), np.array([None]), np.zeros((1, 1, 1, 1, 1), np.float32), np.zeros(0, np.int32),
    np.zeros((2, 6, 4, 8), ">f4"), np.zeros((2, 0, 4, 8), np.float32), np.array([3, 1, 2], np.int32),
    np.full(4, np.nan, np.float32), np.zeros((2, 6, 4, 8), np.float16), np.zeros(2, "f4,i4"), Q,
]  # fmt: skip
NAMES = [
    "q", "k", "v", "softmax_scale", "causal", "window_size", "align", "softcap", "alibi_slopes",
    "bias", "mask", "sink", "key_lengths", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q",
    "max_seqlen_k", "seqused_q", "seqused_k", "dropout_p", "dropout_state", "deterministic",
    "return_lse",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_what_makes_no_sense_is_refused_by_name(name, packed):
    """Either it is a call, or it raises one of four kinds with an argument's name first."""
    arrays = dict(q=Q, k=Q, v=Q)
    if packed:
        arrays = dict(q=Q[0], k=Q[0], v=Q[0], cu_seqlens_q=CU, cu_seqlens_k=CU)
        arrays.update(max_seqlen_q=4, max_seqlen_k=4)
    if name == "dropout_state":  # is not looked at where nothing is dropped
        arrays["dropout_p"] = 0.5
    refused = 0
    for strange in STRANGE:
        try:
            ferroflash.attention(**{**arrays, name: strange})
        except (TypeError, ValueError, NotImplementedError) as why:
            words = str(why)
            assert words.split(":")[0].split(",")[0] in NAMES, (strange, words)
            refused += 1
    assert refused > 3


@pytest.mark.parametrize("name", ["d_o", "o", "lse", "d_lse"])
def test_what_makes_no_gradient_is_refused_by_name(name):
    o, lse = ferroflash.attention(Q, Q, Q, return_lse=True)
    saved = dict(d_o=o, q=Q, k=Q, v=Q, o=o, lse=lse)
    for strange in STRANGE:
        fits = strange is Q and name in ("d_o", "o") or strange is None and name == "d_lse"
        try:
            ferroflash.attention_backward(**{**saved, name: strange})
        except (TypeError, ValueError) as why:
            assert not fits and str(why).startswith(f"{name}:"), (strange, str(why))
        else:
            assert fits, strange
