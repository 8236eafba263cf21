"""Exact attention on NVIDIA GPUs and on the CPU.

`flash_attn_func` has flash-attn 2.8's arguments. PyTorch tensors and numpy arrays go in and the
same kind comes out, without copies: CUDA tensors run on their device and its current stream, all
others on the CPU. Neither numpy nor torch is needed to import this package.

    >>> import ferroflash
    >>> o = ferroflash.flash_attn_func(q, k, v, causal=True)

An option that cannot be done raises, naming the argument; none is ever ignored.
"""

from __future__ import annotations

import sys
from typing import Any, Optional, Sequence

from . import _native

__version__: str = _native.__version__
__all__ = ["doctor", "explain", "flash_attn_func", "is_available", "kernel_name"]

_UNBOUNDED = (-1, -1)
# Modules that speak for a type of array, by that type.
_BACKENDS: dict[type, Any] = {}


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Sequence[int] = _UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Computes softmax(scale * q @ k^T) @ v, exactly.

    Args:
        q: queries, [batch, q_len, q_heads, head_dim]: float16, bfloat16 or float32, any strides
            with contiguous channels (the last axis).
        k: keys, [batch, kv_len, kv_heads, head_dim], like q. kv_heads divides q_heads; query head
            h reads KV head h // (q_heads // kv_heads).
        v: values, [batch, kv_len, kv_heads, value_dim], like q.
        dropout_p: probability of dropping an attention weight; only 0 so far.
        softmax_scale: factor of every score, any finite number; None is 1 / sqrt(head_dim).
        causal: row i sees keys up to i + kv_len - q_len: the last row sees every key. With
            window_size, a key must be inside both.
        window_size: (left, right): row i sees keys i + kv_len - q_len - left to
            i + kv_len - q_len + right; -1 is unbounded.
        softcap: replaces each score s by softcap * tanh(s / softcap); 0 does not.
        alibi_slopes: float32 [q_heads] or [batch, q_heads]; subtracts
            slope * |i + kv_len - q_len - j| from the score of row i and key j.
        deterministic: asks for a bitwise repeatable backward pass. The forward pass always is.
        return_attn_probs: also returns the log-sum-exp of every row.

    Returns:
        o, [batch, q_len, q_heads, value_dim], contiguous, of q's dtype and device. With
        return_attn_probs (o, softmax_lse, S_dmask): softmax_lse is the natural log-sum-exp of each
        row's scores, float32 [batch, q_heads, q_len]; S_dmask, flash-attn's dropout pattern, is
        None. A row that sees no key has o = 0 and softmax_lse = -inf (flash-attn: +inf).

    Raises:
        TypeError: an argument is of the wrong kind or dtype.
        ValueError: an argument does not fit the others, or is out of range.
        NotImplementedError: no kernel does this yet on the tensors' device; also the backward
            pass of a result whose inputs require gradients.
        RuntimeError: there is no usable driver, or it failed.

    float32 runs on the CPU only. On CUDA devices so far: causal or full, without left window,
    softcap and alibi_slopes.
    """
    if dropout_p != 0.0:
        raise _no_dropout(dropout_p)
    left, right = window_size if window_size is _UNBOUNDED else _sides(window_size)
    options = (softmax_scale, bool(causal), left, right, softcap)
    backend = _BACKENDS.get(type(q)) or _backend(q)
    o, lse = backend.forward(q, k, v, options, alibi_slopes, return_attn_probs)
    return (o, lse, None) if return_attn_probs else o


def explain(
    q: Any,
    k: Any,
    v: Any,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Sequence[int] = _UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
) -> str:
    """Says which kernel `flash_attn_func` would run on these tensors, how and why.

    Arguments and exceptions are those of `flash_attn_func`. Nothing is computed; on a CUDA device
    the kernel is loaded, so that a later call finds it there. FLOPs and bytes are modelled.
    """
    left, right = _sides(window_size)
    options = (softmax_scale, bool(causal), left, right, softcap)
    return (_BACKENDS.get(type(q)) or _backend(q)).explain(q, k, v, options, alibi_slopes)


def kernel_name(
    direction: str = "forward",
    head_dim: int = 128,
    dtype: Any = "bf16",
    causal: bool = False,
    q_heads: int = 1,
    kv_heads: Optional[int] = None,
    deterministic: bool = False,
    *,
    value_dim: Optional[int] = None,
    batch: int = 1,
    q_len: int = 4096,
    kv_len: int = 4096,
    device: Optional[int] = None,
) -> str:
    """Returns the name of the kernel that a call of these sizes runs.

    Args:
        direction: "forward"; "backward" raises NotImplementedError until there is one.
        head_dim: channels of a query and of a key.
        dtype: "bf16", "f16", "f32" or a torch or numpy dtype.
        causal: as in `flash_attn_func`.
        q_heads, kv_heads: heads; as many KV heads as query heads if None.
        deterministic: changes nothing in the forward direction.
        value_dim: channels of a value; head_dim if None.
        batch, q_len, kv_len: items, and rows and keys of each.
        device: CUDA ordinal, or -1 for the CPU. None is torch's current device if torch has one
            in use, else the first CUDA device, else the CPU.
    """
    sizes = (
        batch,
        q_len,
        kv_len,
        q_heads,
        q_heads if kv_heads is None else kv_heads,
        head_dim,
        head_dim if value_dim is None else value_dim,
    )
    name = getattr(dtype, "name", None) or str(dtype)
    device = _default_device() if device is None else device
    return _native.kernel_name(direction, name.replace("torch.", ""), bool(causal), sizes, device)


def is_available() -> bool:
    """Whether a driver is usable and sees a CUDA device. The CPU backend always is there.

    Kernels need compute capability 8.0; `doctor` says how many run on each device.
    """
    return _native.is_available()


def doctor() -> str:
    """Describes what is here: kernels, driver, devices and what runs on each, Python and torch.

    Opens the primary context of every CUDA device it can see.
    """
    versions = [f"python     {sys.version.split()[0]}"]
    for name in ("numpy", "torch"):
        module = sys.modules.get(name)
        found = "not imported" if module is None else module.__version__
        versions.append(f"{name:<10} {found}")
    return _native.doctor() + "\n".join(versions)


def _backend(q: Any) -> Any:
    """The module that speaks for q's type; remembered by type."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(q, torch.Tensor):
        from . import _torch as backend
    elif numpy is not None and isinstance(q, numpy.ndarray):
        from . import _numpy as backend
    else:
        kind = type(q).__name__
        raise TypeError(f"q: is a {kind}, but it must be a torch.Tensor or a numpy.ndarray")
    _BACKENDS[type(q)] = backend
    return backend


def _sides(window_size: Any) -> tuple[int, int]:
    """Both sides of a window; the native side checks their values."""
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise ValueError(f"window_size: {window_size!r}, but it must be two integers") from None
    return left, right


def _no_dropout(dropout_p: Any) -> Exception:
    if isinstance(dropout_p, (int, float)) and 0.0 < dropout_p <= 1.0:
        return NotImplementedError(f"dropout_p: {dropout_p}, but only 0 is implemented so far")
    return ValueError(f"dropout_p: {dropout_p!r}, but it must be a number from 0 to 1")


def _default_device() -> int:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return torch.cuda.current_device()
    return 0 if _native.is_available() else -1
