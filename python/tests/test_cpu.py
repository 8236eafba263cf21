"""numpy arrays against the float64 reference. Needs numpy; ml_dtypes for bfloat16."""

import subprocess
import sys
import threading

import ferroflash
import numpy as np
import pytest
from reference import attention, tensors

call = ferroflash.flash_attn_func
# Rounding of the inputs is the reference's too: these bound the result's own rounding.
TOLERANCE = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}


def dtype_named(name):
    if name == "bfloat16":
        return pytest.importorskip("ml_dtypes").bfloat16
    return np.dtype(name)


def check(q, k, v, tolerance=2e-6, alibi_slopes=None, **options):
    """Compares o and lse with the reference."""
    o, lse, mask = call(q, k, v, alibi_slopes=alibi_slopes, return_attn_probs=True, **options)
    want_o, want_lse = attention(q, k, v, alibi_slopes=alibi_slopes, **options)
    assert mask is None
    assert o.dtype == q.dtype and o.shape == want_o.shape and o.flags.c_contiguous
    assert lse.dtype == np.float32 and lse.shape == want_lse.shape
    np.testing.assert_allclose(o.astype(np.float64), want_o, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-5)
    alone = call(q, k, v, alibi_slopes=alibi_slopes, **options)
    assert alone.tobytes() == o.tobytes()


@pytest.mark.parametrize("name", TOLERANCE)
@pytest.mark.parametrize("causal", [False, True])
def test_dtypes(name, causal):
    q, k, v = (x.astype(dtype_named(name)) for x in tensors(2, 65, 130, 4, 2, 64))
    check(q, k, v, TOLERANCE[name], causal=causal)


@pytest.mark.parametrize("q_len, kv_len", [(1, 1), (1, 300), (7, 300), (300, 7), (193, 385)])
def test_causal_ends_at_the_last_key(q_len, kv_len):
    check(*tensors(1, q_len, kv_len, 2, 2, 32), causal=True)


def test_a_row_without_keys_is_zero():
    q, k, v = tensors(1, 5, 2, 1, 1, 8)
    o, lse, _ = call(q, k, v, causal=True, return_attn_probs=True)
    assert (o[:, :3] == 0.0).all() and (lse[..., :3] == -np.inf).all()


@pytest.mark.parametrize("q_heads, kv_heads", [(6, 6), (6, 3), (6, 2), (6, 1)])
def test_heads_share(q_heads, kv_heads):
    check(*tensors(2, 20, 33, q_heads, kv_heads, 16), causal=True)


@pytest.mark.parametrize("dim, value_dim", [(1, 1), (24, 40), (72, 8), (256, 256)])
def test_head_dimensions(dim, value_dim):
    check(*tensors(1, 9, 17, 2, 1, dim, value_dim))


@pytest.mark.parametrize("window", [(0, 0), (3, 5), (-1, 4), (4, -1), (-1, -1), (900, 900)])
@pytest.mark.parametrize("causal", [False, True])
def test_window(window, causal):
    check(*tensors(1, 31, 50, 2, 2, 16), window_size=window, causal=causal)
    check(*tensors(1, 50, 31, 2, 2, 16), window_size=list(window), causal=causal)


@pytest.mark.parametrize("scale", [None, 0.0, -0.3, 0.7, np.float32(0.2)])
def test_scale(scale):
    check(*tensors(1, 12, 20, 2, 2, 16), softmax_scale=scale)


def test_softcap():
    q, k, v = tensors(1, 40, 40, 2, 2, 16)
    check(q * 8.0, k, v, softcap=5.0, causal=True)


@pytest.mark.parametrize("dims", [(4,), (2, 4)])
@pytest.mark.parametrize("causal", [False, True])
def test_alibi(dims, causal):
    slopes = np.random.default_rng(1).uniform(0.05, 1.0, dims).astype(np.float32)
    check(*tensors(2, 21, 40, 4, 2, 16), alibi_slopes=slopes, causal=causal)


def test_strided_views():
    q, k, v = tensors(2, 24, 24, 4, 4, 16)
    packed = np.stack([q, k, v], axis=2)  # [batch, row, 3, head, channel]
    check(packed[:, :, 0], packed[:, :, 1], packed[:, :, 2], causal=True)
    heads_first = [np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (q, k, v)]
    check(*heads_first, causal=True)
    check(q[:, ::2, ::-1], k[::-1, 3:], v[::-1, 3:])
    check(np.broadcast_to(q[:1], q.shape), k, np.broadcast_to(v[:, :1], v.shape))
    q.flags.writeable = False
    check(q, k, v)


def test_empty():
    q, k, v = tensors(2, 0, 5, 2, 2, 8)
    assert call(q, k, v).shape == (2, 0, 2, 8)
    q, k, v = tensors(2, 3, 0, 2, 2, 8)
    o, lse, _ = call(q, k, v, return_attn_probs=True)
    assert (o == 0.0).all() and (lse == -np.inf).all()


def test_positional_arguments_are_flash_attn_s():
    q, k, v = tensors(1, 9, 9, 2, 2, 8)
    slopes = np.full(2, 0.5, np.float32)
    by_place = call(q, k, v, 0.0, 0.3, True, (4, 0), 20.0, slopes, True, True)
    by_name = call(
        q,
        k,
        v,
        softmax_scale=0.3,
        causal=True,
        window_size=(4, 0),
        softcap=20.0,
        alibi_slopes=slopes,
        return_attn_probs=True,
    )
    assert (by_place[0] == by_name[0]).all() and (by_place[1] == by_name[1]).all()


def test_threads_and_forks():
    q, k, v = tensors(1, 64, 64, 2, 2, 16)
    want, results = call(q, k, v), [None] * 8

    def work(index):
        results[index] = call(q, k, v)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(results))]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert all((result == want).all() for result in results)
    program = (
        "import os, numpy as np, ferroflash\n"
        "q = np.ones((1, 500, 2, 16), np.float32)\n"
        "ferroflash.flash_attn_func(q, q, q)\n"
        "child = os.fork()\n"
        "ferroflash.flash_attn_func(q, q, q)\n"
        "child or os._exit(0)\n"
        "raise SystemExit(os.waitpid(child, 0)[1])\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=60)


Q, K, V = tensors(2, 6, 7, 4, 2, 8)
SLOPES = np.ones(4, np.float32)
BAD = {
    "list": (TypeError, "q", dict(q=[1.0])),
    "none": (TypeError, "k", dict(k=None)),
    "dtype": (TypeError, "q", dict(q=Q.astype(np.float64))),
    "opaque": (TypeError, "q", dict(q=np.zeros(Q.shape, "V2"))),
    "byte order": (TypeError, "v", dict(v=V.astype(">f4"))),
    "other dtype": (TypeError, "k", dict(k=K.astype(np.float16))),
    "masked array": (TypeError, "v", dict(v=np.ma.masked_array(V))),
    "axes": (ValueError, "q", dict(q=Q[0])),
    "axes of v": (ValueError, "v", dict(v=V[0, 0, 0])),
    "batch": (ValueError, "k", dict(k=K[:1])),
    "keys": (ValueError, "v", dict(v=V[:, :3])),
    "head_dim": (ValueError, "k", dict(k=K[..., :4])),
    "heads": (ValueError, "q", dict(q=Q[:, :, :3])),
    "kv heads": (ValueError, "v", dict(v=V[:, :, :1])),
    "channels": (ValueError, "q", dict(q=np.zeros((2, 6, 4, 16), np.float32)[..., ::2])),
    "part of an element": (
        ValueError,
        "q",
        dict(zip("qkv", [np.zeros(2, "f4,i1")["f0"].reshape(2, 1, 1, 1)] * 3)),
    ),
    "dropout_p": (TypeError, "dropout_p", dict(dropout_p="0.1")),
    "dropout_p flag": (TypeError, "dropout_p", dict(dropout_p=True)),
    "scale flag": (TypeError, "softmax_scale", dict(softmax_scale=False)),
    "causal number": (TypeError, "causal", dict(causal=0.5)),
    "causal word": (TypeError, "causal", dict(causal="no")),
    "deterministic": (TypeError, "deterministic", dict(deterministic=None)),
    "return_attn_probs": (TypeError, "return_attn_probs", dict(return_attn_probs=2)),
    "dropout_p range": (ValueError, "dropout_p", dict(dropout_p=1.5)),
    "dropout_p nan": (ValueError, "dropout_p", dict(dropout_p=float("nan"))),
    "scale nan": (ValueError, "softmax_scale", dict(softmax_scale=float("nan"))),
    "scale inf": (ValueError, "softmax_scale", dict(softmax_scale=1e300)),
    "scale type": (TypeError, "softmax_scale", dict(softmax_scale="1")),
    "softcap": (ValueError, "softcap", dict(softcap=-1.0)),
    "softcap type": (TypeError, "softcap", dict(softcap=None)),
    "window": (ValueError, "window_size", dict(window_size=(-2, 0))),
    "window of three": (ValueError, "window_size", dict(window_size=(1, 2, 3))),
    "window type": (TypeError, "window_size", dict(window_size=(1.5, 0))),
    "window flags": (TypeError, "window_size", dict(window_size=(True, False))),
    "window none": (TypeError, "window_size", dict(window_size=None)),
    "slopes dtype": (TypeError, "alibi_slopes", dict(alibi_slopes=SLOPES.astype(np.float16))),
    "slopes": (ValueError, "alibi_slopes", dict(alibi_slopes=SLOPES[:2])),
    "slopes axes": (ValueError, "alibi_slopes", dict(alibi_slopes=SLOPES.reshape(1, 2, 2))),
    "slopes type": (TypeError, "alibi_slopes", dict(alibi_slopes=[1.0] * 4)),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_names_its_argument(case):
    kind, argument, changes = BAD[case]
    with pytest.raises(kind, match=rf"^{argument}\b"):
        call(**{"q": Q, "k": K, "v": V, **changes})


def test_import_needs_nothing():
    program = "import sys, ferroflash; assert not {'numpy', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_kernel_name_and_explain():
    name = ferroflash.kernel_name(
        direction="forward",
        head_dim=64,
        dtype="bf16",
        causal=True,
        q_heads=8,
        kv_heads=2,
        deterministic=False,
        device=-1,
    )
    assert name.startswith("cpu")
    assert ferroflash.kernel_name(dtype=np.dtype(np.float16), device=-1) == name
    backward = ferroflash.kernel_name(direction="backward", device=-1)
    assert backward.startswith("cpu") and backward != name
    words = ferroflash.explain(Q, K, V, causal=True)
    assert name in words and backward in words
    for kind, argument, changes in (
        (ValueError, "direction", dict(direction="sideways")),
        (ValueError, "dtype", dict(dtype="int8")),
        (ValueError, "q", dict(q_heads=3, kv_heads=2)),
        (ValueError, "q", dict(head_dim=0)),
    ):
        with pytest.raises(kind, match=rf"^{argument}\b"):
            ferroflash.kernel_name(**{"device": -1, **changes})
    with pytest.raises(ValueError, match=r"^k\b"):
        ferroflash.explain(Q, K[:1], V)


def test_doctor():
    assert ferroflash.__version__ in ferroflash.doctor()
    assert isinstance(ferroflash.is_available(), bool)
