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

mod agent;
mod blocks;
mod commit;
mod copies;
mod error;
mod gate;
mod history;
mod hooks;
mod lease;
mod library;
mod live;
mod offload;
mod parked;
mod pools;
mod regions;
mod share;
mod site;
mod start;
mod statistics;

use pyo3::prelude::*;

#[pymodule]
mod _glake {
    #[pymodule_export]
    use crate::agent::{join, leave};
    #[pymodule_export]
    use crate::blocks::{alloc, find, fraction, free, largest, record_stream, set_fraction, trim};
    #[pymodule_export]
    use crate::commit::{commit, decommit};
    #[pymodule_export]
    use crate::copies::{
        copy_async, copy_done, copy_drop, copy_list, copy_stats_json, copy_to_all, copy_wait, device_of,
        host_register, host_unregister, multi_path, stream_synchronize,
    };
    #[pymodule_export]
    use crate::gate::{
        gate_json, gate_wait, safepoint_wanted, use_begin, use_end, use_join, use_leave, use_wanted,
    };
    #[pymodule_export]
    use crate::history::{history_enabled, on_out_of_memory, record_history};
    #[pymodule_export]
    use crate::hooks::{hooks_end, hooks_set};
    #[pymodule_export]
    use crate::lease::{lease_grant, lease_set, lease_take, lease_watch};
    #[pymodule_export]
    use crate::library::{open, path};
    #[pymodule_export]
    use crate::live::{live_callback, live_ranges};
    #[pymodule_export]
    use crate::offload::{
        Packed, generation, is_private, offload_begin, offload_prepare, offload_stats_json,
    };
    #[pymodule_export]
    use crate::parked::Parked;
    #[pymodule_export]
    use crate::pools::{pool_create, pool_release, pool_trim, pool_use_count};
    #[pymodule_export]
    use crate::regions::{
        memory_usage_json, refill, region_define, region_fix, region_of, region_order, region_pop,
        region_prepare, region_push, region_seal, region_unseal, region_wait, regions_json, shrink,
    };
    #[pymodule_export]
    use crate::share::{close_shared, enable_peer, open_shared, share};
    #[pymodule_export]
    use crate::site::Site;
    #[pymodule_export]
    use crate::start::{abi, configure, device_count, device_name, start, started, version};
    #[pymodule_export]
    use crate::statistics::{reset_peaks, reset_totals, snapshot_json, stats_json};
}
