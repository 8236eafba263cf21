"""Arrays that only speak DLPack: borrowed, not copied, and handed back as their own kind."""

import subprocess
import sys
import types
import weakref

import ferroflash
import numpy as np
import pytest
from ferroflash import _dlpack
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


class Event:
    """What `torch.cuda.Event` tells: whether the device has come past it."""

    def __init__(self):
        self.is_done = False

    def query(self):
        return self.is_done

    def synchronize(self):
        self.is_done = True


def test_borrowed_arrays_are_kept_until_their_event(monkeypatch):
    """The order of giving back, without a device."""
    events, is_captured = [], False
    monkeypatch.setattr(_dlpack, "_KEPT", type(_dlpack._KEPT)())
    monkeypatch.setattr(_dlpack, "_is_captured", lambda: is_captured)
    monkeypatch.setattr(_dlpack, "_event", lambda device: events.append(Event()) or events[-1])

    def borrow():
        arrays = [Array(np.zeros(1))]
        _dlpack._keep(arrays, types.SimpleNamespace(is_cuda=True, device=0))
        return weakref.ref(arrays[0])

    first, second = borrow(), borrow()
    assert first() is not None and second() is not None
    events[1].is_done = True  # of another stream, which is quicker
    third = borrow()
    assert first() is not None and second() is None and third() is not None
    events[0].is_done = True
    is_captured = True
    assert borrow()() is None and first() is not None and len(events) == 3
    is_captured = False
    borrow()
    assert first() is None and third() is not None
    _dlpack._let_go()
    assert third() is None and all(event.is_done for event in events)


def test_arrays_of_the_host_are_given_back_at_once(monkeypatch):
    # Without what calls on a device have left there.
    monkeypatch.setattr(_dlpack, "_KEPT", type(_dlpack._KEPT)())
    arrays = tensors(1, 9, 12, 4, 2, 16)
    given = [Array(x) for x in arrays]
    ferroflash.flash_attn_func(*given)
    inside = [sys.getrefcount(x) for x in arrays]
    del given
    assert [sys.getrefcount(x) for x in arrays] == [count - 1 for count in inside]
    assert not _dlpack._KEPT


def cuda():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch


def test_cuda_arrays_are_kept_while_kernels_read_them():
    torch = cuda()
    q, k, v = (torch.from_numpy(x).half().cuda() for x in tensors(1, 70, 70, 2, 2, 64))
    want = ferroflash.flash_attn_func(q, k, v)
    owned = q.clone()
    side = torch.cuda.Stream()

    def other():
        return [torch.full_like(q, torch.nan) for _ in range(8)]

    # Kernels are loaded and memory is reserved beforehand: both may wait for the device.
    with torch.cuda.stream(side):
        ferroflash.flash_attn_func(Array(q.clone()), Array(k), Array(v))
    other()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(1_000_000_000)
        o = ferroflash.flash_attn_func(Array(owned), Array(k), Array(v)).inside
    address = owned.data_ptr()
    del owned
    # This stream's allocator would hand the memory out anew, were it given back by now.
    taken = other()
    assert not side.query(), "the call waited for the device"
    assert address not in [x.data_ptr() for x in taken]
    side.synchronize()
    assert torch.equal(o, want)
    ferroflash.flash_attn_func(Array(q), Array(k), Array(v))
    # Of the last call alone, unless that is done with as well.
    assert len(_dlpack._KEPT) <= 1, "what is done with was not given back"


def test_results_of_another_device_are_handed_back():
    torch = cuda()
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    q, k, v = (torch.from_numpy(x).half().to(last) for x in tensors(1, 70, 70, 2, 2, 64))
    o = ferroflash.flash_attn_func(*(Array(x) for x in (q, k, v)))
    assert o.inside.device == last and torch.equal(o.inside, ferroflash.flash_attn_func(q, k, v))


def test_nothing_is_left_at_exit():
    program = (
        "import atexit, ferroflash\n"
        "from ferroflash import _dlpack\n"
        "class Event:\n"
        "    def synchronize(self): print('waited')\n"
        "_dlpack._KEPT.append((Event(), None))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    assert done.stdout == b"waited\n"
