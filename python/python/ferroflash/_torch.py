"""PyTorch tensors: CUDA tensors on their device's current stream, CPU tensors on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from . import _native, _torch_dropout
from ._call import ARRAYS, Extras, Options, plan, read_extras, rows_of
from ._torch_dropout import with_state

# Element types as the native side numbers them.
_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_KINDS = {
    "f4": torch.float32,
    "i4": torch.int32,
    "b1": torch.bool,
    "u1": torch.uint8,
    "i8": torch.int64,
}


def _current_stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


# The same without making a Stream object, where torch has it.
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _current_stream)

_no = lambda: False
_is_transformed = getattr(torch._C, "_are_functorch_transforms_active", _no)
_count_modes = getattr(torch._C, "_len_torch_dispatch_stack", _no)
_is_traced = getattr(torch._C, "_is_tracing", _no)
_is_batched = getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda x: False)
_NO_DISPATCH = torch.Tensor.__torch_dispatch__


def _is_watched(q: Any) -> bool:
    """Whether something wants to see the call that would not see what becomes of addresses.

    Such are forward-mode differentiation, torch.func's transforms, dispatch modes (which fake
    tensors and tracers are made of), and tensors that stand for others.
    """
    return (
        forward_ad._current_level >= 0
        or _is_transformed()
        or _count_modes() > 0
        or _is_traced()
        or getattr(type(q), "__torch_dispatch__", _NO_DISPATCH) is not _NO_DISPATCH
    )


def attend(
    tensors: tuple, numbers: Options, extras: Extras | None, want_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """o, and lse if it is wanted."""
    if torch.compiler.is_compiling():
        from . import _torch_ops

        return _torch_ops.attend(split(autocast(tensors)), numbers, extras)
    tensors, numbers = autocast(tensors), as_deterministic(numbers)
    if _is_watched(tensors[0]):
        from . import _torch_transforms

        return _torch_transforms.attend(tensors, numbers, extras)
    if extras is not None and extras.dropout is not None:
        extras = with_state(extras, tensors[0])
    if torch.is_grad_enabled() and _wants_gradient(tensors, extras):
        bias, sink = (None, None) if extras is None else (extras.bias, extras.sink)
        result = _Attention.apply((numbers, extras, want_lse), bias, sink, *tensors)
        return result if want_lse else (result, None)
    return forward(split(tensors), numbers, extras, want_lse, as_q=True)


def gradients(
    d_o: Any,
    tensors: tuple,
    o: Any,
    lse: Any,
    d_lse: Any,
    numbers: Options,
    extras: Extras | None,
) -> tuple[torch.Tensor | None, ...]:
    """dq, dk, dv, dbias and dsink; those of options that were not given are None."""
    numbers = as_deterministic(numbers)
    if torch.compiler.is_compiling() or _is_watched(tensors[0]):
        from . import _torch_transforms

        return _torch_transforms.gradients((d_o, d_lse, o, lse), tensors, numbers, extras)
    if extras is not None and extras.dropout is not None:
        extras = with_state(extras, tensors[0])
    given = (None, None) if extras is None else (extras.bias, extras.sink)
    saved = (o, lse, d_o, d_lse)
    outputs: list[torch.Tensor | None] = [_gradient(x) for x in tensors]
    outputs += [None if x is None else _gradient(x) for x in given]
    with torch.no_grad():
        backward(tensors, numbers, extras, saved, outputs)
    sources = (*tensors, *given, *saved)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in sources):
        return tuple(_once(outputs, sources))
    return tuple(outputs)


def explain(tensors: tuple, numbers: Options, extras: Extras | None) -> str:
    """What `attend` would do, in words."""
    if extras is not None and extras.dropout is not None:
        extras = extras._replace(dropout=(extras.dropout[0], (0, 0)), dropout_state=None)
    return _read(split(autocast(tensors)), numbers, extras)[0].explain()


class _Attention(torch.autograd.Function):
    """Attention of q, k, v, or of the tensors that they are packed in.

    lse is a result only where it is wanted: each one costs microseconds.
    """

    @staticmethod
    def forward(ctx, call, bias, sink, *tensors):
        numbers, extras, want_lse = call
        o, lse = forward(split(tensors), numbers, extras, True, with_backward=True, as_q=True)
        arrays = () if extras is None else extras[:ARRAYS]
        ctx.save_for_backward(o, lse, *tensors, *arrays)
        ctx.call = numbers, None if extras is None else extras[ARRAYS:], len(tensors)
        if not want_lse:
            return o
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx, d_o, d_lse=None):
        numbers, rest, count = ctx.call
        if d_o is None and d_lse is None:
            return (None,) * (3 + count)
        o, lse, *saved = ctx.saved_tensors
        tensors = tuple(saved[:count])
        extras = None if rest is None else Extras(*saved[count:], *rest)
        _, wants_bias, wants_sink, *wants = ctx.needs_input_grad
        if any(x is not None and _is_batched(x) for x in (d_o, d_lse)):
            # Many upstream gradients at once, which `is_grads_batched` makes: an operator loops.
            from . import _torch_ops

            *parts, dbias, dsink = _torch_ops.gradients(
                (torch.zeros_like(o) if d_o is None else d_o, d_lse, o, lse),
                split(tensors),
                numbers,
                Extras() if extras is None else extras,
                (*wants[:-1], *wants[-1:] * (4 - count), wants_bias, wants_sink),
            )
            if count < 3:
                packed = torch.stack(parts[count - 1 :], -3) if wants[-1] else None
                parts = [*parts[: count - 1], packed]
            return None, dbias, dsink, *parts
        results = [_gradient(x) if want else None for x, want in zip(tensors, wants)]
        dbias = _gradient(extras.bias) if wants_bias else None
        dsink = _gradient(extras.sink) if wants_sink else None
        with torch.no_grad():
            outputs = [*_split_gradients(results), dbias, dsink]
            d_o = torch.zeros_like(o) if d_o is None else d_o
            backward(split(tensors), numbers, extras, (o, lse, d_o, d_lse), outputs)
        results = [dbias, dsink, *results]
        if torch.is_grad_enabled():
            results = _once(results, (d_o, d_lse, *saved))
        return None, *results


NO_SECOND = "attention: has no second derivative; its first one may be used"


class _Once(torch.autograd.Function):
    """Gradients that have no gradients themselves: a missing one is an error and not a zero."""

    @staticmethod
    def forward(ctx, count, *tensors):
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError(NO_SECOND)


def _once(gradients: list, sources: tuple) -> list:
    """`gradients` as tensors that depend on `sources` and refuse to be differentiated."""
    there = [x for x in gradients if x is not None]
    guarded = iter(_Once.apply(len(there), *there, *(x for x in sources if x is not None)))
    return [None if x is None else next(guarded) for x in gradients]


def forward(
    tensors: tuple,
    numbers: Options,
    extras: Extras | None,
    want_lse: bool,
    with_backward: bool = False,
    as_q: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """o, and lse if it is wanted, of q, k and v; no autograd.

    o is contiguous, or with `as_q` has its heads before its rows where q has and that is faster.
    """
    made, place, (q, k, v), extra = _read(tensors, numbers, extras)
    if with_backward and made.no_backward is not None:
        raise NotImplementedError(made.no_backward)
    like = tensors[0]
    o_dims = (*q[1][:-1], v[1][-1])
    o, o_strides, lse, lse_view = like.new_empty(o_dims), None, None, None
    if as_q and made.heads_first and q[2][2] == q[1][1] * q[2][1]:
        o = o.view(q[1][0], q[1][2], q[1][1], -1).transpose(1, 2)
        o_strides = o.stride()
    if want_lse:
        lse_dims = rows_of(q[1])
        lse = like.new_empty(lse_dims, dtype=torch.float32)
        lse_view = (lse.data_ptr(), lse_dims, None)
    scratch = _scratch(like, made.forward_bytes)
    address = 0 if scratch is None else scratch.data_ptr()
    o_view = (o.data_ptr(), o_dims, o_strides)
    _native.forward(made, place, q, k, v, extra, o_view, lse_view, address)
    return o, lse


def backward(
    tensors: tuple,
    numbers: Options,
    extras: Extras | None,
    saved: tuple,
    outputs: list,
) -> None:
    """Writes dq, dk, dv, dbias and dsink, those that are not None; saved is o, lse, d_o, d_lse."""
    made, place, (q, k, v), extra = _read(tensors, numbers, extras)
    if made.no_backward is not None:
        raise NotImplementedError(made.no_backward)
    dtype, where = tensors[0].dtype, tensors[0].device
    o, lse, d_o, d_lse = saved
    if d_o.stride(-1) != 1 or d_o.is_neg():
        # Such as the gradient of a sum, whose channels are all one element.
        d_o = d_o.clone(memory_format=torch.contiguous_format)
    d_lse = None if d_lse is None else d_lse.contiguous()
    kept = (
        _view(o, "o", dtype, where),
        _view(lse, "lse", torch.float32, where),
        _view(d_o, "d_o", dtype, where),
        None if d_lse is None else _view(d_lse, "d_lse", torch.float32, where),
    )
    results = tuple(None if x is None else (x.data_ptr(), x.shape, x.stride()) for x in outputs)
    scratch = _scratch(d_o, made.backward_bytes)
    address = 0 if scratch is None else scratch.data_ptr()
    _native.backward(made, place, q, k, v, extra, kept, results, address)


def _scratch(like: torch.Tensor, size: int) -> torch.Tensor | None:
    """A workspace, freed on return to the caching allocator, which reuses it in stream order."""
    return like.new_empty(size, dtype=torch.uint8) if size else None


def split(tensors: tuple) -> tuple:
    """q, k and v, of which some may be packed into one tensor along its third axis from the end."""
    return tensors if len(tensors) == 3 else (*tensors[:-1], *tensors[-1].unbind(-3))


def _split_gradients(results: list) -> tuple:
    """As `split`, of gradients that may be None; one packed tensor is wanted whole or not."""
    if len(results) == 3:
        return tuple(results)
    parts = 4 - len(results)
    packed = results[-1]
    return (*results[:-1], *((None,) * parts if packed is None else packed.unbind(-3)))


where, from_dlpack, read_state = torch.where, torch.from_dlpack, _torch_dropout.read_state


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor outside of its graph."""
    return tensor.detach()


def as_mask(kept: bytearray, dims: tuple, q: torch.Tensor) -> torch.Tensor:
    """A tensor of bool on q's device."""
    if not kept:
        return q.new_empty(dims, dtype=torch.bool)
    return torch.frombuffer(kept, dtype=torch.bool).view(dims).to(q.device)


def zeros(dims: tuple, like: torch.Tensor) -> torch.Tensor:
    """Zeros of the element type and device of `like`."""
    return like.new_zeros(dims)


def one_hot(columns: list, first: int, end: int, k: torch.Tensor) -> torch.Tensor:
    """Values for the rows of k: 1 at channel columns[row] - first, the same for every head."""
    rows = torch.tensor(columns, device=k.device)[:, None]
    rows = (rows == torch.arange(first, end, device=k.device)).to(k.dtype)
    return rows[:, None].expand(*k.shape[:-1], end - first)


def as_deterministic(numbers: Options) -> Options:
    """The call, deterministic also where torch was told to be."""
    return (*numbers[:5], True) if torch.are_deterministic_algorithms_enabled() else numbers


def autocast(tensors: tuple) -> tuple:
    """q, k and v in the type that autocast asks for, where it is on."""
    try:
        kind = "cuda" if tensors[0].is_cuda else "cpu"
        if not torch.is_autocast_enabled(kind):
            return tensors
        dtype = torch.get_autocast_dtype(kind)
        return tuple(x.to(dtype) if x.dtype in _DTYPES else x for x in tensors)
    except AttributeError:
        return tensors  # not all tensors, which is reported where they are read


def _read(tensors: tuple, numbers: Options, extras: Extras | None) -> tuple:
    """The plan, the place, and views of q, k, v and the extras, as the native side takes them."""
    q, k, v = tensors
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
    views = view_q, view_k, view_v = (
        _view(q, "q", dtype, where),
        _view(k, "k", dtype, where),
        _view(v, "v", dtype, where),
    )
    if extras is None:
        declared = extra = None
    else:
        declared, extra = read_extras(
            extras, lambda x, name, kind: _view(x, name, _KINDS[kind], where)
        )
    made = plan(number, device, view_q[1], view_k[1], view_v[1], numbers, declared)
    return made, (stream, False), views, extra


def _view(tensor: Any, name: str, dtype: torch.dtype, where: torch.device) -> tuple:
    """Address, dimensions and strides in elements."""
    try:
        if tensor.dtype is dtype and tensor.device == where and not tensor.is_neg():
            return tensor.data_ptr(), tensor.shape, tensor.stride()
    except AttributeError:
        kind = type(tensor).__name__
        raise TypeError(f"{name}: is a {kind}, but it must be a torch.Tensor as q is") from None
    except (RuntimeError, NotImplementedError):
        # Sparse, nested, fake and other tensors without memory and strides of their own.
        kind = f"{type(tensor).__name__} of layout {tensor.layout}"
        raise TypeError(f"{name}: is a {kind}, but it must be a dense tensor with memory") from None
    if tensor.dtype is not dtype:
        raise TypeError(f"{name}: holds {tensor.dtype}, but it must hold {dtype}")
    if tensor.device != where:
        raise ValueError(f"{name}: lies on {tensor.device}, but q lies on {where}")
    raise ValueError(f"{name}: is a lazily negated view; call resolve_neg() on it")


def _gradient(tensor: torch.Tensor) -> torch.Tensor:
    """Room for a gradient, in the order of the tensor's memory if its channels are contiguous."""
    gradient = torch.empty_like(tensor)
    if gradient.stride(-1) == 1 or gradient.shape[-1] <= 1:
        return gradient
    return tensor.new_empty(tensor.shape)


def check_slopes(extras: Extras) -> None:
    """Refuses slopes whose gradient would be missing."""
    if extras.alibi_slopes is not None and extras.alibi_slopes.requires_grad:
        raise ValueError("alibi_slopes: requires a gradient, but it has none; detach() it")


def _wants_gradient(tensors: tuple, extras: Extras | None) -> bool:
    try:
        if extras is not None:
            check_slopes(extras)
            for extra in (extras.bias, extras.sink):
                if extra is not None and extra.requires_grad:
                    return True
        for x in tensors:
            if x.requires_grad:
                return True
        return False
    except AttributeError:
        return False  # not tensors, which is reported where they are read
