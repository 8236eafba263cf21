"""Runs of `ferroflash.bench` as files, of the schema `ferroflash.bench.v1`."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from typing import Any, NamedTuple

SCHEMA = "ferroflash.bench.v1"
LEAST_SAMPLES = 20
LEAST_SEEDS = 3


class Workload(NamedTuple):
    """What is timed: self-attention of `s` rows, causal or full."""

    direction: str
    deterministic: bool
    d: int
    s: int
    b: int
    heads: int
    kv_heads: int
    dtype: str
    causal: bool

    @classmethod
    def of(cls, row: dict) -> Workload:
        """The workload of a row."""
        return cls(**{name: row[name] for name in cls._fields})

    def fields(self) -> dict:
        """The row's fields that say what was timed."""
        sizes = {"d": self.d, "dv": self.d, "s": self.s, "sk": self.s, "b": self.b}
        heads = {"heads": self.heads, "kv_heads": self.kv_heads}
        kind = {"causal": self.causal, "deterministic": self.deterministic, "options": {}}
        return {"direction": self.direction, **sizes, **heads, "dtype": self.dtype, **kind}

    def flops(self) -> float:
        """Operations by the papers' convention: half of them causal, 2.5 times them backward."""
        forward = 4.0 * self.b * self.heads * self.s * self.s * self.d
        return (
            forward * (0.5 if self.causal else 1.0) * (1.0 if self.direction == "forward" else 2.5)
        )

    def __str__(self) -> str:
        heads = str(self.heads) if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        kind = f"{self.direction}, {'causal' if self.causal else 'full'}"
        kind += ", deterministic" if self.deterministic else ""
        return f"{self.dtype} {kind}, d {self.d}, s {self.s}, b {self.b}, heads {heads}"


def chosen(there: dict[str, Any], names: list[str] | None) -> dict[str, Any]:
    """Those that were named, in that order, or all that need not be."""
    if names is None:
        return {name: c for name, c in there.items() if not c.only_by_name}
    missing = [name for name in names if name not in there]
    if missing:
        raise ValueError(f"--contenders: there is no {missing[0]} here, but {', '.join(there)}")
    return {name: there[name] for name in names}


def new_run(backend: Any, version: str, peers: dict[str, str]) -> dict:
    """A run without rows."""
    return {
        "schema": SCHEMA,
        "ferroflash": version,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": backend.device(),
        "method": backend.method,
        "clocks": backend.clocks(),
        "timer_ms": round(backend.timer.empty_ms(), 6),
        "peers": peers,
        "rows": [],
        "left_out": [],
        "roofs": [],
    }


def refuse_existing(path: str | None, force: bool) -> None:
    """Refuses to replace a file unless told to."""
    if path not in (None, "-") and os.path.lexists(path) and not force:
        raise ValueError(f"--json: {path} is there already; --force replaces it")


def write(run: dict, path: str, force: bool) -> None:
    """Writes the run to a file, whole or not at all; - is stdout."""
    text = json.dumps(run) + "\n"
    if path == "-":
        sys.stdout.write(text)
        return
    refuse_existing(path, force)
    folder = os.path.dirname(path) or "."
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=".ferroflash-")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def processor() -> dict:
    """The CPU, as a run's device."""
    name = os.uname().machine if hasattr(os, "uname") else "cpu"
    try:
        with open("/proc/cpuinfo") as file:
            models = [
                line.split(":", 1)[1].strip() for line in file if line.startswith("model name")
            ]
        name = next(filter(None, models), name)
    except OSError:
        pass
    none = {"driver": None, "capability": None, "l2_bytes": None}
    return {"backend": "cpu", "name": name, "units": threads(), **none}


def threads() -> int:
    """Threads of the CPU path: its pool's, or what its variable asks for."""
    asked = os.environ.get("RAYON_NUM_THREADS", "")
    if asked.isdecimal() and int(asked) > 0:
        return int(asked)
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


class HostTimer:
    """Samples by the host's clock, of work that is done when a call returns."""

    aim_ms, most_calls = 2.0, 10_000

    def sample(self, call: Any, calls: int, expected_ms: float = 0.0) -> tuple[float, float]:
        """Milliseconds a call, and those in which the host queued it."""
        begun = time.perf_counter()
        for _ in range(calls):
            call()
        ms = (time.perf_counter() - begun) * 1e3 / calls
        return ms, ms

    def empty_ms(self) -> float:
        """What a sample without work lasts."""
        return sorted(self.sample(lambda: None, 1)[0] for _ in range(21))[10]
