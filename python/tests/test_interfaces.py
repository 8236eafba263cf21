"""The ways in: flash-attn's names, torch's contract, transformers' registry."""

import inspect
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import ferroflash
from ferroflash._transformers import attend
from torch_reference import close, reference, tensors

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]
F32 = torch.float32
torch_sdpa = torch.nn.functional.scaled_dot_product_attention

OPTIONS = [
    ("dropout_p", 0.0),
    ("softmax_scale", None),
    ("causal", False),
    ("window_size", (-1, -1)),
    ("softcap", 0.0),
    ("alibi_slopes", None),
    ("deterministic", False),
    ("return_attn_probs", False),
]
# Positional arguments of flash-attn 2.8.3.
SIGNATURES = {
    "flash_attn_func": ["q", "k", "v"],
    "flash_attn_qkvpacked_func": ["qkv"],
    "flash_attn_kvpacked_func": ["q", "kv"],
    "flash_attn_varlen_func": [
        "q",
        "k",
        "v",
        "cu_seqlens_q",
        "cu_seqlens_k",
        "max_seqlen_q",
        "max_seqlen_k",
    ],
    "flash_attn_varlen_qkvpacked_func": ["qkv", "cu_seqlens", "max_seqlen"],
    "flash_attn_varlen_kvpacked_func": (
        ["q", "kv", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    ),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_flash_attn_s(name):
    parameters = inspect.signature(getattr(ferroflash, name)).parameters.values()
    want = [(argument, inspect.Parameter.empty) for argument in SIGNATURES[name]] + OPTIONS
    if name == "flash_attn_varlen_func":
        want.append(("block_table", None))
    assert [(p.name, p.default) for p in parameters] == want


def test_sdpa_has_torch_s_signature():
    parameters = inspect.signature(ferroflash.scaled_dot_product_attention).parameters.values()
    want = ["query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"]
    assert [p.name for p in parameters] == want


def sdpa_cases():
    generator = torch.Generator().manual_seed(0)
    normal = lambda *dims: torch.randn(dims, generator=generator)
    q, k, v = normal(2, 4, 9, 16), normal(2, 4, 14, 16), normal(2, 4, 14, 8)
    mask = torch.rand((2, 1, 9, 14), generator=generator) < 0.6
    mask[1, :, 3] = False  # a row that sees nothing
    return {
        "plain": ((q, k, v), {}),
        "top left": ((q, k, v), dict(is_causal=True)),
        "top left, more rows": ((normal(1, 2, 20, 16), normal(1, 2, 5, 16), normal(1, 2, 5, 16)),
                                dict(is_causal=True)),
        "boolean": ((q, k, v), dict(attn_mask=mask)),
        "boolean of keys": ((q, k, v), dict(attn_mask=mask[0, 0, :1])),
        "boolean of rows": ((q, k, v), dict(attn_mask=mask[0, 0, :, :1].expand(9, 14) | mask[0, 0])),
        "bias": ((q, k, v), dict(attn_mask=normal(9, 14))),
        "bias of heads": ((q, k, v), dict(attn_mask=normal(1, 4, 1, 14), scale=0.4)),
        "bias transposed": ((q, k, v), dict(attn_mask=normal(2, 4, 14, 9).transpose(2, 3))),
        "bias of rows": ((q, k, v), dict(attn_mask=normal(9, 1))),
        "grouped": ((q, k[:, :2], v[:, :2]), dict(enable_gqa=True, is_causal=False)),
        "no batch": ((q[0], k[0], v[0]), dict(attn_mask=mask[0])),
        "no heads": ((q[0, 0], k[0, 0], v[0, 0]), dict(is_causal=True)),
    }  # fmt: skip


@pytest.mark.parametrize("case", sdpa_cases())
def test_sdpa_is_torch_s(case):
    inputs, options = sdpa_cases()[case]
    found = []
    for function, kind in (
        (ferroflash.scaled_dot_product_attention, F32),
        (torch_sdpa, torch.float64),
    ):
        leaves = [x.to(kind).requires_grad_() for x in inputs]
        given = dict(options)
        mask = given.get("attn_mask")
        if mask is not None and mask.dtype is not torch.bool:
            given["attn_mask"] = mask.to(kind).requires_grad_()
            leaves.append(given["attn_mask"])
        o = function(*leaves[:3], **given)
        weights = torch.linspace(-1.0, 1.0, o.numel(), dtype=kind).view(o.shape)
        found.append([o.detach(), *torch.autograd.grad(o, leaves, weights)])
    for had, want in zip(*found):
        close(had, want, F32, 16.0)


def test_sdpa_of_numpy():
    inputs, options = sdpa_cases()["bias of rows"]
    want = torch_sdpa(*inputs, **options)
    arrays = {name: x.numpy() for name, x in options.items()}
    o = ferroflash.scaled_dot_product_attention(*(x.numpy() for x in inputs), **arrays)
    close(torch.from_numpy(o), want, F32)


@pytest.mark.parametrize("device", DEVICES)
def test_sdpa_takes_half_precision_masks(device):
    q, k, v = (x.transpose(1, 2) for x in tensors(2, 8, 8, 2, 2, 64, device=device))
    close(ferroflash.scaled_dot_product_attention(q, k, v, is_causal=True),
          torch_sdpa(q.double(), k.double(), v.double(), is_causal=True), q.dtype)  # fmt: skip
    if device == "cpu":
        mask = torch.randn(8, 8, dtype=q.dtype)
        o = ferroflash.scaled_dot_product_attention(q, k, v, mask)
        close(o, torch_sdpa(*(x.double() for x in (q, k, v)), mask.double()), q.dtype)


Q, K, V = (x.transpose(1, 2) for x in tensors(2, 6, 7, 4, 2, 8, dtype=F32))
BAD_SDPA = {
    "kind": (TypeError, "query", dict(query=[1.0])),
    "axes": (ValueError, "query", dict(query=Q[0, 0, 0])),
    "other axes": (ValueError, "key", dict(key=K[0])),
    "heads": (ValueError, "key", dict(enable_gqa=False)),
    "head_dim": (ValueError, "key", dict(key=K[..., :4])),
    "keys": (ValueError, "value", dict(value=V[:, :, 1:])),
    "both masks": (ValueError, "attn_mask", dict(attn_mask=torch.ones(6, 7), is_causal=True)),
    "mask": (ValueError, "attn_mask", dict(attn_mask=torch.ones(6, 5))),
    "mask kind": (TypeError, "attn_mask", dict(attn_mask=[True])),
    "scale": (ValueError, "scale", dict(scale=float("inf"))),
    "dropout_p": (ValueError, "dropout_p", dict(dropout_p=2.0)),
}


@pytest.mark.parametrize("case", BAD_SDPA)
def test_sdpa_bad_input_names_its_argument(case):
    kind, argument, changes = BAD_SDPA[case]
    arguments = {"query": Q, "key": K, "value": V, "enable_gqa": True, **changes}
    with pytest.raises(kind, match=rf"^{argument}\b"):
        ferroflash.scaled_dot_product_attention(**arguments)


def test_flash_attn_is_not_there_unless_asked_for():
    program = (
        "import ferroflash, sys\n"
        "assert 'flash_attn' not in sys.modules\n"
        "ferroflash.install_as_flash_attn(); ferroflash.install_as_flash_attn()\n"
        "import flash_attn, importlib.util\n"
        "from flash_attn import flash_attn_func, flash_attn_with_kvcache\n"
        "from flash_attn.flash_attn_interface import flash_attn_varlen_func\n"
        "from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input\n"
        "assert flash_attn_func is ferroflash.flash_attn_func\n"
        "assert importlib.util.find_spec('flash_attn') and flash_attn.__version__ >= '2.8'\n"
        "try: flash_attn_with_kvcache(1, 2, 3)\n"
        "except NotImplementedError as refusal: assert 'flash_attn_with_kvcache' in str(refusal)\n"
        "else: raise SystemExit(1)\n"
        "try: import flash_attn.layers.rotary\n"
        "except ModuleNotFoundError: pass\n"
        "else: raise SystemExit(2)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_padding_and_back():
    from ferroflash._flash_attn import bert_padding

    x = torch.randn(3, 5, 2, 4, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 1, 0, 0, 0]])
    tokens, indices, cu_seqlens, longest, used = bert_padding.unpad_input(x, mask)
    assert cu_seqlens.tolist() == [0, 3, 8, 9] and cu_seqlens.dtype is torch.int32
    assert longest == 5 and used.tolist() == [3, 5, 1]
    assert torch.equal(tokens, x[mask.bool()])
    padded = bert_padding.pad_input(tokens, indices, 3, 5)
    assert torch.equal(padded, x * mask[:, :, None, None])
    padded.sum().backward()
    assert torch.equal(x.grad, mask[:, :, None, None].expand_as(x).float())
    unused = torch.tensor([[0, 0, 0, 1, 0], [0] * 5, [1, 0, 1, 0, 0]])
    _, _, cu_seqlens, longest, used = bert_padding.unpad_input(x, mask, unused)
    assert cu_seqlens.tolist() == [0, 4, 9, 12] and longest == 5 and used.tolist() == [3, 5, 1]
    lengths = torch.tensor([[2, 1, 0, 0, 0], [5, 0, 0, 0, 0], [1, 0, 0, 0, 0]])
    tokens, _, cu_seqlens, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert cu_seqlens.tolist() == [0, 2, 3, 8, 9] and longest == 5 and len(tokens) == 9
    o = ferroflash.flash_attn_varlen_func(*[tokens.detach()] * 3, cu_seqlens, cu_seqlens, 5, 5)
    first = x.detach()[:1, :2]
    close(o[:2], reference(first, first, first)[0][0], F32)


@pytest.mark.parametrize("model", ["llama", "gemma2", "gpt_oss"])
def test_transformers(model):
    transformers = pytest.importorskip("transformers", minversion="4.56")
    config = {
        "llama": lambda **x: transformers.LlamaConfig(**x),
        "gemma2": lambda **x: transformers.Gemma2Config(**x, head_dim=16, sliding_window=4),
        "gpt_oss": lambda **x: transformers.GptOssConfig(
            **x, head_dim=16, sliding_window=4, num_local_experts=2, num_experts_per_tok=1
        ),
    }[model](
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
    )
    torch.manual_seed(0)
    ferroflash.register_transformers()
    eager = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    ours = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="ferro_attention"
    )
    ours.load_state_dict(eager.state_dict())
    tokens = torch.randint(0, 50, (2, 11))
    padding = torch.ones_like(tokens)
    padding[0, :3] = 0
    for mask in (None, padding):
        outputs = []
        for each in (eager.eval(), ours.eval()):
            logits = each(tokens, attention_mask=mask).logits
            kept = logits if mask is None else logits[mask.bool()]
            loss = kept.square().mean()
            weight = next(each.parameters())
            outputs.append((kept.detach(), torch.autograd.grad(loss, weight)[0]))
        for had, want in zip(*outputs):
            torch.testing.assert_close(had, want, rtol=1e-3, atol=1e-4)
    greedy = dict(max_new_tokens=6, do_sample=False, pad_token_id=0)
    with torch.no_grad():
        assert torch.equal(ours.generate(tokens, **greedy), eager.generate(tokens, **greedy))
    with pytest.raises(NotImplementedError, match=r"^output_attentions\b"):
        attend(ours, Q, K, V, None, output_attentions=True)
