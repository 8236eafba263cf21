//! `ferroflash._native`: attention over addresses, dimensions and strides.
//!
//! The Python side looks at arrays and tensors, allocates outputs and passes integers; this side
//! knows nothing of numpy or torch. A call is read (`call`), its plan is found or made (`plans`)
//! and run without the interpreter's lock; errors come back as Python exceptions that name the
//! argument (`error`).

use pyo3::prelude::*;

mod call;
mod error;
mod plans;
mod pool;
mod report;

/// The native half of `ferroflash`; private to the package.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    pool::remember_process();
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_function(wrap_pyfunction!(call::forward, module)?)?;
    module.add_function(wrap_pyfunction!(call::explain, module)?)?;
    module.add_function(wrap_pyfunction!(report::kernel_name, module)?)?;
    module.add_function(wrap_pyfunction!(report::doctor, module)?)?;
    module.add_function(wrap_pyfunction!(report::is_available, module)?)
}
