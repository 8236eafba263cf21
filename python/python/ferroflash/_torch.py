"""PyTorch tensors: CUDA tensors on their device's current stream, CPU tensors on the CPU."""

from __future__ import annotations

from typing import Any, Optional

import torch

from . import _native

# Element types as the native side numbers them.
_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


def _current_stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


# The same without making a Stream object, where torch has it.
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _current_stream)


def forward(
    q: Any, k: Any, v: Any, options: tuple, slopes: Any, want_lse: bool
) -> tuple[torch.Tensor, Optional[torch.Tensor]]:
    """o, and lse if it is wanted."""
    if torch.is_grad_enabled() and _wants_gradient(q, k, v, slopes):
        return _Attention.apply(q, k, v, options, slopes, want_lse)
    return _forward(q, k, v, options, slopes, want_lse)


def explain(q: Any, k: Any, v: Any, options: tuple, slopes: Any) -> str:
    """What `forward` would do, in words."""
    views, place, options = _call(q, k, v, options, slopes)
    return _native.explain(*views, place, options)


class _Attention(torch.autograd.Function):
    """Keeps a result in the graph, so that a missing gradient is an error and not a zero."""

    @staticmethod
    def forward(ctx, q, k, v, options, slopes, want_lse):
        return _forward(q, k, v, options, slopes, want_lse)

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError(
            "flash_attn_func: there is no backward pass yet; call it under torch.no_grad(), or on "
            "tensors that do not require gradients"
        )


def _forward(
    q: Any, k: Any, v: Any, options: tuple, slopes: Any, want_lse: bool
) -> tuple[torch.Tensor, Optional[torch.Tensor]]:
    views, place, options = _call(q, k, v, options, slopes)
    batch, rows, heads, _ = q.shape
    o = q.new_empty((batch, rows, heads, v.shape[3]))
    lse = q.new_empty((batch, heads, rows), dtype=torch.float32) if want_lse else None
    # Freed to the caching allocator on return, which gives it away again in stream order only.
    workspace = q.new_empty(64, dtype=torch.uint8) if q.is_cuda else None
    output = (
        o.data_ptr(),
        0 if lse is None else lse.data_ptr(),
        0 if workspace is None else workspace.data_ptr(),
    )
    _native.forward(*views, output, place, options)
    return o, lse


def _call(q: Any, k: Any, v: Any, options: tuple, slopes: Any) -> tuple:
    """Views of q, k and v, the place and the options, as the native side takes them."""
    dtype, where = q.dtype, q.device
    number = _DTYPES.get(dtype)
    if number is None:
        raise TypeError(f"q: holds {dtype}, but it must hold bfloat16, float16 or float32")
    if q.is_cuda:
        device = where.index
        stream = _current_stream(device)
    elif q.is_cpu:
        device, stream = -1, 0
    else:
        raise ValueError(f"q: lies on {where}, but it must lie on a CUDA device or the CPU")
    view_q = _view(q, "q", dtype, where)
    view_k = _view(k, "k", dtype, where)
    view_v = _view(v, "v", dtype, where)
    if not len(view_q[1]) == len(view_k[1]) == len(view_v[1]) == 4:
        raise _not_four_axes(q=q, k=k, v=v)
    if slopes is not None:
        slopes = _view(slopes, "alibi_slopes", torch.float32, where)
    return (view_q, view_k, view_v), (number, device, stream, False), (*options, slopes)


def _view(tensor: Any, name: str, dtype: torch.dtype, where: torch.device) -> tuple:
    """Address, dimensions and strides in elements."""
    try:
        if tensor.dtype is dtype and tensor.device == where and not tensor.is_neg():
            return tensor.data_ptr(), tensor.shape, tensor.stride()
    except AttributeError:
        kind = type(tensor).__name__
        raise TypeError(f"{name}: is a {kind}, but it must be a torch.Tensor as q is") from None
    if tensor.dtype is not dtype:
        raise TypeError(f"{name}: holds {tensor.dtype}, but it must hold {dtype}")
    if tensor.device != where:
        raise ValueError(f"{name}: lies on {tensor.device}, but q lies on {where}")
    raise ValueError(f"{name}: is a lazily negated view; call resolve_neg() on it")


def _wants_gradient(q: Any, k: Any, v: Any, slopes: Any) -> bool:
    try:
        if slopes is not None and slopes.requires_grad:
            raise ValueError("alibi_slopes: requires a gradient, but it has none; detach() it")
        return q.requires_grad or k.requires_grad or v.requires_grad
    except AttributeError:
        return False  # not tensors, which is reported where they are read


def _not_four_axes(**tensors: Any) -> Exception:
    name, had = next((n, t.dim()) for n, t in tensors.items() if t.dim() != 4)
    axes = "[batch, rows, heads, channels]"
    return ValueError(f"{name}: has {had} axes, but it must have 4: {axes}")
