//! The copy engine (TMA): boxes of a tensor between global and shared memory.

/// Address of the parameter structure of kernel `$kernel`, in the constant bank where the copy
/// engine can read tensor maps: no copy to local memory, no allocation.
///
/// # Safety
/// Stands in the entry function `$kernel`, whose only parameter is a structure by value.
#[macro_export]
macro_rules! parameter_address {
    ($kernel:ident) => {{
        let address: u64;
        // SAFETY: takes an address.
        unsafe {
            core::arch::asm!(
                "{{",
                ".reg .b64 t;",
                concat!("mov.b64 t, ", stringify!($kernel), "_param_0;"),
                "cvta.param.u64 {0}, t;",
                "}}",
                out(reg64) address, options(pure, nomem, nostack)
            );
        }
        address
    }};
}

/// `prefetch.tensormap` (PTX ISA, "prefetch"): brings a tensor map into the engine's cache.
///
/// # Safety
/// `map` is the generic address of an encoded tensor map.
#[inline(always)]
pub unsafe fn prefetch_tensor_map(map: u64) {
    ptx_asm!("prefetch.tensormap [{0}];", in(reg64) map, options(nostack));
}

/// `cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes` (PTX ISA,
/// "cp.async.bulk.tensor"): starts copying the box at `coordinates` (innermost dimension first) to
/// `shared`; its whole bytes, also those outside the tensor, which become zero, count against
/// `barrier`.
///
/// # Safety
/// `map` is the generic address of an encoded 4-dimensional map; the box fits at `shared`, aligned
/// to 128 bytes (to the swizzle's period if swizzled), which no one reads or writes until the
/// barrier's phase has ended; the barrier expects the bytes.
#[inline(always)]
pub unsafe fn load_box(shared: u32, map: u64, barrier: u32, coordinates: [u32; 4]) {
    let [c0, c1, c2, c3] = coordinates;
    ptx_asm!(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes \
         [{0}], [{1}, {{{2}, {3}, {4}, {5}}}], [{6}];",
        in(reg32) shared, in(reg64) map, in(reg32) c0, in(reg32) c1, in(reg32) c2, in(reg32) c3,
        in(reg32) barrier, options(nostack)
    );
}

/// `cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes` (PTX ISA, "cp.async.bulk"):
/// starts copying `bytes` from `source` to `shared`, which count against `barrier`.
///
/// # Safety
/// Both addresses and `bytes` are multiples of 16; the source is readable; the target is in the
/// block's shared memory, which no one reads or writes until the barrier's phase has ended; the
/// barrier expects the bytes.
#[inline(always)]
pub unsafe fn load_bytes(shared: u32, source: u64, bytes: u32, barrier: u32) {
    ptx_asm!(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{0}], [{1}], {2}, \
         [{3}];",
        in(reg32) shared, in(reg64) source, in(reg32) bytes, in(reg32) barrier, options(nostack)
    );
}

/// `cp.async.bulk.tensor.4d.global.shared::cta.bulk_group` (PTX ISA, "cp.async.bulk.tensor"):
/// starts writing the box at `coordinates` from `shared`; what lies outside the tensor is not
/// written.
///
/// # Safety
/// As [`load_box`]; the box was written before [`fence_proxy_async`] in each writing thread and a
/// barrier, and stays until [`wait_stores_read`].
#[inline(always)]
pub unsafe fn store_box(map: u64, shared: u32, coordinates: [u32; 4]) {
    let [c0, c1, c2, c3] = coordinates;
    ptx_asm!(
        "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [{0}, {{{1}, {2}, {3}, {4}}}], \
         [{5}];",
        in(reg64) map, in(reg32) c0, in(reg32) c1, in(reg32) c2, in(reg32) c3, in(reg32) shared,
        options(nostack)
    );
}

/// `cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32` (PTX ISA, "cp.reduce.async.bulk"):
/// starts adding `bytes` of f32 values from `shared` to those at `target`, each by itself.
///
/// # Safety
/// Both addresses and `bytes` are multiples of 16; the values at `target` are touched by atomics
/// only; those at `shared` were written before [`fence_proxy_async`] in each writing thread and a
/// barrier, and stay until [`wait_stores_read`].
#[inline(always)]
pub unsafe fn add_bytes_f32(target: u64, shared: u32, bytes: u32) {
    ptx_asm!("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{0}], [{1}], {2};",
        in(reg64) target, in(reg32) shared, in(reg32) bytes, options(nostack));
}

/// `cp.async.bulk.commit_group` (PTX ISA, "cp.async.bulk.commit_group"): closes the group of this
/// thread's stores so far.
///
/// # Safety
/// None beyond the stores' own.
#[inline(always)]
pub unsafe fn commit_stores() {
    ptx_asm!("cp.async.bulk.commit_group;", options(nostack));
}

/// `cp.async.bulk.wait_group.read 0` (PTX ISA, "cp.async.bulk.wait_group"): waits until all of this
/// thread's stores have read their shared memory.
///
/// # Safety
/// None beyond the stores' own.
#[inline(always)]
pub unsafe fn wait_stores_read() {
    ptx_asm!("cp.async.bulk.wait_group.read 0;", options(nostack));
}

/// `cp.async.bulk.wait_group 0` (PTX ISA, "cp.async.bulk.wait_group"): waits until all of this
/// thread's stores are complete and visible to it.
///
/// # Safety
/// None beyond the stores' own.
#[inline(always)]
pub unsafe fn wait_stores() {
    ptx_asm!("cp.async.bulk.wait_group 0;", options(nostack));
}

/// `fence.proxy.async.shared::cta` (PTX ISA, "membar/fence"): orders this thread's ordinary
/// shared-memory accesses before those of the copy engine and of `wgmma`.
///
/// # Safety
/// Never unsafe in itself.
#[inline(always)]
pub unsafe fn fence_proxy_async() {
    ptx_asm!("fence.proxy.async.shared::cta;", options(nostack));
}

/// `fence.proxy.async.global` (PTX ISA, "membar/fence"): orders this thread's ordinary
/// global-memory accesses before those of the copy engine.
///
/// # Safety
/// Never unsafe in itself.
#[inline(always)]
pub unsafe fn fence_proxy_async_global() {
    ptx_asm!("fence.proxy.async.global;", options(nostack));
}
