"""Where a dropout's state may lie, what it drops, and masks with a bit a key."""

import ferroflash
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from reference import kept
from torch_reference import tensors

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]
F16, F32 = torch.float16, torch.float32
P = 0.4


def test_masks_are_the_definition():
    q, k, _ = tensors(2, 35, 77, 3, 3, 8, dtype=F32)
    state = (2**40 + 3, 5 * 2**33 + 9)
    mask = ferroflash.dropout_mask(q, k, dropout_p=P, dropout_state=state)
    assert mask.dtype is torch.bool and mask.shape == (2, 3, 35, 77)
    want = kept(P, state, 2, 3, 35, 77)
    assert (mask.numpy() == want).all()
    of_numpy = ferroflash.dropout_mask(q.numpy(), k.numpy(), dropout_p=P, dropout_state=state)
    assert of_numpy.dtype == np.bool_ and (of_numpy == want).all()
    assert ferroflash.dropout_mask(q, k, dropout_p=0.0, dropout_state=state).all()
    assert not ferroflash.dropout_mask(q, k, dropout_p=1.0, dropout_state=state).any()
    assert ferroflash.dropout_mask(q[:0], k[:0], dropout_p=P, dropout_state=state).numel() == 0
    with pytest.raises(ValueError, match=r"^dropout_state\b"):
        ferroflash.dropout_mask(q, k, dropout_p=P, dropout_state=None)


@pytest.mark.parametrize("device", DEVICES)
def test_masks_are_what_calls_drop(device):
    dtype = F16 if device == "cuda" else F32
    q, k, _ = tensors(2, 64, 64, 4, 2, 64, dtype=dtype, device=device)
    eye = torch.eye(64, dtype=dtype, device=device)[None, :, None].expand(2, 64, 2, 64)
    state = dict(dropout_p=P, dropout_state=(7, 2**63 + 1))
    weights = ferroflash.attention(q * 0, k, eye, **state).transpose(1, 2)
    mask = ferroflash.dropout_mask(q, k, **state)
    assert mask.device == q.device
    assert torch.equal(weights > 0, mask)


def test_masks_of_packed_sequences():
    q, k, _ = (x[0] for x in tensors(1, 12, 12, 2, 2, 8, dtype=F32))
    cu = torch.tensor([0, 5, 12], dtype=torch.int32)
    state = dict(dropout_p=P, dropout_state=(1, 2))
    mask = ferroflash.dropout_mask(q, k, **state, cu_seqlens_q=cu, max_seqlen_q=7, max_seqlen_k=8)
    assert mask.shape == (2, 2, 7, 8)
    assert (mask.numpy() == kept(P, (1, 2), 2, 2, 7, 8)).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("packed", [False, True])
def test_bits_are_a_mask(device, packed):
    dtype = F16 if device == "cuda" else F32
    q, k, v = (x.requires_grad_() for x in tensors(2, 37, 45, 2, 1, 32, dtype=dtype, device=device))
    lengths = {}
    if packed:
        q, k, v = (x.detach()[0].requires_grad_() for x in (q, k, v))
        cu = [torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 20, 37], [0, 11, 45])]
        lengths = dict(cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], max_seqlen_q=20, max_seqlen_k=34)
    rows, keys = (20, 34) if packed else (37, 45)
    mask = torch.rand(2, 1, rows, keys) < 0.5
    bits = torch.from_numpy(np.packbits(mask.numpy(), -1, bitorder="little")).to(device)
    results = []
    for given in (dict(mask=mask.to(device)), dict(mask_bits=bits)):
        o = ferroflash.attention(q, k, v, **given, **lengths, deterministic=True)
        results.append((o, *torch.autograd.grad(o.float().square().sum(), (q, k, v))))
    assert all(torch.equal(a, b) for a, b in zip(*results))
    assert not (results[0][0] == 0).all()


def test_bits_that_do_not_fit():
    q, k, v = tensors(2, 5, 9, 2, 2, 8, dtype=F32)
    bits = torch.zeros(2, 2, 5, 2, dtype=torch.uint8)
    assert (ferroflash.attention(q, k, v, mask_bits=bits) == 0).all()
    mask = torch.ones(2, 2, 5, 9, dtype=torch.bool)
    for error, wrong in (
        (ValueError, dict(mask_bits=bits[..., :1])),
        (ValueError, dict(mask_bits=bits, mask=mask)),
        (TypeError, dict(mask_bits=mask)),
    ):
        with pytest.raises(error, match=r"^mask_bits\b"):
            ferroflash.attention(q, k, v, **wrong)


def test_plans_are_kept_whatever_is_drawn():
    from ferroflash import _call

    q, k, v = tensors(1, 6, 7, 1, 1, 24, dtype=F32)
    ferroflash.flash_attn_func(q, k, v, 0.5)
    had = len(_call._PLANS)
    a, b = (ferroflash.flash_attn_func(q, k, v, 0.5) for _ in range(2))
    assert len(_call._PLANS) == had and not torch.equal(a, b)


def _both(q, k, v, d_o, **state):
    o = ferroflash.attention(q, k, v, dropout_p=P, deterministic=True, **state)
    return o, *torch.autograd.grad(o, (q, k, v), d_o)


def _leaves(seed=0):
    torch.manual_seed(seed)
    x = tensors(2, 100, 150, 4, 2, 64, dtype=F16, device="cuda")
    return [y.requires_grad_() for y in x], torch.randn(2, 100, 4, 64, dtype=F16, device="cuda")


@gpu
def test_a_state_on_the_device_is_the_same_by_value():
    (q, k, v), d_o = _leaves()
    for state in ([3, 4], [2**40, -1]):
        want = _both(q, k, v, d_o, dropout_state=[x % 2**64 for x in state])
        for dtype in (torch.int64, torch.uint64):
            given = torch.tensor(state, device="cuda").view(dtype)
            had = _both(q, k, v, d_o, dropout_state=given)
            assert all(torch.equal(a, b) for a, b in zip(want, had))
    mask = ferroflash.dropout_mask(q, k, dropout_p=P, dropout_state=torch.tensor([3, 4]).cuda())
    want = ferroflash.dropout_mask(q, k, dropout_p=P, dropout_state=(3, 4))
    assert mask.is_cuda and torch.equal(mask, want)


@gpu
def test_eager_calls_do_not_wait_for_the_device():
    (q, k, v), d_o = _leaves()
    given = torch.tensor([3, 4], device="cuda")
    _both(q, k, v, d_o)
    torch.cuda.set_sync_debug_mode("error")
    try:
        _both(q, k, v, d_o)
        _both(q, k, v, d_o, dropout_state=given)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@gpu
def test_a_given_state_advances_in_a_graph():
    (q, k, v), d_o = _leaves()
    state = torch.tensor([5, 0], device="cuda")
    _both(q, k, v, d_o, dropout_state=state)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = _both(q, k, v, d_o, dropout_state=state)
        state[1] += 1
    state.copy_(torch.tensor([5, 0]))
    for offset in range(4):
        graph.replay()
        want = _both(q, k, v, d_o, dropout_state=(5, offset))
        assert all(torch.equal(a, b) for a, b in zip(results, want)), offset


@gpu
def test_every_replay_of_a_graph_draws_anew():
    (q, k, v), d_o = _leaves()
    _both(q, k, v, d_o)
    torch.cuda.synchronize()
    eye = torch.eye(64, dtype=F16, device="cuda")[None, :, None].expand(2, 64, 2, 64)
    first = k.detach()[:, :64]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = _both(q, k, v, d_o)
        weights = ferroflash.attention(q.detach() * 0, first, eye, dropout_p=P)
        fixed = ferroflash.attention(q, k, v, dropout_p=P, dropout_state=(3, 4))
    torch.cuda.manual_seed(11)
    seen = []
    for _ in range(4):
        graph.replay()
        assert all(not torch.equal(results[0], had) for had, _ in seen)
        seen.append((results[0].clone(), weights.clone()))
        share = (weights > 0).double().mean().item()
        assert abs(share - (1 - P)) < 0.02
        assert torch.equal(fixed, ferroflash.attention(q, k, v, dropout_p=P, dropout_state=(3, 4)))
        # dV of a replay is of the mask that its o is of: <dV, V> = <dO, O>.
        left = (results[3].double() * v.double()).sum()
        right = (results[0].double() * d_o.double()).sum()
        size = (results[0].double() * d_o.double()).abs().sum()
        assert abs(left - right) < 2e-3 * size, (left, right)
    torch.cuda.manual_seed(11)
    graph.replay()
    assert torch.equal(results[0], seen[0][0]) and torch.equal(weights, seen[0][1])


@gpu
def test_compiled_graphs_draw_on_the_device():
    (q, k, v), _ = _leaves()
    call = torch.compile(
        lambda q, k, v: ferroflash.flash_attn_func(q, k, v, P), mode="reduce-overhead"
    )
    with torch.no_grad():
        results = [call(q, k, v).clone() for _ in range(5)]
    assert all(not torch.equal(a, b) for i, a in enumerate(results) for b in results[:i])


@gpu
def test_states_that_do_not_fit():
    (q, k, v), _ = _leaves()
    call = lambda state, q=q, k=k, v=v: ferroflash.attention(
        q, k, v, dropout_p=P, dropout_state=state
    )
    for error, state in (
        (TypeError, torch.tensor([1.0, 2.0], device="cuda")),
        (TypeError, torch.tensor([1, 2, 3], device="cuda")),
        (TypeError, torch.tensor([1, 2], device="cuda", dtype=torch.int32)),
    ):
        with pytest.raises(error, match=r"^dropout_state\b"):
            call(state)
    with pytest.raises(ValueError, match=r"^dropout_state\b"):
        call(torch.tensor([1, 2], device="cuda"), *(x.detach().float().cpu() for x in (q, k, v)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(NotImplementedError, match="^return_attn_probs"):
        ferroflash.flash_attn_func(q, k, v, P, return_attn_probs=True)
