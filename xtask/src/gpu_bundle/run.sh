#!/usr/bin/env bash
# Runs one stage of ferroflash's GPU checks on a machine that has a GPU and no Rust.
#
#   run.sh STAGE [--budget SECONDS] [--filter TEXT]
#
#   unpack     nothing but what every stage does first: the programs, from programs.lzma
#   test       every GPU test, with the cubins and with the PTX
#   memcheck   the tests whose names contain the filter, under compute-sanitizer's memcheck
#   racecheck  likewise under racecheck
#   command    `ferroflash attend --check` on the fixtures
#   python     the Python package's tests, those of a GPU, where pytest and torch are installed
#   bench      timings beside the peers that Python can import
#
# Records are JSON lines in $OUT (default ./out), one file a stage; evidence.jsonl is what
# `cargo xtask evidence --import` takes in. A stage that was cut short goes on where its record
# ends; delete the record to begin anew. Exit status: 0 all done and right, 1 something failed,
# 2 bad usage, 3 the budget ran out.
set -u
here=$(cd "$(dirname "$0")" && pwd)
stage=${1:-}
shift || true
budget=540
filter=
while [ $# -gt 0 ]; do
  case $1 in
    --budget) budget=${2:-}; shift ;;
    --filter) filter=${2:-}; shift ;;
    *) echo "run.sh: unknown argument $1" >&2; exit 2 ;;
  esac
  shift || true
done
case $budget in '' | *[!0-9]*) echo "run.sh: --budget takes whole seconds" >&2; exit 2 ;; esac

out=${OUT:-./out}
mkdir -p "$out"
out=$(cd "$out" && pwd)
scratch=$(mktemp -d)
trap 'collect_rows; rm -rf "$scratch"' EXIT
trap 'exit 3' INT TERM
record=$out/$stage.jsonl
log=$out/log.txt
export FERROFLASH_FIXTURES="$here/fixtures" FERROFLASH_REQUIRE_GPU=1
export PYTHONPATH="$here/python${PYTHONPATH:+:$PYTHONPATH}"

note() { echo "run.sh: $*" | tee -a "$log" >&2; }
left() { echo $((budget - SECONDS)); }
# The stream of the programs, by whichever reader there is.
stream() {
  if command -v xz >/dev/null; then
    xz --format=lzma -dc "$here/programs.lzma"
  else
    python3 -c 'import lzma, shutil, sys
shutil.copyfileobj(lzma.open(sys.argv[1]), sys.stdout.buffer)' "$here/programs.lzma"
  fi
}
# Unpacks the programs beside this script, where that was not done before.
unpack() {
  local first bytes path
  [ -f "$here/programs.lzma" ] || return 0
  stream >"$scratch/programs" || { note "programs.lzma does not unpack"; exit 2; }
  while read -r first bytes path; do
    mkdir -p "$here/${path%/*}"
    tail -c "+$((first + 1))" "$scratch/programs" | head -c "$bytes" >"$here/$path.part"
    chmod +x "$here/$path.part"
    mv "$here/$path.part" "$here/$path"
  done <"$here/programs.list"
  rm -f "$here/programs.lzma" "$scratch/programs"
}
# Text as a JSON string.
quoted() { printf '"%s"' "$(printf %s "$1" | tr '\n\t' '  ' | sed 's/[\\"]/\\&/g')"; }
# Whether the record has a line with this key.
has() { [ -f "$record" ] && grep -qF "\"key\": $(quoted "$1")," "$record"; }
# add KEY PASSED MORE: one line of the record.
add() { echo "{\"key\": $(quoted "$1"), \"passed\": $2${3:+, $3}}" >>"$record"; }
# Ends the stage when the budget is spent.
in_budget() { [ "$(left)" -gt 2 ] || { note "$stage: the budget of $budget s ran out"; exit 3; }; }

# Moves the evidence that the tests wrote behind a line that says where and when it arose.
collect_rows() {
  [ -s "$scratch/rows.jsonl" ] || return 0
  local gpu device driver clocks
  gpu=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -n 1)
  device=${gpu%%,*} driver=${gpu##*, }
  clocks=$(nvidia-smi --query-gpu=clocks.sm,clocks.mem,clocks.max.sm --format=csv,noheader \
    2>/dev/null | head -n 1)
  {
    printf '{"device": %s, "driver": %s, "recorded": "%s"%s}\n' \
      "$(quoted "${device:-unknown}")" "$(quoted "${driver:-unknown}")" "$(date -u +%F)" \
      "${clocks:+, \"clocks\": $(quoted "SM, memory, most of SM: $clocks")}"
    # A row that was cut short is no row.
    grep '}$' "$scratch/rows.jsonl"
  } >>"$out/evidence.jsonl"
  rm -f "$scratch/rows.jsonl"
}

# Names of a test program's tests, one a line; `[kind] ` before a name is no part of it.
tests_of() { "$1" --list --format terse 2>>"$log" | sed -n 's/: test$//p' | sed 's/^\[[^]]*\] //'; }

stage_test() {
  local form program name verdict status skips wanted
  for form in cubin ptx; do
    for program in "$here"/bin/gpu*; do
      has "done $form ${program##*/}" && continue
      in_budget
      skips=()
      wanted=0
      while IFS= read -r name; do
        if has "$form ${program##*/} $name" || [[ $name != *"$filter"* ]]; then
          skips+=(--skip "$name")
        else
          wanted=$((wanted + 1))
        fi
      done < <(tests_of "$program")
      note "test: ${program##*/} with the $form, $wanted tests to run"
      [ "$wanted" -gt 0 ] || continue
      FERROFLASH_ARTIFACT=$form FERROFLASH_EVIDENCE="$scratch/rows.jsonl" \
        timeout "$(left)" "$program" --exact "${skips[@]}" --test-threads=1 \
        >"$scratch/said" 2>&1
      status=$?
      cat "$scratch/said" >>"$log"
      while read -r verdict name; do
        case $verdict in
          ok) add "$form ${program##*/} $name" true ;;
          FAILED) add "$form ${program##*/} $name" false; note "FAILED ($form): $name" ;;
        esac
      done < <(sed -nE 's/^test (\[[^]]*\] )?(.*[^ ]) +\.\.\. (ok|FAILED)$/\3 \2/p' "$scratch/said")
      collect_rows
      grep -q '^test result: ' "$scratch/said" || [ $status = 124 ] || status=crash$status
      case $status in
        0 | 101) [ -n "$filter" ] || add "done $form ${program##*/}" true ;;
        124) note "test: the budget of $budget s ran out"; exit 3 ;;
        *) add "crash $form ${program##*/} $(date +%s)" false "\"status\": \"$status\""
           note "${program##*/} ended with $status: $(tail -n 3 "$scratch/said" | tr '\n' ' ')" ;;
      esac
    done
  done
}

sanitizer() {
  local place
  for place in "$(command -v compute-sanitizer)" /usr/local/cuda/bin/compute-sanitizer \
    /usr/local/cuda/compute-sanitizer/compute-sanitizer; do
    [ -x "$place" ] && { echo "$place"; return; }
  done
}

cannot_attach='device not supported|unable to attach|failed to (attach|initialize)|not permitted'

# One test a run: a report then names the test, and the budget is kept.
stage_sanitizer() {
  local tool program name status reason
  tool=$(sanitizer)
  if [ -z "$tool" ]; then
    add "no tool" null "\"skipped\": \"compute-sanitizer is not installed\""
    note "$stage: SKIPPED, compute-sanitizer is not installed"
    return
  fi
  for program in "$here"/bin/gpu*; do
    while IFS= read -r name; do
      has "${program##*/} $name" && continue
      in_budget
      FERROFLASH_SANITIZER=$stage FERROFLASH_EVIDENCE="$scratch/checked.jsonl" \
        timeout "$(left)" "$tool" --tool "$stage" \
        --error-exitcode 99 "$program" --exact "$name" --test-threads=1 >"$scratch/said" 2>&1
      status=$?
      cat "$scratch/said" >>"$log"
      # Rows of what the tool found nothing in are evidence, under its name.
      if [ $status = 0 ] && [ -s "$scratch/checked.jsonl" ]; then
        sed "s/^{/{\"sanitizer\": \"$stage\", /" "$scratch/checked.jsonl" >>"$scratch/rows.jsonl"
      fi
      rm -f "$scratch/checked.jsonl"
      if reason=$(grep -m 1 -iE "$cannot_attach" "$scratch/said"); then
        add "cannot attach" null "\"skipped\": $(quoted "$reason")"
        note "$stage: SKIPPED, compute-sanitizer cannot attach on this machine"
        return
      fi
      case $status in
        0) add "${program##*/} $name" true ;;
        124) note "$stage: the budget of $budget s ran out"; exit 3 ;;
        *) add "${program##*/} $name" false "\"status\": $status, \"summary\": $(quoted \
             "$(grep -m 1 'ERROR SUMMARY' "$scratch/said")")"
           note "FAILED ($stage): $name" ;;
      esac
    done < <(tests_of "$program" | grep -F -- "${filter:-sanitize}")
  done
  [ -s "$record" ] || { note "$stage: no test's name contains '${filter:-sanitize}'"; exit 2; }
}

stage_command() {
  local file form causal key
  for form in cubin ptx; do
    for file in "$here"/fixtures/minilm/*-bf16.safetensors; do
      for causal in none top-left bottom-right; do
        key="$form ${file##*/} $causal"
        has "$key" && continue
        in_budget
        if FERROFLASH_ARTIFACT=$form timeout "$(left)" "$here/bin/ferroflash" attend "$file" \
          --out "$scratch/o.safetensors" --device cuda:0 --causal "$causal" --check --json \
          >"$scratch/said" 2>"$scratch/errors"; then
          add "$key" true "\"result\": $(tr '\n' ' ' <"$scratch/said")"
        else
          add "$key" false "\"error\": $(quoted "$(cat "$scratch/errors" "$scratch/said")")"
          note "FAILED (command): $key: $(tail -n 1 "$scratch/errors")"
        fi
      done
    done
  done
}

stage_bench() {
  local dim causal key
  if ! python3 -c 'import torch, ferroflash; assert torch.cuda.is_available()' 2>>"$log"; then
    add "no peers" null "\"skipped\": \"Python cannot import torch with a GPU, and ferroflash\""
    note "bench: SKIPPED, Python cannot import torch with a GPU, and ferroflash (see log.txt)"
    return
  fi
  for dim in 64 128 256; do
    for causal in 0 1; do
      key="forward d$dim causal $causal"
      has "$key" && continue
      in_budget
      if timeout "$(left)" python3 "$here/peers/peers.py" --dims "$dim" --causal "$causal" \
        --directions forward --seqs 1024,2048,4096,8192,16384 --out "$scratch/rows.json" \
        >"$scratch/said" 2>&1; then
        cat "$scratch/said" | tee -a "$log"
        add "$key" true "\"rows\": $(tr '\n' ' ' <"$scratch/rows.json")"
      else
        cat "$scratch/said" >>"$log"
        [ "$(left)" -gt 2 ] || { note "bench: the budget of $budget s ran out"; exit 3; }
        add "$key" false "\"error\": $(quoted "$(tail -n 2 "$scratch/said")")"
        note "FAILED (bench): $key"
      fi
    done
  done
}

stage_python() {
  local file status
  if ! python3 -c 'import pytest, torch; assert torch.cuda.is_available()' 2>>"$log"; then
    add "no pytest" null "\"skipped\": \"Python cannot import pytest, and torch with a GPU\""
    note "python: SKIPPED, Python cannot import pytest, and torch with a GPU (see log.txt)"
    return
  fi
  for file in "$here"/python-tests/test_*.py; do
    has "${file##*/}" && continue
    in_budget
    timeout "$(left)" python3 -m pytest -q -p no:cacheprovider -k "not cpu" "$file" \
      >"$scratch/said" 2>&1
    status=$?
    cat "$scratch/said" >>"$log"
    case $status in
      # 5: every test of the file is the CPU's.
      0 | 5) add "${file##*/}" true "\"said\": $(quoted "$(tail -n 1 "$scratch/said")")" ;;
      124) note "python: the budget of $budget s ran out"; exit 3 ;;
      *) add "${file##*/}" false "\"said\": $(quoted "$(tail -n 1 "$scratch/said")")"
         note "FAILED (python): ${file##*/}: $(tail -n 1 "$scratch/said")" ;;
    esac
  done
}

unpack
case $stage in
  unpack) exit 0 ;;
  test) stage_test ;;
  python) stage_python ;;
  memcheck | racecheck) stage_sanitizer ;;
  command) stage_command ;;
  bench) stage_bench ;;
  *)
    echo "usage: run.sh unpack|test|memcheck|racecheck|command|python|bench" \
      "[--budget S] [--filter T]" >&2
    exit 2
    ;;
esac
count() { cat "$record" 2>/dev/null | grep -v '"key": "done ' | grep -c "\"passed\": $1"; }
failures=$(count false)
note "$stage: $(count true) passed, $failures failed, $SECONDS s"
[ "$failures" = 0 ]
