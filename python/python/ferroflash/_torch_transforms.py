"""Calls that are watched: torch.func's transforms, dispatch modes, forward-mode differentiation.

The quick way through addresses would be invisible to all of these, and its results silently wrong.
Modes, tracers and tensors that stand for others see an operator instead (`_torch_ops`). Reverse
transforms and vmap see Functions in the form that they ask for; forward-mode differentiation is
refused by name.
"""

from __future__ import annotations

from typing import Callable

import torch

from . import _torch, _torch_ops
from ._call import ARRAYS, Extras, Options
from ._torch_dropout import with_state
from ._torch_ops import NO_TANGENT, refuse_tangents


def _is_for_operators() -> bool:
    """Whether an operator is what the watcher sees: no transform, or one that rewrites operators."""
    if not _torch._is_transformed():
        return True
    top = torch._C._functorch.peek_interpreter_stack()
    return top is not None and top.key() == torch._C._functorch.TransformType.Functionalize


def attend(tensors: tuple, numbers: Options, extras: Extras | None) -> tuple:
    """o and lse."""
    extras = Extras() if extras is None else extras
    refuse_tangents(tensors, extras)
    if _is_for_operators():
        return _torch_ops.attend(_torch.split(tensors), numbers, extras)
    wants = torch.is_grad_enabled() and _torch._wants_gradient(tensors, extras)
    if extras.dropout is not None:
        extras = with_state(extras, tensors[0])
    call = (numbers, *extras[ARRAYS:], wants)
    return _Forward.apply(call, *extras[:ARRAYS], *tensors)


def gradients(saved: tuple, tensors: tuple, numbers: Options, extras: Extras | None) -> tuple:
    """dq, dk, dv, dbias and dsink; saved is d_o, d_lse, o, lse."""
    extras = Extras() if extras is None else extras
    wanted = (True, True, True, extras.bias is not None, extras.sink is not None)
    if torch.compiler.is_compiling() or _is_for_operators():
        return _torch_ops.gradients(saved, tensors, numbers, extras, wanted)
    refuse_tangents(tensors, extras, saved)
    return backward(saved, tensors, numbers, extras, wanted)


def backward(
    saved: tuple, tensors: tuple, numbers: Options, extras: Extras, wanted: tuple
) -> tuple:
    """Gradients of the tensors, of bias and of sink, those `wanted`; the others are None."""
    d_o, d_lse, o, lse = saved
    if extras.dropout is not None:
        extras = with_state(extras, tensors[0])
    d_o = torch.zeros_like(o) if d_o is None else d_o
    call = (numbers, *extras[ARRAYS:], wanted)
    found = iter(_Backward.apply(call, d_o, d_lse, o, lse, *extras[:ARRAYS], *tensors))
    return tuple(next(found) if want else None for want in wanted)


def _each(apply: Callable, call: tuple, dims: tuple, arrays: tuple, size: int) -> tuple:
    """vmap as what it stands for: one call after another, results stacked."""
    results = [
        apply(call, *(x if dim is None else x.select(dim, i) for x, dim in zip(arrays, dims)))
        for i in range(size)
    ]
    stacked = tuple(torch.stack(parts) for parts in zip(*results))
    return stacked, (0,) * len(stacked)


class _Forward(torch.autograd.Function):
    """o and lse of (call, *option arrays, *tensors), as torch.func wants a Function to be."""

    @staticmethod
    def forward(call, *arrays):
        numbers, *rest, wants = call
        extras = Extras(*arrays[:ARRAYS], *rest)
        return _torch.forward(_torch.split(arrays[ARRAYS:]), numbers, extras, True, wants)

    @staticmethod
    def setup_context(ctx, inputs, output):
        call, *arrays = inputs
        ctx.call = call
        ctx.save_for_backward(*output, *arrays)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, d_o, d_lse):
        count = len(ctx.needs_input_grad)
        if d_o is None and d_lse is None:
            return (None,) * count
        o, lse, *arrays = ctx.saved_tensors
        numbers, *rest, _ = ctx.call
        extras = Extras(*arrays[:ARRAYS], *rest)
        _, _, wants_bias, _, wants_sink, *wants = ctx.needs_input_grad
        wants = wants[ARRAYS - 4 :]
        *results, dbias, dsink = backward(
            (d_o, d_lse, o, lse),
            tuple(arrays[ARRAYS:]),
            numbers,
            extras,
            (*wants, wants_bias, wants_sink),
        )
        return None, None, dbias, None, dsink, *(None,) * (ARRAYS - 4), *results

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(f"attention: an argument {NO_TANGENT}")

    @staticmethod
    def vmap(info, in_dims, call, *arrays):
        return _each(_Forward.apply, call, in_dims[1:], arrays, info.batch_size)


class _Backward(torch.autograd.Function):
    """Gradients, those wanted, of (call, d_o, d_lse, o, lse, *option arrays, *tensors)."""

    @staticmethod
    def forward(call, d_o, d_lse, o, lse, *arrays):
        numbers, *rest, wanted = call
        extras, tensors = Extras(*arrays[:ARRAYS], *rest), arrays[ARRAYS:]
        sources = (*tensors, extras.bias, extras.sink)
        results = [_torch._gradient(x) if want else None for x, want in zip(sources, wanted)]
        outputs = [*_torch._split_gradients(results[:-2]), *results[-2:]]
        _torch.backward(_torch.split(tensors), numbers, extras, (o, lse, d_o, d_lse), outputs)
        return tuple(x for x in results if x is not None)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError(_torch.NO_SECOND)

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(f"attention: an upstream gradient {NO_TANGENT}")

    @staticmethod
    def vmap(info, in_dims, call, *arrays):
        return _each(_Backward.apply, call, in_dims[1:], arrays, info.batch_size)
