//! Exchanges inside a warp.

#[cfg(target_arch = "nvptx64")]
unsafe extern "unadjusted" {
    #[link_name = "llvm.nvvm.bar.warp.sync"]
    fn bar_warp_sync(mask: u32);
    #[link_name = "llvm.nvvm.shfl.sync.bfly.i32"]
    fn shfl_sync_bfly_i32(mask: u32, value: u32, lane_mask: u32, clamp: u32) -> u32;
    #[link_name = "llvm.nvvm.shfl.sync.idx.i32"]
    fn shfl_sync_idx_i32(mask: u32, value: u32, lane: u32, clamp: u32) -> u32;
    #[link_name = "llvm.nvvm.vote.any.sync"]
    fn vote_any_sync(mask: u32, condition: bool) -> bool;
    #[link_name = "llvm.nvvm.vote.ballot.sync"]
    fn vote_ballot_sync(mask: u32, condition: bool) -> u32;
}

/// `shfl.sync.bfly.b32` (PTX ISA, "shfl.sync"): the value of the lane whose number differs in
/// `lane_mask`.
///
/// # Safety
/// All 32 lanes reach the same call.
#[inline(always)]
pub unsafe fn shuffle_xor(value: f32, lane_mask: u32) -> f32 {
    #[cfg(target_arch = "nvptx64")]
    return f32::from_bits(shfl_sync_bfly_i32(u32::MAX, value.to_bits(), lane_mask, 31));
    #[cfg(not(target_arch = "nvptx64"))]
    super::not_on_host()
}

/// `shfl.sync.idx.b32` (PTX ISA, "shfl.sync"): lane 0's value, which the assembler then knows to be
/// the same in the whole warp.
///
/// # Safety
/// All 32 lanes reach the same call.
#[inline(always)]
pub unsafe fn uniform(value: u32) -> u32 {
    #[cfg(target_arch = "nvptx64")]
    return shfl_sync_idx_i32(u32::MAX, value, 0, 31);
    #[cfg(not(target_arch = "nvptx64"))]
    super::not_on_host()
}

/// `vote.sync.any.pred` (PTX ISA, "vote.sync"): whether any lane's condition holds.
///
/// # Safety
/// All 32 lanes reach the same call.
#[inline(always)]
pub unsafe fn any(condition: bool) -> bool {
    #[cfg(target_arch = "nvptx64")]
    return vote_any_sync(u32::MAX, condition);
    #[cfg(not(target_arch = "nvptx64"))]
    super::not_on_host()
}

/// `vote.sync.ballot.b32` (PTX ISA, "vote.sync"): bit i is lane i's condition.
///
/// # Safety
/// All 32 lanes reach the same call.
#[inline(always)]
pub unsafe fn ballot(condition: bool) -> u32 {
    #[cfg(target_arch = "nvptx64")]
    return vote_ballot_sync(u32::MAX, condition);
    #[cfg(not(target_arch = "nvptx64"))]
    super::not_on_host()
}

/// `bar.warp.sync` (PTX ISA, "bar.warp.sync"): waits for all 32 lanes and makes their memory
/// accesses visible to one another.
///
/// # Safety
/// All 32 lanes reach the same call.
#[inline(always)]
pub unsafe fn sync_warp() {
    #[cfg(target_arch = "nvptx64")]
    return bar_warp_sync(u32::MAX);
    #[cfg(not(target_arch = "nvptx64"))]
    super::not_on_host()
}
