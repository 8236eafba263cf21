//! p9: what a packed call needs beside its results grows with its tokens, not with the number of
//! sequences times the longest. An allocator counts; nothing else runs in this program.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use ferroflash_tests::backend::{tiled_backward, tiled_forward};
use ferroflash_tests::case::{Case, PackedLengths, Sight};
use half::bf16;

/// The system's allocator, counting the bytes that are held.
struct Counting;

static HELD: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is the system allocator's own; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let held = HELD.fetch_add(layout.size(), Ordering::SeqCst) + layout.size();
        MOST.fetch_max(held, Ordering::SeqCst);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Ordering::SeqCst);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The most bytes held at once during `run`, beyond those held before.
fn most_bytes(run: impl FnOnce()) -> usize {
    let before = HELD.load(Ordering::SeqCst);
    MOST.store(before, Ordering::SeqCst);
    run();
    MOST.load(Ordering::SeqCst) - before
}

/// One sequence of 32768 rows and 4096 of one row: 36864 tokens, and 134 million where every
/// sequence is given as much as the longest.
#[test]
fn p9_scratch_grows_with_tokens() {
    let sequences = std::iter::once(32_768).chain(std::iter::repeat_n(1, 4096));
    let mut cu_q = vec![0];
    for rows in sequences {
        cu_q.push(cu_q[cu_q.len() - 1] + rows);
    }
    // Few keys, so that the call is short; one of the small sequences has none.
    let cu_k: Vec<i32> = (0..cu_q.len() as i32).map(|item| (item * 2).min(8192)).collect();
    let packed = PackedLengths { cu_q, cu_k, ..PackedLengths::default() };
    let case = Case::<bf16>::packed((1, 1), (16, 16), packed, Sight::BOTTOM_RIGHT, 1, 1.0);
    let tokens = 32_768 + 4096;
    // A worker's tiles are in it too, so that threads count.
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    let allowed = tokens * 1024 + workers * (4 << 20);
    let forward = most_bytes(|| drop(tiled_forward(&case, None).expect("a valid call")));
    assert!(forward <= allowed, "forward: {forward} bytes for {tokens} tokens");
    let backward = most_bytes(|| drop(tiled_backward(&case, None).expect("a valid call")));
    assert!(backward <= allowed, "backward: {backward} bytes for {tokens} tokens");
    println!("forward {forward}, backward {backward}, allowed {allowed} bytes");
}
