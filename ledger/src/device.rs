//! Limits of devices, as their vendor states them (M4.4 §0x04E).

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result, positive};

/// Limits of one device. They bound what a launch may have; they measure nothing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceModel {
    /// Lower-case name to ask for it by.
    pub name: Cow<'static, str>,
    /// Compute capability, major and minor.
    pub compute_capability: [u64; 2],
    /// Multiprocessors, where one product is meant.
    pub multiprocessors: Option<u64>,
    /// Warps that may be resident on a multiprocessor.
    pub warps_per_sm: u64,
    /// Threads that may be.
    pub threads_per_sm: u64,
    /// Blocks that may be.
    pub blocks_per_sm: u64,
    /// Threads of a block at most.
    pub threads_per_block: u64,
    /// 32-bit registers of a multiprocessor.
    pub registers_per_sm: u64,
    /// Registers of a thread at most.
    pub registers_per_thread: u64,
    /// Shared memory of a multiprocessor, in bytes.
    pub shared_bytes_per_sm: u64,
    /// Shared memory that a block may opt in to, in bytes.
    pub shared_bytes_per_block: u64,
    /// Dense 16-bit tensor operations a second, the vendor's figure.
    pub vendor_tensor_flops_per_second: Option<f64>,
    /// Bytes a second of device memory, the vendor's figure.
    pub vendor_bytes_per_second: Option<f64>,
}

const KIB: u64 = 1024;

/// A device of compute capability 8.0, whose figures others are given by what differs.
const BASE: DeviceModel = DeviceModel {
    name: Cow::Borrowed("a100"),
    compute_capability: [8, 0],
    multiprocessors: Some(108),
    warps_per_sm: 64,
    threads_per_sm: 2048,
    blocks_per_sm: 32,
    threads_per_block: 1024,
    registers_per_sm: 65_536,
    registers_per_thread: 255,
    shared_bytes_per_sm: 164 * KIB,
    shared_bytes_per_block: 163 * KIB,
    vendor_tensor_flops_per_second: Some(312e12),
    vendor_bytes_per_second: Some(2.039e12),
};

/// The devices that are known by name: A100 (80 GB, SXM), any device of compute capability 8.6,
/// H100 and H200 (SXM).
pub const DEVICES: &[DeviceModel] = &[
    BASE,
    DeviceModel {
        name: Cow::Borrowed("cc8.6"),
        compute_capability: [8, 6],
        multiprocessors: None,
        warps_per_sm: 48,
        threads_per_sm: 1536,
        blocks_per_sm: 16,
        shared_bytes_per_sm: 100 * KIB,
        shared_bytes_per_block: 99 * KIB,
        vendor_tensor_flops_per_second: None,
        vendor_bytes_per_second: None,
        ..BASE
    },
    DeviceModel {
        name: Cow::Borrowed("h100"),
        compute_capability: [9, 0],
        multiprocessors: Some(132),
        shared_bytes_per_sm: 228 * KIB,
        shared_bytes_per_block: 227 * KIB,
        vendor_tensor_flops_per_second: Some(989.4e12),
        vendor_bytes_per_second: Some(3.35e12),
        ..BASE
    },
    DeviceModel {
        name: Cow::Borrowed("h200"),
        compute_capability: [9, 0],
        multiprocessors: Some(132),
        shared_bytes_per_sm: 228 * KIB,
        shared_bytes_per_block: 227 * KIB,
        vendor_tensor_flops_per_second: Some(989.4e12),
        vendor_bytes_per_second: Some(4.8e12),
        ..BASE
    },
];

/// The device of `name` among [`DEVICES`] and `added` ones, which come first.
///
/// # Errors
///
/// A name that neither has.
pub fn device<'a>(name: &str, added: &'a [DeviceModel]) -> Result<&'a DeviceModel> {
    let mut all = added.iter().chain(DEVICES);
    let found = all.find(|device| device.name.eq_ignore_ascii_case(name));
    found.ok_or_else(|| {
        let known: Vec<&str> = added.iter().chain(DEVICES).map(|device| &*device.name).collect();
        Error::Unknown { field: "device", had: name.to_owned(), known: known.join(", ") }
    })
}

impl DeviceModel {
    /// Refuses a device that could not be.
    ///
    /// # Errors
    ///
    /// A limit of 0, or a block that may have more than its multiprocessor.
    pub fn check(&self) -> Result<()> {
        for (field, limit) in [
            ("multiprocessors", self.multiprocessors.unwrap_or(1)),
            ("warps_per_sm", self.warps_per_sm),
            ("threads_per_sm", self.threads_per_sm),
            ("blocks_per_sm", self.blocks_per_sm),
            ("threads_per_block", self.threads_per_block),
            ("registers_per_sm", self.registers_per_sm),
            ("registers_per_thread", self.registers_per_thread),
            ("shared_bytes_per_sm", self.shared_bytes_per_sm),
            ("shared_bytes_per_block", self.shared_bytes_per_block),
        ] {
            positive(field, limit)?;
        }
        if self.shared_bytes_per_block > self.shared_bytes_per_sm {
            let needs = format!("at most {}, a multiprocessor's", self.shared_bytes_per_sm);
            return Err(Error::field("shared_bytes_per_block", self.shared_bytes_per_block, needs));
        }
        Ok(())
    }
}
