//! Work in blocks: who takes which, and in which order sums are made.
//!
//! Workers take block numbers from one counter, so blocks start in order and a slow one delays
//! nobody. Where blocks add to the same sum, a [`Turn`] makes them add in the order of their
//! numbers. A block waits only for lower numbers, and those are held by threads that are running
//! (a worker never yields to the pool), so somebody can always go on.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rayon::prelude::*;

/// Runs blocks `0..count` on the current rayon pool; `scratch` is made once a worker.
pub(super) fn for_each_block<S>(
    count: usize,
    scratch: impl Fn() -> S + Sync,
    run: impl Fn(usize, &mut S) + Sync,
) {
    let next = AtomicUsize::new(0);
    let workers = rayon::current_num_threads().min(count);
    (0..workers).into_par_iter().with_max_len(1).for_each(|_| {
        let mut block = next.fetch_add(1, Ordering::Relaxed);
        if block >= count {
            return;
        }
        let mut scratch = scratch();
        while block < count {
            run(block, &mut scratch);
            block = next.fetch_add(1, Ordering::Relaxed);
        }
    });
}

/// Blocks of a call that are counted item by item.
pub(super) struct Numbering {
    /// Number of the first block of each item, then the number of all.
    starts: Vec<usize>,
}

impl Numbering {
    /// From the number of blocks of each item.
    pub(super) fn new(counts: impl Iterator<Item = usize>) -> Self {
        let mut starts = vec![0];
        let mut total = 0_usize;
        starts.extend(counts.map(|count| {
            total = total.saturating_add(count);
            total
        }));
        Self { starts }
    }

    /// Blocks of all items.
    pub(super) fn total(&self) -> usize {
        self.starts.last().copied().unwrap_or(0)
    }

    /// Number of an item's first block.
    pub(super) fn start(&self, item: usize) -> usize {
        self.starts[item]
    }

    /// The item of a block, and the block's number in it.
    pub(super) fn locate(&self, block: usize) -> (usize, usize) {
        let item = self.starts.partition_point(|&start| start <= block) - 1;
        (item, block - self.starts[item])
    }
}

/// Something that blocks take turns with, in a fixed order.
pub(super) struct Turn<T> {
    state: Mutex<State<T>>,
    passed: Condvar,
}

struct State<T> {
    next: usize,
    value: T,
}

/// Set when a block panics: whoever waits for a turn gives up, and the panic is passed on.
#[derive(Default)]
pub(super) struct Abandoned(AtomicBool);

impl<T> Turn<T> {
    pub(super) fn new(value: T) -> Self {
        Self { state: Mutex::new(State { next: 0, value }), passed: Condvar::new() }
    }

    /// Waits until it is block `turn`'s turn and runs `act`, which others then see the result of.
    /// The turn stays this block's. Nothing is run if another block has panicked.
    pub(super) fn act(&self, turn: usize, abandoned: &Abandoned, act: impl FnOnce(&mut T)) {
        if let Some(mut state) = self.wait(turn, abandoned) {
            act(&mut state.value);
        }
    }

    /// Waits as [`Self::act`] does and hands the turn to the next block.
    pub(super) fn pass(&self, turn: usize, abandoned: &Abandoned) {
        if let Some(mut state) = self.wait(turn, abandoned) {
            state.next += 1;
            drop(state);
            self.passed.notify_all();
        }
    }

    fn wait(&self, turn: usize, abandoned: &Abandoned) -> Option<MutexGuard<'_, State<T>>> {
        let mut state = lock(&self.state);
        while state.next != turn {
            if abandoned.0.load(Ordering::SeqCst) {
                return None;
            }
            // A panic may be noted just before this waits, so it never waits for long.
            let patience = Duration::from_millis(100);
            let woken = self.passed.wait_timeout(state, patience);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
        Some(state)
    }
}

impl Abandoned {
    /// Notes a panic of the scope that holds the guard.
    pub(super) fn on_panic(&self) -> impl Drop + '_ {
        struct Guard<'a>(&'a AtomicBool);
        impl Drop for Guard<'_> {
            fn drop(&mut self) {
                if std::thread::panicking() {
                    self.0.store(true, Ordering::SeqCst);
                }
            }
        }
        Guard(&self.0)
    }
}

/// Locks; what a panicking thread left is as good as what it would have left.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_found_in_their_items() {
        let numbering = Numbering::new([2, 0, 3].into_iter());
        let places: Vec<_> = (0..numbering.total()).map(|block| numbering.locate(block)).collect();
        assert_eq!(places, [(0, 0), (0, 1), (2, 0), (2, 1), (2, 2)]);
        assert_eq!(Numbering::new(std::iter::empty()).total(), 0);
    }

    #[test]
    fn turns_are_taken_in_order() {
        let (turn, abandoned) = (Turn::new(Vec::new()), Abandoned::default());
        for_each_block(
            100,
            || (),
            |block, ()| {
                turn.act(block, &abandoned, |order| order.push(block));
                turn.pass(block, &abandoned);
            },
        );
        assert_eq!(lock(&turn.state).value, (0..100).collect::<Vec<_>>());
    }

    #[test]
    fn a_panic_frees_those_who_wait() {
        let (turn, abandoned) = (Turn::new(()), Abandoned::default());
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pool.install(|| {
                for_each_block(
                    9,
                    || (),
                    |block, ()| {
                        let _guard = abandoned.on_panic();
                        assert!(block != 1, "as intended");
                        turn.pass(block, &abandoned);
                    },
                );
            });
        }));
        assert!(caught.is_err());
    }
}
