"""Exact attention on NVIDIA GPUs and on the CPU.

`flash_attn_func` and its packed and variable-length forms have flash-attn 2.8's arguments;
`attention` has every option, `scaled_dot_product_attention` torch's contract. PyTorch tensors,
numpy arrays and arrays that have `__dlpack__` go in and the same kind comes out, without copies:
CUDA tensors run on their device and its current stream, all others on the CPU. Neither numpy nor
torch is needed to import this package.

    >>> import ferroflash
    >>> o = ferroflash.flash_attn_func(q, k, v, causal=True)

An option that cannot be done raises, naming the argument; none is ever ignored.
"""

from . import _native
from ._attention import Gradients, attention, attention_backward, scaled_dot_product_attention
from ._flash import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from ._probabilities import dropout_mask
from ._report import doctor, explain, is_available, kernel_name
from ._shim import install_as_flash_attn
from ._transformers import register_transformers

__version__: str = _native.__version__
__all__ = [
    "Gradients",
    "attention",
    "attention_backward",
    "doctor",
    "dropout_mask",
    "explain",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install_as_flash_attn",
    "is_available",
    "kernel_name",
    "register_transformers",
    "scaled_dot_product_attention",
]
