"""The same calls as operators of torch.library, for torch.compile alone.

An operator has a schema, so options are spelled out; a fake kernel says what comes back. Eager
calls do not go through here, since the dispatcher would cost them more than they take.
"""

from __future__ import annotations

from typing import Any, Optional

import torch

from . import _torch
from ._call import ARRAYS, Extras, Options, rows_of

_Tensor = torch.Tensor
# Schemas are read from these names, which `X | None` is none of before Python 3.10.
_Maybe = Optional[torch.Tensor]
_Number = Optional[float]


def attend(tensors: tuple, numbers: Options, extras: Extras | None) -> tuple[_Tensor, _Tensor]:
    """o and lse, traced as one operator."""
    extras = Extras() if extras is None else extras
    _torch.check_slopes(extras)
    probability, state = extras.dropout or (0.0, None)
    if probability and state is None:
        # Drawn in the graph, so that every run of it draws anew.
        state = torch.randint(2**63 - 1, (2,), dtype=torch.int64, device="cpu")
    elif state is not None and not isinstance(state, torch.Tensor):
        state = torch.tensor(state, dtype=torch.int64, device="cpu")
    longest_q, longest_k = extras.longest
    scale, top_left, left, right, softcap, deterministic = _torch.as_deterministic(numbers)
    return torch.ops.ferroflash.attention(
        *tensors,
        *extras[:ARRAYS],
        state,
        longest_q,
        longest_k,
        scale,
        top_left,
        left,
        right,
        softcap,
        deterministic,
        probability,
    )


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
) -> tuple[_Tensor, _Tensor]:
    numbers = (softmax_scale, top_left, left, right, softcap, deterministic)
    lengths = (key_lengths, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    arrays = (alibi_slopes, bias, mask, sink, *lengths)
    extras = _extras(arrays, dropout_state, (max_seqlen_q, max_seqlen_k), dropout_p)
    result: Any = _torch.forward((q, k, v), numbers, extras, True)
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
) -> tuple[_Tensor, _Tensor, _Tensor, _Tensor, _Tensor]:
    numbers = (softmax_scale, top_left, left, right, softcap, deterministic)
    lengths = (key_lengths, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    arrays = (alibi_slopes, bias, mask, sink, *lengths)
    extras = _extras(arrays, dropout_state, (max_seqlen_q, max_seqlen_k), dropout_p)
    outputs = _gradients(q, k, v, bias, sink)
    wanted = [*outputs[:3], None if bias is None else outputs[3]]
    wanted.append(None if sink is None else outputs[4])
    _torch.backward((q, k, v), numbers, extras, (o, lse, d_o, d_lse), wanted)
    return outputs


@_attention_backward.register_fake
def _(d_o, d_lse, o, lse, q, k, v, alibi_slopes, bias, mask, sink, *options):
    return _gradients(q, k, v, bias, sink)


def _gradients(q: _Tensor, k: _Tensor, v: _Tensor, bias: _Maybe, sink: _Maybe) -> tuple:
    """Room for every gradient; an operator returns tensors only, so an empty one stands for none."""
    outputs = [q.new_empty(x.shape) for x in (q, k, v)]
    outputs += [
        q.new_empty(() if x is None else x.shape, dtype=torch.float32) for x in (bias, sink)
    ]
    return tuple(outputs)


def _extras(arrays: tuple, state: _Maybe, longest: tuple[int, int], dropout_p: float) -> Any:
    if state is None and all(array is None for array in arrays):
        return None
    dropout = _torch.with_state((dropout_p, state)) if dropout_p else None
    return Extras(*arrays)._replace(longest=longest, dropout=dropout)


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*output, *inputs[: 4 + ARRAYS])
    ctx.options = inputs[4 + ARRAYS :]


def _backward(ctx: Any, d_o: _Tensor, d_lse: _Maybe) -> tuple:
    dq, dk, dv, dbias, dsink = torch.ops.ferroflash.attention_backward(
        d_o, d_lse, *ctx.saved_tensors, *ctx.options
    )
    wants = ctx.needs_input_grad
    results: list = [None] * len(wants)
    results[:3] = [dq, dk, dv]
    results[4], results[6] = (dbias if wants[4] else None), (dsink if wants[6] else None)
    return tuple(results)


_attention.register_autograd(_backward, setup_context=_setup_context)
