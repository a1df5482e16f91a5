//! `glake._glake`: the bindings of the Python package to `libgmlake.so`.
//!
//! ```text
//! glake (Python) ─► _glake (this module) ─► libgmlake.so ◄─ torch's pluggable allocator, the compiled backend
//!                     bindings: no state       one library holds the state of a process
//! ```
//!
//! Every function is one call of the C API (`gmlake.h`) without the GIL; a failed status becomes an exception of `glake.errors` with the
//! library's own text. Sizes are bytes, pointers and streams are integers. Functions that torch itself calls (`gmlake_malloc` and others),
//! and functions that need C++ (filters of private pools, checkpoints, mappings), have no binding here. `glake/_glake.pyi` has the types
//! and descriptions for Python.

mod bindings;
mod error;
mod hooks;
mod lease;
mod library;
mod offload;
mod parked;

use pyo3::prelude::*;

#[pymodule]
fn _glake(module: &Bound<'_, PyModule>) -> PyResult<()> {
    macro_rules! add {
        ($($name:path),* $(,)?) => { $(module.add_function(wrap_pyfunction!($name, module)?)?;)* };
    }
    add!(library::open, library::path, bindings::version, bindings::device_name);
    add!(bindings::device_of, bindings::find, bindings::region_of, bindings::share);
    add!(hooks::hooks_end, hooks::hooks_set, hooks::live_callback, hooks::on_out_of_memory);
    add!(lease::join, lease::lease_watch, offload::offload_begin, offload::offload_reserve);
    bindings::add(module)?;
    module.add_class::<offload::Packed>()?;
    module.add_class::<offload::Site>()?;
    module.add_class::<parked::Parked>()
}
