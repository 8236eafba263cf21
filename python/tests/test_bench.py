"""`python -m ferroflash.bench` on the CPU: rows, files and refusals."""

import json
import pathlib
import subprocess
import sys

import pytest

try:
    import jsonschema
except ImportError:  # rows are checked without it too
    jsonschema = None
from ferroflash import bench
from ferroflash._bench_clocks import reasons
from ferroflash._bench_record import Workload

SCHEMA = pathlib.Path(__file__).parents[2] / "fixtures" / "schemas" / "bench.v1.json"
TINY = ["--device", "cpu", "--seqs", "16,24", "--dims", "8", "--heads", "2", "--batch", "1"]


def follows_the_schema(run):
    if jsonschema is None:
        return
    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))
    assert [fault.message for fault in validator.iter_errors(run)] == []
    wrong = json.loads(json.dumps(run))
    wrong["rows"][0]["ms"][bench.OURS] = [1.0] * 19
    assert not validator.is_valid(wrong)


def measured(arguments, path):
    assert bench.main([*arguments, "--json", str(path)]) == 0
    return json.loads(path.read_text())


def check_rows(run, contenders, passes=3):
    rows = run["rows"]
    assert len(rows) == 2 * 2 * passes
    for row in rows:
        forward = 4 * row["b"] * row["heads"] * row["s"] ** 2 * row["d"]
        half, more = 0.5 if row["causal"] else 1.0, 1.0 if row["direction"] == "forward" else 2.5
        assert row["flops"] == forward * half * more
        assert row["kernel"] == f"cpu_tiled_{row['direction']}"
        there = [bench.OURS] if row["deterministic"] else contenders
        assert sorted(row["ms"]) == sorted(there)
        assert all(len(samples) == 20 and min(samples) > 0 for samples in row["ms"].values())
        if len(there) > 1:
            assert row["difference"]["torch"] < 1e-4


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_numpy_is_enough(dtype, tmp_path, monkeypatch):
    pytest.importorskip("numpy")
    if dtype == "bf16":
        pytest.importorskip("ml_dtypes")
    from ferroflash._bench_numpy import NumpyBackend

    monkeypatch.setattr(bench, "_backend", lambda _: NumpyBackend())
    passes = ["--directions", "forward,backward,deterministic", "--dtype", dtype]
    run = measured(TINY + passes, tmp_path / "run.json")
    follows_the_schema(run)
    check_rows(run, [bench.OURS])
    assert run["left_out"] == [] and run["peers"] == {}


def test_torch_takes_its_turn(tmp_path):
    pytest.importorskip("torch")
    passes = ["--directions", "forward,backward,deterministic"]
    run = measured([*TINY, *passes, "--kv-heads", "1"], tmp_path / "run.json")
    follows_the_schema(run)
    check_rows(run, [bench.OURS, "torch"])
    assert {row["kv_heads"] for row in run["rows"]} == {1}
    # Torch is not asked for determinism, and that is said.
    assert len(run["left_out"]) == 4 and "torch" in run["left_out"][0]["what"]


def test_dense_takes_part_where_it_is_named(tmp_path):
    pytest.importorskip("torch")
    named = ["--contenders", "torch,dense", "--directions", "forward,backward"]
    run = measured([*TINY, *named, "--kv-heads", "1"], tmp_path / "run.json")
    for row in run["rows"]:
        assert set(row["ms"]) == {"torch", "dense"} and row["difference"]["dense"] < 1e-5
    run = measured([*TINY, *named[:2], "--dtype", "bf16"], tmp_path / "half.json")
    assert all(set(row["ms"]) == {"torch"} for row in run["rows"])
    assert "is for f32 alone" in run["left_out"][0]["why"]


def test_wrong_results_are_left_out(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    from ferroflash import _bench_torch
    from ferroflash._bench_contenders import Contender, on_cpu

    def zeros(w):
        return lambda q, k, v: (torch.zeros_like(q), None)

    there = {**on_cpu(), "zeros": Contender("0", zeros)}
    monkeypatch.setattr(_bench_torch, "on_cpu", lambda: there)
    run = measured([*TINY, "--directions", "forward"], tmp_path / "run.json")
    assert all("zeros" not in row["ms"] for row in run["rows"])
    assert "differs from ferroflash's" in run["left_out"][0]["why"]


def test_roofs(tmp_path, monkeypatch):
    pytest.importorskip("numpy")
    from ferroflash._bench_numpy import NumpyBackend

    monkeypatch.setattr(bench, "_backend", lambda _: NumpyBackend())
    run = measured(["--only-roofs"], tmp_path / "roofs.json")
    assert [roof["kind"] for roof in run["roofs"]] == ["copy", "matrix"] and run["rows"] == []
    assert all(len(roof["ms"]) == 20 and roof["work"] > 0 for roof in run["roofs"])


def test_files_that_are_there_stay(tmp_path, capsys):
    path = tmp_path / "run.json"
    path.write_text("precious")
    arguments = [*TINY, "--directions", "forward", "--json", str(path)]
    assert bench.main(arguments) == 2
    assert "--force" in capsys.readouterr().err and path.read_text() == "precious"
    assert bench.main([*arguments, "--force"]) == 0
    assert json.loads(path.read_text())["schema"] == "ferroflash.bench.v1"


@pytest.mark.parametrize(
    "wrong, words",
    [
        (["--rounds", "19"], "--rounds: 19"),
        (["--kv-heads", "3"], "--kv-heads: 3"),
        (["--contenders", "nobody"], "there is no nobody"),
        (["--seqs", "8,8"], "asked for twice"),
    ],
)
def test_what_cannot_be_is_refused(wrong, words, capsys):
    assert bench.main([*TINY, *wrong]) == 2
    assert words in capsys.readouterr().err


def test_nothing_measured_is_no_success(monkeypatch, tmp_path, capsys):
    pytest.importorskip("numpy")
    from ferroflash._bench_numpy import NumpyBackend

    monkeypatch.setattr(bench, "_backend", lambda _: NumpyBackend())
    path = tmp_path / "run.json"
    wide = ["--seqs", "8", "--dims", "600", "--json", str(path)]
    assert bench.main(wide) == 1
    assert "nothing was measured" in capsys.readouterr().err
    assert json.loads(path.read_text())["rows"] == []
    # One that was measured is enough.
    assert bench.main([*TINY, "--dims", "8,600", "--directions", "forward"]) == 0


@pytest.mark.parametrize("wrong", [["--seqs", "0"], ["--dtype", "f64"], ["--causal", "left"]])
def test_what_does_not_parse_is_refused(wrong):
    with pytest.raises(SystemExit) as stop:
        bench.main(wrong)
    assert stop.value.code == 2


def test_it_runs_as_a_module():
    pytest.importorskip("numpy")
    arguments = [*TINY[:2], "--seqs", "8", *TINY[4:], "--directions", "forward", "--json", "-"]
    command = [sys.executable, "-m", "ferroflash.bench", *arguments]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert len(json.loads(ran.stdout)["rows"]) == 2


def test_operations_and_words():
    w = Workload("backward", True, 64, 128, 2, 4, 2, "bf16", True)
    assert w.flops() == 2.5 * 4 * 2 * 4 * 128 * 128 * 64 / 2
    assert str(w) == "bf16 backward, causal, deterministic, d 64, s 128, b 2, heads 4/2"
    assert Workload.of(w.fields()) == w
    assert reasons(0x04 | 0x40 | 0x01) == ["power cap", "thermal, by hardware"]
