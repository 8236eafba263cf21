"""The native half; private to the package. `python/src/call.rs` says more."""

from typing import Optional

# (address, dimensions, strides); strides of None are contiguous ones.
_Tensor = tuple[int, tuple[int, ...], Optional[tuple[int, ...]]]
# (dtype: 0 bf16, 1 f16, 2 f32; CUDA ordinal or -1; CUstream; whether strides count bytes)
_Where = tuple[int, int, int, bool]
# (softmax_scale, causal, left, right, softcap, alibi_slopes)
_Options = tuple[Optional[float], bool, int, int, float, Optional[_Tensor]]

__version__: str

def forward(
    q: _Tensor,
    k: _Tensor,
    v: _Tensor,
    output: tuple[int, int, int],
    place: _Where,
    options: _Options,
    /,
) -> None: ...
def explain(
    q: _Tensor, k: _Tensor, v: _Tensor, place: _Where, options: _Options, /
) -> str: ...
def kernel_name(
    direction: str,
    dtype: str,
    causal: bool,
    sizes: tuple[int, int, int, int, int, int, int],
    device: int,
    /,
) -> str: ...
def is_available() -> bool: ...
def doctor() -> str: ...
