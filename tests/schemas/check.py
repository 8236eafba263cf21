"""Validates the schemas of fixtures/schemas, and the committed records by them, with Python's
jsonschema: a reader that shares nothing with `cargo xtask`'s own.

    pip install jsonschema
    python tests/schemas/check.py

Of the rows of evidence every fortieth is looked at; `cargo xtask evidence --check` reads all.
"""

import json
import pathlib
import sys

import jsonschema

ROOT = pathlib.Path(__file__).resolve().parents[2]
RECORDS = {
    "kernel-evidence.v1": "fixtures/evidence/*.json",
    "profile.v1": "fixtures/profiles/*.json",
    "errors.v1": "docs/benchmarks/errors-*.json",
    "bench.v1": "docs/benchmarks/[fpr]*-h200.json",
}
STEP = 40


def read(file):
    return json.loads(file.read_text(encoding="utf-8"))


def main():
    schemas = {file.stem: read(file) for file in (ROOT / "fixtures/schemas").glob("*.json")}
    if schemas.keys() != RECORDS.keys():
        sys.exit(f"records are known of {sorted(RECORDS)}, schemas are {sorted(schemas)}")
    checked = 0
    for name, schema in schemas.items():
        jsonschema.Draft202012Validator.check_schema(schema)
        validator = jsonschema.Draft202012Validator(schema)
        for file in sorted(ROOT.glob(RECORDS[name])):
            record = read(file)
            if name == "kernel-evidence.v1":
                record["rows"] = record["rows"][::STEP]
            for error in validator.iter_errors(record):
                sys.exit(f"{file.name}: {error.json_path}: {error.message[:200]}")
            checked += 1
            # A record with a field that no one knows must be found out.
            if validator.is_valid({**record, "unknown": 1}):
                sys.exit(f"{name} takes what it does not describe")
    print(f"{len(schemas)} schemas, {checked} records")


if __name__ == "__main__":
    main()
