"""`python -m ferroflash.errors`: its reference, its record, and what it refuses."""

import json
import pathlib

import pytest

torch = pytest.importorskip("torch")

import numpy as np
from ferroflash import _bench_torch, errors
from ferroflash._bench_contenders import Contender, on_cpu
from reference import attention, gradients

try:
    import jsonschema
except ImportError:  # the record is checked without it too
    jsonschema = None
SCHEMA = pathlib.Path(__file__).parents[2] / "fixtures" / "schemas" / "errors.v1.json"
TINY = ["--device", "cpu", "--seqs", "20", "--dims", "8", "--heads", "4"]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block", [1, 100, 1 << 23])
def test_the_reference_is_attention(causal, block, monkeypatch):
    monkeypatch.setattr(errors, "_BLOCK", block)
    torch.manual_seed(3)
    q, k, v, d_o = (torch.randn(2, 21, n, 8) for n in (4, 2, 2, 4))
    had = errors.reference(q, k, v, d_o, causal)
    o, lse = attention(q.numpy(), k.numpy(), v.numpy(), causal=causal)
    arrays = [x.numpy() for x in (d_o, q, k, v)]
    want = (o, *gradients(*arrays, np.zeros(lse.shape), causal=causal)[:3])
    for (name, x), y in zip(had.items(), want):
        np.testing.assert_allclose(x.numpy(), y, rtol=1e-12, atol=1e-12, err_msg=name)


def test_the_record(tmp_path, capsys):
    path = tmp_path / "errors.json"
    arguments = [*TINY, "--kv-heads", "2", "--json", str(path)]
    assert errors.main(arguments) == 0
    assert "ferroflash" in capsys.readouterr().out
    run = json.loads(path.read_text())
    assert run["seeds"] == [1, 2, 3] and len(run["rows"]) == 4 and run["left_out"] == []
    forward = run["rows"][0]
    assert forward["kernel"].startswith("cpu") and set(forward["errors"]) == {"ferroflash", "torch"}
    assert len(set(forward["errors"]["ferroflash"]["o"]["rms"])) == 3, "seeds give the same numbers"
    assert errors.main(arguments) == 2
    assert "--force" in capsys.readouterr().err
    if jsonschema is not None:
        validator = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))
        assert [fault.message for fault in validator.iter_errors(run)] == []
        run["rows"][0]["errors"]["torch"]["o"]["rms"] = [0.0, 0.0]
        assert not validator.is_valid(run)


def test_an_error_is_found(tmp_path, monkeypatch):
    def off(w):
        compute = on_cpu()["torch"].make(w)
        return lambda q, k, v: compute(q, k, v) + 0.5

    def broken(w):
        return lambda q, k, v: (q + k + v) * float("nan")

    there = {
        **on_cpu(),
        "off": Contender("0", off, heads_first=True),
        "broken": Contender("0", broken),
    }
    monkeypatch.setattr(_bench_torch, "on_cpu", lambda: there)
    path = tmp_path / "errors.json"
    assert errors.main([*TINY, "--causal", "none", "--json", str(path)]) == 0
    run = json.loads(path.read_text())
    figures = run["rows"][0]["errors"]["off"]["o"]
    assert all(abs(x - 0.5) < 1e-5 for x in figures["max"] + figures["rms"])
    # What is added to o has no part in the gradients.
    assert max(run["rows"][1]["errors"]["off"]["dq"]["max"]) < 1e-5
    assert all("broken" not in row["errors"] for row in run["rows"])
    assert "not finite" in run["left_out"][0]["why"]


@pytest.mark.parametrize(
    "wrong, words",
    [
        (["--seeds", "1,2"], "--seeds"),
        (["--seeds", "1,1,1"], "--seeds"),
        (["--contenders", "nobody"], "there is no nobody"),
        (["--kv-heads", "3"], "--kv-heads"),
    ],
)
def test_what_cannot_be_is_refused(wrong, words, capsys):
    assert errors.main([*TINY, *wrong]) == 2
    assert words in capsys.readouterr().err


def test_nothing_measured_is_no_success(capsys):
    assert errors.main([*TINY[:4], "--dims", "600", "--contenders", "ferroflash"]) == 1
    assert "nothing was measured" in capsys.readouterr().err
