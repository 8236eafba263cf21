"""Times the CPU path against PyTorch's CPU attention, in alternating rounds of one run.

    cargo build --release -p ferroflash --example cpu_rounds
    python tests/peers/cpu.py target/release/examples/cpu_rounds --output docs/benchmarks/cpu.json

Both sides have f32 tensors of the same shape and memory order, and the same number of threads.
While one runs, the other waits: ours for a line, PyTorch's threads passively. The order of the two
changes from round to round. Rows of the output, times in milliseconds, one a round:

    {"direction", "causal", "s", "d", "heads", "threads", "ms": {"ferroflash": [], "torch": []}}
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import time


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", help="the built example cpu_rounds")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--output", type=pathlib.Path)
    return parser.parse_args()


class Ours:
    """The example program, held open."""

    def __init__(self, options):
        sizes = [str(size) for size in (options.heads, options.length, options.channels)]
        self.process = subprocess.Popen(
            [options.program, *sizes],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "RAYON_NUM_THREADS": str(options.threads)},
        )

    def __call__(self, direction, causal):
        self.process.stdin.write(f"{direction} {'causal' if causal else 'full'}\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())


class Torch:
    """PyTorch's scaled_dot_product_attention on the CPU."""

    def __init__(self, options):
        import torch

        torch.set_num_threads(options.threads)
        self.attention = torch.nn.functional.scaled_dot_product_attention
        shape = (1, options.heads, options.length, options.channels)
        uniform = lambda: torch.rand(shape) * 2 - 1
        self.inputs = [uniform() for _ in range(3)]
        self.d_o = uniform()
        self.no_grad = torch.no_grad

    def __call__(self, direction, causal):
        if direction == "forward":
            with self.no_grad():
                start = time.perf_counter()
                self.attention(*self.inputs, is_causal=causal)
                return (time.perf_counter() - start) * 1e3
        inputs = [tensor.clone().requires_grad_() for tensor in self.inputs]
        o = self.attention(*inputs, is_causal=causal)
        start = time.perf_counter()
        o.backward(self.d_o)
        return (time.perf_counter() - start) * 1e3


def main():
    options = arguments()
    # Before PyTorch is imported: its threads must not spin while the other side runs.
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    sides = {"ferroflash": Ours(options), "torch": Torch(options)}
    rows = []
    for direction in ("forward", "backward"):
        for causal in (False, True):
            for run in sides.values():
                run(direction, causal)
            ms = {name: [] for name in sides}
            for round_number in range(options.rounds):
                names = list(sides) if round_number % 2 else list(reversed(sides))
                for name in names:
                    ms[name].append(round(sides[name](direction, causal), 4))
            rows.append(
                {
                    "direction": direction,
                    "causal": causal,
                    "s": options.length,
                    "d": options.channels,
                    "heads": options.heads,
                    "threads": options.threads,
                    "ms": ms,
                }
            )
            report(rows[-1])
    if options.output:
        written = options.output.with_suffix(".partial")
        written.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
        written.replace(options.output)


def report(row):
    products = 4 if row["direction"] == "forward" else 10
    flops = products * row["heads"] * row["s"] ** 2 * row["d"] / (2 if row["causal"] else 1)
    medians = {name: statistics.median(times) for name, times in row["ms"].items()}
    rates = {name: flops / median / 1e6 for name, median in medians.items()}
    print(
        f"{row['direction']:8} {'causal' if row['causal'] else 'full':6}"
        + "".join(f"  {name} {rate:6.1f} GFLOP/s" for name, rate in rates.items())
        + f"  ratio {rates['ferroflash'] / rates['torch']:.2f}"
    )


if __name__ == "__main__":
    main()
