"""Where the (seed, offset) of a dropout comes from, for torch tensors.

Eager calls pass both by value, drawn on the CPU: nothing waits for a device. While a CUDA graph is
captured they lie on the device instead, and are drawn by a kernel that the graph captures too, from
torch's own generator: every replay then has a mask of its own, which torch.cuda.manual_seed repeats,
and the backward pass of a replay reads what its forward pass read.
"""

from __future__ import annotations

from typing import Any

import torch

from ._call import Extras, seed_and_offset

# Element types of a state; torch before 2.3 has no uint64.
_STATES = (torch.int64, getattr(torch, "uint64", torch.int64))


def with_state(extras: Extras, q: Any) -> Extras:
    """The extras with the dropout's (seed, offset), drawn from torch's generator if it has none.

    They are integers in `dropout`, or a tensor on q's CUDA device in `dropout_state`.
    """
    if extras.dropout is None or extras.dropout_state is not None:
        return extras
    probability, state = extras.dropout
    if state is None:
        where = q.device if is_captured(q) else "cpu"
        state = torch.empty(2, dtype=torch.int64, device=where).random_()
    if isinstance(state, torch.Tensor):
        _check(state)
        if not state.is_cpu:
            if state.device != q.device:
                raise ValueError(f"dropout_state: lies on {state.device}, but q lies on {q.device}")
            # The 64 bits of negative integers are those of large ones.
            state = state if state.dtype is torch.int64 else state.view(torch.int64)
            return extras._replace(dropout=(probability, None), dropout_state=state)
        state = _integers(state)
    return extras._replace(dropout=(probability, seed_and_offset(state)))


def read_state(state: Any) -> tuple[int, int]:
    """(seed, offset) of any state; one on a device is waited for."""
    if isinstance(state, torch.Tensor):
        _check(state)
        state = _integers(state)
    return seed_and_offset(state)


def _check(state: torch.Tensor) -> None:
    if state.dtype not in _STATES or state.shape != (2,):
        had = f"holds {state.dtype} of dimensions {tuple(state.shape)}"
        raise TypeError(f"dropout_state: {had}, but it must hold two int64, (seed, offset)")
    if not (state.is_cpu or state.is_cuda):
        raise ValueError(f"dropout_state: lies on {state.device}, but it must lie where q does")


def _integers(state: torch.Tensor) -> list[int]:
    """The two integers, of which negative ones are their 64 bits."""
    try:
        return [x % 2**64 for x in state.tolist()]
    except RuntimeError as error:
        if "capturing" in str(error):
            raise
        raise TypeError(
            "dropout_state: is one of many that torch.func maps over; give one"
        ) from None


def is_captured(q: Any) -> bool:
    """Whether work on q's device goes to a CUDA graph and not to the device."""
    return getattr(q, "is_cuda", False) and torch.cuda.is_current_stream_capturing()
