"""torch.compile: whole graphs, the same results and gradients, shapes that change."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import ferroflash
from ferroflash import _torch
from torch_reference import tensors

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]
F32 = torch.float32


def compiled(call, backend="aot_eager", **options):
    """`call` traced as one graph, by default without generating code for it."""
    torch._dynamo.reset()
    return torch.compile(call, fullgraph=True, backend=backend, **options)


def check(call, *leaves):
    """o and gradients of `call` eagerly and compiled, its result once more differentiated."""
    found = []
    for function in (call, compiled(call)):
        o = function(*leaves)
        found.append([o, *torch.autograd.grad(o, leaves, torch.ones_like(o))])
    for eager, traced in zip(*found):
        torch.testing.assert_close(traced, eager, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_functions(device):
    q, k, v = (x.requires_grad_() for x in tensors(2, 24, 24, 2, 2, 64, device=device))
    check(lambda q, k, v: ferroflash.flash_attn_func(q * 2, k, v, causal=True) + 1, q, k, v)
    qkv = torch.stack([q, k, v], 2).detach().requires_grad_()
    check(lambda qkv: ferroflash.flash_attn_qkvpacked_func(qkv * 1.5, causal=True), qkv)
    check(lambda q, kv: ferroflash.flash_attn_kvpacked_func(q, kv), q, qkv[:, :, 1:])
    check(
        lambda q, k, v: ferroflash.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True
        ),
        q,
        k,
        v,
    )


def test_options():
    q, k, v = (x.requires_grad_() for x in tensors(2, 12, 20, 2, 2, 16, dtype=F32))
    bias = torch.randn(1, 2, 12, 20, requires_grad=True)
    sink = torch.randn(2, requires_grad=True)
    slopes = torch.rand(2)
    mask = torch.rand(2, 1, 12, 20) < 0.8

    def call(q, k, v, bias, sink):
        o, lse = ferroflash.attention(
            q,
            k,
            v,
            bias=bias,
            sink=sink,
            mask=mask,
            alibi_slopes=slopes,
            softcap=3.0,
            window_size=(10, 4),
            return_lse=True,
        )
        return o * lse.transpose(1, 2)[..., None]

    check(call, q, k, v, bias, sink)


def test_variable_lengths():
    cu = torch.tensor([0, 4, 12], dtype=torch.int32)
    q, k, v = (x[0].requires_grad_() for x in tensors(1, 12, 12, 2, 2, 16, dtype=F32))
    check(
        lambda q, k, v: ferroflash.flash_attn_varlen_func(q, k, v, cu, cu, 8, 8, causal=True),
        q,
        k,
        v,
    )


def test_dropout_is_drawn_anew():
    q, k, v = tensors(1, 12, 64, 2, 2, 16, dtype=F32)
    call = compiled(lambda q, k, v: ferroflash.flash_attn_func(q, k, v, 0.5))
    assert not torch.equal(call(q, k, v), call(q, k, v))
    state = dict(dropout_p=0.5, dropout_state=(2**63 + 1, 2))
    call = compiled(lambda q, k, v: ferroflash.attention(q, k, v, **state))
    assert torch.equal(call(q, k, v), ferroflash.attention(q, k, v, **state))


@pytest.mark.parametrize("device", DEVICES)
def test_lengths_that_change(device):
    call = compiled(lambda q, k, v: ferroflash.flash_attn_func(q, k, v, causal=True), dynamic=True)
    for length in (5, 9, 17):
        q, k, v = tensors(2, length, length, 2, 2, 64, device=device)
        torch.testing.assert_close(call(q, k, v), ferroflash.flash_attn_func(q, k, v, causal=True))


@pytest.mark.parametrize("device", DEVICES)
def test_a_module_under_autocast(device):
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = torch.nn.Linear(64, 192)

        def forward(self, x):
            qkv = self.qkv(x).unflatten(-1, (3, 2, 32))
            return ferroflash.flash_attn_qkvpacked_func(qkv, causal=True)

    block = Block().to(device)
    x = torch.randn(2, 10, 64, device=device)
    with torch.autocast(device, torch.bfloat16):
        want = block(x)
        assert want.dtype is torch.bfloat16
        torch.testing.assert_close(compiled(block)(x), want, rtol=2e-2, atol=2e-2)
    compiled(block)(x) if device == "cpu" else None


def test_operators_keep_their_word():
    q, k, v = (x.requires_grad_() for x in tensors(1, 6, 8, 2, 1, 16, dtype=F32))
    from ferroflash import _torch_ops  # noqa: F401  (registers the operators)

    none = (None,) * 11
    numbers = (0, 0, None, False, -1, 0, 0.0, False, 0.0)
    torch.library.opcheck(torch.ops.ferroflash.attention, (q, k, v, *none, *numbers, True))
    q, k, v = (x.detach() for x in (q, k, v))
    o, lse = torch.ops.ferroflash.attention(q, k, v, *none, *numbers, False)
    saved, wanted = (o, lse, o, lse), [True, False, True, False, False]
    operator = torch.ops.ferroflash.attention_backward
    torch.library.opcheck(operator, (*saved, q, k, v, *none, *numbers, wanted))


@pytest.mark.parametrize("wanted", ["q", "kv", "bias", "q sink", "qkv bias sink"])
def test_only_wanted_gradients_are_computed(monkeypatch, wanted):
    computed, backward = [], _torch.backward

    def recorded(tensors, numbers, extras, saved, outputs):
        computed.append(tuple(x is not None for x in outputs))
        backward(tensors, numbers, extras, saved, outputs)

    monkeypatch.setattr(_torch, "backward", recorded)
    q, k, v = tensors(1, 6, 8, 2, 2, 16, dtype=F32)
    sources = dict(q=q, k=k, v=v, bias=torch.randn(1, 2, 6, 8), sink=torch.randn(2))
    words = wanted.replace("qkv", "q k v").replace("kv", "k v").split()
    leaves = [x.requires_grad_() for name, x in sources.items() if name in words]
    found = []
    for call in (ferroflash.attention, compiled(ferroflash.attention)):
        found.append(torch.autograd.grad(call(**sources).sum(), leaves))
    assert computed == [tuple(name in words for name in sources)] * 2
    assert all(torch.equal(*pair) for pair in zip(*found))


@pytest.mark.parametrize("traced", [False, True])
def test_a_gradient_that_cannot_be_had_is_refused_in_the_forward_pass(monkeypatch, traced):
    reason = "window_size: no gradients: no kernel does that"
    read = _torch._read

    def without_backward(*arguments):
        made = SimpleNamespace(no_backward=reason, forward_bytes=0, heads_first=False)
        return (made, *read(*arguments)[1:])

    monkeypatch.setattr(_torch, "_read", without_backward)
    monkeypatch.setattr(_torch._native, "forward", lambda *arguments: None)
    q, k, v = tensors(1, 6, 8, 2, 2, 16, dtype=F32)
    call = lambda q: ferroflash.flash_attn_func(q * 1.0, k, v, window_size=(2, 2))
    call = compiled(call) if traced else call
    call(q)  # no gradient is needed
    with torch.no_grad():
        call(q.requires_grad_())
    with pytest.raises(NotImplementedError, match=r"^window_size\b"):
        call(q.clone())


@gpu
def test_generated_code():
    q, k, v = tensors(1, 40, 40, 2, 2, 64, device="cuda")
    call = lambda q, k, v: ferroflash.flash_attn_func(q * 2, k, v, causal=True) + 1
    torch.testing.assert_close(compiled(call, "inductor")(q, k, v), call(q, k, v))
