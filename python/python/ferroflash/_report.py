"""What would run here, and what is here."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from . import _native
from ._call import UNBOUNDED, Extras, backend, flag, length, options


def explain(
    q: Any,
    k: Any,
    v: Any,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
) -> str:
    """Says which kernels `flash_attn_func` would run on these tensors, how and why.

    Arguments and exceptions are those of `flash_attn_func`. Nothing is computed; on a CUDA device
    the kernels are loaded, so that a later call finds them there. FLOPs and bytes are modelled.
    """
    numbers = options(softmax_scale, causal, window_size, softcap, deterministic)
    return backend(q).explain((q, k, v), numbers, Extras(alibi_slopes=alibi_slopes))


def kernel_name(
    direction: str = "forward",
    head_dim: int = 128,
    dtype: Any = "bf16",
    causal: bool = False,
    q_heads: int = 1,
    kv_heads: int | None = None,
    deterministic: bool = False,
    *,
    value_dim: int | None = None,
    batch: int = 1,
    q_len: int = 4096,
    kv_len: int = 4096,
    device: int | None = None,
) -> str:
    """Returns the name of the kernel that a call of these sizes runs.

    Args:
        direction: "forward" or "backward".
        head_dim: channels of a query and of a key.
        dtype: "bf16", "f16", "f32" or a torch or numpy dtype.
        causal: as in `flash_attn_func`.
        q_heads, kv_heads: heads; as many KV heads as query heads if None.
        deterministic: as in `flash_attn_func`; changes nothing in the forward direction.
        value_dim: channels of a value; head_dim if None.
        batch, q_len, kv_len: items, and rows and keys of each.
        device: CUDA ordinal, or -1 for the CPU. None is torch's current device if torch has one
            in use, else the first CUDA device, else the CPU.
    """
    if not isinstance(direction, str):
        raise TypeError(f"direction: is a {type(direction).__name__}, but it must be a str")
    named = {
        "batch": batch,
        "q_len": q_len,
        "kv_len": kv_len,
        "q_heads": q_heads,
        "kv_heads": q_heads if kv_heads is None else kv_heads,
        "head_dim": head_dim,
        "value_dim": head_dim if value_dim is None else value_dim,
    }
    sizes: Any = tuple(length(size, name) for name, size in named.items())
    options = (flag(causal, "causal"), flag(deterministic, "deterministic"))
    ordinal = _default_device() if device is None else device
    if ordinal != -1 and length(ordinal, "device") >= 2**31:
        raise ValueError(f"device: {ordinal}, but it must be a CUDA ordinal, or -1 for the CPU")
    return _native.kernel_name(direction, _dtype_name(dtype), options, sizes, ordinal)


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
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            found = "not installed"
        else:
            found += "" if name in sys.modules else ", not imported"
        versions.append(f"{name:<10} {found}")
    return _native.doctor() + "\n".join(versions)


def _dtype_name(dtype: Any) -> str:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(dtype, torch.dtype):
        return str(dtype).rpartition(".")[2]
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", None)
    if not isinstance(name, str):
        raise TypeError(f"dtype: is a {type(dtype).__name__}, but it must be a dtype or its name")
    return name


def _default_device() -> int:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return torch.cuda.current_device()
    return 0 if _native.is_available() else -1
