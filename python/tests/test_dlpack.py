"""Arrays that only speak DLPack: borrowed, not copied, and handed back as their own kind."""

import types

import ferroflash
import numpy as np
import pytest
from reference import attention, tensors


class Array:
    """An array that has nothing but its memory; counts how often that is asked for."""

    def __init__(self, inside):
        self.inside, self.dtype, self.asked = inside, inside.dtype, 0

    def __dlpack__(self, **options):
        self.asked += 1
        return self.inside.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.inside.__dlpack_device__()

    def __array_namespace__(self):
        library = np if isinstance(self.inside, np.ndarray) else pytest.importorskip("torch")
        return types.SimpleNamespace(from_dlpack=lambda x: Array(library.from_dlpack(x)))


def test_results_are_of_the_same_kind():
    arrays = tensors(1, 9, 12, 4, 2, 16)
    q, k, v = (Array(x) for x in arrays)
    o, lse, _ = ferroflash.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    want_o, want_lse = attention(*arrays, causal=True)
    assert isinstance(o, Array) and q.asked == 1
    np.testing.assert_allclose(o.inside, want_o, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(lse.inside, want_lse, rtol=1e-5, atol=1e-5)
    mask = np.random.default_rng(0).random((1, 1, 9, 12)) < 0.5
    o = ferroflash.attention(q, k, v, mask=Array(mask))
    np.testing.assert_allclose(o.inside, attention(*arrays, mask=mask)[0], rtol=1e-5, atol=1e-5)
    assert "cpu" in ferroflash.explain(q, k, v)


def test_gradients():
    arrays = tensors(1, 9, 12, 4, 2, 16)
    o, lse = ferroflash.attention(*arrays, return_lse=True)
    want = ferroflash.attention_backward(o, *arrays, o, lse)
    got = ferroflash.attention_backward(*(Array(x) for x in (o, *arrays, o, lse)))
    assert got.dbias is None
    assert all((had.inside == needs).all() for had, needs in zip(got[:3], want[:3]))


def test_bad_input_names_its_argument():
    q, k, v = (Array(x) for x in tensors(1, 4, 4, 1, 1, 8))
    with pytest.raises(TypeError, match=r"^k\b"):
        ferroflash.flash_attn_func(q, [1.0], v)
    with pytest.raises(TypeError, match=r"^q\b"):
        ferroflash.flash_attn_func(Array(np.zeros((1, 4, 1, 8))), k, v)
    with pytest.raises(NotImplementedError, match=r"^return_attn_probs\b"):
        ferroflash.flash_attn_func(q, k, v, 0.5, return_attn_probs=True)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_jax(device):
    jax = pytest.importorskip("jax")
    try:
        place = jax.devices(device)[0]
    except RuntimeError:
        pytest.skip(f"JAX has no {device}")
    kind = jax.numpy.float32 if device == "cpu" else jax.numpy.float16
    arrays = tensors(2, 33, 40, 4, 2, 64)
    given = [jax.device_put(x.astype(kind), place) for x in arrays]
    o = ferroflash.flash_attn_func(*given, causal=True)
    assert isinstance(o, jax.Array) and o.devices() == {place}
    limit = 1e-5 if device == "cpu" else 4e-3
    np.testing.assert_allclose(o, attention(*arrays, causal=True)[0], rtol=limit, atol=limit)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_bfloat16_and_cuda_go_through_torch(device):
    torch = pytest.importorskip("torch")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    q, k, v = (torch.from_numpy(x).to(device, torch.bfloat16) for x in tensors(1, 70, 70, 2, 2, 64))
    o = ferroflash.flash_attn_func(*(Array(x) for x in (q, k, v)), causal=True)
    assert isinstance(o, Array) and o.inside.device == q.device
    assert torch.equal(o.inside, ferroflash.flash_attn_func(q, k, v, causal=True))
