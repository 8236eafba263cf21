"""numpy arrays: read where they lie, computed on the CPU."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from . import _native
from ._call import Extras, Options, plan, read_extras, rows_of, seed_and_offset

_ORDER = "<" if sys.byteorder == "little" else ">"
# Element types as the native side numbers them, by numpy's type string.
_DTYPES = {_ORDER + "f2": 1, _ORDER + "f4": 2}
_BFLOAT16 = 0
_KINDS = {
    "f4": (_ORDER + "f4", "float32"),
    "i4": (_ORDER + "i4", "int32"),
    "b1": ("|b1", "bool"),
    "u1": ("|u1", "uint8"),
}
# The CPU has no stream; numpy's strides count bytes.
_PLACE = (0, True)


def attend(
    tensors: tuple, numbers: Options, extras: Extras | None, want_lse: bool
) -> tuple[np.ndarray, np.ndarray | None]:
    """o, and lse if it is wanted."""
    made, (q, k, v), extra = _read(tensors, numbers, extras)
    o = np.empty((*q[1][:-1], v[1][-1]), tensors[0].dtype)
    lse = np.empty(rows_of(q[1]), np.float32) if want_lse else None
    lse_view = None if lse is None else _view(lse)
    _native.forward(made, _PLACE, q, k, v, extra, _view(o), lse_view, 0)
    return o, lse


def gradients(
    d_o: Any,
    tensors: tuple,
    o: Any,
    lse: Any,
    d_lse: Any,
    numbers: Options,
    extras: Extras | None,
) -> tuple[np.ndarray | None, ...]:
    """dq, dk, dv, dbias and dsink; those of options that were not given are None."""
    made, (q, k, v), extra = _read(tensors, numbers, extras)
    dtype = _read_view(tensors[0], "q")[1]
    saved = [_read_view(o, "o"), _read_view(d_o, "d_o")]
    for name, (_, had) in zip(("o", "d_o"), saved):
        if had != dtype:
            raise TypeError(f"{name}: must hold {tensors[0].dtype}, as q does")
    d_rows = None if d_lse is None else _extra_view(d_lse, "d_lse", "f4")
    kept = (saved[0][0], _extra_view(lse, "lse", "f4"), saved[1][0], d_rows)
    outputs: list[Any] = [np.empty(x.shape, tensors[0].dtype) for x in tensors]
    for given in (extras.bias, extras.sink) if extras else (None, None):
        outputs.append(None if given is None else np.empty(given.shape, np.float32))
    views = tuple(None if x is None else _view(x) for x in outputs)
    _native.backward(made, _PLACE, q, k, v, extra, kept, views, 0)
    return tuple(outputs)


def explain(tensors: tuple, numbers: Options, extras: Extras | None) -> str:
    """What `attend` would do, in words."""
    return _read(tensors, numbers, extras)[0].explain()


def split(tensors: tuple) -> tuple:
    """q, k and v, of which some may be packed into one array along its third axis from the end."""
    if len(tensors) == 3:
        return tensors
    packed = tensors[-1]
    return (*tensors[:-1], *(packed[..., i, :, :] for i in range(packed.shape[-3])))


def _read(tensors: tuple, numbers: Options, extras: Extras | None) -> tuple:
    """The plan, and views of q, k, v and of the extras, as the native side takes them."""
    for array, name in zip(tensors, ("q", "k", "v")):
        _check_kind(array, name)
    q, k, v = split(tensors)
    view_q, dtype = _read_view(q, "q")
    view_k, dtype_k = _read_view(k, "k")
    view_v, dtype_v = _read_view(v, "v")
    if dtype_k != dtype or dtype_v != dtype:
        name, other = ("k", k) if dtype_k != dtype else ("v", v)
        raise TypeError(f"{name}: holds {other.dtype}, but q holds {q.dtype}")
    if extras is not None and extras.dropout is not None:
        extras = with_state(extras)
    declared, extra = read_extras(extras, _extra_view)
    made = plan(dtype, -1, q.shape, k.shape, v.shape, numbers, declared)
    return made, (view_q, view_k, view_v), extra


def _read_view(array: Any, name: str) -> tuple[tuple, int]:
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


def _extra_view(array: Any, name: str, kind: str) -> tuple:
    """Address, dimensions and strides of an array of one element type."""
    _check_kind(array, name)
    typestr, words = _KINDS[kind]
    interface = array.__array_interface__
    if interface["typestr"] != typestr:
        raise TypeError(f"{name}: holds {array.dtype}, but it must hold {words}")
    return interface["data"][0], interface["shape"], interface["strides"]


def _check_kind(array: Any, name: str) -> None:
    if not isinstance(array, np.ndarray):
        kind = type(array).__name__
        raise TypeError(f"{name}: is a {kind}, but it must be a numpy.ndarray as q is")
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name}: is a masked array, whose mask attention would not see")


def _view(array: np.ndarray) -> tuple:
    """A contiguous array of our own."""
    return array.__array_interface__["data"][0], array.shape, None


def with_state(extras: Extras, q: Any = None) -> Extras:
    """The extras with the dropout's (seed, offset), drawn from numpy's global state if it has none."""
    probability, state = extras.dropout or (0.0, None)
    if state is None:
        state = np.random.randint(0, 2**63 - 1, 2, np.int64).tolist()
    return extras._replace(dropout=(probability, seed_and_offset(state)))


def read_state(state: Any) -> tuple[int, int]:
    """The (seed, offset) of a dropout's state."""
    return seed_and_offset(state)


def as_mask(kept: bytearray, dims: tuple, q: np.ndarray) -> np.ndarray:
    """An array of bool of q's kind."""
    return np.frombuffer(kept, np.bool_).reshape(dims)


where, from_dlpack = np.where, np.from_dlpack


def detached(array: np.ndarray) -> np.ndarray:
    """The array, which is in no graph."""
    return array


def zeros(dims: tuple, like: np.ndarray) -> np.ndarray:
    """Zeros of the element type of `like`."""
    return np.zeros(dims, like.dtype)


def one_hot(columns: list, first: int, end: int, k: np.ndarray) -> np.ndarray:
    """Values for the rows of k: 1 at channel columns[row] - first, the same for every head."""
    rows = (np.array(columns)[:, None] == np.arange(first, end)).astype(k.dtype)
    return np.broadcast_to(rows[:, None], (*k.shape[:-1], end - first))
