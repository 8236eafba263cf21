"""The same calls as operators of torch.library: what tracers and dispatch modes see.

An operator has a schema, so options are spelled out; a fake kernel says what comes back. Eager
calls do not go through here, since the dispatcher would cost them more than they take.
"""

from __future__ import annotations

from typing import Any, List, Optional  # noqa: UP035

import torch
from torch.autograd import forward_ad

from . import _torch
from ._call import ARRAYS, Extras, Options, rows_of, seed_and_offset
from ._torch_dropout import with_state

_Tensor = torch.Tensor
# Schemas are read from these names: older versions of Python and torch know no newer ones.
_Maybe = Optional[torch.Tensor]
_Number = Optional[float]
_Flags = List[bool]  # noqa: UP006

NO_TANGENT = (
    "carries a forward-mode tangent (torch.func.jvp, torch.autograd.forward_ad), and attention has "
    "no forward-mode derivative; use a reverse-mode one (torch.func.vjp, torch.autograd.grad)"
)
_NO_FUNC = (
    "attention: cannot be differentiated by torch.func inside torch.compile or functionalize; use "
    "torch.autograd there, or leave the call out of what is compiled"
)


def refuse_tangents(tensors: tuple, extras: Extras, saved: tuple = (None,) * 4) -> None:
    """Refuses a tensor with a tangent, which would be lost; saved is d_o, d_lse, o, lse."""
    if forward_ad._current_level < 0:
        return
    names = (("qkv",), ("q", "kv"), ("q", "k", "v"))[len(tensors) - 1]
    given = [*zip(("d_o", "d_lse", "o", "lse"), saved), *zip(names, tensors)]
    for name, x in (*given, *zip(Extras._fields, extras[:ARRAYS])):
        if isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(f"{name}: {NO_TANGENT}")


def attend(tensors: tuple, numbers: Options, extras: Extras | None) -> tuple[_Tensor, _Tensor]:
    """o and lse, traced as one operator."""
    extras = Extras() if extras is None else extras
    refuse_tangents(tensors, extras)
    wants = torch.is_grad_enabled() and _torch._wants_gradient(tensors, extras)
    if wants and _torch._is_transformed():
        raise NotImplementedError(_NO_FUNC)
    options = _options(numbers, extras, tensors[0])
    return torch.ops.ferroflash.attention(*tensors, *options, wants)


def gradients(
    saved: tuple, tensors: tuple, numbers: Options, extras: Extras, wanted: tuple
) -> tuple[_Maybe, ...]:
    """dq, dk, dv, dbias and dsink, those wanted, traced as one operator; saved is d_o, d_lse, o,
    lse."""
    refuse_tangents(tensors, extras, saved)
    found = torch.ops.ferroflash.attention_backward(
        *saved, *tensors, *_options(numbers, extras, tensors[0]), list(wanted)
    )
    return tuple(x if want else None for x, want in zip(found, wanted))


def _options(numbers: Options, extras: Extras, q: _Tensor) -> tuple:
    """The arguments that both operators have after q, k and v."""
    probability, state = extras.dropout or (0.0, None)
    if extras.dropout_state is not None:
        state = extras.dropout_state
    elif probability and state is None:
        # Drawn in the graph, on q's device, so that every run and every replay of it draws anew.
        state = torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=q.device)
    elif state is not None and not isinstance(state, torch.Tensor):
        # Two's complement: the upper half of 64 bits is negative.
        halves = [x - 2**64 if x >= 2**63 else x for x in seed_and_offset(state)]
        state = torch.tensor(halves, dtype=torch.int64, device="cpu")
    numbers = _torch.as_deterministic(numbers)
    return *extras[: ARRAYS - 1], state, *extras.longest, *numbers, probability


@torch.library.custom_op("ferroflash::attention", mutates_args=())
def _attention(
    q: _Tensor,
    k: _Tensor,
    v: _Tensor,
    alibi_slopes: _Maybe,
    bias: _Maybe,
    mask: _Maybe,
    sink: _Maybe,
    key_lengths: _Maybe,
    cu_seqlens_q: _Maybe,
    cu_seqlens_k: _Maybe,
    seqused_q: _Maybe,
    seqused_k: _Maybe,
    mask_bits: _Maybe,
    dropout_state: _Maybe,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: _Number,
    top_left: bool,
    left: int,
    right: int,
    softcap: float,
    deterministic: bool,
    dropout_p: float,
    with_backward: bool,
) -> tuple[_Tensor, _Tensor]:
    numbers = (softmax_scale, top_left, left, right, softcap, deterministic)
    lengths = (key_lengths, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    arrays = (alibi_slopes, bias, mask, sink, *lengths, mask_bits)
    extras = _extras(arrays, dropout_state, (max_seqlen_q, max_seqlen_k), dropout_p, q)
    refuse_tangents((q, k, v), extras or Extras())
    result: Any = _torch.forward((q, k, v), numbers, extras, True, with_backward)
    return result


@_attention.register_fake
def _(q, k, v, *options):
    o = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return o, q.new_empty(rows_of(q.shape), dtype=torch.float32)


@torch.library.custom_op("ferroflash::attention_backward", mutates_args=())
def _attention_backward(
    d_o: _Tensor,
    d_lse: _Maybe,
    o: _Tensor,
    lse: _Tensor,
    q: _Tensor,
    k: _Tensor,
    v: _Tensor,
    alibi_slopes: _Maybe,
    bias: _Maybe,
    mask: _Maybe,
    sink: _Maybe,
    key_lengths: _Maybe,
    cu_seqlens_q: _Maybe,
    cu_seqlens_k: _Maybe,
    seqused_q: _Maybe,
    seqused_k: _Maybe,
    mask_bits: _Maybe,
    dropout_state: _Maybe,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: _Number,
    top_left: bool,
    left: int,
    right: int,
    softcap: float,
    deterministic: bool,
    dropout_p: float,
    wanted: _Flags,
) -> tuple[_Tensor, _Tensor, _Tensor, _Tensor, _Tensor]:
    numbers = (softmax_scale, top_left, left, right, softcap, deterministic)
    lengths = (key_lengths, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    arrays = (alibi_slopes, bias, mask, sink, *lengths, mask_bits)
    extras = _extras(arrays, dropout_state, (max_seqlen_q, max_seqlen_k), dropout_p, q)
    outputs = _gradients((q, k, v, bias, sink), wanted)
    views = [x if want else None for x, want in zip(outputs, wanted)]
    _torch.backward((q, k, v), numbers, extras, (o, lse, d_o, d_lse), views)
    return outputs


@_attention_backward.register_fake
def _(d_o, d_lse, o, lse, q, k, v, alibi_slopes, bias, mask, sink, *options):
    return _gradients((q, k, v, bias, sink), options[-1])


def _gradients(sources: tuple, wanted: _Flags) -> tuple:
    """Room for gradients; an operator returns tensors only, so an empty one stands for none."""
    q = sources[0]
    return tuple(
        x.new_empty(x.shape) if want else q.new_empty((0,)) for x, want in zip(sources, wanted)
    )


def _extras(
    arrays: tuple, state: _Maybe, longest: tuple[int, int], dropout_p: float, q: _Tensor
) -> Any:
    if state is None and all(array is None for array in arrays):
        return None
    dropout = (dropout_p, state) if dropout_p else None
    return with_state(Extras(*arrays)._replace(longest=longest, dropout=dropout), q)


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*output, *inputs[: 3 + ARRAYS])
    ctx.options = inputs[3 + ARRAYS : -1]


def _backward(ctx: Any, d_o: _Tensor, d_lse: _Maybe) -> tuple:
    wants = ctx.needs_input_grad
    results: list = [None] * len(wants)
    # q, k, v, bias and sink among the operator's arguments.
    places = (0, 1, 2, 4, 6)
    wanted = [wants[place] for place in places]
    found = torch.ops.ferroflash.attention_backward(
        d_o, d_lse, *ctx.saved_tensors, *ctx.options, wanted
    )
    for place, gradient in zip(places, found):
        results[place] = gradient if wants[place] else None
    return tuple(results)


def _no_second(ctx: Any, *gradients: Any) -> Any:
    raise NotImplementedError(_torch.NO_SECOND)


_attention.register_autograd(_backward, setup_context=_setup_context)
_attention_backward.register_autograd(_no_second)
