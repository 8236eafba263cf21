//! The list of faults against the tests: each kind is exercised, and each test is of a listed kind.

use std::collections::BTreeSet;

use ferroflash::{Attention, Dtype, Layout, Limits, Shape};
use libtest_mimic::Failed;
use serde_json::Value;

const LIST: &str = include_str!("../../../fixtures/public-faults.json");

/// Compares the list with the names of tests: `m2_dense` and `m6/negative_sides` are of m2 and m6.
pub(crate) fn every_listed_fault_is_tested<'a>(
    tests: impl Iterator<Item = &'a str>,
) -> Result<(), Failed> {
    let list: Value = serde_json::from_str(LIST)?;
    let faults = list["faults"].as_array().ok_or("the list has no faults")?;
    let listed: BTreeSet<&str> = faults.iter().filter_map(|fault| fault["id"].as_str()).collect();
    if listed.len() != faults.len() {
        return Err("a fault is listed twice, or without an id".into());
    }
    let tested: BTreeSet<&str> =
        tests.map(|name| name.split(['_', '/']).next().unwrap_or(name)).collect();
    let untested: Vec<&&str> = listed.difference(&tested).collect();
    let unlisted: Vec<&&str> = tested.difference(&listed).collect();
    if untested.is_empty() && unlisted.is_empty() {
        return Ok(());
    }
    Err(format!("listed and not tested: {untested:?}; tested and not listed: {unlisted:?}").into())
}

/// One packed item of 32768 rows and 4096 of one: workspaces follow the tokens, not the items times
/// the longest or a tile. Asked of the planner for a device that need not be here.
pub(crate) fn p9_packed_scratch() -> Result<(), Failed> {
    let (long, short) = (32_768, 4096);
    let (tokens, heads, channels) = (long + short, 8, 128);
    let shape = Shape {
        batch: 1 + short,
        q_heads: heads,
        kv_heads: heads,
        q_len: long,
        kv_len: long,
        head_dim: channels,
        value_dim: channels,
    };
    let hopper = Limits {
        name: "compute capability 9.0".to_owned(),
        capability: (9, 0),
        multiprocessors: 132,
        shared_bytes_per_block: 232_448,
        shared_bytes_per_multiprocessor: 233_472,
        l2_bytes: 0,
        memory_bytes: 0,
        driver_version: 0,
    };
    let layout = Layout::Packed { q_tokens: tokens, kv_tokens: tokens };
    let bytes = Attention::new(shape).layout(layout).workspace_for(Dtype::Bf16, &hopper)?;
    // The sums of dQ and two values a row, twice over for padding, and counters.
    let most = 2 * (4 * channels + 8) * heads * tokens + (1 << 20);
    if bytes.forward > most || bytes.backward > most {
        return Err(format!("{bytes:?} for {tokens} tokens; at most {most} bytes each").into());
    }
    Ok(())
}
