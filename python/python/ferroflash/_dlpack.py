"""Arrays of other libraries, such as JAX and CuPy: borrowed through DLPack, handed back likewise.

Host memory is read as numpy arrays, CUDA memory and bfloat16 as torch tensors: one of the two is
the way in, and neither copies. Results are allocated there and become arrays of the caller's
library, which takes them over without a copy wherever it can.

A borrowed array is given back by its deleter, which knows of no stream: its owner may then use the
memory at once. So CUDA arrays are kept until the kernels that read them are done.
"""

from __future__ import annotations

import atexit
import importlib
import sys
from collections import deque
from contextlib import nullcontext
from typing import Any, Callable

from ._call import ARRAYS, Extras, Options, seed_and_offset

# Device types of the DLPack standard.
_CPU, _CUDA = 1, 2
# Arrays that kernels may still read, each with an event behind those kernels.
_KEPT: deque[tuple[Any, Any]] = deque()


def attend(
    tensors: tuple, numbers: Options, extras: Extras | None, want_lse: bool
) -> tuple[Any, Any]:
    """o, and lse if it is wanted."""
    home = _home(tensors[0])
    with _current(tensors[0]):
        module, borrowed, extras = _borrow_call(tensors, extras)
        o, lse = module.attend(borrowed, numbers, extras, want_lse)
        _keep((borrowed, extras), borrowed[0])
        return home(o), None if lse is None or not want_lse else home(lse)


def gradients(
    d_o: Any,
    tensors: tuple,
    o: Any,
    lse: Any,
    d_lse: Any,
    numbers: Options,
    extras: Extras | None,
) -> tuple[Any, ...]:
    """dq, dk, dv, dbias and dsink; those of options that were not given are None."""
    home = _home(tensors[0])
    with _current(tensors[0]):
        module, borrowed, extras = _borrow_call(tensors, extras)
        d_o, o, lse, d_lse = saved = [
            None if x is None else _borrow(x, name, module)
            for x, name in ((d_o, "d_o"), (o, "o"), (lse, "lse"), (d_lse, "d_lse"))
        ]
        results = module.gradients(d_o, borrowed, o, lse, d_lse, numbers, extras)
        _keep((borrowed, extras, saved), borrowed[0])
        return tuple(None if x is None else home(x) for x in results)


def explain(tensors: tuple, numbers: Options, extras: Extras | None) -> str:
    """What `attend` would do, in words."""
    with _current(tensors[0]):
        module, borrowed, extras = _borrow_call(tensors, extras)
        return module.explain(borrowed, numbers, extras)


def read_state(state: Any) -> Any:
    """The (seed, offset) of a dropout's state."""
    return seed_and_offset(state)


def as_mask(kept: bytearray, dims: tuple, q: Any) -> Any:
    """An array of bool of q's library, where it takes numpy's."""
    return _home(q)(importlib.import_module("._numpy", __package__).as_mask(kept, dims, q))


def with_state(extras: Any, q: Any = None) -> Any:
    """Refuses: the dropout mask as an array is made for torch and numpy alone."""
    raise NotImplementedError("return_attn_probs: with dropout, q must be of torch or numpy")


def _current(array: Any) -> Any:
    """The array's CUDA device as torch's current one: torch lends no other's arrays."""
    device, ordinal = array.__dlpack_device__()
    if device != _CUDA:
        return nullcontext()
    try:
        return importlib.import_module("torch").cuda.device(ordinal)
    except ImportError:  # said by name where arrays are borrowed
        return nullcontext()


def _borrow_call(tensors: tuple, extras: Extras | None) -> tuple[Any, tuple, Extras | None]:
    """The module that computes, and all arrays as its own."""
    device = tensors[0].__dlpack_device__()[0]
    if device not in (_CPU, _CUDA):
        raise ValueError(f"q: lies on a DLPack device of type {device}, but it must be 1 or 2")
    # numpy has no bfloat16 that DLPack knows.
    needs_torch = device == _CUDA or "bfloat16" in str(getattr(tensors[0], "dtype", ""))
    name = "torch" if needs_torch else "numpy"
    try:
        importlib.import_module(name)
    except ImportError:
        message = f"q: needs {name}, through which such arrays are read, and it is not installed"
        raise NotImplementedError(message) from None
    module = importlib.import_module(f"._{name}", __package__)
    named = ("q", "kv") if len(tensors) == 2 else ("q", "k", "v")
    borrowed = tuple(_borrow(x, name, module) for x, name in zip(tensors, named))
    if extras is not None:
        fields = zip(extras[:ARRAYS], Extras._fields)
        arrays = [None if x is None else _borrow(x, name, module) for x, name in fields]
        given: Any = zip(Extras._fields, arrays)
        extras = extras._replace(**dict(given))
    return module, borrowed, extras


def _borrow(array: Any, name: str, module: Any) -> Any:
    """An array of `module`'s library in the same memory."""
    if not hasattr(array, "__dlpack__"):
        kind = type(array).__name__
        raise TypeError(f"{name}: is a {kind}, but it must have __dlpack__ as q has")
    try:
        return module.from_dlpack(array)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(f"{name}: cannot be read through DLPack: {error}") from error


def _keep(arrays: Any, q: Any) -> None:
    """Keeps the arrays of a call until its kernels are done; lets go of those that are done with.

    In a captured graph they are the caller's to keep, as all that its replays read.
    """
    if not getattr(q, "is_cuda", False) or _is_captured():
        return
    _KEPT.append((_event(q.device), arrays))
    for _ in range(len(_KEPT)):
        try:
            event, kept = _KEPT.popleft()
        except IndexError:  # another thread looks through them too
            break
        if not event.query():
            _KEPT.append((event, kept))


def _is_captured() -> bool:
    return sys.modules["torch"].cuda.is_current_stream_capturing()


def _event(device: Any) -> Any:
    """An event behind all that the device's current stream was given so far."""
    return sys.modules["torch"].cuda.current_stream(device).record_event()


@atexit.register
def _let_go() -> None:
    """Gives everything back while its owners still are there."""
    while _KEPT:
        _KEPT.popleft()[0].synchronize()


def _home(array: Any) -> Callable[[Any], Any]:
    """What makes arrays of the library that `array` is of."""
    namespace = getattr(array, "__array_namespace__", None)
    library = type(array).__module__.partition(".")[0]
    found: Any = sys.modules.get(library) if namespace is None else namespace()
    if not hasattr(found, "from_dlpack"):
        kind = type(array).__name__
        raise TypeError(f"q: is a {kind}, whose library has no from_dlpack to take a result with")

    return found.from_dlpack
