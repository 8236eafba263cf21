//! Biases, and their gradient.
//!
//! Where each cell has an element of its own, the block that owns the key stores its gradient.
//! Elsewhere blocks add to it by atomics, which have no order; of a bias without rows a warp adds
//! the sum of its queries.

use ferroflash_core::backward::params::options::PortableMaskedBackwardParams;
use ferroflash_core::backward::portable::PortableBackwardTiling;
use ferroflash_core::fragment::Fragment;

use super::Kernel;
use super::options::{Cells, key_of, row_of};
use crate::options::biased;
use crate::ptx::matrix::MatrixElement;
use crate::ptx::memory::{add_global_f32, load_global_f32_if, store_global_f32};
use crate::ptx::warp::shuffle_xor;

impl<T: PortableBackwardTiling, E: MatrixElement> Kernel<T, E> {
    /// `score += bias`; a bias of −∞ hides the key, whatever its score.
    #[inline(always)]
    pub(super) unsafe fn add_bias(
        scores: &mut T::Scores,
        params: &PortableMaskedBackwardParams,
        cells: &Cells<'_>,
    ) {
        let (visible, corner) = (Self::visible(params, cells), Self::corner(cells));
        let (first, row_bytes) = Self::first_cell(&params.options.bias, cells, &corner, 4);
        let mut biases = [0.0; 16];
        Self::each(cells, |_, at| {
            let (row, key) = (row_of(at % 4), key_of(at / 4));
            let is_there = corner.row + row < visible.q_len && corner.key + key < visible.kv_len;
            let offset = row_bytes * row as i64 + key as i64 * 4;
            biases[at] = load_global_f32_if(first.wrapping_add(offset as u64), is_there);
        });
        Self::each(cells, |index, at| {
            *scores.at_mut(index) = biased(scores.at(index), biases[at]);
        });
    }

    /// Adds dS to the gradient of the bias, or stores it there.
    #[inline(always)]
    pub(super) unsafe fn add_bias_gradient(
        ds: &T::Scores,
        params: &PortableMaskedBackwardParams,
        cells: &Cells<'_>,
    ) {
        let (visible, corner) = (Self::visible(params, cells), Self::corner(cells));
        let (first, row_bytes) = Self::first_cell(&params.bias_gradient, cells, &corner, 4);
        if row_bytes == 0 {
            let mut half = 0;
            while half < Self::HALVES {
                // Hidden cells and rows past the end are 0.
                let mut sum = 0.0;
                let mut column = 0;
                while column < 4 {
                    sum += ds.at(Self::cell(half, cells.tile * 2 + column));
                    column += 1;
                }
                sum += shuffle_xor(sum, 1);
                sum += shuffle_xor(sum, 2);
                let key = key_of(half);
                // The first of the four lanes that share a key.
                if corner.row == corner.warp_row && corner.key + key < visible.kv_len {
                    add_global_f32(first + key as u64 * 4, sum);
                }
                half += 1;
            }
            return;
        }
        let is_sum = params.bias_gradient_is_sum != 0;
        Self::each(cells, |index, at| {
            let (row, key) = (row_of(at % 4), key_of(at / 4));
            let offset = row_bytes * row as i64 + key as i64 * 4;
            let to = first.wrapping_add(offset as u64);
            if corner.row + row < visible.q_len && corner.key + key < visible.kv_len {
                if is_sum {
                    add_global_f32(to, ds.at(index));
                } else {
                    store_global_f32(to, ds.at(index));
                }
            }
        });
    }
}
