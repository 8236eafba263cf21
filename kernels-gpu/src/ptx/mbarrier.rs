//! Transaction barriers in shared memory: phases that end when enough threads have arrived and
//! enough bytes have come.

/// `mbarrier.init.shared::cta.b64` (PTX ISA, "mbarrier.init"): phase 0 ends after `arrivals`.
///
/// # Safety
/// `barrier` is aligned to 8, in shared memory and used by no one yet; other threads use it only
/// after [`fence_mbarrier_init`] and a barrier of the block.
#[inline(always)]
pub unsafe fn mbarrier_init(barrier: u32, arrivals: u32) {
    ptx_asm!("mbarrier.init.shared::cta.b64 [{0}], {1};", in(reg32) barrier, in(reg32) arrivals,
        options(nostack));
}

/// `fence.mbarrier_init.release.cluster` (PTX ISA, "membar/fence"): makes initialised barriers
/// visible to the copy engine.
///
/// # Safety
/// None beyond the barriers' own.
#[inline(always)]
pub unsafe fn fence_mbarrier_init() {
    ptx_asm!("fence.mbarrier_init.release.cluster;", options(nostack));
}

/// `mbarrier.arrive.shared::cta.b64` (PTX ISA, "mbarrier.arrive"): one arrival, with release.
///
/// # Safety
/// `barrier` is initialised, and its phase still expects an arrival.
#[inline(always)]
pub unsafe fn mbarrier_arrive(barrier: u32) {
    ptx_asm!("mbarrier.arrive.shared::cta.b64 _, [{0}];", in(reg32) barrier, options(nostack));
}

/// `mbarrier.arrive.shared::cta.b64` with a count (PTX ISA, "mbarrier.arrive"): as many arrivals.
///
/// # Safety
/// As [`mbarrier_arrive`], `count` times.
#[inline(always)]
pub unsafe fn mbarrier_arrive_many(barrier: u32, count: u32) {
    ptx_asm!("mbarrier.arrive.shared::cta.b64 _, [{0}], {1};", in(reg32) barrier,
        in(reg32) count, options(nostack));
}

/// `mbarrier.arrive.expect_tx.shared::cta.b64` (PTX ISA, "mbarrier.arrive"): one arrival, after
/// which the phase also waits for `bytes` to be copied.
///
/// # Safety
/// As [`mbarrier_arrive`]; exactly `bytes` are then copied against the barrier.
#[inline(always)]
pub unsafe fn mbarrier_arrive_expect(barrier: u32, bytes: u32) {
    ptx_asm!("mbarrier.arrive.expect_tx.shared::cta.b64 _, [{0}], {1};", in(reg32) barrier,
        in(reg32) bytes, options(nostack));
}

/// Waits for the end of the phase of this `parity`, with acquire. A fresh barrier counts as past
/// its phase of parity 1.
///
/// # Safety
/// `barrier` is initialised; the phase waited for is the current one or the one before.
#[inline(always)]
pub unsafe fn mbarrier_wait(barrier: u32, parity: u32) {
    while !mbarrier_try_wait(barrier, parity) {}
}

/// `mbarrier.try_wait.parity.shared::cta.b64` (PTX ISA, "mbarrier.try_wait"): waits for a while;
/// whether the phase has ended.
///
/// # Safety
/// As [`mbarrier_wait`].
#[inline(always)]
pub unsafe fn mbarrier_try_wait(barrier: u32, parity: u32) -> bool {
    let done: u32;
    ptx_asm!(
        "{{",
        ".reg .pred done;",
        "mbarrier.try_wait.parity.shared::cta.b64 done, [{1}], {2};",
        "selp.u32 {0}, 1, 0, done;",
        "}}",
        out(reg32) done, in(reg32) barrier, in(reg32) parity, options(nostack)
    );
    done != 0
}
