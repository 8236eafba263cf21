"""The package as others see it: names, documentation, types, the command."""

import ast
import inspect
import os
import pathlib
import shutil
import subprocess
import sys

import ferroflash
import pytest
from ferroflash import _native

HERE = pathlib.Path(ferroflash.__file__).parent
FUNCTIONS = [name for name in ferroflash.__all__ if inspect.isfunction(getattr(ferroflash, name))]


def stub():
    """Parameters of each function and method of the native half's stub, and names of its values."""
    found, values = {}, set()
    for node in ast.parse((HERE / "_native.pyi").read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = parameters(node)
        elif isinstance(node, ast.ClassDef):
            for part in node.body:
                if isinstance(part, ast.FunctionDef):
                    name = node.name if part.name == "__new__" else f"{node.name}.{part.name}"
                    found[name] = parameters(part)
                elif isinstance(part, ast.AnnAssign):
                    values.add(f"{node.name}.{part.target.id}")
        elif isinstance(node, ast.AnnAssign) and node.target.id.startswith("__"):
            values.add(node.target.id)
    return found, values


def parameters(function):
    arguments = function.args
    by_place = [(x.arg, "POSITIONAL_ONLY") for x in arguments.posonlyargs if x.arg != "cls"]
    others = [(x.arg, "POSITIONAL_OR_KEYWORD") for x in arguments.args if x.arg != "self"]
    return by_place + others


def test_the_stub_is_what_runs():
    found, values = stub()
    there = {name for name in vars(_native) if not name.startswith("__")}
    assert there == {name for name in found if "." not in name}
    members = {f"Plan.{name}" for name in vars(_native.Plan) if not name.startswith("__")}
    assert members == {name for name in (*found, *values) if "." in name}
    for name, want in found.items():
        function = _native
        for part in name.split("."):
            function = getattr(function, part)
        had = inspect.signature(function).parameters.values()
        assert [(x.name, x.kind.name) for x in had if x.name != "self"] == want, name
    assert all(hasattr(_native, name) for name in values if "." not in name)


def test_the_package_says_that_it_is_typed():
    assert (HERE / "py.typed").exists()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_functions_are_typed_and_documented(name):
    function = getattr(ferroflash, name)
    parameters = inspect.signature(function).parameters
    assert "return" in function.__annotations__
    assert parameters.keys() <= function.__annotations__.keys()
    text = inspect.getdoc(function)
    # An argument is described here or in the function that this one refers to.
    others = [inspect.getdoc(getattr(ferroflash, other)) for other in FUNCTIONS if other in text]
    for parameter in parameters:
        assert parameter in ("args", "kwargs") or any(parameter in x for x in (text, *others))


def test_exactly_the_public_names_are_there():
    public = {name for name in vars(ferroflash) if not name.startswith("_")}
    modules = {name for name in public if inspect.ismodule(getattr(ferroflash, name))}
    assert public - modules == set(ferroflash.__all__)


def test_the_module_run_as_a_program_is_the_doctor():
    command = [sys.executable, "-m", "ferroflash"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.startswith(f"ferroflash {ferroflash.__version__}\n")
    assert "cpu " in done.stdout and "python " in done.stdout and "numpy " in done.stdout


def test_a_driver_that_is_too_old_is_named(tmp_path):
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a C compiler, to stand in for a driver")
    (tmp_path / "old.c").write_text("int cuInit(unsigned flags) { return 0; }\n")
    for name in ("libcuda.so", "libcuda.so.1"):
        command = [
            compiler,
            "-shared",
            "-fPIC",
            "-o",
            str(tmp_path / name),
            str(tmp_path / "old.c"),
        ]
        subprocess.run(command, check=True)
    program = (
        "import ferroflash\n"
        "assert not ferroflash.is_available()\n"
        "try: ferroflash.kernel_name(device=0)\n"
        "except RuntimeError as error: print(error)\n"
        "print(ferroflash.doctor())\n"
    )
    # Before the path of a driver that may be here.
    path = os.pathsep.join([str(tmp_path), os.environ.get("LD_LIBRARY_PATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "LD_LIBRARY_PATH": path},
    )
    error, *rest = done.stdout.splitlines()
    needs = "a driver for CUDA 12.0 or later is needed"
    assert "libcuda has no cu" in error and needs in error
    assert any(line.startswith("cuda ") and needs in line for line in rest)
