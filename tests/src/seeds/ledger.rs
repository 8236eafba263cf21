//! Cases that the ledger accounts for: its functions, by the name of the case's kind.

use ferroflash_ledger::bounds::{TwoLevel, bounds};
use ferroflash_ledger::device::{DeviceModel, device};
use ferroflash_ledger::row_work::{Normalization, RowTiles};
use ferroflash_ledger::shared::{BackwardTile, ForwardTile};
use ferroflash_ledger::sizes::Sizes;
use ferroflash_ledger::stages::{BackwardStages, StagedCall};
use ferroflash_ledger::tiles::{CausalAlign, TiledMask};
use ferroflash_ledger::v2_0_0::{BACKWARD, BackwardLoop, FORWARD};
use ferroflash_ledger::words::{Order, Tiled};
use ferroflash_ledger::{
    Result, backward, benchmark, contracts, evidence, launch, materialized, movement, residency,
    row_work, shared, split, stages, tiles, v2_0_0, words,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

/// What the ledger makes of the inputs of a case.
pub(super) fn account(kind: &str, inputs: &Value) -> Value {
    match kind {
        "compared" => compared(inputs),
        "refused" => refused(inputs),
        kind => try_account(kind, inputs).unwrap_or_else(|why| panic!("{why}")),
    }
}

/// Several accounts under a name each, so that a case may relate them.
fn compared(inputs: &Value) -> Value {
    let parts = inputs.as_object().expect("accounts by name").iter();
    let account = |part: &Value| account(part["kind"].as_str().expect("a kind"), &part["inputs"]);
    Value::Object(parts.map(|(name, part)| (name.clone(), account(part))).collect::<Map<_, _>>())
}

/// The words with which an account is refused.
fn refused(inputs: &Value) -> Value {
    let kind = inputs["kind"].as_str().expect("a kind");
    let refused = try_account(kind, &inputs["inputs"]).expect_err("was not refused");
    json!({"error": refused.to_string()})
}

fn json_of(value: impl Serialize) -> Value {
    serde_json::to_value(value).expect("figures of fixtures fit 64 bits")
}

/// A value of a fixture as what a function takes.
fn read<T: DeserializeOwned>(inputs: &Value) -> T {
    serde_json::from_value(inputs.clone()).unwrap_or_else(|why| panic!("{why}: {inputs}"))
}

/// One field of the inputs.
fn field<T: DeserializeOwned>(inputs: &Value, name: &str) -> T {
    let value = serde_json::from_value(inputs[name].clone());
    value.unwrap_or_else(|why| panic!("{name}: {why}"))
}

/// Joins objects, so that one case may state figures of several functions.
fn joined(parts: &[Value]) -> Value {
    let fields = parts.iter().filter_map(Value::as_object).flatten();
    Value::Object(fields.map(|(name, value)| (name.clone(), value.clone())).collect())
}

fn sizes(inputs: &Value) -> Sizes {
    let number = |name| field(inputs, name);
    let or = |name: &str, other| inputs[name].as_u64().unwrap_or(other);
    let head_dim = or("head_dim", 1);
    Sizes {
        batch: or("batch", 1),
        q_heads: number("q_heads"),
        kv_heads: number("kv_heads"),
        q_len: number("q_len"),
        kv_len: number("kv_len"),
        head_dim,
        value_dim: or("value_dim", head_dim),
    }
}

fn mask(inputs: &Value) -> TiledMask {
    TiledMask {
        q_len: field(inputs, "q_len"),
        kv_len: field(inputs, "kv_len"),
        q_block: field(inputs, "q_block"),
        kv_block: field(inputs, "kv_block"),
        align: field(inputs, "align"),
    }
}

fn tiled(inputs: &Value) -> Tiled {
    Tiled {
        q_len: field(inputs, "q_len"),
        kv_len: field(inputs, "kv_len"),
        head_dim: field(inputs, "head_dim"),
        q_block: field(inputs, "q_block"),
        kv_block: field(inputs, "kv_block"),
    }
}

fn try_account(kind: &str, inputs: &Value) -> Result<Value> {
    let number = |name| field::<u64>(inputs, name);
    Ok(match kind {
        "materialized" => {
            let sizes: Sizes = field(inputs, "sizes");
            let ledger = materialized::materialized(&sizes, &field(inputs, "widths"))?;
            joined(&[json!({"values": json_of(sizes.values()?)}), json_of(ledger)])
        }
        "row_state_bytes" => {
            let (scalars, width) = (number("scalars"), number("width"));
            let bytes = materialized::row_state_bytes(&field(inputs, "sizes"), scalars, width)?;
            json!({"bytes": bytes as u64})
        }
        "softmax_accesses" => {
            json_of(materialized::softmax_accesses(field(inputs, "form"), number("row_len"))?)
        }
        "capacity_words" => {
            json!({"words": words::capacity_words(number("bytes"), number("width"))? as u64})
        }
        "paper_blocks" => {
            let blocks = words::paper_blocks(number("on_chip_words"), number("head_dim"))?;
            let tiled = Tiled {
                q_len: number("len"),
                kv_len: number("len"),
                head_dim: number("head_dim"),
                q_block: blocks.q_block,
                kv_block: blocks.kv_block,
            };
            let (q_tiles, kv_tiles) = tiled.blocks()?;
            let counts = json!({"q_tiles": q_tiles as u64, "kv_tiles": kv_tiles as u64});
            let forward = words::forward_words(&tiled, Order::KvOuter, 2)?;
            let backward = words::backward_words(&tiled)?;
            let words = json!({"forward": json_of(forward), "backward": json_of(backward)});
            joined(&[json_of(blocks), counts, words])
        }
        "forward_words" => {
            let saved = inputs["saved_scalars"].as_u64().unwrap_or(2);
            json_of(words::forward_words(&tiled(inputs), field(inputs, "order"), saved)?)
        }
        "backward_words" => json_of(words::backward_words(&tiled(inputs))?),
        "bounds" => json_of(bounds(&read::<TwoLevel>(inputs))?),
        "row_work" => row_work_of(&read(inputs))?,
        "movement" => {
            let tiled = tiled(inputs);
            let bytes = movement::movement(&tiled, &field(inputs, "widths"))?;
            joined(&[json_of(bytes), json_of(movement::order_visits(&tiled)?)])
        }
        "head_widths" => json_of(v2_0_0::head_widths(number("head_dim"))?),
        "workspace_extent" => {
            json!({"extent": v2_0_0::workspace_extent(number("len"))? as u64})
        }
        "forward_grid" => json_of(launch::forward_grid(
            number("batch"),
            number("q_heads"),
            number("q_len"),
            number("q_block"),
        )?),
        "populations" => json_of(launch::populations(&read(inputs))?),
        "head_programs" => {
            let blocks = (number("q_block"), number("kv_block"));
            json_of(launch::head_programs(&sizes(inputs), blocks.0, blocks.1)?)
        }
        "surfaces" => {
            let chunks = inputs["kv_chunks"].as_u64().unwrap_or(1);
            json_of(launch::surfaces(&sizes(inputs), number("q_block"), chunks)?)
        }
        "backward_grids" => {
            let blocks = (number("q_block"), number("kv_block"));
            json_of(launch::backward_grids(&sizes(inputs), blocks.0, blocks.1)?)
        }
        "forward_shared" => json_of(shared::forward_shared(&read::<ForwardTile>(inputs))?),
        "backward_shared" => json_of(shared::backward_shared(&read::<BackwardTile>(inputs))?),
        "tile_bytes" => {
            let sizes = ["tiles", "rows", "channels", "element_bytes"].map(number);
            let [tiles, rows, channels, width] = sizes;
            json!({"bytes": shared::tile_bytes(tiles, rows, channels, width)? as u64})
        }
        "warp_layout" => {
            json!({"layout": shared::warp_layout(number("warps"), number("along_rows"))?})
        }
        kind => return device_or_tile(kind, inputs),
    })
}

fn device_or_tile(kind: &str, inputs: &Value) -> Result<Value> {
    let number = |name| field::<u64>(inputs, name);
    Ok(match kind {
        "device" => json_of(device(&field::<String>(inputs, "name"), &[])?),
        "residency" => {
            let block = field(inputs, "block");
            json_of(residency::residency(&block, &device_of(inputs)?)?)
        }
        "register_budget" => {
            let device = device_of(inputs)?;
            json_of(residency::register_budget(number("blocks"), number("threads"), &device)?)
        }
        "waves" => {
            let launched = u128::from(number("launched"));
            let slots = (number("multiprocessors"), number("blocks_per_sm"));
            json_of(residency::waves(launched, slots.0, slots.1)?)
        }
        "first_wave" => {
            let [slots, heads, q_block] = ["slots", "heads", "q_block"].map(number);
            json_of(residency::first_wave(slots, heads, q_block)?)
        }
        "forward_trait" => forward_trait(&field::<String>(inputs, "branch"))?,
        "backward_trait" => backward_trait(&field::<String>(inputs, "branch"))?,
        "trait_sweep" => trait_sweep(&read(inputs))?,
        "split_k_ledger" => json_of(split::split_keys(&read(inputs))?),
        "tile_counts" => json_of(tiles::tile_counts(&mask(inputs))?),
        "causal_key_loop" => json_of(v2_0_0::causal_key_loop(&mask(inputs))?),
        "gradient_producers" => json_of(tiles::gradient_producers(&mask(inputs), &sizes(inputs))?),
        "scratch" => {
            let widths = (number("element_bytes"), number("accumulator_bytes"));
            json_of(backward::scratch(&sizes(inputs), widths.0, widths.1)?)
        }
        "accumulators" => json_of(backward::accumulators(&read(inputs))?),
        "barriers" => json_of(v2_0_0::barriers(&read::<BackwardLoop>(inputs))?),
        "pair_flops" => {
            let [rows, keys, d] = ["q_block", "kv_block", "head_dim"].map(number);
            json_of(stages::pair_flops(rows, keys, d)?)
        }
        "backward_stages" => json_of(stages::backward_stages(&read(inputs))?),
        "forward_stages" => json_of(stages::forward_stages(&read(inputs))?),
        kind => return rate(kind, inputs),
    })
}

fn rate(kind: &str, inputs: &Value) -> Result<Value> {
    let number = |name| field::<u64>(inputs, name);
    let real = |name| field::<f64>(inputs, name);
    Ok(match kind {
        "numerators" => json_of(benchmark::numerators(&read(inputs))?),
        "fixed_tokens" => {
            let (tokens, len) = (number("tokens"), number("len"));
            json!({"batch": benchmark::batch_at_fixed_tokens(tokens, len)?})
        }
        "implied_seconds" => {
            let call = field(inputs, "call");
            let flops = benchmark::numerators(&call)?;
            let is_causal: bool = field(inputs, "causal");
            let flops = if is_causal { flops.causal_both_flops } else { flops.both_flops };
            let seconds = benchmark::implied_seconds(flops, real("flops_per_second"))?;
            let rate = benchmark::declared_rate(flops, seconds)?;
            json!({
                "flops": flops as u64, "milliseconds": seconds * 1e3,
                "teraflops_per_second": rate / 1e12,
            })
        }
        "rate_ratio" => {
            let ratio = benchmark::rate_ratio(real("rate"), real("of"))?;
            json!({"ratio": ratio, "percent": ratio * 100.0})
        }
        "model_flops" => {
            let flops = benchmark::model_flops(&field(inputs, "model"))?;
            let [batch, gpus] = ["batch", "gpus"].map(number);
            let step_seconds = real("step_seconds");
            let rate = benchmark::model_rate(flops.total_flops, batch, gpus, step_seconds)?;
            joined(&[json_of(flops), json!({"rate": rate})])
        }
        "evidence" => evidence_of(&read(inputs)),
        "statement" => json!({"lacks": contracts::lacks(&read(inputs))}),
        unknown => panic!("nothing runs kind {unknown}"),
    })
}

fn evidence_of(record: &evidence::Record) -> Value {
    let rungs = evidence::ladder(record);
    json!({
        "verdicts": rungs.each_ref().map(|rung| json_of(rung.verdict)),
        "reasons": rungs.each_ref().map(|rung| rung.reason.clone()),
        "median_seconds": evidence::median_seconds(record),
    })
}

/// A device by name, or one that the case describes.
fn device_of(inputs: &Value) -> Result<DeviceModel> {
    match &inputs["device"] {
        Value::String(name) => device(name, &[]).cloned(),
        described => Ok(read(described)),
    }
}

fn row_work_of(row: &RowTiles) -> Result<Value> {
    let forms = [Normalization::Probabilities, Normalization::Product, Normalization::Delayed];
    let [probabilities, product, delayed] =
        forms.map(|form| row_work::normalization_work(row, form).map(json_of));
    let saving = |form| row_work::delayed_saving(row, form).map(json_of);
    Ok(json!({
        "retained": json_of(row_work::retained_work(row)?),
        "probabilities": probabilities?, "product": product?, "delayed": delayed?,
        "saved_against_probabilities": saving(Normalization::Probabilities)?,
        "saved_against_product": saving(Normalization::Product)?,
    }))
}

fn forward_trait(branch: &str) -> Result<Value> {
    let found = FORWARD.iter().find(|found| found.branch == branch);
    let found = found.unwrap_or_else(|| panic!("there is no branch {branch}"));
    let shared = shared::forward_shared(&found.tile())?;
    let block = residency::BlockResources {
        warps: found.warps,
        shared_bytes: shared.block_bytes as u64,
        registers_per_thread: None,
    };
    let on = |name| residency::residency(&block, device(name, &[])?).map(json_of);
    let resident = json!({"a100": on("a100")?, "cc8_6": on("cc8.6")?, "h200": on("h200")?});
    Ok(joined(&[json_of(found), json!({"shared": json_of(shared), "residency": resident})]))
}

fn backward_trait(branch: &str) -> Result<Value> {
    let found = BACKWARD.iter().find(|found| found.branch == branch);
    let found = found.unwrap_or_else(|| panic!("there is no branch {branch}"));
    let layout = |along| shared::warp_layout(found.warps, along);
    Ok(joined(&[
        json_of(found),
        json!({
            "shared": json_of(shared::backward_shared(&found.tile())?),
            "accumulators": json_of(backward::accumulators(&found.accumulator_tile())?),
            "score_layout": layout(found.score_warps)?,
            "dkv_layout": layout(found.dkv_warps)?,
            "dq_layout": layout(found.dq_warps)?,
        }),
    ]))
}

/// Every backward trait of v2.0.0 at one call, full and causal.
fn trait_sweep(call: &StagedCall) -> Result<Value> {
    let mut rows = Map::new();
    for found in BACKWARD {
        let at = |align| -> Result<BackwardStages> {
            let sizes = Sizes { head_dim: found.head_dim, value_dim: found.head_dim, ..call.sizes };
            let (q_block, kv_block) = (found.q_block, found.kv_block);
            stages::backward_stages(&StagedCall { sizes, align, q_block, kv_block, ..*call })
        };
        let (full, causal) = (at(CausalAlign::None)?, at(CausalAlign::TopLeft)?);
        let row = json!({"full": json_of(full), "causal": json_of(causal)});
        rows.insert(found.branch.to_owned(), row);
    }
    let distinct: std::collections::HashSet<_> =
        BACKWARD.iter().map(|row| (row.tile().head_dim, format!("{:?}", row.tile()))).collect();
    Ok(json!({"rows": BACKWARD.len(), "distinct": distinct.len(), "by_branch": rows}))
}
