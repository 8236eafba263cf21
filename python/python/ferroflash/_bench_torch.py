"""`ferroflash.bench` with torch: tensors, CUDA events, and what else torch can reach."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from ._bench_clocks import Clocks
from ._bench_contenders import Contender, on_cpu, on_cuda
from ._bench_record import HostTimer, Workload, processor, threads

_DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
_LEAD_BYTES = 256 << 20
_MOST_SETS = 64


class TorchBackend:
    """The CPU or the first CUDA device, through torch."""

    def __init__(self, device: str) -> None:
        if device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device: cuda, but torch sees no CUDA device")
        is_cuda = torch.cuda.is_available() if device == "auto" else device == "cuda"
        self.kind = "cuda" if is_cuda else "cpu"
        self.ordinal = torch.cuda.current_device() if is_cuda else -1
        if is_cuda:
            self._properties = torch.cuda.get_device_properties(self.ordinal)
            self._clocks = Clocks(getattr(self._properties, "uuid", None))
            self.timer: Any = _EventTimer()
            self.method = (
                "CUDA events around calls that were queued behind other work, so that the host's "
                "time is not in them; contenders in alternating rounds of one process; tensors in "
                "turn, together larger than twice the second-level cache where their number "
                "allows it; pseudo-random normal inputs"
            )
        else:
            torch.set_num_threads(threads())
            self.timer = HostTimer()
            self.method = (
                "monotonic clock around calls on warm tensors; contenders in alternating rounds "
                "of one process; pseudo-random normal inputs"
            )

    def device(self) -> dict:
        """What is measured on."""
        if self.kind == "cpu":
            return processor()
        p = self._properties
        return {
            "backend": "cuda",
            "name": p.name,
            "driver": self._clocks.driver(),
            "capability": f"{p.major}.{p.minor}",
            "units": p.multi_processor_count,
            "l2_bytes": getattr(p, "L2_cache_size", None),
        }

    def clocks(self) -> str:
        """How clocks are read."""
        return "not read: the device is a CPU" if self.kind == "cpu" else self._clocks.words()

    def clock(self, call: Callable[[], Any]) -> dict | None:
        """Clocks while the device is at `call`."""
        if self.kind == "cpu" or not self._clocks:
            return None
        for _ in range(8):
            call()
        clock = self._clocks.read()
        torch.cuda.synchronize()
        return clock

    def contenders(self) -> dict[str, Contender]:
        """Who takes part, this package first."""
        return on_cuda() if self.kind == "cuda" else on_cpu()

    def sets(self, w: Workload) -> list:
        """Sets of q, k, v and d_o, [batch, row, head, channel], in this order of axes in memory."""
        torch.manual_seed(42)
        width = torch.empty((), dtype=_DTYPES[w.dtype]).element_size()
        size = 2 * (w.heads + w.kv_heads) * w.b * w.s * w.d * width
        cache = getattr(self._properties, "L2_cache_size", 0) if self.kind == "cuda" else 0
        count = max(1, min(_MOST_SETS, math.ceil(2 * cache / size)))
        return [self._set(w) for _ in range(count)]

    def numbers(self, w: Workload, seed: int) -> list:
        """The set of a seed: q, k, v and d_o, [batch, row, head, channel]."""
        torch.manual_seed(seed)
        return self._set(w)

    def _set(self, w: Workload) -> list:
        heads = (w.heads, w.kv_heads, w.kv_heads, w.heads)
        where = dict(device=self.kind, dtype=_DTYPES[w.dtype])
        return [torch.randn(w.b, w.s, n, w.d, **where) for n in heads]

    def prepare(self, contender: Contender, w: Workload, sets: list) -> tuple:
        """A call to time, and what it computes, [batch, row, head, channel]."""
        own = [[contender.lay_out(x) for x in tensors] for tensors in sets]
        compute = contender.call(w)
        turn, count = 0, len(own)
        if w.direction == "forward":

            def forward() -> Any:
                nonlocal turn
                turn = (turn + 1) % count
                with torch.no_grad():
                    return compute(*own[turn][:3])

            with torch.no_grad():
                return forward, [contender.read(compute(*own[0][:3]))]
        if not contender.has_backward:
            raise NotImplementedError("has no backward pass")
        graphs = []
        for q, k, v, d_o in own:
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            graphs.append((compute(*leaves), leaves, d_o))

        def gradients(graph: tuple) -> tuple:
            o, leaves, d_o = graph
            return torch.autograd.grad(o, leaves, d_o, retain_graph=True)

        def backward() -> Any:
            nonlocal turn
            turn = (turn + 1) % count
            return gradients(graphs[turn])

        return backward, [contender.read(x) for x in gradients(graphs[0])]

    def difference(self, result: list, first: list) -> float:
        """The largest relative difference, in the Frobenius norm."""
        if result is first:
            return 0.0
        pairs = [(a.float(), b.float()) for a, b in zip(result, first)]
        return max(float((a - b).norm() / b.norm()) for a, b in pairs)

    def roofs(self, rounds: int) -> list[dict]:
        """Copies, and products by torch's own libraries."""
        on_gpu = self.kind == "cuda"
        floats, size = ((256 << 20), 8192) if on_gpu else ((64 << 20), 2048)
        dtype = "bf16" if on_gpu else "f32"
        source = torch.randn(floats, device=self.kind)
        target = torch.empty_like(source)
        where = dict(device=self.kind, dtype=_DTYPES[dtype])
        left, right, out = (torch.randn(size, size, **where) for _ in range(3))
        copied = f"torch's copy of {floats * 4 >> 20} MiB; bytes read and written"
        return [
            self._roof("copy", None, 8.0 * floats, rounds, lambda: target.copy_(source), copied),
            self._roof(
                "matrix",
                dtype,
                2.0 * size**3,
                rounds,
                lambda: torch.matmul(left, right, out=out),
                f"torch.matmul of {size}³ in {dtype}",
            ),
        ]

    def _roof(
        self, kind: str, dtype: str | None, work: float, rounds: int, call: Any, method: str
    ) -> dict:
        for _ in range(3):
            ms, host_ms = self.timer.sample(call, 1)
        calls = max(1, min(self.timer.most_calls, math.ceil(self.timer.aim_ms / max(ms, 1e-6))))
        samples = [self.timer.sample(call, calls, host_ms * calls)[0] for _ in range(rounds)]
        return {"kind": kind, "dtype": dtype, "method": method, "work": work, "ms": samples}


class _EventTimer:
    """Samples by CUDA events, behind memory to clear for longer than the host takes."""

    aim_ms, most_calls = 4.0, 100

    def __init__(self) -> None:
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._cleared = torch.zeros(_LEAD_BYTES, dtype=torch.uint8, device="cuda")
        self._clear_ms = 1.0
        clears = [self.sample(self._cleared.zero_, 1)[0] for _ in range(5)]
        self._clear_ms = max(1e-3, statistics.median(clears))

    def sample(
        self, call: Callable[[], Any], calls: int, expected_ms: float = 0.0
    ) -> tuple[float, float]:
        """Milliseconds a call, and those in which the host queued it."""
        for _ in range(min(256, 1 + math.ceil(1.5 * expected_ms / self._clear_ms))):
            self._cleared.zero_()
        self._start.record()
        begun = time.perf_counter()
        for _ in range(calls):
            call()
        host_ms = (time.perf_counter() - begun) * 1e3
        self._end.record()
        self._end.synchronize()
        return self._start.elapsed_time(self._end) / calls, host_ms / calls

    def empty_ms(self) -> float:
        """What a sample without work lasts."""
        return statistics.median(self.sample(lambda: None, 1)[0] for _ in range(21))
