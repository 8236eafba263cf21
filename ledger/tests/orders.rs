//! Word counts against their orders of growth (M4.3 §0x0CA–0x0CE): the constants stay within bounds
//! over a grid of `d ≤ M ≤ Nd`.

use ferroflash_ledger::bounds::{TwoLevel, bounds};
use ferroflash_ledger::words::{Order, Tiled, backward_words, forward_words, paper_blocks};

/// Sizes with `d ≤ M ≤ Nd`.
fn grid() -> impl Iterator<Item = TwoLevel> {
    let lens = [64, 257, 1024, 4096];
    let of_len = |len: u64| [1, 3, 16, 64].map(move |head_dim| (len, head_dim));
    let sizes = lens.into_iter().flat_map(of_len);
    sizes.flat_map(|(len, head_dim)| {
        let most = len * head_dim;
        let capacities = (0..).map(move |step| head_dim << step).take_while(move |m| *m <= most);
        let capacities = capacities.chain([most]);
        capacities.map(move |on_chip_words| TwoLevel { len, head_dim, on_chip_words })
    })
}

fn tiled(sizes: &TwoLevel) -> Tiled {
    let blocks = paper_blocks(sizes.on_chip_words, sizes.head_dim).expect("sizes");
    Tiled {
        q_len: sizes.len,
        kv_len: sizes.len,
        head_dim: sizes.head_dim,
        q_block: blocks.q_block,
        kv_block: blocks.kv_block,
    }
}

#[test]
fn words_follow_their_order() {
    for sizes in grid() {
        let order = bounds(&sizes).expect("sizes").flash_order;
        let tiled = tiled(&sizes);
        let forward = forward_words(&tiled, Order::KvOuter, 2).expect("sizes").total as f64;
        let backward = backward_words(&tiled).expect("sizes").total as f64;
        // At most four passes a term, each of so many words a value: three and five channels, and
        // the row state; then what is moved once.
        let d = sizes.head_dim as f64;
        let (most_forward, most_backward) = (4.0 * (3.0 + 4.0 / d), 4.0 * (5.0 + 2.0 / d));
        let forward = forward / order;
        assert!((3.0..=most_forward + 3.0 + 2.0 / d).contains(&forward), "{sizes:?}: {forward}");
        let backward = backward / order;
        assert!((5.0..=most_backward + 7.0).contains(&backward), "{sizes:?}: {backward}");
    }
}

#[test]
fn passes_follow_their_order() {
    for sizes in grid() {
        let (_, passes) = tiled(&sizes).blocks().expect("sizes");
        let per_term = sizes.len as f64 * sizes.head_dim as f64 / sizes.on_chip_words as f64;
        let passes = passes as f64;
        assert!(per_term <= passes && passes <= 4.0 * per_term + 1.0, "{sizes:?}: {passes}");
    }
}

#[test]
fn blocks_fit_up_to_a_constant() {
    for sizes in grid() {
        let blocks = paper_blocks(sizes.on_chip_words, sizes.head_dim).expect("sizes");
        let most = 4 * u128::from(sizes.on_chip_words) + 4;
        for words in [blocks.kv_words, blocks.qo_words, blocks.score_words] {
            assert!(words <= most, "{sizes:?}: {blocks:?}");
        }
    }
}

#[test]
fn one_term_dominates_between_the_ends() {
    for sizes in grid() {
        let found = bounds(&sizes).expect("sizes");
        let ends = (sizes.len * sizes.head_dim) as f64;
        assert!(found.flash_term_dominates && found.flash_term >= ends, "{sizes:?}: {found:?}");
    }
}
