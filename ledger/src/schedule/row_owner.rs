//! The other backward: a program owns a query tile (M4.4 §0x06.1I).
//!
//! It walks the K/V tiles that its rows see, keeps dQ on the chip and writes it once; dK and dV,
//! which every query tile of every head of the group contributes to, are added up in two scratches
//! of the KV heads. The sum over the group costs nothing more, but both gradients are contended
//! for. flash-attention v2.0.0 holds this loop in its source and never launches it.

use super::call::{Blocks, Call, expect_len};
use super::column_owner::preprocess;
use super::fa1::Backward;
use super::fa2::Forward;
use super::gradient::{Cells, Gradients, PairTiles, RowsState};
use super::memory::Slow;
use super::number::Real;
use super::tile::{Chip, Tile};
use super::trace::{Tensor, Trace};
use crate::error::Result;

/// Gradients by query tiles.
///
/// # Errors
/// A block size of 0; `d_o`, or what the forward left, of another size.
pub fn backward<F: Real>(
    call: &Call<'_, F>,
    blocks: Blocks,
    saved: &Forward<F>,
    d_o: &[F],
) -> Result<Backward<F>> {
    call.check(blocks)?;
    let s = call.shape;
    expect_len("d_o", d_o.len(), &s.o_dims())?;
    expect_len("o", saved.o.len(), &s.o_dims())?;
    expect_len("lse", saved.lse.len(), &s.lse_dims())?;
    let (mut trace, [q, k, v]) = (Trace::default(), call.inputs());
    let o = Slow::holding(Tensor::O, s.q_len, s.value_dim, &saved.o);
    let d_o = Slow::holding(Tensor::DO, s.q_len, s.value_dim, d_o);
    let lse = Slow::holding(Tensor::State, s.q_len, 1, &saved.lse);
    let delta = preprocess(call, blocks, &mut trace, &o, &d_o);
    let kv_heads = call.kv_heads();
    let mut dk = Slow::undefined(Tensor::Scratch, kv_heads, s.kv_len, s.head_dim);
    let mut dv = Slow::undefined(Tensor::ScratchV, kv_heads, s.kv_len, s.value_dim);
    for kv_head in 0..kv_heads {
        dk.initialise(&mut trace, kv_head, 0..s.kv_len, F::ZERO);
        dv.initialise(&mut trace, kv_head, 0..s.kv_len, F::ZERO);
    }

    let mut dq = Slow::undefined(Tensor::DQ, call.heads(), s.q_len, s.head_dim);
    for head in 0..call.heads() {
        let kv_head = call.kv_head(head);
        for (i, rows) in call.q_tiles(blocks).into_iter().enumerate() {
            let (program, chip) = (trace.programs, Chip::default());
            trace.programs += 1;
            let q_tile = q.load(&chip, &mut trace, head, rows.clone());
            let d_o_tile = d_o.load(&chip, &mut trace, head, rows.clone());
            let state = RowsState {
                lse: lse.load(&chip, &mut trace, head, rows.clone()),
                delta: delta.load(&chip, &mut trace, head, rows.clone()),
            };
            let mut dq_tile = Tile::filled(&chip, rows.len(), s.head_dim, F::ZERO);
            for (j, keys) in call.kv_tiles(blocks).into_iter().enumerate() {
                if call.visible_cells(&rows, &keys) == 0 {
                    continue;
                }
                call.visit(&mut trace, program, (i, &rows), (j, &keys));
                let k_tile = k.load(&chip, &mut trace, kv_head, keys.clone());
                let v_tile = v.load(&chip, &mut trace, kv_head, keys.clone());
                let mut gradients = Gradients::zeros(call, &chip, keys.len());
                let cells = Cells { head, rows: &rows, keys: &keys };
                let tiles = PairTiles { q: &q_tile, k: &k_tile, v: &v_tile, d_o: &d_o_tile };
                gradients.add(call, cells, tiles, &state, &mut dq_tile, call.scale);
                dk.add(&mut trace, program, kv_head, keys.clone(), &gradients.dk);
                dv.add(&mut trace, program, kv_head, keys, &gradients.dv);
            }
            dq.store(&mut trace, program, head, rows, &dq_tile);
            trace.peak_words = trace.peak_words.max(chip.peak());
        }
    }
    let dk = dk.convert(&mut trace, Tensor::DK, F::ONE);
    let dv = dv.convert(&mut trace, Tensor::DV, F::ONE);
    Ok(Backward { dq: dq.into_values(), dk, dv, trace })
}
