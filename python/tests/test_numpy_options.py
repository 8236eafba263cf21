"""Every option of `attention` on numpy arrays, forward and backward, against float64."""

import ferroflash
import numpy as np
import pytest
from reference import attention, gradients, kept, tensors

RANDOM = np.random.default_rng(3)


def normal(*dims):
    return RANDOM.standard_normal(dims, np.float32)


MASK = RANDOM.random((2, 1, 21, 34)) < 0.7
# Row 5 of the second item sees nothing.
MASK[1, :, 5] = False
CASES = {
    "plain": {},
    "top left": dict(causal=True, align="top-left"),
    "window": dict(window_size=(6, 3), softmax_scale=-0.4),
    "softcap": dict(softcap=2.0, causal=True),
    "slopes": dict(alibi_slopes=np.abs(normal(2, 4))),
    "mask": dict(mask=MASK),
    "mask of keys": dict(mask=MASK[:, :, :1]),
    "bias": dict(bias=normal(2, 4, 21, 34)),
    "bias of heads": dict(bias=normal(1, 4, 1, 34), causal=True),
    "sink": dict(sink=normal(4), mask=MASK),
    "lengths": dict(key_lengths=np.array([34, 9], np.int32)),
    "all": dict(bias=normal(1, 1, 21, 34), sink=normal(4), mask=MASK, softcap=4.0, causal=True),
}


@pytest.mark.parametrize("case", CASES)
def test_options(case):
    options = CASES[case]
    q, k, v = tensors(2, 21, 34, 4, 2, 16, 24)
    o, lse = ferroflash.attention(q, k, v, **options, return_lse=True)
    want_o, want_lse = attention(q, k, v, **options)
    np.testing.assert_allclose(o, want_o, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-5)
    d_o, d_lse = normal(*o.shape), normal(*lse.shape)
    got = ferroflash.attention_backward(d_o, q, k, v, o, lse, d_lse=d_lse, **options)
    want = gradients(d_o, q, k, v, d_lse, **options)
    for name, had, needs in zip(got._fields, got, want):
        if needs is None:
            assert had is None, name
            continue
        assert had.dtype == np.float32 and had.shape == needs.shape, name
        np.testing.assert_allclose(had, needs, rtol=1e-4, atol=1e-4, err_msg=name)


def test_packed_sequences_are_each_alone():
    q, k, v = (x[0] for x in tensors(1, 30, 25, 4, 2, 16))
    cu_q, cu_k = np.array([0, 4, 4, 30], np.int32), np.array([0, 9, 12, 25], np.int32)
    slopes = np.abs(normal(4))
    o, lse, _ = ferroflash.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 26, 13, causal=True, alibi_slopes=slopes, return_attn_probs=True
    )
    for item in range(3):
        rows, keys = (slice(cu[item], cu[item + 1]) for cu in (cu_q, cu_k))
        want_o, want_lse = attention(
            q[None, rows], k[None, keys], v[None, keys], causal=True, alibi_slopes=slopes
        )
        np.testing.assert_allclose(o[rows], want_o[0], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(lse[:, rows], want_lse[0], rtol=1e-5, atol=1e-5)


def test_used_lengths():
    q, k, v = (x[0] for x in tensors(1, 12, 12, 2, 2, 8))
    cu = np.array([0, 6, 12], np.int32)
    packed = dict(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=6, max_seqlen_k=6)
    used_q, used_k = np.array([6, 2], np.int32), np.array([3, 6], np.int32)
    o = ferroflash.attention(q, k, v, **packed, seqused_q=used_q, seqused_k=used_k)
    want, _ = attention(q[None, :6], k[None, :3], v[None, :3])
    np.testing.assert_allclose(o[:6], want[0], rtol=1e-5, atol=1e-5)
    assert (o[8:] == 0.0).all() and (o[6:8] != 0.0).any()


def test_packed_arrays():
    q, k, v = tensors(2, 9, 9, 2, 2, 8)
    qkv = np.stack([q, k, v], 2)
    want = ferroflash.flash_attn_func(q, k, v, causal=True)
    assert (ferroflash.flash_attn_qkvpacked_func(qkv, causal=True) == want).all()
    assert (ferroflash.flash_attn_kvpacked_func(q, qkv[:, :, 1:], causal=True) == want).all()
    cu = np.array([0, 9], np.int32)
    alone = ferroflash.flash_attn_varlen_qkvpacked_func(qkv[0], cu, 9, causal=True)
    both = ferroflash.flash_attn_varlen_kvpacked_func(
        q[0], qkv[0, :, 1:], cu, cu, 9, 9, causal=True
    )
    np.testing.assert_allclose(alone, want[0], rtol=1e-6, atol=1e-6)
    assert (both == alone).all()


def test_dropout():
    q, k, v = tensors(2, 16, 300, 2, 2, 8)
    np.random.seed(4)
    o, lse, signed = ferroflash.flash_attn_func(q, k, v, 0.25, return_attn_probs=True)
    assert abs((signed < 0).mean() - 0.25) < 0.02
    weights = np.maximum(signed, 0.0) / 0.75
    np.testing.assert_allclose(o, (weights @ v.swapaxes(1, 2)).swapaxes(1, 2), rtol=0, atol=1e-5)
    np.testing.assert_allclose(lse, attention(q, k, v)[1], rtol=1e-5, atol=1e-5)
    np.random.seed(4)
    assert (ferroflash.flash_attn_func(q, k, v, 0.25) == o).all()
    state = dict(dropout_p=0.25, dropout_state=(1, 2))
    assert (ferroflash.attention(q, k, v, **state) == ferroflash.attention(q, k, v, **state)).all()
    with pytest.raises(ValueError, match=r"^dropout_state\b"):
        ferroflash.attention_backward(o, q, k, v, o, lse, dropout_p=0.25)


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("causal", [False, True])
def test_the_sign_of_a_weight_says_whether_it_was_dropped(probability, causal):
    q, k, v = tensors(2, 37, 290, 4, 2, 8)
    np.random.seed(4)
    o, _, signed = ferroflash.flash_attn_func(
        q, k, v, probability, causal=causal, return_attn_probs=True
    )
    np.random.seed(4)
    state = np.random.randint(0, 2**63 - 1, 2, np.int64).tolist()
    keeps = kept(probability, state, 2, 4, 37, 290)
    visible = np.arange(290) <= np.arange(37)[:, None] + 290 - 37 if causal else np.ones((37, 290))
    assert ((signed < 0) == ~keeps & (visible != 0)).all()
    assert (np.signbit(signed) == (signed < 0)).all(), "there is a zero with a sign"
    # The state that was drawn, given again: the same call, forward and backward.
    options = dict(dropout_p=probability, dropout_state=state, causal=causal)
    again, lse = ferroflash.attention(q, k, v, **options, return_lse=True)
    assert (again == o).all()
    dv = ferroflash.attention_backward(np.ones_like(o), q, k, v, o, lse, **options).dv
    weights = np.where(keeps, signed, 0.0) / (1.0 - round(probability * 65536) / 65536)
    want = weights.reshape(2, 2, 2, 37, 290).sum((2, 3)).swapaxes(1, 2)
    np.testing.assert_allclose(dv, np.repeat(want[..., None], 8, 3), rtol=0, atol=1e-4)


def test_packed_weights_have_their_items_masks():
    cu_q, cu_k = np.array([0, 5, 12], np.int32), np.array([0, 40, 73], np.int32)
    q, k, v = tensors(1, 12, 73, 2, 2, 8)
    np.random.seed(9)
    _, _, signed = ferroflash.flash_attn_varlen_func(
        q[0], k[0], v[0], cu_q, cu_k, 7, 40, 0.4, return_attn_probs=True
    )
    np.random.seed(9)
    keeps = kept(0.4, np.random.randint(0, 2**63 - 1, 2, np.int64).tolist(), 2, 2, 7, 40)
    for item, (rows, keys) in enumerate(((5, 40), (7, 33))):
        there = np.s_[item, :, :rows, :keys]
        assert ((signed[there] < 0) == ~keeps[there]).all()
        assert (signed[item, :, rows:] == 0.0).all() and (signed[item, :, :, keys:] == 0.0).all()


def test_a_cache_is_refused_by_name():
    with pytest.raises(NotImplementedError, match=r"^flash_attn_with_kvcache\b"):
        ferroflash.flash_attn_with_kvcache(None, None, None)
