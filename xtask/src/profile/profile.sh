#!/usr/bin/env bash
# Profiles one forward and one backward call with Nsight Compute, stage by stage. Run it beside the
# unpacked programs of `cargo xtask gpu-bundle` on a machine with a GPU, torch and ncu.
#
#   profile.sh [BATCH Q_HEADS KV_HEADS LENGTH CHANNELS none|top-left]
#
# In $OUT (default ./out): call.json, what was run on what; stages.csv, ncu's raw page, a line a
# kernel. `cargo xtask profile --import OUT` makes a record of the two. Exit status 3: ncu is not
# there, or may not read the counters (see docs/profiling.md).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=${OUT:-./out}
mkdir -p "$out"
batch=${1:-4} q_heads=${2:-16} kv_heads=${3:-16} length=${4:-4096} channels=${5:-128}
causal=${6:-none}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

ncu=
for place in "$(command -v ncu || true)" /usr/local/cuda/bin/ncu \
  /opt/nvidia/nsight-compute/*/ncu; do
  [ -x "$place" ] && { ncu=$place; break; }
done
[ -n "$ncu" ] || { echo "profile.sh: Nsight Compute (ncu) is not installed" >&2; exit 3; }

python3 - "$scratch/call.safetensors" "$batch" "$q_heads" "$kv_heads" "$length" "$channels" <<'END'
import json, struct, sys, torch
path, (batch, q_heads, kv_heads, length, channels) = sys.argv[1], map(int, sys.argv[2:])
torch.manual_seed(1)
tensors = {}
for name, heads in [("q", q_heads), ("k", kv_heads), ("v", kv_heads), ("d_o", q_heads)]:
    tensors[name] = torch.randn(batch, length, heads, channels).bfloat16()
header, blobs, at = {}, [], 0
for name, tensor in tensors.items():
    blob = tensor.contiguous().view(torch.int16).numpy().tobytes()
    header[name] = {
        "dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [at, at + len(blob)],
    }
    blobs.append(blob)
    at += len(blob)
text = json.dumps(header).encode()
text += b" " * (-len(text) % 8)
with open(path, "wb") as file:
    file.write(struct.pack("<Q", len(text)) + text + b"".join(blobs))
END

# Names differ between versions of the tool and between chips: those that this one has.
wanted="gpu__time_duration.sum dram__bytes_read.sum dram__bytes_write.sum
  lts__t_sectors_op_read.sum lts__t_sectors_op_write.sum lts__t_sectors_op_red.sum
  sm__ops_path_tensor_src_bf16_dst_fp32.sum sm__inst_executed_pipe_tensor.sum
  sm__inst_executed_pipe_tensor_op_hmma.sum sm__inst_executed_pipe_tensor_op_gmma.sum
  launch__registers_per_thread launch__shared_mem_per_block_dynamic"
"$ncu" --query-metrics >"$scratch/known" 2>/dev/null || true
metrics=
for metric in $wanted; do
  base=${metric%%.*}
  case $base in
    launch__*) metrics=$metrics,$metric ;;
    *) grep -q "^$base " "$scratch/known" && metrics=$metrics,$metric ;;
  esac || true
done

run() { # run NAME ARGUMENTS: the command under ncu, its raw page as CSV
  local name=$1
  shift
  "$ncu" --csv --page raw --print-units base --clock-control none --cache-control all \
    --kernel-name 'regex:^(hopper|portable)_' --metrics "${metrics#,}" \
    "$here/bin/ferroflash" "$@" --device cuda:0 --causal "$causal" \
    --out "$scratch/$name.safetensors" \
    >"$scratch/$name.said" 2>"$scratch/$name.errors" || true
  grep '^"' "$scratch/$name.said" >"$scratch/$name.csv" || {
    echo "profile.sh: ncu gave no figures: $(grep -h -m 1 -E '==ERROR==|ERR_' \
      "$scratch/$name.said" "$scratch/$name.errors" || tail -n 1 "$scratch/$name.errors")" >&2
    exit 3
  }
}
run forward attend "$scratch/call.safetensors"
run backward grad "$scratch/call.safetensors"
# The backward command runs a forward pass first; its stages alone are taken from the second.
cat "$scratch/forward.csv" >"$out/stages.csv"
grep -E '_(backward_|preprocess_|convert_)' "$scratch/backward.csv" >>"$out/stages.csv"

gpu=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -n 1)
cat >"$out/call.json" <<END
{"device": "${gpu%%,*}", "driver": "${gpu##*, }", "recorded": "$(date -u +%F)",
 "tool": "$("$ncu" --version | tail -n 1)",
 "batch": $batch, "q_heads": $q_heads, "kv_heads": $kv_heads, "length": $length,
 "channels": $channels, "causal": $([ "$causal" = none ] && echo false || echo true)}
END
echo "profile.sh: $(($(wc -l <"$out/stages.csv") - 2)) stages in $out/stages.csv"
