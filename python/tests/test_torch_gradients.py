"""Gradients of torch tensors against float64 autograd, for every function and option."""

import pytest

torch = pytest.importorskip("torch")

import ferroflash
from torch_reference import check_gradients, close, reference, tensors

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]
F32 = torch.float32


def check(q, k, v, inputs=None, **options):
    """Gradients of q, k, v and of what `inputs` has, with `options`."""
    inputs = {"q": q, "k": k, "v": v, **(inputs or {})}
    call = lambda **x: ferroflash.attention(**x, **options, return_lse=True)
    check_gradients(call, lambda **x: reference(**x, **options), inputs, q.dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [32, 64, 80, 128, 256])
def test_head_dimensions(device, dtype, causal, dim):
    q, k, v = tensors(2, 97, 161, 4, 2, dim, device=device, dtype=dtype)
    # No d_lse of a row without keys: its lse is not finite.
    check(q, k, v, causal=causal)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dim", [64, 128])
def test_float32(device, dim):
    check(*tensors(2, 97, 161, 4, 2, dim, device=device, dtype=torch.float32), causal=True)


def test_wide_float32():
    check(*tensors(2, 97, 161, 4, 2, 256, dtype=F32), causal=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("q_len, kv_len", [(1, 1), (1, 130), (130, 5), (70, 64)])
@pytest.mark.parametrize("align", ["top-left", "bottom-right"])
def test_causal_of_unequal_lengths(device, q_len, kv_len, align):
    q, k, v = tensors(2, q_len, kv_len, 2, 1, 64, 32, device=device, dtype=torch.float16)
    o, lse = ferroflash.attention(q, k, v, causal=True, align=align, return_lse=True)
    want_o, want_lse = reference(q, k, v, causal=True, align=align)
    close(o, want_o, q.dtype)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-4)
    grads = []
    for call, kind in ((ferroflash.attention, q.dtype), (reference, torch.float64)):
        leaves = [x.detach().to(kind).requires_grad_() for x in (q, k, v)]
        o = call(*leaves, causal=True, align=align)
        o = o[0] if isinstance(o, tuple) else o
        grads.append(torch.autograd.grad(o, leaves, torch.ones_like(o)))
    for had, want in zip(*grads):
        close(had, want, q.dtype, 16.0)


def option_cases(device):
    generator = torch.Generator().manual_seed(2)
    normal = lambda *dims: torch.randn(dims, generator=generator).to(device)
    mask = torch.rand((2, 1, 33, 50), generator=generator).to(device) < 0.7
    mask[..., 0] = True
    return {
        "scale": dict(softmax_scale=-0.3),
        "window": dict(window_size=(9, 4)),
        "window causal": dict(window_size=(9, -1), causal=True),
        "softcap": dict(softcap=2.0),
        "alibi": dict(alibi_slopes=normal(4).abs()),
        "alibi of items": dict(alibi_slopes=normal(2, 4).abs(), causal=True),
        "mask": dict(mask=mask),
        "mask of rows": dict(mask=mask[:1, :, :1]),
        "bias": dict(inputs=dict(bias=normal(2, 4, 33, 50))),
        "bias of heads": dict(inputs=dict(bias=normal(1, 4, 33, 50)), causal=True),
        "bias of keys": dict(inputs=dict(bias=normal(2, 1, 1, 50))),
        "sink": dict(inputs=dict(sink=normal(4)), causal=True),
        "key lengths": dict(key_lengths=torch.tensor([50, 17], dtype=torch.int32, device=device)),
        "all": dict(
            inputs=dict(bias=normal(1, 1, 33, 50), sink=normal(4)),
            mask=mask,
            alibi_slopes=normal(4).abs(),
            softcap=5.0,
            window_size=(40, 10),
            softmax_scale=0.2,
        ),
    }


@pytest.mark.parametrize("case", option_cases("cpu"))
def test_options(case):
    q, k, v = tensors(2, 33, 50, 4, 2, 16, dtype=F32)
    check(q, k, v, **option_cases("cpu")[case])


@gpu
@pytest.mark.parametrize("case", [name for name in option_cases("cpu") if name != "scale"])
def test_options_on_a_gpu(case):
    q, k, v = tensors(2, 33, 50, 4, 2, 64, dtype=torch.float16, device="cuda")
    check(q, k, v, **option_cases("cuda")[case])


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk", "kv", "qv"])
@pytest.mark.parametrize("device", DEVICES)
def test_any_subset(device, wanted):
    leaves = dict(zip("qkv", tensors(1, 40, 40, 2, 2, 64, device=device)))
    every = {name: x.clone().requires_grad_() for name, x in leaves.items()}
    ferroflash.flash_attn_func(**every, causal=True, deterministic=True).float().sum().backward()
    some = {name: x.clone().requires_grad_(name in wanted) for name, x in leaves.items()}
    ferroflash.flash_attn_func(**some, causal=True, deterministic=True).float().sum().backward()
    for name in "qkv":
        if name in wanted:
            assert torch.equal(some[name].grad, every[name].grad)
        else:
            assert some[name].grad is None


@pytest.mark.parametrize("device", DEVICES)
def test_views_and_upstream_strides(device):
    q, k, v = tensors(2, 48, 48, 4, 4, 64, device=device, dtype=torch.float16)
    want = [x.clone().requires_grad_() for x in (q, k, v)]
    o = reference(*(x.double() for x in want), causal=True)[0]
    d_o = torch.randn(2, 4, 48, 64, generator=torch.Generator().manual_seed(3)).to(q)
    upstreams = {
        "heads first": d_o.transpose(1, 2),
        "expanded": d_o[:, :1, :1].expand(2, 4, 48, 64).transpose(1, 2),
        "channels apart": d_o.transpose(2, 3).contiguous().transpose(2, 3).transpose(1, 2),
        "of a sum": torch.ones((), device=device, dtype=q.dtype).expand(2, 48, 4, 64),
    }
    layouts = {
        "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "packed": lambda x: torch.stack([x, x], 2)[:, :, 1],
        "sliced": lambda x: torch.cat([x, x], 1)[:, 48:],
    }
    for d_o in upstreams.values():
        expected = torch.autograd.grad(o, want, d_o.double(), retain_graph=True)
        for view in layouts.values():
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            got = ferroflash.flash_attn_func(*(view(x) for x in leaves), causal=True)
            for had, needs in zip(torch.autograd.grad(got, leaves, d_o), expected):
                close(had, needs, q.dtype, 16.0)


@pytest.mark.parametrize("device", DEVICES)
def test_packed_tensors_have_packed_gradients(device):
    qkv = torch.stack(tensors(2, 40, 40, 4, 4, 64, device=device), 2)
    q, k, v = (x.detach().clone().requires_grad_() for x in qkv.unbind(2))
    options = dict(causal=True, deterministic=True)
    o = ferroflash.flash_attn_func(q, k, v, **options)
    d_o = torch.randn_like(o)
    want = torch.autograd.grad(o, (q, k, v), d_o)
    qkv.requires_grad_()
    packed = ferroflash.flash_attn_qkvpacked_func(qkv, **options)
    assert torch.equal(packed, o)
    assert torch.equal(torch.autograd.grad(packed, qkv, d_o)[0], torch.stack(want, 2))
    kv = qkv.detach()[:, :, 1:].clone().requires_grad_()
    packed = ferroflash.flash_attn_kvpacked_func(q, kv, **options)
    dq, dkv = torch.autograd.grad(packed, (q, kv), d_o)
    assert torch.equal(dq, want[0]) and torch.equal(dkv, torch.stack(want[1:], 2))


def test_variable_lengths_are_each_sequence_alone():
    lengths_q, lengths_k = [5, 0, 33, 12], [9, 4, 20, 12]
    cu_q, cu_k = (
        torch.tensor([0, *x]).cumsum(0, dtype=torch.int32) for x in (lengths_q, lengths_k)
    )
    q, k, v = (x[0] for x in tensors(1, 50, 50, 4, 2, 16, dtype=F32))
    k, v = k[:45], v[:45]
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    options = dict(causal=True, window_size=(15, 0))
    o, lse, _ = ferroflash.flash_attn_varlen_func(
        *leaves, cu_q, cu_k, 33, 20, **options, return_attn_probs=True
    )
    assert o.shape == (50, 4, 16) and lse.shape == (4, 50)
    d_o = torch.randn_like(o)
    got = torch.autograd.grad(o, leaves, d_o)
    want = [torch.zeros_like(x, dtype=torch.float64) for x in (q, k, v)]
    for item in range(4):
        rows, keys = (slice(cu[item], cu[item + 1]) for cu in (cu_q, cu_k))
        parts = [x.double().requires_grad_() for x in (q[None, rows], k[None, keys], v[None, keys])]
        want_o, want_lse = reference(*parts, **options)
        close(o[rows], want_o[0].detach(), F32)
        torch.testing.assert_close(lse[:, rows].double(), want_lse[0], rtol=1e-4, atol=1e-4)
        for total, part, at in zip(
            want, torch.autograd.grad(want_o[0], parts, d_o[rows].double()), (rows, keys, keys)
        ):
            total[at] = part[0]
    for had, needs in zip(got, want):
        close(had, needs, F32, 16.0)


def test_variable_lengths_packed():
    cu = torch.tensor([0, 7, 7, 30], dtype=torch.int32)
    qkv = torch.stack(tensors(1, 30, 30, 2, 2, 16, dtype=F32), 2)[0].requires_grad_()
    o = ferroflash.flash_attn_varlen_qkvpacked_func(qkv, cu, 23, causal=True)
    want = ferroflash.flash_attn_varlen_func(*qkv.unbind(1), cu, cu, 23, 23, causal=True)
    q, kv = qkv[:, 0], qkv[:, 1:]
    half = ferroflash.flash_attn_varlen_kvpacked_func(q, kv, cu, cu, 23, 23, causal=True)
    assert torch.equal(o, want) and torch.equal(half, want)
    d_o = torch.randn_like(o)
    gradients = [torch.autograd.grad(x, qkv, d_o)[0] for x in (o, half, want)]
    assert torch.equal(gradients[0], gradients[2]) and torch.equal(gradients[1], gradients[2])


@pytest.mark.parametrize("device", ["cpu"])
def test_dropout(device):
    q, k, v = tensors(2, 40, 300, 4, 2, 16, dtype=F32, device=device)
    torch.manual_seed(5)
    o, _, signed = ferroflash.flash_attn_func(q, k, v, 0.25, return_attn_probs=True)
    assert signed.shape == (2, 4, 40, 300)
    keep = (signed >= 0).double()
    assert abs(keep.mean().item() - 0.75) < 0.01
    want_o, _ = reference(q, k, v, keep=keep, dropout_p=0.25)
    close(o, want_o, F32)
    plain = reference(q, k, v)
    close(signed.abs() @ v.transpose(1, 2).repeat_interleave(2, 1), plain[0].transpose(1, 2), F32)
    torch.manual_seed(5)
    assert torch.equal(ferroflash.flash_attn_func(q, k, v, 0.25), o)
    assert not torch.equal(ferroflash.flash_attn_func(q, k, v, 0.25), o)
    call = lambda **x: ferroflash.attention(
        **x, dropout_p=0.25, dropout_state=(3, 4), return_lse=True
    )
    state = dict(dropout_p=0.25, dropout_state=(3, 4))
    ones = ferroflash.attention(q, k, torch.eye(300)[None, :, None].expand(2, -1, 2, -1), **state)
    keep = (ones > 0).transpose(1, 2).double()
    want = lambda **x: reference(**x, keep=keep, dropout_p=0.25)
    check_gradients(call, want, {"q": q, "k": k, "v": v}, F32)
    everything = ferroflash.flash_attn_func(q, k, v, 1.0)
    assert (everything == 0.0).all()


def test_a_dropout_state_may_be_a_tensor_of_the_cpu():
    q, k, v = tensors(1, 8, 40, 2, 2, 16, dtype=F32)
    call = lambda state: ferroflash.attention(q, k, v, dropout_p=0.5, dropout_state=state)
    assert torch.equal(call(torch.tensor([3, -1])), call((3, 2**64 - 1)))
    for state in (torch.tensor([1.0, 2.0]), torch.tensor([1, 2, 3]), torch.tensor(1), "12", 3):
        with pytest.raises(TypeError, match=r"^dropout_state\b"):
            call(state)
    with pytest.raises(ValueError, match=r"^dropout_state\b"):
        call((-1, 2))
    with pytest.raises(ValueError, match=r"^dropout_state\b.*meta"):
        call(torch.tensor([1, 2], device="meta"))


def test_dropout_of_packed_sequences():
    cu = torch.tensor([0, 4, 12], dtype=torch.int32)
    q, k, v = (x[0] for x in tensors(1, 12, 12, 2, 2, 8, dtype=F32))
    o, _, signed = ferroflash.flash_attn_varlen_func(
        q, k, v, cu, cu, 9, 8, dropout_p=0.5, return_attn_probs=True
    )
    assert signed.shape == (2, 2, 9, 8)
    for item, rows in enumerate((slice(0, 4), slice(4, 12))):
        count = rows.stop - rows.start
        weights = signed[item, :, :count, :count].clamp(min=0.0) / 0.5
        close(weights @ v[rows].transpose(0, 1), o[rows].transpose(0, 1).double(), F32)
        assert (signed[item, :, count:] == 0.0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_only_lse_and_nothing(device):
    q, k, v = (x.requires_grad_() for x in tensors(1, 20, 30, 2, 2, 64, device=device))
    _, lse = ferroflash.attention(q, k, v, return_lse=True)
    lse.sum().backward()
    assert (v.grad == 0.0).all() and torch.isfinite(q.grad).all() and (q.grad != 0.0).any()
    with torch.no_grad():
        assert not ferroflash.attention(q, k, v).requires_grad


@pytest.mark.parametrize("device", DEVICES)
def test_the_second_derivative_is_refused(device):
    q, k, v = (x.requires_grad_() for x in tensors(1, 8, 8, 1, 1, 64, device=device))
    o = ferroflash.flash_attn_func(q, k, v)
    (dq,) = torch.autograd.grad(o.float().square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"^attention\b.*second derivative"):
        dq.float().sum().backward()


def test_slopes_have_no_gradient():
    q, k, v = (x.requires_grad_() for x in tensors(1, 8, 8, 1, 1, 64))
    with pytest.raises(ValueError, match=r"^alibi_slopes\b"):
        ferroflash.flash_attn_func(q, k, v, alibi_slopes=torch.ones(1, requires_grad=True))


def test_a_changed_input_is_noticed():
    q, k, v = (x.requires_grad_() for x in tensors(1, 8, 8, 1, 1, 64))
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    o = ferroflash.attention(q, k, v, mask=mask)
    mask[..., 0] = False
    with pytest.raises(RuntimeError, match="inplace"):
        o.sum().backward()


@pytest.mark.parametrize("device", DEVICES)
def test_explicit_backward_is_autograd_s(device):
    q, k, v = tensors(1, 33, 40, 2, 1, 64, device=device)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    options = dict(causal=True, deterministic=True)
    o, lse = ferroflash.attention(*leaves, **options, return_lse=True)
    d_o, d_lse = torch.randn_like(o), torch.randn_like(lse)
    want = torch.autograd.grad([o, lse], leaves, [d_o, d_lse])
    got = ferroflash.attention_backward(
        d_o, q, k, v, o.detach(), lse.detach(), d_lse=d_lse, **options
    )
    assert got.dbias is None and got.dsink is None
    assert all(torch.equal(*pair) for pair in zip(got, want))
