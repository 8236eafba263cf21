"""`ferroflash.bench` without torch: this package alone, on numpy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import _native
from ._attention import attention, attention_backward
from ._bench_record import HostTimer, Workload, processor, threads


class _Ours:
    version, deterministic, only_by_name = _native.__version__, True, False


class NumpyBackend:
    """The CPU, through numpy."""

    kind, ordinal = "cpu", -1
    method = "monotonic clock around calls on warm arrays; pseudo-random normal inputs"

    def __init__(self) -> None:
        self.timer = HostTimer()

    def device(self) -> dict:
        """What is measured on."""
        return processor()

    def clocks(self) -> str:
        """How clocks are read."""
        return "not read: the device is a CPU"

    def clock(self, _call: Any) -> None:
        """Clocks now: not known."""

    def contenders(self) -> dict:
        """Who takes part."""
        return {"ferroflash": _Ours()}

    def sets(self, w: Workload) -> list:
        """One set of q, k, v and d_o."""
        random = np.random.default_rng(42)
        if w.dtype == "bf16":
            from ml_dtypes import bfloat16 as dtype
        else:
            dtype = {"f16": np.float16, "f32": np.float32}[w.dtype]
        heads = (w.heads, w.kv_heads, w.kv_heads, w.heads)
        dims = [(w.b, w.s, n, w.d) for n in heads]
        return [[random.standard_normal(size, np.float32).astype(dtype) for size in dims]]

    def prepare(self, _contender: Any, w: Workload, sets: list) -> tuple:
        """A call to time, and its result."""
        q, k, v, d_o = sets[0]
        options = dict(causal=w.causal)

        def forward() -> Any:
            return attention(q, k, v, **options)

        if w.direction == "forward":
            return forward, forward()
        o, lse = attention(q, k, v, return_lse=True, **options)

        def backward() -> Any:
            return attention_backward(
                d_o, q, k, v, o, lse, deterministic=w.deterministic, **options
            )

        return backward, backward()

    def difference(self, _result: Any, _first: Any) -> float:
        """There is nobody to differ from."""
        return 0.0

    def roofs(self, rounds: int) -> list[dict]:
        """Copies and products by numpy."""
        random = np.random.default_rng(7)
        source = random.standard_normal(64 << 20, np.float32)
        target, size = np.zeros_like(source), 2048
        left, right = (random.standard_normal((size, size), np.float32) for _ in range(2))
        out = np.zeros((size, size), np.float32)
        return [
            self._roof("copy", None, 2.0 * source.nbytes, rounds, lambda: np.copyto(target, source),
                       "numpy.copyto of 256 MiB by one thread; bytes read and written"),
            self._roof("matrix", "f32", 2.0 * size**3, rounds, lambda: np.matmul(left, right, out),
                       f"numpy.matmul of {size}³ in f32, {threads()} threads at most"),
        ]  # fmt: skip

    def _roof(
        self, kind: str, dtype: Any, work: float, rounds: int, call: Any, method: str
    ) -> dict:
        self.timer.sample(call, 1)
        ms = [self.timer.sample(call, 1)[0] for _ in range(rounds)]
        return {"kind": kind, "dtype": dtype, "method": method, "work": work, "ms": ms}
