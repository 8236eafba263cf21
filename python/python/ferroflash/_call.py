"""What every function shares: options, plans, and the module that speaks for a kind of array."""

from __future__ import annotations

import operator
import sys
from typing import Any, Callable, NamedTuple, Optional

from . import _native

UNBOUNDED = (-1, -1)
# Modules that speak for a type of array, by that type.
_BACKENDS: dict[type, Any] = {}
_PLANS: dict[tuple, _native.Plan] = {}
# Plans kept; a program whose shapes never repeat forgets them all now and then.
_MOST_PLANS = 1024

# (softmax_scale, top_left, left, right, softcap, deterministic)
Options = tuple[Optional[float], bool, int, int, float, bool]


class Extras(NamedTuple):
    """What a call may have besides q, k, v and numbers. The first eleven are arrays."""

    alibi_slopes: Any = None
    bias: Any = None
    mask: Any = None
    sink: Any = None
    key_lengths: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    seqused_q: Any = None
    seqused_k: Any = None
    # The mask with a bit a key.
    mask_bits: Any = None
    # Seed and offset of the dropout, where they lie on q's CUDA device.
    dropout_state: Any = None
    # (longest q, longest k) of packed items.
    longest: tuple[int, int] = (0, 0)
    # (probability, state): state is (seed, offset), or None to draw one or where it is on the device.
    dropout: tuple[float, Any] | None = None


ARRAYS = 11
# Element types of the arrays: float32, bool, int32, uint8, int64.
_KINDS = ("f4", "f4", "b1", "f4", "i4", "i4", "i4", "i4", "i4", "u1", "i8")


def options(
    softmax_scale: Any,
    causal: Any,
    window_size: Any,
    softcap: Any,
    deterministic: Any,
    top_left: bool = False,
) -> Options:
    """The numbers of a call in the form that plans are found by."""
    if softmax_scale is not None and type(softmax_scale) is not float:
        softmax_scale = _number(softmax_scale, "softmax_scale")
    if type(softcap) is not float:
        softcap = _number(softcap, "softcap")
    left, right = window_size if window_size is UNBOUNDED else _sides(window_size)
    # Causal and a window: a key must be inside both.
    if flag(causal, "causal"):
        right = 0 if right == -1 else min(right, 0)
    return softmax_scale, top_left, left, right, softcap, flag(deterministic, "deterministic")


def seed_and_offset(state: Any) -> tuple[int, int]:
    """A dropout's state as two integers."""
    try:
        seed, offset = (_integer(x) for x in state)
    except (TypeError, ValueError):
        kind = type(state).__name__
        needs = "it must be two integers, (seed, offset)"
        raise TypeError(f"dropout_state: is a {kind}, but {needs}") from None
    if not (0 <= seed < 2**64 and 0 <= offset < 2**64):
        needs = "it must be two integers from 0 to 2^64 - 1"
        raise ValueError(f"dropout_state: {(seed, offset)}, but {needs}")
    return seed, offset


def dropout(probability: Any, state: Any = None) -> tuple[float, Any] | None:
    """The dropout of a call, or None where nothing is dropped."""
    if type(probability) is not float:
        probability = _number(probability, "dropout_p")
    if not 0.0 <= probability <= 1.0:
        raise ValueError(f"dropout_p: {probability!r}, but it must be a number from 0 to 1")
    return (probability, state) if probability else None


def flag(value: Any, name: str) -> bool:
    """An option that is set or not. What else could be meant as one is an argument out of place."""
    if type(value) is bool:
        return value
    kind = type(value).__name__
    if kind in ("bool", "bool_") or (type(value) is int and value in (0, 1)):
        return bool(value)
    raise TypeError(f"{name}: is a {kind}, but it must be True or False")


def length(value: Any, name: str) -> int:
    """A length that the caller states."""
    try:
        value = _integer(value)
    except TypeError:
        kind = type(value).__name__
        raise TypeError(f"{name}: is a {kind}, but it must be an integer") from None
    if not 0 <= value < 2**63:
        raise ValueError(f"{name}: {value}, but it must be from 0 to 2^63 - 1")
    return value


def rows_of(q: Any) -> tuple:
    """[batch, head, row] of q [batch, row, head, channel]; [head, token] where items are packed."""
    return (q[1], q[0]) if len(q) == 3 else (q[0], q[2], q[1])


def backend(q: Any) -> Any:
    """The module that speaks for arrays such as `q`."""
    return _BACKENDS.get(type(q)) or _find_backend(q)


def plan(
    dtype: int, device: int, q: tuple, k: tuple, v: tuple, numbers: Options, declared: Any
) -> _native.Plan:
    """The plan of a call, made at its first use; arguments as `_native.Plan` has them."""
    key = (dtype, device, q, k, v, numbers, declared)
    found = _PLANS.get(key)
    if found is None:
        found = _native.Plan(*key)
        if len(_PLANS) >= _MOST_PLANS:
            _PLANS.clear()
        _PLANS[key] = found
    return found


def read_extras(
    extras: Extras | None, view: Callable[[Any, str, str], tuple]
) -> tuple[tuple | None, tuple | None]:
    """What a plan must know of `extras`, and their arrays as the native side takes them.

    `view(array, name, kind)` reads an array of that kind; a dropout's state is drawn by now.
    """
    if extras is None:
        return None, None
    views = tuple(
        None if array is None else view(array, name, kind)
        for array, name, kind in zip(extras[:ARRAYS], Extras._fields, _KINDS)
    )
    slopes, bias, mask, sink, key_lengths, cu_q = views[:6]
    bits, state = views[9:]
    packed = None
    if cu_q is not None:
        items = cu_q[1]
        if len(items) != 1 or items[0] == 0:
            raise ValueError("cu_seqlens_q: must have one axis of batch + 1 offsets")
        packed = (items[0] - 1, *extras.longest)
    declared = (
        slopes is not None,
        None if bias is None else bias[1],
        None if mask is None else mask[1],
        sink is not None,
        key_lengths is not None,
        packed,
        None if extras.dropout is None else extras.dropout[0],
        None if bits is None else bits[1],
    )
    if state is None and extras.dropout is not None:
        views = (*views[:-1], extras.dropout[1])
    return declared, views


def _find_backend(q: Any) -> Any:
    found: Any
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(q, torch.Tensor):
        from . import _torch

        found = _torch
    elif numpy is not None and isinstance(q, (numpy.ndarray, numpy.generic)):
        from . import _numpy

        found = _numpy
    elif hasattr(q, "__dlpack__") and hasattr(q, "__dlpack_device__"):
        from . import _dlpack

        found = _dlpack
    else:
        kind = type(q).__name__
        needs = "a torch.Tensor, a numpy.ndarray or an array that has __dlpack__"
        raise TypeError(f"q: is a {kind}, but it must be {needs}")
    _BACKENDS[type(q)] = found
    return found


def _number(value: Any, name: str) -> float:
    # float() reads words too, and True is more likely to be an argument out of place than a 1.
    if not isinstance(value, (str, bytes, bytearray, bool)):
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"{name}: {value!r} is beyond what a float holds") from None
        except (TypeError, ValueError, RuntimeError):
            pass
    kind = type(value).__name__
    raise TypeError(f"{name}: is a {kind}, but it must be a number")


def _integer(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def _sides(window_size: Any) -> tuple[int, int]:
    """Both sides of a window; the native side checks their values."""
    if not isinstance(window_size, (tuple, list)):
        kind = type(window_size).__name__
        raise TypeError(f"window_size: is a {kind}, but it must be two integers, (left, right)")
    if len(window_size) != 2:
        had = len(window_size)
        raise ValueError(f"window_size: has {had} sides, but it must have two, (left, right)")
    left, right = window_size
    try:
        left, right = _integer(left), _integer(right)
    except TypeError:
        kinds = f"{type(left).__name__} and {type(right).__name__}"
        raise TypeError(f"window_size: is of {kinds}, but it must be two integers") from None
    if not -(2**63) <= min(left, right) <= max(left, right) < 2**63:
        raise ValueError(f"window_size: {(left, right)}, but each must be under 2^63")
    return left, right
