//! The threads of CPU calls.
//!
//! A forked process has none of its parent's threads: work given to the parent's pool would wait
//! for ever. So a process that forked from the one that imported the module makes its own pool.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use rayon::{ThreadPool, ThreadPoolBuilder};

/// The process that imported the module.
static IMPORTER: OnceLock<u32> = OnceLock::new();
/// The pool of a forked process, and that process.
static FORKED: Mutex<Option<(u32, Arc<ThreadPool>)>> = Mutex::new(None);

/// To be called once, at import.
pub(crate) fn remember_process() {
    IMPORTER.get_or_init(std::process::id);
}

/// Runs `work` where its parallel parts find threads that exist.
pub(crate) fn with_threads<R: Send>(work: impl FnOnce() -> R + Send) -> R {
    let process = std::process::id();
    if IMPORTER.get().is_none_or(|&importer| importer == process) {
        return work();
    }
    match forked_pool(process) {
        Some(pool) => pool.install(work),
        None => work(),
    }
}

fn forked_pool(process: u32) -> Option<Arc<ThreadPool>> {
    let mut slot = FORKED.lock().unwrap_or_else(PoisonError::into_inner);
    match slot.take() {
        Some((owner, pool)) if owner == process => {
            *slot = Some((owner, pool.clone()));
            return Some(pool);
        }
        // A pool whose threads did not survive the fork: there is nothing to end.
        Some((_, lost)) => std::mem::forget(lost),
        None => {}
    }
    let pool = Arc::new(ThreadPoolBuilder::new().build().ok()?);
    *slot = Some((process, pool.clone()));
    Some(pool)
}
