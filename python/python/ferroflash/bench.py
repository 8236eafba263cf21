"""Times attention here, beside the libraries that can be imported, in alternating rounds.

    python -m ferroflash.bench --dims 128 --seqs 2048,8192 --json run.json
    ferroflash bench --from run.json --html run.html

Every contender has the same numbers in its own contiguous layout and takes its turn in each round,
the order moving on by one, so that a chip which gets hotter does so for all. A contender whose
results differ from the first one's is left out, as is one that raises; the file says why. It is of
the schema `ferroflash.bench.v1`, as that of the command `ferroflash bench`.

With torch and a CUDA device, contenders are this package, torch's cuDNN (`cudnn`) and
FlashAttention-2 (`fa2`) backends, FlexAttention (`flex`), and FlashAttention-3 (`fa3`) and 4
(`fa4`), xFormers (`xformers`) and flash-attn's Triton kernel (`triton`) where they are installed;
with torch alone, this package and torch's attention on the CPU; without torch, this package on
numpy arrays. `dense`, torch's products and softmax over all scores in f32, has to be named.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable
from typing import Any

from . import _native
from ._bench_record import LEAST_SAMPLES, Workload, chosen, new_run, refuse_existing, write
from ._report import kernel_name

OURS = "ferroflash"
DTYPES = ("bf16", "f16", "f32")
# (pass, whether it is deterministic)
DIRECTIONS = {
    "forward": ("forward", False),
    "backward": ("backward", False),
    "deterministic": ("backward", True),
}
# Relative differences, in the Frobenius norm, that roundings to 16 bits explain.
MOST_DIFFERENCE = {"forward": 0.02, "backward": 0.04}
# Tokens of all items, channels of all heads, and lengths: the papers' convention, and a CPU's part.
DEFAULTS = {
    "cuda": (16384, 2048, [512, 1024, 2048, 4096, 8192, 16384], [64, 128, 256], ["bf16"]),
    "cpu": (2048, 512, [512, 1024, 2048], [64, 128], ["f32"]),
}


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0, 1 if nothing was measured, 2 for bad input."""
    parser = _parser()
    asked = parser.parse_args(arguments)
    try:
        backend = _backend(asked.device)
        run = measure(asked, backend)
        if asked.json is not None:
            write(run, asked.json, asked.force)
        if asked.json != "-":
            print(words(run))
    except (ValueError, OSError) as why:
        print(f"error: {why}", file=sys.stderr)
        return 2
    return 0 if run["rows"] or run["roofs"] else left_out(run)


def left_out(run: dict) -> int:
    """Says why a run has no rows; returns the exit code of such a run."""
    reasons = "; ".join(f"{left['what']}: {left['why']}" for left in run["left_out"][:3])
    print(f"error: nothing was measured, all was left out: {reasons}", file=sys.stderr)
    return 1


def measure(asked: argparse.Namespace, backend: Any) -> dict:
    """Measures what `asked` says on `backend`; returns the run."""
    if asked.rounds < LEAST_SAMPLES:
        raise ValueError(f"--rounds: {asked.rounds}, but it must be at least {LEAST_SAMPLES}")
    refuse_existing(asked.json, asked.force)
    workloads = [] if asked.only_roofs else grid(asked, backend.kind)
    contenders = chosen(backend.contenders(), asked.contenders)
    versions = {name: c.version for name, c in contenders.items() if name != OURS}
    run = new_run(backend, _native.__version__, versions)
    if asked.roofs or asked.only_roofs:
        run["roofs"] = backend.roofs(asked.rounds)
    for index, workload in enumerate(workloads):
        if sys.stderr.isatty():
            print(f"\r{index + 1}/{len(workloads)}  {workload}\x1b[K", end="", file=sys.stderr)
        row = _row(workload, contenders, backend, asked.rounds, run["left_out"])
        if row is not None:
            run["rows"].append(row)
    if sys.stderr.isatty() and workloads:
        print("\r\x1b[K", end="", file=sys.stderr)
    return run


def grid(asked: argparse.Namespace, kind: str) -> list[Workload]:
    """The workloads: every combination of what was asked for."""
    tokens, width, seqs, dims, dtypes = DEFAULTS[kind]
    workloads = []
    for dtype in asked.dtype or dtypes:
        for d in asked.dims or dims:
            for s in asked.seqs or seqs:
                heads = asked.heads or max(1, width // d)
                batch = asked.batch or max(1, tokens // s)
                kv_heads = asked.kv_heads or heads
                if heads % kv_heads:
                    raise ValueError(f"--kv-heads: {kv_heads}, but it must divide {heads} heads")
                for causal in asked.causal:
                    for direction in asked.directions:
                        workloads.append(
                            Workload(
                                *DIRECTIONS[direction], d, s, batch, heads, kv_heads, dtype, causal
                            )
                        )
    for index, workload in enumerate(workloads):
        if workload in workloads[:index]:
            raise ValueError(f"{workload} is asked for twice")
    return workloads


def _row(
    workload: Workload, contenders: dict, backend: Any, rounds: int, left_out: list
) -> dict | None:
    """The row of a workload, or None where nobody takes part."""
    calls, first, differences = {}, None, {}
    try:
        sets = backend.sets(workload)
    except Exception as why:  # no memory for it, or no such type here
        text = " ".join(str(why).split())[:300]
        left_out.append({"what": str(workload), "why": f"{type(why).__name__}: {text}"})
        return None
    for name, contender in contenders.items():
        try:
            if workload.deterministic and not contender.deterministic:
                raise NotImplementedError("is not asked for deterministic gradients here")
            call, result = backend.prepare(contender, workload, sets)
            if first is None:
                first = result
            difference = backend.difference(result, first)
            most = MOST_DIFFERENCE[workload.direction]
            if not difference <= most:
                raise ArithmeticError(
                    f"its result differs from {next(iter(calls), name)}'s by {difference:.3g}, "
                    f"and at most {most} is rounding"
                )
            del result
        except Exception as why:  # whatever a library raises for what it cannot do
            text = " ".join(str(why).split())[:300]
            left_out.append({"what": f"{name}: {workload}", "why": f"{type(why).__name__}: {text}"})
            continue
        calls[name], differences[name] = call, difference
    if not calls:
        return None
    del first
    timed = _rounds(calls, backend.timer, rounds)
    row = workload.fields()
    row["kernel"] = _kernel(workload, backend) if OURS in calls else None
    row["flops"] = workload.flops()
    medians = {name: statistics.median(samples) for name, samples in timed["ms"].items()}
    row["tflops"] = {name: workload.flops() / ms * 1e-9 for name, ms in medians.items()}
    row.update(timed)
    row["buffers"] = len(sets)
    if len(calls) > 1:
        row["difference"] = differences
    row["clock"] = backend.clock(next(iter(calls.values())))
    return row


def _rounds(calls: dict[str, Callable[[], Any]], timer: Any, rounds: int) -> dict:
    """Samples of every contender, each in its turn."""
    counts, host = {}, {name: [] for name in calls}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for name, call in calls.items():
        for _ in range(2):
            timer.sample(call, 1)
        ms, host_ms = timer.sample(call, 1)
        counts[name] = max(1, min(timer.most_calls, math.ceil(timer.aim_ms / max(ms, 1e-6))))
        host[name].append(max(host_ms, timer.sample(call, counts[name])[1]))
    names = list(calls)
    for turn in range(rounds + 1):  # the first round warms up
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            expected = statistics.median(host[name]) * counts[name]
            ms, host_ms = timer.sample(calls[name], counts[name], expected)
            host[name].append(host_ms)
            if turn:
                samples[name].append(max(round(ms, 6), 1e-6))
    hosts = {name: round(statistics.median(host[name][1:]), 6) for name in names}
    return {"ms": samples, "calls": counts, "host_ms": hosts}


def _kernel(workload: Workload, backend: Any) -> str | None:
    w = workload
    return kernel_name(
        w.direction,
        w.d,
        w.dtype,
        w.causal,
        w.heads,
        w.kv_heads,
        w.deterministic,
        batch=w.b,
        q_len=w.s,
        kv_len=w.s,
        device=backend.ordinal,
    )


def words(run: dict) -> str:
    """The run as a table."""
    lines = [f"{run['device']['name']}, {run['date']}, clocks {run['clocks']}"]
    for roof in run["roofs"]:
        rate = roof["work"] / statistics.median(roof["ms"]) * 1e-9
        unit = "TB/s" if roof["kind"] == "copy" else "TFLOP/s"
        lines.append(f"roof  {rate:.3f} {unit}: {roof['method']}")
    for row in run["rows"]:
        rates = sorted(row["tflops"].items(), key=lambda item: (item[0] != OURS, item[0]))
        text = "  ".join(f"{name} {rate:.4g}" for name, rate in rates)
        others = [rate for name, rate in rates if name != OURS]
        if others and OURS in row["tflops"]:
            text += f"  ÷ best {row['tflops'][OURS] / max(others):.3f}"
        lines.append(f"{Workload.of(row)}  TFLOP/s: {text}")
    lines += [f"left out: {left['what']}: {left['why']}" for left in run["left_out"]]
    return "\n".join(lines)


def _backend(device: str) -> Any:
    try:
        from ._bench_torch import TorchBackend
    except ImportError:
        if device == "cuda":
            raise ValueError("--device: cuda needs torch, which cannot be imported") from None
        from ._bench_numpy import NumpyBackend

        return NumpyBackend()
    return TorchBackend(device)


def sizes(text: str) -> list[int]:
    """Positive whole numbers between commas."""
    numbers = [int(part) for part in text.split(",")]
    if min(numbers) < 1:
        raise ValueError
    return numbers


def size(text: str) -> int:
    """A positive whole number."""
    return sizes(text)[0]


def among(*there: str) -> Callable[[str], list[str]]:
    """Parses some of `there`, between commas."""

    def parse(text: str) -> list[str]:
        for part in text.split(","):
            if part not in there:
                raise argparse.ArgumentTypeError(f"{part!r} is none of {', '.join(there)}")
        return text.split(",")

    return parse


def masks(text: str) -> list[bool]:
    """Masks by name, as whether each is causal."""
    return [part != "none" for part in among("none", "bottom-right")(text)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ferroflash.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--seqs", type=sizes, help="rows and keys of an item")
    add("--dims", type=sizes, help="channels of a head")
    add("--heads", type=size, help="query heads (default: 2048, on a CPU 512, / channels)")
    add("--kv-heads", type=size, help="key and value heads (default: as many)")
    add("--batch", type=size, help="items (default: 16384, on a CPU 2048, / rows)")
    add("--dtype", type=among(*DTYPES), help="bf16, f16, f32")
    add("--causal", type=masks, default=[False, True], help="none, bottom-right (default: both)")
    add(
        "--directions",
        type=among(*DIRECTIONS),
        default=["forward", "backward"],
        help="forward, backward, deterministic (default: the first two)",
    )
    add("--contenders", type=lambda text: text.split(","), help="by name (default: all but dense)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--rounds", type=int, default=LEAST_SAMPLES, help="samples of each, 20 at least")
    add("--roofs", action="store_true", help="measure copies and products too")
    add("--only-roofs", action="store_true", help="measure nothing else")
    add("--json", metavar="FILE", help="write the run; - is stdout")
    add("--force", action="store_true", help="replace FILE")
    return parser


if __name__ == "__main__":
    sys.exit(main())
