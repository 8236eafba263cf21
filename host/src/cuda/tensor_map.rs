//! Encoding what the copy engine is told of a tensor.

use std::ffi::c_void;

use cudarc::driver::sys::{
    self, CUtensorMap, CUtensorMapDataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave,
    CUtensorMapL2promotion, CUtensorMapSwizzle,
};
use ferroflash_core::axes::Dtype;
use ferroflash_core::tensor_map::{TensorMap, TensorMapPlan};

use super::driver::{checked, failed};
use crate::error::{Error, Result};

/// The map of a tensor of 16-bit elements at `address`.
pub(crate) fn encode(
    kernel: &'static str,
    address: u64,
    plan: &TensorMapPlan,
    dtype: Dtype,
) -> Result<TensorMap> {
    let data_type = match dtype {
        Dtype::Bf16 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        Dtype::F16 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        Dtype::F32 => {
            return Err(Error::argument("tensor map", "f32 elements", "16-bit elements"));
        }
    };
    let swizzle = match plan.panel.swizzle_bytes {
        128 => CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
        _ => CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_64B,
    };
    let sides = [plan.panel.columns, plan.panel.rows, 1, 1];
    let steps = [1_u32; 4];
    // SAFETY: a tensor map is plain data, which the call below fills in.
    let mut map: CUtensorMap = unsafe { std::mem::zeroed() };
    // SAFETY: every pointer is to four (strides: three) values that outlive the call.
    let code = unsafe {
        sys::cuTensorMapEncodeTiled(
            &raw mut map,
            data_type,
            4,
            address as *mut c_void,
            plan.dims.as_ptr(),
            plan.strides.as_ptr(),
            sides.as_ptr(),
            steps.as_ptr(),
            CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    checked(code).map_err(failed("cuTensorMapEncodeTiled", Some(kernel)))?;
    Ok(TensorMap(map.opaque))
}
