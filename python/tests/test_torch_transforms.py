"""torch.func's transforms, forward-mode differentiation, dispatch modes and tracers.

Each of them gets the same numbers as plain calls, or a refusal by name; never silently nothing.
"""

import pytest

torch = pytest.importorskip("torch")

import ferroflash
from torch.autograd import forward_ad
from torch_reference import tensors

F32 = torch.float32
Q, K, V = tensors(2, 9, 12, 4, 2, 16, dtype=F32)
NO_FORWARD_MODE = r"^(q|qkv|query|kv|attention)\b.*forward-mode"


def by_qkv(q):
    return ferroflash.flash_attn_qkvpacked_func(torch.stack([q, q, q + 1], 2), causal=True)


def shim(q):
    from ferroflash._flash_attn import flash_attn_func

    return flash_attn_func(q, K, V, causal=True)


ROUTES = {
    "function": lambda q: ferroflash.flash_attn_func(q, K, V, causal=True),
    "packed": by_qkv,
    "attention": lambda q: ferroflash.attention(q, K, V, softcap=2.0, return_lse=True)[0],
    "only lse": lambda q: ferroflash.attention(q, K, V, window_size=(3, 3), return_lse=True)[1],
    "sdpa": lambda q: ferroflash.scaled_dot_product_attention(
        q.transpose(1, 2), K.transpose(1, 2), V.transpose(1, 2), enable_gqa=True
    ),
    "shim": shim,
}
each_route = pytest.mark.parametrize("call", ROUTES.values(), ids=ROUTES)


def compiled(call):
    torch._dynamo.reset()
    return torch.compile(call, fullgraph=True, backend="aot_eager")


@each_route
@pytest.mark.parametrize("gradient", [False, True])
def test_dual_tensors_are_refused(call, gradient):
    q = Q.clone().requires_grad_(gradient)
    with forward_ad.dual_level():
        with pytest.raises(NotImplementedError, match=NO_FORWARD_MODE):
            call(forward_ad.make_dual(q, torch.ones_like(q)))
        call(q)  # no tangent is lost


@each_route
@pytest.mark.parametrize(
    "transform",
    [
        lambda call: torch.func.jvp(call, (Q,), (Q,)),
        lambda call: torch.func.jacfwd(call)(Q),
        lambda call: torch.func.linearize(call, Q),
        lambda call: torch.func.hessian(lambda q: call(q).sum())(Q),
        lambda call: torch.func.vmap(lambda t: torch.func.jvp(call, (Q,), (t,)))(Q[None]),
        lambda call: torch.autograd.functional.jacobian(
            call, Q, strategy="forward-mode", vectorize=True
        ),
    ],
    ids=["jvp", "jacfwd", "linearize", "hessian", "vmap of jvp", "jacobian"],
)
def test_forward_mode_is_refused(call, transform):
    with pytest.raises(NotImplementedError, match=NO_FORWARD_MODE):
        transform(call)


@pytest.mark.parametrize("name", ["bias", "sink", "alibi_slopes"])
def test_tangents_of_options_are_refused(name):
    option = torch.rand(1, 4, 9, 12) if name == "bias" else torch.rand(4)
    call = lambda x: ferroflash.attention(Q, K, V, **{name: x})
    with pytest.raises(NotImplementedError, match=rf"^{name}\b.*forward-mode"):
        torch.func.jvp(call, (option,), (option,))


def test_tangents_of_an_explicit_backward_are_refused():
    o, lse = ferroflash.attention(Q, K, V, return_lse=True)
    call = lambda x: ferroflash.attention_backward(x, Q, K, V, o, lse).dq
    with pytest.raises(NotImplementedError, match=r"^d_o\b.*forward-mode"):
        torch.func.jvp(call, (o,), (o,))


def test_forward_mode_is_refused_in_compiled_graphs():
    call = compiled(lambda q: torch.func.jvp(ROUTES["function"], (q,), (q,))[1])
    with pytest.raises(Exception, match="carries a forward-mode tangent"):
        call(Q)
    torch._dynamo.reset()
    broken = torch.compile(
        lambda q: torch.func.jvp(ROUTES["function"], (q,), (q,))[1], backend="aot_eager"
    )
    with pytest.raises(NotImplementedError, match=NO_FORWARD_MODE):
        broken(Q)
    # torch's own refusals of tangents and transforms from outside; 2.11's is an assertion of its.
    refusal = "tangent|dual|is_inference"
    with forward_ad.dual_level(), pytest.raises(Exception, match=refusal):
        compiled(ROUTES["function"])(forward_ad.make_dual(Q, Q))
    with pytest.raises(Exception, match="func"):
        torch.func.jvp(compiled(ROUTES["function"]), (Q,), (Q,))


def test_torch_func_in_compiled_graphs_is_refused():
    call = lambda q: torch.func.grad(lambda q: ROUTES["function"](q).sum())(q)
    # torch 2.11 leaves the reason out.
    with pytest.raises(Exception, match="torch.func inside torch.compile|GradTrackingTensor"):
        compiled(call)(Q)


def derivative(call, *inputs):
    leaves = [x.clone().requires_grad_() for x in inputs]
    weights = torch.linspace(-1.0, 1.0, call(*leaves).numel()).view(call(*leaves).shape)
    return weights, torch.autograd.grad(call(*leaves), leaves, weights)


@each_route
def test_reverse_transforms_are_autograd_s(call):
    weights, (want,) = derivative(call, Q)
    o, pull = torch.func.vjp(call, Q)
    assert torch.equal(o, call(Q))
    assert torch.equal(pull(weights)[0], want)
    assert torch.equal(torch.func.grad(lambda q: (call(q) * weights).sum())(Q), want)
    small = lambda q: call(q).flatten()[:6]
    rows = torch.func.jacrev(small)(Q)
    for row, had in enumerate(rows):
        leaf = Q.clone().requires_grad_()
        assert torch.equal(had, torch.autograd.grad(small(leaf)[row], leaf)[0])


def test_reverse_transforms_of_every_input():
    bias, sink = torch.randn(1, 4, 9, 12), torch.randn(4)
    state = dict(dropout_p=0.3, dropout_state=(5, 6), mask=torch.rand(2, 1, 9, 12) < 0.8)
    call = lambda q, k, v, bias, sink: ferroflash.attention(q, k, v, bias=bias, sink=sink, **state)
    weights, want = derivative(call, Q, K, V, bias, sink)
    _, pull = torch.func.vjp(call, Q, K, V, bias, sink)
    assert all(torch.equal(*pair) for pair in zip(pull(weights), want))


@each_route
def test_vmap_is_one_call_after_another(call):
    many = torch.stack([Q, Q.flip(0), Q * 2], 1)
    got = torch.func.vmap(call, in_dims=1, out_dims=1)(many)
    assert torch.equal(got, torch.stack([call(x) for x in many.unbind(1)], 1))
    nested = torch.func.vmap(torch.func.vmap(call))(many.swapaxes(0, 1)[None])
    assert torch.equal(nested[0], got.swapaxes(0, 1))


def test_gradients_of_each_sample():
    loss = lambda q, k: ferroflash.flash_attn_func(q[None], k[None], V[:1]).square().sum()
    got = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)))(Q, K)
    for item in range(2):
        leaves = [x[item].clone().requires_grad_() for x in (Q, K)]
        want = torch.autograd.grad(loss(*leaves), leaves)
        assert all(torch.equal(had[item], needs) for had, needs in zip(got, want))


@each_route
def test_upstream_gradients_in_batches(call):
    leaf = Q.clone().requires_grad_()
    o = call(leaf)
    upstream = torch.stack([torch.ones_like(o), torch.rand_like(o)])
    got = torch.autograd.grad(o, leaf, upstream, is_grads_batched=True, retain_graph=True)[0]
    for had, d_o in zip(got, upstream):
        assert torch.equal(had, torch.autograd.grad(o, leaf, d_o, retain_graph=True)[0])


@each_route
def test_second_derivatives_are_refused(call):
    leaf = Q.clone().requires_grad_()
    (first,) = torch.autograd.grad(call(leaf).square().sum(), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"^attention\b.*second derivative"):
        first.sum().backward()
    once = torch.func.grad(lambda q: call(q).square().sum())
    with pytest.raises(NotImplementedError, match=r"^attention\b.*second derivative"):
        torch.func.grad(lambda q: once(q).sum())(Q)
    with pytest.raises(NotImplementedError, match=r"^attention\b.*second derivative"):
        torch.autograd.functional.hessian(lambda q: call(q).square().sum(), Q)
    made = compiled(call)(leaf)
    with pytest.raises((NotImplementedError, RuntimeError), match="double backward|second"):
        (first,) = torch.autograd.grad(made.square().sum(), leaf, create_graph=True)
        first.sum().backward()


def test_second_derivatives_of_other_ways_are_refused():
    leaf = Q.clone().requires_grad_()
    o, lse = ferroflash.attention(Q, K, V, return_lse=True)
    dq = ferroflash.attention_backward(o, leaf, K, V, o, lse).dq
    with pytest.raises(NotImplementedError, match=r"^attention\b.*second derivative"):
        dq.sum().backward()
    with torch.no_grad():
        assert not ferroflash.attention_backward(o, leaf, K, V, o, lse).dq.requires_grad
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False):
        made = ROUTES["function"](leaf)
    (first,) = torch.autograd.grad(made.square().sum(), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"^attention\b.*second derivative"):
        first.sum().backward()


@each_route
def test_tracers_record_the_call(call):
    from torch.fx.experimental.proxy_tensor import make_fx

    other = Q.flip(0)
    traced = [make_fx(call)(Q)]
    traced.append(make_fx(call, tracing_mode="fake", _allow_non_fake_inputs=True)(Q))
    traced.append(make_fx(torch.func.functionalize(call))(Q))
    traced.append(torch.jit.trace(call, (Q,), check_trace=False))
    for graph in traced:
        assert torch.equal(graph(other), call(other))

    class Module(torch.nn.Module):
        def forward(self, q):
            return call(q)

    for strict in (False, True):
        program = torch.export.export(Module(), (Q,), strict=strict)
        assert torch.equal(program.module()(other), call(other))


@each_route
def test_fake_tensors_have_the_right_shapes(call):
    from torch._subclasses.fake_tensor import FakeTensorMode

    want = call(Q)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        inside = call(mode.from_tensor(Q))
    assert inside.shape == want.shape and inside.dtype == want.dtype
    assert inside.stride() == want.stride()


def test_an_explicit_backward_is_traced_too():
    from torch.fx.experimental.proxy_tensor import make_fx

    o, lse = ferroflash.attention(Q, K, V, return_lse=True)
    call = lambda d_o: ferroflash.attention_backward(d_o, Q, K, V, o, lse)[:3]
    other = torch.rand_like(o)
    for traced in (make_fx(call)(o.clone()), compiled(call)):
        assert all(torch.equal(*pair) for pair in zip(traced(other), call(other)))
    got = torch.func.vmap(call)(torch.stack([o, other]))
    assert all(torch.equal(had[1], needs) for had, needs in zip(got, call(other)))
