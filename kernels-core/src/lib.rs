//! The contract that the host and the GPU kernels of ferroflash both compile.
//!
//! Everything here is plain arithmetic on values: no allocation, no `std`, no GPU. A schedule or a
//! mask written here runs unchanged in a kernel, in the CPU path and in a property test, so that
//! what the tests prove is what the device executes.
//!
//! | module | what it decides |
//! | --- | --- |
//! | [`shape`] | sizes of one attention call, strides of a tensor, query head → KV head |
//! | [`visibility`] | which keys a query row may see; full, partial and skipped tiles |
//! | [`axes`] | the compile-time axes of a kernel: family, direction, element, mask class |
//! | [`tile`] | tile sizes, the register fragments and shared-memory plan they imply |
//! | [`tilings`] | every tile size in use, with its reason |
//! | [`backward`] | the stages of the backward pass: schedule, plans, scratch, parameters |
//! | [`table`] | every kernel there is, once |
//! | [`items`] | where the items of a call lie; which of them a block's query rows belong to |
//! | [`schedule`] | block index ↔ the work that block owns |
//! | [`walk`] | in which order a block visits its K/V tiles; which of them need no mask |
//! | [`fragment`], [`swizzle`] | which lane holds which element; where a tile's bytes lie |
//! | [`tensor_map`] | what the copy engine is told of a tensor, and when it cannot be |
//! | [`row_state`] | the mergeable softmax state (row maximum, row sum, numerator) |
//! | [`philox`], [`dropout`] | the random generator; which probabilities a dropout mask keeps |
//! | [`params`] | the structures passed to kernels by value |
#![no_std]

pub mod axes;
pub mod backward;
pub mod dropout;
pub mod fragment;
pub mod items;
pub mod params;
pub mod philox;
pub mod row_state;
pub mod schedule;
pub mod shape;
pub mod swizzle;
pub mod table;
pub mod tensor_map;
pub mod tile;
pub mod tilings;
pub mod visibility;
pub mod walk;
