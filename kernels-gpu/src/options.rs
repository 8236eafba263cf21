//! What kernels with options share: which item a block's slot belongs to, which keys a row sees,
//! and the functions that make a score of a product.

use ferroflash_core::dropout::DropoutMask;
use ferroflash_core::items::{ItemSearch, Items};
use ferroflash_core::params::options::ScoreOptions;
use ferroflash_core::visibility::Visibility;

use crate::ptx::math::{exp2, fma, reciprocal};
use crate::ptx::memory::{load_global_u32, load_shared_v4, store_shared_v4};
use crate::ptx::warp::{any, ballot, uniform};

/// The packed item that `slot` belongs to, by the first slot of each.
///
/// # Safety
/// All 32 lanes of the warp call this alike.
#[inline(always)]
pub unsafe fn find_item(
    items: &Items,
    slot: u32,
    lane: u32,
    first_slot: impl Fn(u32) -> u32,
) -> u32 {
    let mut search = ItemSearch::new(items);
    while search.count > 1 {
        search = narrowed(search, slot, lane, &first_slot);
    }
    search.first
}

/// The same, and whether the item's first slot and every one from there to `slot` find it as well:
/// among many items, malformed offsets may hide it from some. A slot votes as a later one does
/// except for items that start between the two; so the first one comes here too if it is not before
/// the start of any item that the search passed by.
///
/// # Safety
/// As [`find_item`].
#[inline(always)]
pub unsafe fn find_whole_item(
    items: &Items,
    slot: u32,
    lane: u32,
    first_slot: impl Fn(u32) -> u32,
) -> (u32, bool) {
    let mut search = ItemSearch::new(items);
    let mut latest = 0;
    while search.count > 1 {
        let before = search.first;
        search = narrowed(search, slot, lane, &first_slot);
        if search.first != before {
            latest = first_slot(search.first).max(latest);
        }
    }
    (search.first, latest <= first_slot(search.first))
}

/// What is left of a search after one vote.
#[inline(always)]
unsafe fn narrowed(
    search: ItemSearch,
    slot: u32,
    lane: u32,
    first_slot: impl Fn(u32) -> u32,
) -> ItemSearch {
    let is_reached = match search.candidate(lane) {
        Some(index) => first_slot(index) <= slot,
        None => false,
    };
    search.narrowed(ballot(is_reached))
}

/// Value `index` of an i32 array of lengths or offsets.
#[inline(always)]
pub fn read_length(array: u64, index: u32) -> i32 {
    // SAFETY: the host checked that the array has a value an item, and where it has one more, the
    // caller asks for no index beyond.
    unsafe { load_global_u32(array + u64::from(index) * 4) as i32 }
}

/// The first key that `row` sees and one past its last, in 32 bits: the host bounds lengths and
/// sides so that no sum overflows. The first may be negative.
#[inline(always)]
pub fn sides(visible: &Visibility, row: u32) -> (i32, i32) {
    let diagonal = row as i32 + visible.offset;
    (diagonal - visible.left, (diagonal + visible.right + 1).min(visible.kv_len as i32))
}

/// A score after its bias; a bias of −∞ hides the key, whatever its score.
#[inline(always)]
pub fn biased(score: f32, bias: f32) -> f32 {
    if bias == f32::NEG_INFINITY { bias } else { score + bias }
}

/// Leaves the dropout's seed and offset, by value or from the device, and a word of the caller's in
/// the 16 bytes of shared memory at `slot`: one thread of a block calls this, once.
///
/// # Safety
/// The bytes are this thread's to write; a state's address is readable.
#[inline(always)]
pub unsafe fn store_dropout(options: &ScoreOptions, slot: u32, own: u32) {
    let mut mask = options.dropout;
    if options.dropout_state != 0 {
        let word = |index: u64| load_global_u32(options.dropout_state + index * 4) as u64;
        mask = mask.advanced(word(1) << 32 | word(0), word(3) << 32 | word(2));
    }
    store_shared_v4(slot, [mask.key[0], mask.key[1], mask.offset_low, own]);
}

/// The mask that [`store_dropout`] left at `slot`, known to be the same in the whole warp, and the
/// caller's word.
///
/// # Safety
/// All 32 lanes of the warp call this alike, after a barrier behind the store.
#[inline(always)]
pub unsafe fn load_dropout(options: &ScoreOptions, slot: u32) -> (DropoutMask, u32) {
    let [low, high, offset_low, own] = load_shared_v4(slot);
    let key = [uniform(low), uniform(high)];
    (DropoutMask { key, offset_low: uniform(offset_low), ..options.dropout }, own)
}

/// How tanh of a warp's products is formed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Tanh {
    /// By [`tanh_near`].
    Near,
    /// By [`tanh_far`].
    Far,
    /// By [`tanh`].
    Exact,
}

/// Softcaps up to this leave an error of 3·10⁻⁷ of them in a score, which 16-bit probabilities do
/// not show: 4·10⁻⁵, a sixth of half a unit of binary16.
const FAR_CAP: f32 = 128.0;

impl Tanh {
    /// What will do for a warp whose products have `largest` as their largest magnitude in this
    /// lane.
    ///
    /// # Safety
    /// All 32 lanes of the warp call this alike.
    #[inline(always)]
    pub unsafe fn of(options: &ScoreOptions, largest: f32) -> Self {
        if !any(largest > options.softcap_near) {
            Self::Near
        } else if options.softcap <= FAR_CAP {
            Self::Far
        } else {
            Self::Exact
        }
    }
}

/// tanh of a product near zero, by the coefficients of
/// [`tanh_polynomial`](ferroflash_core::params::options::tanh_polynomial).
#[inline(always)]
pub fn tanh_near(product: f32, [a, b, c]: [f32; 3]) -> f32 {
    let square = product * product;
    product * fma(fma(c, square, b), square, a)
}

/// `1 − 2 / (e²ˣ + 1)`: tanh of x with an error of 3·10⁻⁷ of 1, exactly ±1 from where f32 can't
/// tell, since it saturates as its exponential does.
#[inline(always)]
pub fn tanh_far(x: f32) -> f32 {
    let power = exp2(x * (2.0 * core::f32::consts::LOG2_E));
    fma(-2.0, reciprocal(power + 1.0), 1.0)
}

/// Beyond this, the exponential form of tanh is accurate to 3·10⁻⁷ of tanh.
const SMALL: f32 = 0.3;

/// tanh within 3·10⁻⁷ of its value: far from zero [`tanh_far`]; near zero, where that cancels,
/// `x + x³·p(x²)` with p of degree 2 fitted to |x| ≤ 0.3, error 10⁻⁷.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    let square = x * x;
    let polynomial = fma(fma(-0.050_372_26, square, 0.133_149_07), square, -0.333_330_63);
    let near = fma(x * square, polynomial, x);
    if x.abs() < SMALL { near } else { tanh_far(x) }
}
