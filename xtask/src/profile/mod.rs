//! `cargo xtask profile`: Nsight Compute on a GPU machine, reconciled with the ledger
//! (M4.4 §0x06.3).
//!
//! `--recipe` writes the script that runs there. `--import` reads what it left, a line a kernel,
//! puts the ledger's bytes and FLOPs of each stage beside the counters, and files the two as a
//! record of fixtures/schemas/profile.v1.json.

mod csv;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use ferroflash_core::axes::{Direction, Family};
use ferroflash_core::table::{KERNELS, KernelSpec};
use ferroflash_core::visibility::{Align, Visibility};
use ferroflash_ledger::sizes::Sizes;
use ferroflash_ledger::stages::{backward_stages_of, forward_stages_of};
use ferroflash_ledger::tiles::{TileCounts, tile_counts_of};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::schema::Schema;
use crate::workspace::{read_text, root, write};

const SCRIPT: &str = include_str!("profile.sh");
const SCHEMA: &str = "ferroflash.profile.v1";
/// What a record keeps of a launch, where the chip and the tool have it; profile.sh asks for these.
const METRICS: [&str; 12] = [
    "gpu__time_duration.sum",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "lts__t_sectors_op_read.sum",
    "lts__t_sectors_op_write.sum",
    "lts__t_sectors_op_red.sum",
    "sm__ops_path_tensor_src_bf16_dst_fp32.sum",
    "sm__inst_executed_pipe_tensor.sum",
    "sm__inst_executed_pipe_tensor_op_hmma.sum",
    "sm__inst_executed_pipe_tensor_op_gmma.sum",
    "launch__registers_per_thread",
    "launch__shared_mem_per_block_dynamic",
];
const ELEMENT_BYTES: u64 = 2;
const ACCUMULATOR_BYTES: u64 = 4;

/// What `profile` was asked for.
#[derive(clap::Args)]
#[group(required = true)]
pub(crate) struct Options {
    /// Write profile.sh into FOLDER, for a machine with a GPU and Nsight Compute
    #[arg(long, value_name = "FOLDER")]
    recipe: Option<PathBuf>,
    /// Make a record of the call.json and stages.csv that profile.sh left in FOLDER
    #[arg(long, value_name = "FOLDER")]
    import: Option<PathBuf>,
    /// Put the record in the place of one of the same device, day and call
    #[arg(long, requires = "import")]
    force: bool,
}

/// The call that was profiled, and on what.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Call {
    device: String,
    driver: String,
    recorded: String,
    tool: String,
    #[serde(flatten)]
    sizes: CallSizes,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct CallSizes {
    batch: u64,
    q_heads: u64,
    kv_heads: u64,
    length: u64,
    channels: u64,
    causal: bool,
}

/// Runs `profile`.
pub(crate) fn run(options: &Options) -> Result<()> {
    if let Some(folder) = &options.recipe {
        let path = folder.join("profile.sh");
        write(&path, SCRIPT.as_bytes())?;
        eprintln!("{}", path.display());
    }
    if let Some(folder) = &options.import {
        let read = |name: &str| read_text(&folder.join(name));
        let record = record(&read("call.json")?, &read("stages.csv")?)
            .with_context(|| format!("{} is no profile", folder.display()))?;
        file(&record, options.force)?;
    }
    Ok(())
}

/// Puts a record where it belongs.
fn file(record: &Value, force: bool) -> Result<()> {
    let call: CallSizes = serde_json::from_value(record["call"].clone())?;
    let mask = if call.causal { "causal" } else { "full" };
    let text = |name: &str| record[name].as_str().unwrap_or_default().to_owned();
    let call = format!("d{}-s{}-{mask}", call.channels, call.length);
    let device = format!("{} {call}", text("device"));
    let path = root()
        .join("fixtures")
        .join("profiles")
        .join(crate::evidence::file_name(&text("recorded"), &device));
    let contents = serde_json::to_string_pretty(record)? + "\n";
    refuse_overwriting(&path, &contents, force)?;
    write(&path, contents.as_bytes())?;
    eprintln!("{}", path.display());
    Ok(())
}

fn refuse_overwriting(path: &Path, contents: &str, force: bool) -> Result<()> {
    if !force && path.exists() && read_text(path)? != contents {
        bail!("{} is there with other figures; --force replaces it", path.display());
    }
    Ok(())
}

/// The record of a call and its counters.
fn record(call: &str, stages: &str) -> Result<Value> {
    let call: Call = serde_json::from_str(call).context("call.json does not read")?;
    crate::evidence::validate_day(&call.recorded)?;
    let mut launches = Vec::new();
    for (name, counted) in csv::launches(stages, &METRICS)? {
        let spec = KERNELS.iter().find(|spec| spec.name == name);
        let spec = spec.with_context(|| format!("the kernel table has no {name}"))?;
        if launches.iter().any(|(other, _): &(&KernelSpec, _)| other.name == name) {
            bail!("{name} was launched twice: one call is expected");
        }
        launches.push((spec, counted));
    }
    let is_main =
        |spec: &KernelSpec| spec.direction == Direction::Backward && spec.family == Family::Hopper;
    let on_hopper = launches.iter().any(|(spec, _)| is_main(spec));
    let stages = launches.iter().map(|(spec, counted)| {
        let modelled = modelled(spec, &call.sizes, on_hopper)?;
        Ok(stage(spec, &modelled, counted))
    });
    let all: Vec<Value> = stages.collect::<Result<_>>()?;
    let record = json!({
        "schema": SCHEMA, "device": call.device, "driver": call.driver,
        "recorded": call.recorded, "tool": call.tool, "call": call.sizes, "stages": all,
    });
    Schema::named("profile.v1")?.validate(&record)?;
    Ok(record)
}

/// Bytes and FLOPs of a stage by the ledger.
struct Modelled {
    requested_bytes: u128,
    compulsory_bytes: Option<u128>,
    scheduled_flops: u128,
}

fn stage(spec: &KernelSpec, modelled: &Modelled, counted: &BTreeMap<String, f64>) -> Value {
    let Modelled { requested_bytes, compulsory_bytes, scheduled_flops } = *modelled;
    let mut model = json!({
        "requested_bytes": requested_bytes as f64, "scheduled_flops": scheduled_flops as f64,
    });
    let mut quotients = json!({});
    let metric = |name: &str| counted.get(name).copied();
    let dram = metric("dram__bytes_read.sum").zip(metric("dram__bytes_write.sum"));
    if let Some(bytes) = compulsory_bytes {
        model["compulsory_bytes"] = json!(bytes as f64);
    }
    if let (Some((read, written)), 1..) = (dram, requested_bytes) {
        quotients["dram_over_requested"] = json!((read + written) / requested_bytes as f64);
        if let Some(bytes) = compulsory_bytes {
            quotients["dram_over_compulsory"] = json!((read + written) / bytes as f64);
        }
    }
    let operations = metric("sm__ops_path_tensor_src_bf16_dst_fp32.sum");
    if let (Some(operations), 1..) = (operations, scheduled_flops) {
        quotients["tensor_over_scheduled"] = json!(operations / scheduled_flops as f64);
    }
    json!({
        "kernel": spec.name, "direction": spec.direction.name(), "counted": counted,
        "modelled": model, "quotients": quotients,
    })
}

/// The ledger's of a stage. A hopper main kernel clears the sums of dQ ahead of itself and converts
/// them behind, all but those of a first and a last section of heads: the clearing and converting
/// of all of them counts to it, and its sums need not leave the cache.
fn modelled(spec: &KernelSpec, call: &CallSizes, on_hopper: bool) -> Result<Modelled> {
    let sizes = Sizes {
        batch: call.batch,
        q_heads: call.q_heads,
        kv_heads: call.kv_heads,
        q_len: call.length,
        kv_len: call.length,
        head_dim: call.channels,
        value_dim: call.channels,
    };
    let tiles = tiles(spec, call)?;
    if spec.direction == Direction::Forward {
        let stages = forward_stages_of(&sizes, &tiles, ELEMENT_BYTES, ACCUMULATOR_BYTES)?;
        return Ok(Modelled {
            requested_bytes: stages.total_bytes,
            compulsory_bytes: Some(stages.compulsory_bytes),
            scheduled_flops: stages.scheduled_flops,
        });
    }
    let stages = backward_stages_of(&sizes, &tiles, ELEMENT_BYTES, ACCUMULATOR_BYTES)?;
    let values = sizes.values()?;
    let [element, accumulator] = [ELEMENT_BYTES, ACCUMULATOR_BYTES].map(u128::from);
    let statistics = accumulator * 2 * values.rows;
    let cleared = accumulator * values.q;
    let tensors = element * (values.q + values.o + 2 * (values.k + values.v)) + statistics;
    if on_hopper {
        let preprocessed = stages.preprocess_bytes - cleared;
        let main = stages.main_bytes + cleared + stages.convert_bytes;
        let (bytes, least, flops) = match spec.direction {
            Direction::Preprocess => (preprocessed, Some(preprocessed), 0),
            Direction::Convert => (0, None, 0),
            _ => (main, Some(tensors + element * values.q), stages.scheduled_flops),
        };
        return Ok(Modelled {
            requested_bytes: bytes,
            compulsory_bytes: least,
            scheduled_flops: flops,
        });
    }
    Ok(match spec.direction {
        // Its operands are read once: what it asks for is what there is.
        Direction::Preprocess => Modelled {
            requested_bytes: stages.preprocess_bytes,
            compulsory_bytes: Some(stages.preprocess_bytes),
            scheduled_flops: 0,
        },
        Direction::Convert => Modelled {
            requested_bytes: stages.convert_bytes,
            compulsory_bytes: Some(stages.convert_bytes),
            scheduled_flops: 0,
        },
        // q, k, v and dO in, two values a row, the f32 sums of dQ in and out, dK and dV out.
        _ => Modelled {
            requested_bytes: stages.main_bytes,
            compulsory_bytes: Some(tensors + accumulator * 2 * values.q),
            scheduled_flops: stages.scheduled_flops,
        },
    })
}

fn tiles(spec: &KernelSpec, call: &CallSizes) -> Result<TileCounts> {
    let length = u32::try_from(call.length).context("length")?;
    let visible = match call.causal {
        true => Visibility::causal(length, length, Align::TopLeft),
        false => Visibility::full(length, length),
    };
    let (rows, keys) = (spec.tile.q_rows, spec.tile.kv_columns.max(1));
    Ok(tile_counts_of(&visible, rows.into(), keys.into())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CALL: &str = r#"{"device": "NVIDIA H200", "driver": "580.1", "recorded": "2026-01-31",
        "tool": "ncu 1", "batch": 4, "q_heads": 16, "kv_heads": 16, "length": 4096,
        "channels": 128, "causal": false}"#;
    const CONVERT: &str = "portable_convert_bf16";
    const STAGES: &str = concat!(
        r#""ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum","#,
        r#""sm__ops_path_tensor_src_bf16_dst_fp32.sum""#,
        "\n\"\",\"\",\"byte\",\"byte\",\"\"\n",
        r#""0","hopper_forward_d128_bf16_full","201,326,592","68,157,440","549,755,813,888""#,
        "\n",
        r#""1","portable_preprocess_bf16","1000","500","0""#,
        "\n"
    );

    #[test]
    fn counters_stand_beside_the_ledger() {
        let record = record(CALL, STAGES).expect("it is a profile");
        let forward = &record["stages"][0];
        // 4·B·H·S²·d, and q, k, v, o in 16 bits with an f32 a row.
        let tensors = 4.0 * 4.0 * 4096.0 * 16.0 * 128.0 * 2.0;
        assert_eq!(forward["modelled"]["compulsory_bytes"], tensors + 4.0 * 4.0 * 16.0 * 4096.0);
        assert_eq!(forward["counted"]["dram__bytes_read.sum"], 201_326_592.0);
        let quotient = forward["quotients"]["dram_over_compulsory"].as_f64().expect("a number");
        assert!((quotient - 1.0).abs() < 0.01, "{quotient}");
        // Tiles of 176 keys do not divide 4096: a little more is scheduled than is useful.
        let tensor = forward["quotients"]["tensor_over_scheduled"].as_f64().expect("a number");
        assert!((0.95..=1.0).contains(&tensor), "{tensor}");
        assert!(record["stages"][1]["quotients"].get("tensor_over_scheduled").is_none());
    }

    #[test]
    fn the_recipe_asks_for_what_is_kept() {
        for metric in METRICS {
            assert!(SCRIPT.contains(metric), "profile.sh does not ask for {metric}");
        }
    }

    #[test]
    fn a_hopper_main_kernel_has_the_sums_of_all_stages() {
        let line = |at: u32, name: &str| format!("\"{at}\",\"{name}\",\"4096\",\"0\",\"0\"\n");
        let head: String = STAGES.lines().take(2).map(|line| line.to_owned() + "\n").collect();
        let names = ["portable_preprocess_bf16", "hopper_backward_d128_bf16_full"];
        let stages = [&head, &line(0, names[0]), &line(1, names[1]), &line(2, CONVERT)];
        let record = record(CALL, &stages.map(String::as_str).concat()).expect("it is a profile");
        let modelled =
            |stage: usize, name: &str| record["stages"][stage]["modelled"][name].as_f64();
        // o and dO, and a value a row; the sums are the main kernel's to clear.
        let (tensor, row) = (67_108_864.0, 4.0 * 262_144.0);
        let preprocessed = modelled(0, "requested_bytes").expect("a number");
        assert!((2.0 * tensor..=2.0 * tensor + 2.0 * row).contains(&preprocessed));
        // q, k, v and dO, dq, dk and dv, and two values a row.
        assert_eq!(modelled(1, "compulsory_bytes"), Some(7.0 * tensor + 2.0 * row));
        assert_eq!(modelled(2, "requested_bytes"), Some(0.0));
        assert!(
            record["stages"][2]["quotients"].as_object().is_some_and(serde_json::Map::is_empty)
        );
    }

    #[test]
    fn what_is_no_profile_is_refused_by_name() {
        let refused = |call: &str, stages: &str| {
            format!("{:#}", record(call, stages).expect_err("it is no profile"))
        };
        assert!(refused("{", STAGES).contains("call.json"));
        assert!(refused(&CALL.replace("-31", ""), STAGES).contains("must be a day"));
        assert!(refused(CALL, "").contains("holds no launches"));
        let other = STAGES.replace("hopper_forward_d128_bf16_full", "cutlass_kernel");
        assert!(refused(CALL, &other).contains("no cutlass_kernel"));
        let twice = format!("{STAGES}\"2\",\"portable_preprocess_bf16\",\"1\",\"1\",\"0\"\n");
        assert!(refused(CALL, &twice).contains("launched twice"));
        assert!(refused(CALL, &STAGES.replace("\"1000\"", "\"n/a\"")).contains("n/a"));
    }
}
