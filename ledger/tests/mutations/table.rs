//! Every mutation.

use ferroflash::Align;
use ferroflash_ledger::schedule::hazards::Barrier;

use crate::backward::{self, Keep, Replay, Update};
use crate::forward::{self, Division, Masking, Tiles};
use crate::oracle::{Check, Problem, Sight, Verdict, shape};
use crate::{counts, ownership, schedules, storage};

/// A wrong program.
pub(crate) struct Mutation {
    /// What it does.
    pub(crate) name: &'static str,
    /// Claims of the seed documents that name the failure.
    pub(crate) claims: &'static [&'static str],
    /// The check that must reject it.
    pub(crate) by: Check,
    /// Runs it and the oracle.
    pub(crate) run: fn() -> Verdict,
}

const FORWARD: forward::Rules = forward::Rules::RIGHT;
const BACKWARD: backward::Rules = backward::Rules::RIGHT;

/// Causal, with tails of both kinds, and a last key tile that no row sees.
fn causal() -> Problem {
    Problem::new(shape(1, (1, 1), (10, 14), (4, 3)), Sight::Causal(Align::TopLeft), 3)
}

/// The first rows see no key.
fn empty_rows() -> Problem {
    Problem::new(shape(1, (1, 1), (10, 5), (4, 3)), Sight::Causal(Align::BottomRight), 3)
}

fn full() -> Problem {
    Problem::new(shape(1, (1, 1), (10, 8), (4, 3)), Sight::Full, 3)
}

fn grouped() -> Problem {
    Problem::new(shape(1, (4, 2), (6, 8), (4, 3)), Sight::Full, 3)
}

fn dropped() -> Problem {
    causal().with_dropout(0.4)
}

/// Scores of about `score`, all of one sign.
fn far(score: f32) -> Problem {
    let mut problem = full();
    problem.q.iter_mut().for_each(|q| *q = q.abs() + 0.5);
    problem.k.iter_mut().for_each(|k| *k = k.abs() + 0.5);
    problem.scale = score / 8.0;
    problem
}

/// What the right programs are tried on.
pub(crate) fn problems() -> Vec<Problem> {
    vec![causal(), empty_rows(), full(), grouped(), dropped(), far(1000.0), far(-2000.0)]
}

/// A mutation of the forward: one rule changed, on one problem.
macro_rules! forward {
    ($name:literal, [$($claim:literal),*], $problem:expr, { $($rule:tt)* }) => {
        Mutation {
            name: $name,
            claims: &[$($claim),*],
            by: Check::Values,
            run: || forward::verdict(&$problem, forward::Rules { $($rule)*, ..FORWARD }),
        }
    };
}

/// A mutation of the backward.
macro_rules! backward {
    ($name:literal, [$($claim:literal),*], $problem:expr, { $($rule:tt)* }) => {
        Mutation {
            name: $name,
            claims: &[$($claim),*],
            by: Check::Values,
            run: || backward::verdict(&$problem, backward::Rules { $($rule)*, ..BACKWARD }),
        }
    };
}

/// Any other.
macro_rules! other {
    ($name:literal, [$($claim:literal),*], $check:ident, $run:expr) => {
        Mutation { name: $name, claims: &[$($claim),*], by: Check::$check, run: || $run }
    };
}

/// Every mutation, by the part that is broken.
pub(crate) const MUTATIONS: &[Mutation] = &[
    // The state of a row.
    forward!("output from m and l alone", ["m43-004"], full(), { division: Division::AtEachKey }),
    forward!("no maximum subtracted, large scores", ["m43-051"], far(1000.0), {
        subtract_maximum: false
    }),
    forward!("no maximum subtracted, small scores", ["m43-052"], far(-2000.0), {
        subtract_maximum: false
    }),
    forward!("sum left in the old frame", ["m43-061"], full(), { rescale_sum: false }),
    forward!("numerator left in the old frame", ["m43-110"], full(), { rescale_numerator: false }),
    forward!("neither rescaled", ["m44-018"], full(), {
        rescale_sum: false,
        rescale_numerator: false
    }),
    forward!("first key lost", ["m43-066"], full(), { count_first_key: false }),
    forward!("finite sentinel for no key", ["m43-074"], far(-2000.0), { start: -1000.0 }),
    forward!(
        "exp(-inf - -inf) of a masked first key, row or tile, or of two empty states",
        ["m43-075", "m43-081", "m43-089", "m43-158"],
        empty_rows(),
        { identity_branch: false }
    ),
    forward!("overlapping tiles", ["m43-093"], full(), { tiles: Tiles::Overlapping }),
    forward!("locally normalised tiles added", ["m43-045", "m43-095", "m43-139"], full(), {
        division: Division::TilesAdded
    }),
    forward!(
        "locally normalised tiles averaged",
        ["m43-122", "m43-142", "m44-253"],
        full(),
        { division: Division::TilesAveraged }
    ),
    forward!("the numerator called an output", ["m44-112"], full(), { division: Division::Never }),
    other!("a shifted softmax called exact", ["m43-057"], Values, counts::f32_is_exact()),
    // Masks, dropout, heads.
    forward!(
        "forbidden scores in maximum and sum, masked after",
        ["m43-023", "m44-113", "m44-328"],
        causal(),
        { masking: Masking::AfterSum }
    ),
    forward!("boolean mask inverted", ["m43-308"], causal(), { masking: Masking::Inverted }),
    forward!("dropout before the sum", ["m43-022"], dropped(), { drop_after_sum: false }),
    forward!("tail left out", ["m43-164"], full(), { tiles: Tiles::WholeOnly }),
    forward!("tiles classed by ordinals", ["m44-269"], causal(), { tiles: Tiles::ByOrdinals }),
    other!("tiles chosen by ordinals", ["m44-329"], Coverage, ownership::tiles_by_ordinals()),
    forward!("a rectangle of another alignment", ["m44-331", "m44-619"], causal(), {
        own_alignment: false
    }),
    forward!("KV head h mod kv_heads", ["m44-312", "m44-332"], grouped(), {
        kv_head_by_group: false
    }),
    forward!("outputs of the KV heads alone", ["m44-327", "m44-618"], grouped(), {
        launch_q_heads: false
    }),
    other!("programs over KV heads", ["m44-333"], Ownership, ownership::programs_over_kv_heads()),
    other!("lengths of the longest item", ["m44-326"], Coverage, {
        ownership::lengths_of_the_longest()
    }),
    // Gradients.
    backward!("scale on dV", ["m43-252"], causal(), { scale_dv: true }),
    backward!("no scale on dQ", [], causal(), { scale_dq: false }),
    backward!("no scale on dK", [], causal(), { scale_dk: false }),
    backward!("a fresh dropout mask", ["m43-253"], dropped(), { replay: Replay::Fresh }),
    backward!("a seed drawn from in another order", ["m43-270"], dropped(), {
        replay: Replay::Stream
    }),
    backward!("lse alone replayed", ["m43-132"], dropped(), { replay: Replay::None }),
    backward!("P rebuilt without the mask", ["m43-255"], causal(), { mask: false }),
    backward!("undropped P for dV", ["m44-371"], dropped(), { drop_for_dv: false }),
    backward!("dropped P for dS", [], dropped(), { undropped_for_ds: false }),
    backward!("conversion keeps twice", ["m44-370"], dropped(), { keep: Keep::Twice }),
    backward!("scratch not cleared", ["m44-414"], full(), { clear: false }),
    backward!("plain stores of dQ", ["m44-409"], full(), { update: Update::Racing }),
    other!("shares of dQ rounded", ["m44-410"], Values, {
        backward::rounded_once(&counts::long_sum(), Update::Rounded)
    }),
    other!("arrival called an order", ["m44-411"], Order, {
        backward::arrival_orders([1e20, -1e20, 1.0], false)
    }),
    backward!("no sum over a group", ["m44-335"], grouped(), { sum_group: false }),
    backward!("owners over KV heads", ["m44-413"], grouped(), { launch_q_heads: false }),
    backward!("rows of the forward's warps store dK", ["m44-259"], full(), {
        warps_store_dkv: true
    }),
    other!("two owners of a column", ["m44-412"], Ownership, ownership::two_owners_of_a_column()),
    other!("a partial state called a row", ["m44-254"], Ownership, ownership::partials_are_rows()),
    other!("quarters for bands of rows", ["m44-257"], Ownership, ownership::quarters_for_bands()),
    // Shared memory.
    other!("dS over a V not yet taken", ["m44-492"], Hazard, storage::ds_before_v_is_taken()),
    other!("a commit called a barrier", ["m44-493"], Hazard, storage::a_commit_publishes()),
    other!("no barrier after P and dS", ["m44-494"], Hazard, {
        storage::lacking(&storage::SHARED_V, Barrier::Scores)
    }),
    other!("one Q tile without its barrier", ["m44-495"], Hazard, {
        storage::lacking(&storage::ONE_Q, Barrier::Q)
    }),
    other!("dK over a K still read", ["m44-466", "m44-498"], Hazard, {
        storage::lacking(&storage::SHARED_V, Barrier::Epilogue)
    }),
    other!("no barrier at all", ["m44-256", "m44-616"], Hazard, storage::no_communication()),
    // Schedules.
    other!("a mask skips by itself", ["m43-298"], Counts, schedules::a_mask_skips_by_itself()),
    other!("tiles make it linear", ["m43-275", "m43-327"], Counts, {
        schedules::tiles_make_it_linear()
    }),
    other!("the row owner called Algorithm 1", ["m43-149"], Counts, {
        schedules::the_row_owner_is_algorithm_1()
    }),
    other!("splits are free", ["m43-289"], Counts, schedules::splits_are_free()),
    other!("sharing called reuse", ["m44-334"], Counts, schedules::sharing_is_reuse()),
    other!("no split of keys anywhere", ["m44-417"], Ownership, {
        ownership::no_split_of_keys_anywhere()
    }),
    // Accounts.
    other!("a factor read as a width", ["m43-033"], Counts, counts::a_factor_is_a_width()),
    other!("a mask widens the scores", ["m43-034"], Counts, counts::a_mask_widens_the_scores()),
    other!("transfers called resident", ["m43-038"], Counts, counts::transfers_are_resident()),
    other!("transfers called saved", ["m43-039"], Counts, counts::transfers_are_saved()),
    other!("lse in the place of O", ["m43-130"], Counts, counts::lse_replaces_the_output()),
    other!("blocks swapped", ["m43-152"], Counts, counts::blocks_are_swapped()),
    other!("tails padded", [], Counts, counts::tails_are_padded()),
    other!("one width for all", ["m43-190", "m43-241"], Counts, counts::one_width_for_all()),
    other!("bytes for words of the chip", ["m43-191"], Counts, counts::bytes_for_words()),
    other!("saved state called traffic", ["m43-197"], Counts, counts::saved_state_is_traffic()),
    other!(
        "everything moves once",
        ["m43-115", "m43-202"],
        Counts,
        counts::everything_moves_once()
    ),
    other!("optimal on any chip", ["m43-236"], Counts, counts::optimal_on_any_chip()),
    other!("slots called traffic", ["m44-114"], Counts, counts::slots_are_traffic()),
    other!("K and V stream once", ["m44-115"], Counts, counts::keys_stream_once()),
    other!("diagnostics called traffic", ["m44-116"], Counts, counts::diagnostics_are_traffic()),
    other!("a grid called occupancy", ["m44-193"], Counts, counts::a_grid_is_occupancy()),
    other!("the output tile added", ["m44-195"], Counts, counts::the_output_tile_is_extra()),
    other!("packed blocks all at work", ["m44-198"], Counts, counts::every_packed_block_works()),
    other!("causal halves every block", ["m44-200"], Counts, counts::causal_halves_every_block()),
    other!("K and V loaded by every warp", ["m44-255"], Counts, counts::every_warp_loads_keys()),
    other!("masked called partial", ["m44-330"], Counts, counts::masked_iterations_are_partial()),
    other!("every pointer live", ["m44-491"], Counts, counts::every_pointer_is_live()),
    other!("registers are free", ["m44-497"], Counts, counts::registers_are_free()),
    other!("sizes called traffic", ["m44-562"], Counts, counts::sizes_are_traffic()),
    other!("K and V of the KV heads", ["m44-563"], Counts, counts::owners_over_kv_heads()),
    other!("useful cells called worked", ["m44-565"], Counts, counts::useful_cells_are_worked()),
    other!("smaller tiles move less", ["m44-566"], Counts, counts::smaller_tiles_move_less()),
    other!("shared savings are traffic", ["m44-567"], Counts, {
        counts::shared_savings_are_traffic()
    }),
    other!("the main kernel alone", ["m44-569"], Counts, counts::only_the_main_kernel()),
    other!("one numerator for two", ["m44-689"], Counts, counts::numerators_are_one()),
    other!("combined called forward", ["m44-690"], Counts, counts::combined_is_forward()),
    other!("triangles for halves", ["m44-692"], Counts, counts::triangles_for_halves()),
    other!("implied durations as timings", ["m44-693"], Counts, {
        counts::implied_durations_are_timings()
    }),
    other!("prose for table", ["m44-695"], Counts, counts::prose_for_table()),
    other!("decode over KV heads", ["m44-705"], Counts, counts::decode_over_kv_heads()),
];
