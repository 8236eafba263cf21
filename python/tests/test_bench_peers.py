"""How the bench calls libraries that are not here: stand-ins with their documented signatures.

A stand-in takes what the library's function takes, in its layout, and nothing else, and computes
with torch; so a wrong name, order, layout or default of a call would be left out of the run or
differ. What the libraries themselves compute is no subject of these tests.
"""

import importlib.metadata
import json
import sys
import types

import pytest

torch = pytest.importorskip("torch")

from ferroflash import _bench_contenders, _bench_torch, bench, errors

TINY = ["--device", "cpu", "--seqs", "24", "--dims", "8", "--heads", "4", "--batch", "2"]
PEERS = ["fa3", "fa4", "triton", "xformers"]


def rows_first(q, k, v, causal, scale):
    """[batch, row, head, channel], the causal mask ending at the last key."""
    assert q.ndim == 4 and all(x.is_contiguous() for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    assert group == 1 or not causal or q.shape[1] == k.shape[1]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=scale, enable_gqa=True
    )
    return o.transpose(1, 2)


# fa3-fwd 0.0.3: o alone, and no gradients.
def fa3(q, k, v, softmax_scale=None, causal=False):
    assert not torch.is_grad_enabled() and not q.requires_grad
    return rows_first(q, k, v, causal, softmax_scale)


# flash-attn-4 4.0.0b36, flash_attn.cute.interface: o and the log-sum-exp, or None for it.
def fa4(
    q,
    k,
    v,
    qv=None,
    gather_kv_indices=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    deterministic=False,
):
    assert qv is None and gather_kv_indices is None
    return rows_first(q, k, v, causal, softmax_scale), None


# flash-attn's flash_attn_triton: an autograd function's `apply`, which takes no names.
def triton(q, k, v, bias=None, causal=False, softmax_scale=None, /):
    assert bias is None and isinstance(causal, bool) and q.shape[2] == k.shape[2]
    return rows_first(q, k, v, causal, softmax_scale)


class LowerTriangularMask:
    """xFormers' causal mask."""


# xFormers, xformers.ops: masks are objects.
def xformers(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None):
    assert attn_bias is None or isinstance(attn_bias, LowerTriangularMask)
    assert query.shape[2] == key.shape[2]
    return rows_first(query, key, value, attn_bias is not None, scale)


@pytest.fixture
def peers(monkeypatch):
    """The bench on a CPU with the contenders of a GPU that need no GPU."""
    modules = {
        "fa3_fwd_interface": dict(flash_attn_func=fa3),
        "flash_attn": {},
        "flash_attn.cute": dict(flash_attn_func=fa4),
        "flash_attn.flash_attn_triton": dict(flash_attn_func=triton),
        "xformers": {},
        "xformers.ops": dict(
            memory_efficient_attention=xformers, LowerTriangularMask=LowerTriangularMask
        ),
    }
    for name, members in modules.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, module)
    version = importlib.metadata.version
    distributions = ("fa3-fwd", "flash-attn-4", "flash-attn", "xformers")
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "9" if name in distributions else version(name)
    )
    there = _bench_contenders.on_cuda()
    assert set(PEERS) < set(there)
    there = {name: there[name] for name in ["ferroflash", *PEERS]}
    monkeypatch.setattr(_bench_torch, "on_cpu", lambda: there)


def measured(arguments, tmp_path):
    path = tmp_path / "run.json"
    assert bench.main([*TINY, *arguments, "--json", str(path)]) == 0
    return json.loads(path.read_text())


def test_each_is_called_as_it_documents(peers, tmp_path):
    run = measured(["--directions", "forward,backward"], tmp_path)
    assert len(run["rows"]) == 4
    for row in run["rows"]:
        wanted = PEERS if row["direction"] == "forward" else PEERS[1:]
        assert sorted(row["ms"]) == sorted(["ferroflash", *wanted]), run["left_out"]
        assert max(row["difference"].values()) < 1e-4
    assert {left["what"].split(":")[0] for left in run["left_out"]} == {"fa3"}
    assert run["peers"]["fa4"] == "flash-attn-4 9"


def test_who_shares_no_heads_is_left_out(peers, tmp_path):
    run = measured(["--directions", "forward", "--kv-heads", "2"], tmp_path)
    assert all(set(row["ms"]) == {"ferroflash", "fa3", "fa4"} for row in run["rows"])
    assert {left["what"].split(":")[0] for left in run["left_out"]} == {"triton", "xformers"}


def test_errors_are_measured_beside_them(peers, tmp_path):
    path = tmp_path / "errors.json"
    assert errors.main([*TINY, "--json", str(path)]) == 0
    run = json.loads(path.read_text())
    assert [len(row["errors"]) for row in run["rows"]] == [5, 4, 5, 4] and not run["left_out"]
    for row in run["rows"]:
        for tensor, reference in row["reference"].items():
            for figures in (of[tensor] for of in row["errors"].values()):
                for most, rms, size in zip(figures["max"], figures["rms"], reference["rms"]):
                    assert 0.0 < rms <= most < 1e-4 and rms < 1e-5 * size
