"""Where the (seed, offset) of a dropout comes from, for torch tensors.

Kernels take both by value. A CUDA graph keeps the values of its capture, so that a call that draws
its own is refused there: every replay would drop the same weights.
"""

from __future__ import annotations

from typing import Any

import torch

from ._call import seed_and_offset

# Element types of a state; torch before 2.3 has no uint64.
_STATES = (torch.int64, getattr(torch, "uint64", torch.int64))


def with_state(dropout: tuple[float, Any], q: Any = None) -> tuple[float, tuple[int, int]]:
    """The dropout with its (seed, offset), drawn from torch's default generator if it has none."""
    probability, state = dropout
    if state is None:
        if is_captured(q):
            raise NotImplementedError(
                "dropout_p: a CUDA graph would drop the same weights at every replay; give "
                "dropout_state=(seed, offset) if that is wanted"
            )
        state = torch.empty(2, dtype=torch.int64, device="cpu").random_()
    if isinstance(state, torch.Tensor):
        state = read_state(state)
    return probability, seed_and_offset(state)


def read_state(state: torch.Tensor) -> list[int]:
    """(seed, offset) of a tensor on the CPU, whose negative integers are their 64 bits."""
    if state.dtype not in _STATES or state.shape != (2,):
        had = f"holds {state.dtype} of dimensions {tuple(state.shape)}"
        raise TypeError(f"dropout_state: {had}, but it must hold two int64, (seed, offset)")
    if not state.is_cpu:
        # To read it here would wait for the device, and in a captured graph read it once only.
        raise NotImplementedError(
            f"dropout_state: lies on {state.device}, but no kernel reads it there; it must be two "
            "integers or lie on the CPU"
        )
    try:
        return [x % 2**64 for x in state.tolist()]
    except RuntimeError:
        raise TypeError(
            "dropout_state: is one of many that torch.func maps over; give one"
        ) from None


def is_captured(q: Any) -> bool:
    """Whether work on q's device goes to a CUDA graph and not to the device."""
    return getattr(q, "is_cuda", False) and torch.cuda.is_current_stream_capturing()
