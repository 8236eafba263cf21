"""The native half; private to the package. `python/src/plan.rs` and `call.rs` say more."""

from typing import Any, Self, final

from typing_extensions import TypeAlias

# (address, dimensions, strides); strides of None are contiguous ones.
_Tensor: TypeAlias = tuple[int, tuple[int, ...], tuple[int, ...] | None]
# (CUstream, whether strides count bytes)
_Where: TypeAlias = tuple[int, bool]
# (softmax_scale, top_left, left, right, softcap, deterministic)
_Options: TypeAlias = tuple[float | None, bool, int, int, float, bool]

__version__: str

@final
class Plan:
    """One kind of call, validated, with its kernels."""

    forward_bytes: int
    backward_bytes: int
    no_backward: str | None
    heads_first: bool
    def __new__(
        cls,
        dtype: int,
        device: int,
        q: tuple[int, ...],
        k: tuple[int, ...],
        v: tuple[int, ...],
        options: _Options,
        declared: tuple[Any, ...] | None,
        /,
    ) -> Self: ...
    def explain(self) -> str: ...

def forward(
    plan: Plan,
    place: _Where,
    q: _Tensor,
    k: _Tensor,
    v: _Tensor,
    options: tuple[_Tensor | tuple[int, int] | None, ...] | None,
    o: _Tensor,
    lse: _Tensor | None,
    workspace: int,
    /,
) -> None: ...
def backward(
    plan: Plan,
    place: _Where,
    q: _Tensor,
    k: _Tensor,
    v: _Tensor,
    options: tuple[_Tensor | tuple[int, int] | None, ...] | None,
    saved: tuple[_Tensor, _Tensor, _Tensor, _Tensor | None],
    gradients: tuple[_Tensor | None, ...],
    workspace: int,
    /,
) -> None: ...
def dropout_mask(
    probability: float, state: tuple[int, int], dims: tuple[int, ...], /
) -> bytearray: ...
def kernel_name(
    direction: str,
    dtype: str,
    options: tuple[bool, bool],
    sizes: tuple[int, int, int, int, int, int, int],
    device: int,
    /,
) -> str: ...
def is_available() -> bool: ...
def doctor() -> str: ...
