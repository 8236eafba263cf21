"""Measures how far attention is from exact here, beside the libraries that can be imported.

    python -m ferroflash.errors --dims 64,128 --seqs 512,2048 --json errors.json

Every contender gets the same normal numbers; what it returns is compared with attention in f64 of
exactly these numbers, computed by torch on the same device in blocks of rows. The file has, for
each contender and tensor and for each seed, the largest and the root mean square difference, and
the same of the reference itself. It is of the schema `ferroflash.errors.v1`.

Contenders are those of `python -m ferroflash.bench`; FlexAttention has to be named.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from . import _native
from ._bench_record import LEAST_SEEDS, Workload, chosen, refuse_existing, write
from ._report import kernel_name
from .bench import DTYPES, OURS, left_out, masks, size, sizes

SCHEMA = "ferroflash.errors.v1"
METHOD = (
    "normal inputs, rounded to the type; the reference is attention in f64 of the rounded numbers, "
    "computed by torch on the same device; differences over all elements, one figure a seed"
)
TENSORS = {"forward": ("o",), "backward": ("dq", "dk", "dv")}
# Items, heads, lengths, head dimensions, type.
DEFAULTS = {
    "cuda": (1, 8, [512, 2048, 8192], [64, 128, 256], "bf16"),
    "cpu": (1, 2, [128, 512], [64, 128], "f32"),
}
# Elements of a block of scores of the reference: four of them in f64 take 256 MiB.
_BLOCK = 1 << 23


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0, 1 if nothing was measured, 2 for bad input."""
    asked = _parser().parse_args(arguments)
    try:
        run = measure(asked)
        if asked.json is not None:
            write(run, asked.json, asked.force)
        if asked.json != "-":
            print(words(run))
    except (ValueError, OSError) as why:
        print(f"error: {why}", file=sys.stderr)
        return 2
    return 0 if run["rows"] else left_out(run)


def measure(asked: argparse.Namespace) -> dict:
    """Measures what `asked` says; returns the record."""
    try:
        from ._bench_torch import TorchBackend
    except ImportError:
        raise ValueError("torch: computes the reference, and cannot be imported") from None
    if len(set(asked.seeds)) < LEAST_SEEDS:
        raise ValueError(f"--seeds: {asked.seeds}, but {LEAST_SEEDS} different ones are needed")
    refuse_existing(asked.json, asked.force)
    backend = TorchBackend(asked.device)
    there = backend.contenders()
    if asked.contenders is None:
        there.pop("flex", None)  # compiles for minutes
    contenders = chosen(there, asked.contenders)
    batch, heads, seqs, dims, dtype = DEFAULTS[backend.kind]
    heads, dtype = asked.heads or heads, asked.dtype or dtype
    kv_heads = asked.kv_heads or heads
    if heads % kv_heads:
        raise ValueError(f"--kv-heads: {kv_heads}, but it must divide {heads} heads")
    run = {
        "schema": SCHEMA,
        "ferroflash": _native.__version__,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": backend.device(),
        "method": METHOD,
        "peers": {name: c.version for name, c in contenders.items() if name != OURS},
        "seeds": asked.seeds,
        "rows": [],
        "left_out": [],
    }
    for d in asked.dims or dims:
        for s in asked.seqs or seqs:
            for causal in asked.causal:
                call = (d, s, asked.batch or batch, heads, kv_heads, dtype, causal)
                if sys.stderr.isatty():
                    print(f"\r{Workload('both', False, *call)}\x1b[K", end="", file=sys.stderr)
                run["rows"] += _rows(call, contenders, backend, asked.seeds, run["left_out"])
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    return run


def _rows(call: tuple, contenders: dict, backend: Any, seeds: list, without: list) -> list:
    """A forward and a backward row of a call, of the contenders that do it with every seed."""
    calls = {name: Workload(name, False, *call) for name in TENSORS}
    figures: dict = {}  # (contender, tensor) to a pair of figures for each seed
    failed: dict = {}
    for seed in seeds:
        try:
            inputs = backend.numbers(calls["forward"], seed)
            exact = reference(*inputs, calls["forward"].causal)
        except Exception as why:  # no memory for it, or no such type here
            without.append({"what": str(calls["forward"]), "why": _why(why)})
            return []
        for tensor, values in exact.items():
            figures.setdefault((None, tensor), []).append(_figures(values))
        for name, contender in contenders.items():
            if name in failed:
                continue
            try:
                results = _results(contender, calls["backward"], inputs)
                for tensor, values in results.items():
                    difference = values.double().sub_(exact[tensor])
                    figures.setdefault((name, tensor), []).append(_figures(difference))
            except Exception as why:  # whatever a library raises for what it cannot do
                failed[name] = _why(why)
    without += [{"what": f"{name}: {calls['forward']}", "why": failed[name]} for name in failed]
    rows = []
    for direction, tensors in TENSORS.items():
        row = {key: value for key, value in calls[direction].fields().items() if key != "options"}
        row["kernel"] = kernel_name(
            direction, *(row[key] for key in ("d", "dtype", "causal", "heads", "kv_heads")),
            batch=row["b"], q_len=row["s"], kv_len=row["s"], device=backend.ordinal,
        ) if OURS in contenders and OURS not in failed else None  # fmt: skip
        row["reference"] = {tensor: _lists(figures[None, tensor]) for tensor in tensors}
        row["errors"] = {
            name: {tensor: _lists(figures[name, tensor]) for tensor in tensors}
            for name in contenders
            if name not in failed and (name, tensors[0]) in figures
        }
        if row["errors"]:
            rows.append(row)
    return rows


def _why(why: Exception) -> str:
    return f"{type(why).__name__}: {' '.join(str(why).split())[:300]}"


def _results(contender: Any, w: Workload, inputs: list) -> dict:
    """What a contender computes, [batch, row, head, channel]: o, and gradients if it has them."""
    import torch

    *qkv, d_o = [contender.lay_out(x) for x in inputs]
    compute = contender.call(w)
    if not contender.has_backward:
        with torch.no_grad():
            return {"o": contender.read(compute(*qkv))}
    leaves = [x.detach().requires_grad_() for x in qkv]
    o = compute(*leaves)
    results = (o.detach(), *torch.autograd.grad(o, leaves, d_o))
    return {name: contender.read(x) for name, x in zip(("o", "dq", "dk", "dv"), results)}


def _figures(values: Any) -> tuple[float, float]:
    """The largest magnitude, and the root mean square."""
    most, square = float(values.abs().max()), float(values.square().mean())
    if not most < float("inf"):
        raise ArithmeticError("a result is not finite")
    return most, square**0.5


def _lists(pairs: list) -> dict:
    return {name: [pair[i] for pair in pairs] for i, name in enumerate(("max", "rms"))}


def reference(q: Any, k: Any, v: Any, d_o: Any, causal: bool) -> dict:
    """Attention and its gradients in f64, [batch, row, head, channel] each; causal is square."""
    import torch

    scale, group = q.shape[-1] ** -0.5, q.shape[2] // k.shape[2]
    exact = {
        name: torch.zeros(x.shape, dtype=torch.float64, device=x.device)
        for name, x in (("o", d_o), ("dq", q), ("dk", k), ("dv", v))
    }
    rows = max(1, _BLOCK // k.shape[1])
    for item in range(q.shape[0]):
        for head in range(q.shape[2]):
            keys, values = (x[item, :, head // group].double() for x in (k, v))
            dk, dv = (exact[name][item, :, head // group] for name in ("dk", "dv"))
            for first in range(0, q.shape[1], rows):
                block = (item, slice(first, first + rows), head)
                queries, gradient = q[block].double(), d_o[block].double()
                p = (queries @ keys.T).mul_(scale)
                if causal:
                    hidden = torch.ones(p.shape, dtype=torch.bool, device=p.device)
                    p.masked_fill_(hidden.triu_(first + 1), float("-inf"))
                p = torch.softmax(p, dim=1)
                o = p @ values
                dv += p.T @ gradient
                d_p = gradient @ values.T
                d_s = d_p.sub_((gradient * o).sum(1, keepdim=True)).mul_(p).mul_(scale)
                exact["o"][block], exact["dq"][block] = o, d_s @ keys
                dk += d_s.T @ queries
    return exact


def words(run: dict) -> str:
    """The record as a table: root mean square errors, of all seeds, and the largest."""
    lines = [f"{run['device']['name']}, {run['date']}, {len(run['seeds'])} seeds: rms (largest)"]
    for row in run["rows"]:
        for tensor in TENSORS[row["direction"]]:
            cells = []
            for name, errors in row["errors"].items():
                rms = (sum(x * x for x in errors[tensor]["rms"]) / len(run["seeds"])) ** 0.5
                cells.append(f"{name} {rms:.3g} ({max(errors[tensor]['max']):.3g})")
            lines.append(f"{Workload.of(row)}  {tensor}: {'  '.join(cells)}")
    lines += [f"left out: {left['what']}: {left['why']}" for left in run["left_out"]]
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ferroflash.errors",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--seqs", type=sizes, help="rows and keys of an item (default: 512,2048,8192)")
    add("--dims", type=sizes, help="channels of a head (default: 64,128,256)")
    add("--heads", type=size, help="query heads (default: 8)")
    add("--kv-heads", type=size, help="key and value heads (default: as many)")
    add("--batch", type=size, help="items (default: 1)")
    add("--dtype", choices=DTYPES, help="(default: bf16, on a CPU f32)")
    add("--causal", type=masks, default=[False, True], help="none, bottom-right (default: both)")
    add("--seeds", type=sizes, default=[1, 2, 3], help="three at least (default: 1,2,3)")
    add(
        "--contenders",
        type=lambda text: text.split(","),
        help="by name (default: all but dense, flex)",
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--json", metavar="FILE", help="write the record; - is stdout")
    add("--force", action="store_true", help="replace FILE")
    return parser


if __name__ == "__main__":
    sys.exit(main())
