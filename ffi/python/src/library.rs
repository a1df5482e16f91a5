//! Lookup of `libgmlake.so`, opened once and never closed: allocations live as long as the process.

use std::ffi::CStr;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use glake_abi::{Unfit, Version};
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use pyo3::prelude::*;

use crate::error::Error;

glake_abi::table! {
    /// Functions with a binding here.
    pub(crate) struct Functions {
        glake_abi,
        gmlake_last_error,
        glake_last_status,
        glake_version,
        glake_configure,
        glake_start,
        glake_started,
        glake_device_count,
        glake_device_name,
        glake_alloc,
        glake_free,
        glake_find,
        glake_record_stream,
        glake_largest,
        glake_trim,
        glake_set_fraction,
        glake_fraction,
        glake_pool_create,
        glake_pool_release,
        glake_pool_use_count,
        glake_pool_trim,
        glake_reset_peaks,
        glake_reset_totals,
        glake_stats_json,
        glake_snapshot_json,
        glake_string_free,
        glake_record_history,
        glake_history_enabled,
        glake_on_out_of_memory,
        glake_copy_async,
        glake_copy_wait,
        glake_copy_done,
        glake_copy_drop,
        glake_device_of,
        glake_copy_list,
        glake_copy_to_all,
        glake_multi_path,
        glake_copy_stats_json,
        glake_offload_begin,
        glake_offload_begin_checked,
        glake_offload_check,
        glake_offload_reload,
        glake_offload_wait,
        glake_offload_release,
        glake_offload_prepare,
        glake_offload_stats_json,
        glake_offload_site_create,
        glake_offload_site_release,
        glake_offload_ask,
        glake_offload_needs,
        glake_offload_site_json,
        glake_offload_packed,
        glake_offload_leaf_begins,
        glake_offload_untimed,
        glake_offload_replays,
        glake_offload_unpacked,
        glake_offload_freed,
        glake_offload_dropped,
        glake_is_private,
        glake_generation,
        glake_stream_synchronize,
        glake_host_register,
        glake_host_unregister,
        glake_lease_set,
        glake_lease_grant,
        glake_lease_take,
        glake_lease_watch,
        glake_join,
        glake_joins_agent,
        glake_leave,
        glake_region_define,
        glake_region_push,
        glake_region_pop,
        glake_region_seal,
        glake_region_unseal,
        glake_region_prepare,
        glake_region_fix,
        glake_region_wait,
        glake_live_ranges,
        glake_live_callback,
        glake_decommit,
        glake_commit,
        glake_region_order,
        glake_region_of,
        glake_regions_json,
        glake_shrink,
        glake_refill,
        glake_memory_usage_json,
        glake_use_begin,
        glake_gate_wait,
        glake_use_end,
        glake_safepoint_wanted,
        glake_safepoint_arrive,
        glake_safepoint_go_on,
        glake_use_wanted,
        glake_vote_arrive,
        glake_vote_asked,
        glake_vote_cast,
        glake_use_join,
        glake_use_leave,
        glake_gate_json,
        glake_hooks_set,
        glake_enable_peer,
        glake_share,
        glake_open_shared,
        glake_close_shared,
    }
}

struct Open {
    path: PathBuf,
    symbols: Functions,
}

static OPEN: OnceLock<Open> = OnceLock::new();

/// Returns the functions of the open library.
pub(crate) fn symbols() -> PyResult<&'static Functions> {
    match OPEN.get() {
        Some(open) => Ok(&open.symbols),
        None => Err(Error::new_err("libgmlake.so is not open yet: import glake, not glake._glake")),
    }
}

#[pyfunction]
pub(crate) fn open(path: PathBuf) -> PyResult<()> {
    // Two threads may both get here: dlopen gives them the same library, and one of the equal tables is kept.
    let open = match OPEN.get() {
        Some(open) => open,
        None => {
            let symbols = load(&path)?;
            OPEN.get_or_init(|| Open { path: path.clone(), symbols })
        }
    };
    if open.path == path {
        return Ok(());
    }
    Err(Error::new_err(format!(
        "asked to open {}, but this process has {} open already: one library holds its memory",
        path.display(),
        open.path.display(),
    )))
}

fn load(path: &Path) -> PyResult<Functions> {
    let refuse = |why: String| Error::new_err(format!("cannot use {}: {why}", path.display()));
    // Global, so that the compiled backend finds the same functions.
    // SAFETY: libgmlake.so does nothing in its constructors.
    let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }
        .map_err(|error| refuse(error.to_string()))?;
    // Blocks, observers and torch's own pointers into the library stay for the life of the process.
    let library: &Library = Box::leak(Box::new(library));
    // SAFETY: a name's address is looked up, and not followed.
    let find = |name: &CStr| unsafe { library.get(name.to_bytes_with_nul()) }.map(|found| *found);
    // SAFETY: all of them are that library's, which is never closed.
    unsafe { Functions::of(find) }.map_err(|unfit| {
        refuse(match unfit {
            Unfit::Missing(error) => format!("it is not GLake's library, or another release's ({error})"),
            Unfit::OtherVersion { found } => format!(
                "it is of {found}, this package is of {}: take both from one release, as one installed wheel has them",
                Version::OURS
            ),
        })
    })
}

#[pyfunction]
pub(crate) fn path() -> Option<PathBuf> {
    OPEN.get().map(|open| open.path.clone())
}
