"""flash_attn.bert_padding: between padded batches and packed tokens. Needs torch."""

from __future__ import annotations

import torch
from torch import Tensor


def index_first_axis(tensor: Tensor, indices: Tensor) -> Tensor:
    """Rows `indices` of [tokens, ...]."""
    return tensor.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """[first_axis_dim, ...] with `values` at rows `indices`, and zeros elsewhere."""
    rows = values.new_zeros(first_axis_dim, *values.shape[1:])
    return rows.index_copy(0, indices, values)


def index_first_axis_residual(tensor: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Rows `indices` of [tokens, ...], and the tensor itself, detached."""
    return tensor.index_select(0, indices), tensor.detach()


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Packs the tokens of a padded batch.

    Args:
        hidden_states: [batch, len, ...].
        attention_mask: [batch, len], bool or int: 1 where there is a token.
        unused_mask: [batch, len], bool or int: 1 where room is kept that holds no token.

    Returns:
        The tokens [total, ...]; their indices in [batch * len]; cu_seqlens, int32 [batch + 1]; the
        longest sequence's length; the tokens used of each sequence, int32 [batch]. The longest
        length is read back from the device.
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    used = attention_mask.sum(-1, dtype=torch.int32)
    tokens, indices, cu_seqlens, longest = _packed(hidden_states, kept, lengths)
    return tokens, indices, cu_seqlens, longest, used


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Packs the tokens of a padded batch whose rows hold several sequences each.

    attention_mask_in_length is [batch, len]: the lengths of a row's sequences, then zeros. The
    rest is as in `unpad_input`.
    """
    totals = attention_mask_in_length.sum(-1)
    positions = torch.arange(hidden_states.shape[1], device=totals.device)
    lengths = attention_mask_in_length.flatten()
    lengths = lengths[lengths.nonzero().flatten()].to(torch.int32)
    return _packed(hidden_states, positions < totals[:, None], lengths)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """[batch, seqlen, ...] from packed tokens and `unpad_input`'s indices; zeros are padding."""
    rows = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return rows.unflatten(0, (batch, seqlen))


def _packed(
    hidden_states: Tensor, kept: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    return hidden_states.flatten(0, 1).index_select(0, indices), indices, cu_seqlens, longest
