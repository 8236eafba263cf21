//! `ferroflash._native`: attention over addresses, dimensions and strides.
//!
//! The Python side looks at arrays and tensors, allocates outputs and passes integers; this side
//! knows nothing of numpy or torch. A kind of call is planned once (`plan`), its tensors are read
//! (`view`), and it is run without the interpreter's lock (`call`); errors come back as Python
//! exceptions that name the argument (`error`).

use pyo3::prelude::*;

mod call;
mod error;
mod plan;
mod pool;
mod report;
mod view;

/// The native half of `ferroflash`; private to the package.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    pool::remember_process();
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<plan::PyPlan>()?;
    module.add_function(wrap_pyfunction!(call::forward, module)?)?;
    module.add_function(wrap_pyfunction!(call::backward, module)?)?;
    module.add_function(wrap_pyfunction!(call::dropout_mask, module)?)?;
    module.add_function(wrap_pyfunction!(report::kernel_name, module)?)?;
    module.add_function(wrap_pyfunction!(report::doctor, module)?)?;
    module.add_function(wrap_pyfunction!(report::is_available, module)?)
}
