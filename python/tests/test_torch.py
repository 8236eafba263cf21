"""PyTorch tensors against torch's own float64. Skipped without torch; most need a GPU."""

import pytest

torch = pytest.importorskip("torch")

import ferroflash
from torch_reference import close, reference, tensors

call = ferroflash.flash_attn_func
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]
HALVES = [torch.float16, torch.bfloat16]


def check(q, k, v, causal=False, scale=None):
    o, lse, mask = call(q, k, v, softmax_scale=scale, causal=causal, return_attn_probs=True)
    want_o, want_lse = reference(q, k, v, softmax_scale=scale, causal=causal)
    assert mask is None
    assert o.dtype == q.dtype and o.device == q.device and o.is_contiguous()
    assert lse.dtype == torch.float32 and lse.device == q.device and lse.is_contiguous()
    close(o, want_o, q.dtype)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-4)
    assert torch.equal(call(q, k, v, softmax_scale=scale, causal=causal), o)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [32, 64, 80, 128, 256])
def test_head_dimensions(device, dtype, causal, dim):
    check(*tensors(2, 193, 321, 4, 2, dim, device=device, dtype=dtype), causal=causal)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dim", [40, 64, 128])
def test_float32(device, dim):
    check(*tensors(2, 33, 65, 4, 2, dim, dtype=torch.float32, device=device), causal=True)


@gpu
def test_wide_float32_on_a_gpu_is_refused():
    with pytest.raises(NotImplementedError, match=r"^q, k, v\b.*128"):
        call(*tensors(1, 8, 8, 1, 1, 136, dtype=torch.float32, device="cuda"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("q_len, kv_len", [(1, 1), (1, 1000), (1000, 1), (127, 129), (400, 300)])
def test_causal_ends_at_the_last_key(device, q_len, kv_len):
    check(*tensors(1, q_len, kv_len, 2, 2, 64, device=device), causal=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [0.0, -0.4, 1.0])
def test_scale_and_value_dim(device, scale):
    check(*tensors(1, 70, 90, 6, 1, 64, 128, device=device), scale=scale)


@pytest.mark.parametrize("device", DEVICES)
def test_views(device):
    q, k, v = tensors(2, 96, 96, 4, 4, 64, device=device)
    check(*torch.stack([q, k, v], 2).unbind(2), causal=True)
    check(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)))
    check(q[:, 5:, 1:3], k[:, 1::2, :2], v[:, 1::2, :2], causal=True)
    check(q, k[:1, :, :1].expand_as(k), v[:1, :, :1].expand_as(v))
    check(torch.nn.Parameter(q, requires_grad=False), k, v)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "q_len, causal", [(1, False), (1, True), (2, False), (7, False), (7, True)]
)
@pytest.mark.parametrize("group", [2, 8])
def test_few_rows_of_grouped_heads(device, q_len, causal, group):
    q, k, v = tensors(3, q_len, 130, 2 * group, 2, 64, dtype=torch.float16, device=device)
    options = dict(causal=causal)
    check(q, k, v, **options)
    # Heads before rows, as torch's own function has them.
    q = q.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    o = ferroflash.flash_attn_func(q, k, v, **options)
    want, _ = reference(q.detach(), k, v, **options)
    close(o.detach(), want, q.dtype)
    # On a GPU o has them so too, where all rows are then those of one head.
    assert o.transpose(1, 2).is_contiguous() == (q_len == 1 or (device == "cuda" and not causal))
    (dq,) = torch.autograd.grad(o, q, torch.ones_like(o))
    wanted = q.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(reference(wanted, k, v, **options)[0].sum(), wanted)
    close(dq, want, q.dtype, 16.0)


@pytest.mark.parametrize("device", DEVICES)
def test_empty(device):
    assert call(*tensors(2, 0, 5, 2, 2, 64, device=device)).shape == (2, 0, 2, 64)
    o, lse, _ = call(*tensors(2, 3, 0, 2, 2, 64, device=device), return_attn_probs=True)
    assert (o == 0.0).all() and (lse == -torch.inf).all()


@gpu
def test_runs_on_the_current_stream():
    q, k, v = tensors(4, 2048, 2048, 8, 8, 128, device="cuda")
    want = call(q, k, v)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late = q * 1.0  # ready only after the pause, on this stream
        o = call(late, k, v)
    assert not side.query(), "the call waited for the device"
    side.synchronize()
    assert torch.equal(o, want)


@gpu
def test_is_captured_in_a_graph():
    q, k, v = tensors(2, 256, 256, 4, 4, 64, device="cuda")
    call(q, k, v, causal=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = call(q, k, v, causal=True)
    q.copy_(q.flip(0))
    graph.replay()
    torch.testing.assert_close(o.double(), reference(q, k, v, causal=True)[0], rtol=0.0, atol=0.05)
    assert torch.equal(o, call(q, k, v, causal=True))


@gpu
def test_leaves_the_current_device_alone():
    last = torch.cuda.device_count() - 1
    q, k, v = tensors(1, 64, 64, 2, 2, 64, device=f"cuda:{last}")
    with torch.cuda.device(0):
        o = call(q, k, v)
        assert torch.cuda.current_device() == 0
    assert o.device == q.device
    torch.testing.assert_close(o.double(), reference(q, k, v)[0], rtol=0.0, atol=0.05)


@gpu
@pytest.mark.parametrize(
    "argument, value", [("window_size", (16, 0)), ("softcap", 5.0), ("alibi_slopes", None)]
)
def test_options_on_a_gpu_are_the_cpu_s(argument, value):
    q, k, v = tensors(1, 64, 80, 2, 2, 64, device="cuda")
    slopes = torch.tensor([0.5, 0.25])
    options = {argument: slopes if value is None else value}
    want = call(*(x.cpu() for x in (q, k, v)), **options)
    options = {argument: slopes.cuda() if value is None else value}
    o = call(q, k, v, **options)
    torch.testing.assert_close(o.cpu().double(), want.double(), rtol=0.0, atol=0.05)
    assert not torch.equal(o, call(q, k, v))


def test_options_on_the_cpu_are_numpy_s():
    q, k, v = tensors(1, 30, 40, 2, 2, 16, dtype=torch.float32)
    slopes = torch.tensor([0.5, 0.25])
    options = dict(causal=True, window_size=(9, 0), softcap=3.0)
    o = call(q, k, v, alibi_slopes=slopes, **options)
    arrays = [x.numpy() for x in (q, k, v)]
    assert (o.numpy() == call(*arrays, alibi_slopes=slopes.numpy(), **options)).all()


def bad():
    q, k, v = tensors(2, 6, 7, 4, 2, 8)
    other = k.to(torch.float16)
    negated = torch.view_as_complex(torch.zeros(2, 6, 4, 8, 2)).conj().imag
    cases = {
        "numpy": (TypeError, "k", (q, k.float().numpy(), v)),
        "none": (TypeError, "v", (q, k, None)),
        "dtype": (TypeError, "q", (q.double(), k, v)),
        "other dtype": (TypeError, "k", (q, other, v)),
        "device": (ValueError, "k", (q, k.to("meta"), v)),
        "meta": (ValueError, "q", (q.to("meta"), k, v)),
        "axes": (ValueError, "q", (q[0], k, v)),
        "scalar": (ValueError, "v", (q, k, v[0, 0, 0, 0])),
        "heads": (ValueError, "q", (q[:, :, :3], k, v)),
        "keys": (ValueError, "v", (q, k, v[:, 1:])),
        "channels": (ValueError, "q", (q.repeat(1, 1, 1, 2)[..., ::2], k, v)),
        "negated": (ValueError, "q", (negated, k.float(), v.float())),
    }
    if torch.cuda.is_available():
        cases["cpu and gpu"] = (ValueError, "v", (q.cuda(), k.cuda(), v))
    return cases


@pytest.mark.parametrize("case", bad())
@pytest.mark.parametrize("gradient", [False, True])
def test_bad_input_names_its_argument(case, gradient):
    kind, argument, arguments = bad()[case]
    if gradient and case not in ("numpy", "none") and arguments[0].is_leaf:
        arguments[0].requires_grad_()
    with pytest.raises(kind, match=rf"^{argument}\b"):
        call(*arguments)


@gpu
def test_kernel_name_is_the_current_device_s():
    torch.cuda.init()
    name = ferroflash.kernel_name(
        direction="forward", head_dim=128, dtype="bf16", causal=True, q_heads=16, kv_heads=16
    )
    q, k, v = tensors(1, 4096, 4096, 16, 16, 128, device="cuda")
    assert not name.startswith("cpu") and name in ferroflash.explain(q, k, v, causal=True)
    assert ferroflash.kernel_name(dtype=torch.bfloat16, causal=True, q_heads=16) == name


def varlen_bad():
    q, k, v = (x[0] for x in tensors(1, 12, 12, 2, 2, 8))
    cu = torch.tensor([0, 4, 12], dtype=torch.int32)
    good = dict(q=q, k=k, v=v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=8, max_seqlen_k=8)
    changes = {
        "integers": (TypeError, "cu_seqlens_q", dict(cu_seqlens_q=cu.long())),
        "list": (TypeError, "cu_seqlens_k", dict(cu_seqlens_k=[0, 4, 12])),
        "device": (ValueError, "cu_seqlens_k", dict(cu_seqlens_k=cu.to("meta"))),
        "count": (ValueError, "cu_seqlens_k", dict(cu_seqlens_k=cu[:2])),
        "axes of offsets": (ValueError, "cu_seqlens_q", dict(cu_seqlens_q=cu[None])),
        "apart": (ValueError, "cu_seqlens_q", dict(cu_seqlens_q=cu.repeat_interleave(2)[::2])),
        "end": (ValueError, "cu_seqlens_q", dict(cu_seqlens_q=cu - 1)),
        "order": (ValueError, "cu_seqlens_k", dict(cu_seqlens_k=cu[[0, 2, 1]])),
        "longest": (ValueError, "q, rows .max_seqlen_q", dict(max_seqlen_q=7)),
        "longest type": (TypeError, "max_seqlen_k", dict(max_seqlen_k=8.0)),
        "longest sign": (ValueError, "max_seqlen_k", dict(max_seqlen_k=-8)),
        "axes": (ValueError, "q", dict(q=q[None])),
        "tokens": (ValueError, "v", dict(v=v[:-1])),
        "pages": (NotImplementedError, "block_table", dict(block_table=cu)),
    }
    return {name: (kind, argument, {**good, **x}) for name, (kind, argument, x) in changes.items()}


@pytest.mark.parametrize("case", varlen_bad())
def test_bad_packed_input_names_its_argument(case):
    kind, argument, arguments = varlen_bad()[case]
    with pytest.raises(kind, match=rf"^{argument}\b"):
        ferroflash.flash_attn_varlen_func(**arguments)


def attention_bad():
    q, k, v = tensors(2, 6, 7, 4, 2, 8)
    cu = torch.tensor([0, 3, 6], dtype=torch.int32)
    good = dict(q=q, k=k, v=v)
    changes = {
        "align": (ValueError, "align", dict(align="left")),
        "bias dtype": (TypeError, "bias", dict(bias=torch.zeros(2, 4, 6, 7, dtype=q.dtype))),
        "bias dims": (ValueError, "bias", dict(bias=torch.zeros(2, 3, 6, 7))),
        "bias axes": (ValueError, "bias", dict(bias=torch.zeros(6, 7))),
        "bias channels": (ValueError, "bias", dict(bias=torch.zeros(2, 4, 7, 6).transpose(2, 3))),
        "mask dtype": (TypeError, "mask", dict(mask=torch.zeros(2, 4, 6, 7))),
        "mask keys": (ValueError, "mask", dict(mask=torch.ones(1, 1, 1, 1, dtype=torch.bool))),
        "sink dims": (ValueError, "sink", dict(sink=torch.zeros(3))),
        "sink dtype": (TypeError, "sink", dict(sink=torch.zeros(4, dtype=q.dtype))),
        "lengths": (ValueError, "key_lengths", dict(key_lengths=cu[:2] + 9)),
        "lengths type": (TypeError, "key_lengths", dict(key_lengths=cu[:2].long())),
        "half packed": (ValueError, "cu_seqlens_k", dict(cu_seqlens_q=cu)),
        "used": (ValueError, "seqused_q", dict(seqused_q=cu[:2])),
        "state": (TypeError, "dropout_state", dict(dropout_p=0.5, dropout_state=3)),
    }
    return {name: (kind, argument, {**good, **x}) for name, (kind, argument, x) in changes.items()}


@pytest.mark.parametrize("case", attention_bad())
def test_bad_options_name_their_argument(case):
    kind, argument, arguments = attention_bad()[case]
    with pytest.raises(kind, match=rf"^{argument}\b"):
        ferroflash.attention(**arguments)


@pytest.mark.parametrize(
    "function, argument, dims",
    [
        (ferroflash.flash_attn_qkvpacked_func, "qkv", (2, 6, 2, 4, 8)),
        (ferroflash.flash_attn_qkvpacked_func, "qkv", (2, 6, 3, 4)),
    ],
)
def test_bad_packed_tensors_name_their_argument(function, argument, dims):
    with pytest.raises(ValueError, match=rf"^{argument}\b"):
        function(torch.zeros(dims))
    with pytest.raises(TypeError, match=rf"^{argument}\b"):
        function([1.0])
