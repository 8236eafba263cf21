"""numpy arrays: read where they lie, computed on the CPU."""

from __future__ import annotations

import sys
from typing import Any, Optional

import numpy as np

from . import _native

_ORDER = "<" if sys.byteorder == "little" else ">"
# Element types as the native side numbers them, by numpy's type string.
_DTYPES = {_ORDER + "f2": 1, _ORDER + "f4": 2}
_BFLOAT16 = 0


def forward(
    q: Any, k: Any, v: Any, options: tuple, slopes: Any, want_lse: bool
) -> tuple[np.ndarray, Optional[np.ndarray]]:
    """o, and lse if it is wanted."""
    views, place, options = _call(q, k, v, options, slopes)
    (batch, rows, heads, _), value_dim = views[0][1], views[2][1][3]
    o = np.empty((batch, rows, heads, value_dim), q.dtype)
    lse = np.empty((batch, heads, rows), np.float32) if want_lse else None
    output = (_address(o), 0 if lse is None else _address(lse), 0)
    _native.forward(*views, output, place, options)
    return o, lse


def explain(q: Any, k: Any, v: Any, options: tuple, slopes: Any) -> str:
    """What `forward` would do, in words."""
    views, place, options = _call(q, k, v, options, slopes)
    return _native.explain(*views, place, options)


def _call(q: Any, k: Any, v: Any, options: tuple, slopes: Any) -> tuple:
    """Views of q, k and v, the place and the options, as the native side takes them."""
    view_q, dtype = _view(q, "q")
    view_k, dtype_k = _view(k, "k")
    view_v, dtype_v = _view(v, "v")
    if dtype_k != dtype or dtype_v != dtype:
        name, other = ("k", k) if dtype_k != dtype else ("v", v)
        raise TypeError(f"{name}: holds {other.dtype}, but q holds {q.dtype}")
    for name, view in (("q", view_q), ("k", view_k), ("v", view_v)):
        if len(view[1]) != 4:
            axes = "[batch, rows, heads, channels]"
            raise ValueError(f"{name}: has {len(view[1])} axes, but it must have 4: {axes}")
    if slopes is not None:
        slopes, dtype_slopes = _view(slopes, "alibi_slopes")
        if dtype_slopes != 2:
            raise TypeError("alibi_slopes: must hold float32")
    return (view_q, view_k, view_v), (dtype, -1, 0, True), (*options, slopes)


def _view(array: Any, name: str) -> tuple[tuple, int]:
    """Address, dimensions and strides in bytes, and the element type's number."""
    if type(array) is not np.ndarray:
        _check_kind(array, name)
    interface = array.__array_interface__
    dtype = _DTYPES.get(interface["typestr"])
    if dtype is None:
        # ml_dtypes' type, which numpy itself takes for opaque bytes.
        if array.dtype.name != "bfloat16":
            needs = "float16, float32 or ml_dtypes.bfloat16, in the machine's byte order"
            raise TypeError(f"{name}: holds {array.dtype!r}, but it must hold {needs}")
        dtype = _BFLOAT16
    return (interface["data"][0], interface["shape"], interface["strides"]), dtype


def _check_kind(array: Any, name: str) -> None:
    if not isinstance(array, np.ndarray):
        kind = type(array).__name__
        raise TypeError(f"{name}: is a {kind}, but it must be a numpy.ndarray as q is")
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name}: is a masked array, whose mask attention would not see")


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]
