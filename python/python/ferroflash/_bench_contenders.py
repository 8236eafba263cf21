"""Who `ferroflash.bench` can time, of what is importable."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import _native
from ._bench_record import Workload
from ._flash import flash_attn_func


class Contender(NamedTuple):
    """A library's attention: `make(workload)` gives a function of q, k and v."""

    version: str
    make: Callable[[Workload], Callable[..., Any]]
    # Whether heads come before rows.
    heads_first: bool = False
    has_backward: bool = True
    # Whether it is asked for gradients that are equal bit for bit.
    deterministic: bool = False
    # Whether it takes part only where it is named.
    only_by_name: bool = False

    def call(self, workload: Workload) -> Callable[..., torch.Tensor]:
        """The function for a workload, which gives o alone."""
        compute = self.make(workload)

        def attention(*tensors: torch.Tensor) -> torch.Tensor:
            result = compute(*tensors)
            return result[0] if isinstance(result, tuple) else result

        return attention

    def lay_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """A [batch, row, head, channel] tensor in this contender's order, contiguous."""
        return tensor.transpose(1, 2).contiguous() if self.heads_first else tensor

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """The other way round."""
        return tensor.transpose(1, 2) if self.heads_first else tensor


def _ours(w: Workload) -> Callable[..., Any]:
    options = dict(causal=w.causal, deterministic=w.deterministic)
    return lambda q, k, v: flash_attn_func(q, k, v, **options)


def _sdpa(backend: Any) -> Callable[[Workload], Callable[..., Any]]:
    def make(w: Workload) -> Callable[..., Any]:
        options = dict(is_causal=w.causal, enable_gqa=w.heads != w.kv_heads)

        def compute(q: Any, k: Any, v: Any) -> Any:
            if backend is None:
                return F.scaled_dot_product_attention(q, k, v, **options)
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, **options)

        return compute

    return make


def _dense(w: Workload) -> Callable[..., Any]:
    """All scores in f32, by products without TF32."""
    if w.dtype != "f32":
        raise NotImplementedError("is for f32 alone")

    def compute(q: Any, k: Any, v: Any) -> Any:
        k, v = (x.repeat_interleave(w.heads // w.kv_heads, 1) for x in (k, v))
        scores = q @ k.transpose(2, 3) * w.d**-0.5
        if w.causal:
            hidden = torch.ones(w.s, w.s, dtype=torch.bool, device=q.device).triu_(1)
            scores = scores.masked_fill(hidden, float("-inf"))
        return scores.softmax(3) @ v

    assert not torch.backends.cuda.matmul.allow_tf32
    return compute


def _flex(w: Workload) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def visible(b: Any, h: Any, row: Any, key: Any) -> Any:
        return row >= key

    mask = create_block_mask(visible, None, None, w.s, w.s, device="cuda") if w.causal else None
    compiled = torch.compile(flex_attention)
    options = dict(block_mask=mask, enable_gqa=w.heads != w.kv_heads)
    return lambda q, k, v: compiled(q, k, v, **options)


def _function(module: str, name: str) -> Callable[[Workload], Callable[..., Any]]:
    """A library whose function takes `causal`."""
    function = getattr(importlib.import_module(module), name)
    return lambda w: lambda q, k, v: function(q, k, v, causal=w.causal)


def _triton() -> Callable[[Workload], Callable[..., Any]]:
    function = importlib.import_module("flash_attn.flash_attn_triton").flash_attn_func
    # Its autograd function takes arguments by place: bias, causal.
    return lambda w: lambda q, k, v: function(q, k, v, None, w.causal)


def _xformers() -> Callable[[Workload], Callable[..., Any]]:
    from xformers import ops

    def make(w: Workload) -> Callable[..., Any]:
        if w.heads != w.kv_heads:
            raise NotImplementedError("shares no heads")
        mask = ops.LowerTriangularMask() if w.causal else None
        return lambda q, k, v: ops.memory_efficient_attention(q, k, v, attn_bias=mask)

    return make


def on_cpu() -> dict[str, Contender]:
    """This package, and torch's attention on the CPU."""
    version = torch.__version__
    return {
        "ferroflash": Contender(_native.__version__, _ours, deterministic=True),
        "torch": Contender(f"torch {version}", _sdpa(None), heads_first=True),
        "dense": Contender(f"torch {version}", _dense, heads_first=True, only_by_name=True),
    }


def on_cuda() -> dict[str, Contender]:
    """This package, and the others that can be imported."""
    version = f"torch {torch.__version__}"
    cudnn = f"cuDNN {torch.backends.cudnn.version()}, {version}"
    there = {
        "ferroflash": Contender(_native.__version__, _ours, deterministic=True),
        "cudnn": Contender(cudnn, _sdpa(SDPBackend.CUDNN_ATTENTION), heads_first=True),
        "fa2": Contender(version, _sdpa(SDPBackend.FLASH_ATTENTION), heads_first=True),
        "dense": Contender(version, _dense, heads_first=True, only_by_name=True),
    }
    others = [
        # name, distribution, what makes its function, heads first, whether it has a backward pass
        ("fa3", "fa3-fwd", lambda: _function("fa3_fwd_interface", "flash_attn_func"), False, False),
        (
            "fa4",
            "flash-attn-4",
            lambda: _function("flash_attn.cute", "flash_attn_func"),
            False,
            True,
        ),
        ("flex", "torch", lambda: _flex, True, True),
        ("xformers", "xformers", _xformers, False, True),
        ("triton", "flash-attn", _triton, False, True),
    ]
    for name, distribution, make, heads_first, has_backward in others:
        try:
            if name == "flex":
                importlib.import_module("torch.nn.attention.flex_attention")
            made = make()
            number = importlib.metadata.version(distribution)
        except Exception:  # not installed, or not for this torch: whatever its import raises
            continue
        there[name] = Contender(f"{distribution} {number}", made, heads_first, has_backward)
    return there
