//! The functions of the interface, each declared once: [`functions!`](macro@crate::functions) passes the list to a macro.
//!
//! ```text
//! functions! ─┬─► signatures, NAMES ─► table!     for programs that open the library: the functions that they need
//!             └─► glake-ffi                       each definition is checked against its declaration at compile time
//! ```

use std::ffi::{CStr, c_char, c_void};

use crate::{
    Block, BlockFreed, BlockVisit, ByteRange, Checkpoint, ContextDrop, CopyBlock, DeviceStats, LeaseWatcher,
    LiveCallback, MappingObserver, Pack, RegionHook, SegmentBlockVisit, SegmentVisit, ShortageObserver,
    StreamFilter, Version,
};

/// Passes every declaration of `gmlake.h`, except torch's own names, to a macro of the caller: `name(types) -> answer;`. The types are
/// those of this crate and of `std::ffi`.
#[macro_export]
macro_rules! functions {
    ($macro:ident) => {
        $macro! {
            glake_alloc(i32, usize, *mut c_void, *mut *mut c_void) -> i32;
            glake_free(*mut c_void) -> i32;
            glake_find(*const c_void, *mut Block) -> i32;
            glake_record_stream(*mut c_void, *mut c_void) -> i32;
            glake_largest(i32, *mut u64) -> i32;
            glake_trim(i32, u64, *mut u64) -> i32;
            glake_set_fraction(i32, f64) -> i32;
            glake_fraction(i32, *mut f64) -> i32;
            glake_driver_calls(*mut u64, *mut u64) -> i32;
            glake_heap_allocations() -> u64;
            glake_use_begin(*const *const c_char, usize, u32, i64, *mut u64) -> i32;
            glake_gate_wait(*const *const c_char, usize, u32, i64) -> i32;
            glake_use_end(u64) -> i32;
            glake_safepoint(u64) -> i32;
            glake_safepoint_wanted() -> bool;
            glake_safepoint_arrive(u64) -> i32;
            glake_safepoint_go_on(u64, i64) -> i32;
            glake_use_wanted(u64) -> bool;
            glake_vote_arrive(u64) -> i32;
            glake_vote_asked(u64, i64) -> i32;
            glake_vote_cast(u64, bool) -> i32;
            glake_use_join(u64) -> i32;
            glake_use_leave(u64) -> i32;
            glake_gate_json() -> *mut c_char;
            glake_host_register(*mut c_void, usize) -> i32;
            glake_host_unregister(*mut c_void) -> i32;
            glake_version() -> *const c_char;
            glake_abi() -> u32;
            glake_configure(*const c_char, *const c_char, *const c_char) -> i32;
            glake_start() -> i32;
            glake_started() -> bool;
            glake_device_count(*mut i32) -> i32;
            glake_device_name() -> *const c_char;
            glake_on_out_of_memory(ShortageObserver, *mut c_void) -> i32;
            glake_on_mapping(MappingObserver, *mut c_void) -> i32;
            glake_pool_create(i32, u64, u64) -> i32;
            glake_pool_begin(i32, u64, u64, StreamFilter, *mut c_void, ContextDrop) -> i32;
            glake_pool_expect_capture(i32, u64, u64, *mut c_void) -> i32;
            glake_pool_end(i32, u64, u64) -> i32;
            glake_pool_release(i32, u64, u64) -> i32;
            glake_pool_use_count(i32, u64, u64, *mut i32) -> i32;
            glake_pool_trim(i32, u64, u64) -> i32;
            glake_pool_fix(u64, u64, bool) -> i32;
            glake_pool_blocks(i32, u64, u64, BlockVisit, *mut c_void) -> i32;
            glake_pool_checkpoint(i32, u64, u64, *mut *mut Checkpoint) -> i32;
            glake_pool_restore(*const Checkpoint, BlockFreed, BlockVisit, *mut c_void) -> i32;
            glake_checkpoint_drop(*mut Checkpoint);
            glake_region_define(*const c_char, u32, u32) -> i32;
            glake_region_release(*const c_char) -> i32;
            glake_region_push(*const c_char) -> i32;
            glake_region_pop() -> i32;
            glake_plain_push() -> i32;
            glake_plain_pop() -> i32;
            glake_region_seal(*const c_char, bool) -> i32;
            glake_region_unseal(*const c_char) -> i32;
            glake_region_prepare(*const c_char) -> i32;
            glake_region_fix(*const c_void, bool) -> i32;
            glake_live_ranges(*const c_void, *const ByteRange, usize) -> i32;
            glake_live_callback(*const c_void, LiveCallback, *mut c_void, ContextDrop) -> i32;
            glake_decommit(*const c_void, u64, *mut u64) -> i32;
            glake_commit(*const c_void, u64, *mut u64) -> i32;
            glake_read_evicted(*mut c_void, *const c_void, u64) -> i32;
            glake_region_wait(*const c_char, i32, *mut c_void) -> i32;
            glake_region_order(*const *const c_char, usize) -> i32;
            glake_region_of(*const c_void) -> *mut c_char;
            glake_regions_json() -> *mut c_char;
            glake_enable_peer(i32, i32) -> i32;
            glake_share(*const c_void, *mut u8, usize, *mut usize, *mut u64) -> i32;
            glake_open_shared(*const u8, usize, i32, *mut *mut c_void) -> i32;
            glake_close_shared(*mut c_void) -> i32;
            glake_shrink(*const c_char) -> *mut c_char;
            glake_refill(*const c_char) -> *mut c_char;
            glake_memory_usage_json() -> *mut c_char;
            glake_hooks_set(RegionHook, RegionHook, *mut c_void, i64) -> i32;
            glake_lease_set(i32, u64) -> i32;
            glake_lease_grant(i32, u64) -> i32;
            glake_lease_take(i32, u64, *mut u64) -> i32;
            glake_lease_watch(LeaseWatcher, *mut c_void) -> i32;
            glake_join(*const c_char, *const c_char) -> i32;
            glake_joins_agent() -> bool;
            glake_leave() -> i32;
            glake_snapshot_json() -> *mut c_char;
            glake_segments(i32, SegmentVisit, SegmentBlockVisit, *mut c_void) -> i32;
            glake_record_history(bool, u64, bool) -> i32;
            glake_history_enabled() -> bool;
            glake_stats(i32, *mut DeviceStats) -> i32;
            glake_reset_peaks(i32) -> i32;
            glake_reset_totals(i32) -> i32;
            glake_stats_json(i32) -> *mut c_char;
            glake_string_free(*mut c_char);
            glake_last_error() -> *const c_char;
            glake_last_status() -> i32;
            gmlake_last_error() -> *const c_char;
            glake_stream_create(i32, *mut *mut c_void) -> i32;
            glake_stream_synchronize(i32, *mut c_void) -> i32;
            glake_stream_destroy(i32, *mut c_void) -> i32;
            glake_copy_async(*mut c_void, *const c_void, usize, *mut c_void, u32, *mut u64) -> i32;
            glake_copy_wait(u64) -> i32;
            glake_copy_drop(u64) -> i32;
            glake_copy_done(u64, *mut bool) -> i32;
            glake_copy_list(*const CopyBlock, usize, *mut c_void, u32, *mut u64) -> i32;
            glake_copy_to_all(*const *mut c_void, usize, *const c_void, usize, *mut c_void, u32, *mut u64) -> i32;
            glake_copy_try(*mut c_void, *const c_void, usize, *mut c_void, u32) -> i32;
            glake_device_of(*const c_void, *mut i32) -> i32;
            glake_multi_path(i32) -> i32;
            glake_copy_stats_json() -> *mut c_char;
            glake_offload_begin(*const c_void, u64, *mut c_void, *mut u64) -> i32;
            glake_offload_begin_checked(*const c_void, u64, *mut c_void, u64, u64, *mut u64) -> i32;
            glake_offload_check(u64, u64, *mut i32) -> i32;
            glake_offload_reload(u64, *mut c_void, *mut c_void) -> i32;
            glake_offload_wait(u64, *mut c_void) -> i32;
            glake_offload_release(u64) -> i32;
            glake_offload_prepare(i32, u64) -> i32;
            glake_offload_room(i32, u64, u64) -> i32;
            glake_offload_reserve(i32, u64, *mut u64) -> i32;
            glake_offload_store(u64, *const c_void, *mut c_void) -> i32;
            glake_offload_host(u64, *mut *mut c_void) -> i32;
            glake_offload_stream(u64, *const u64, *const u32, usize) -> i32;
            glake_offload_used(u64, usize, i32, bool, *mut u32, usize, *mut usize, *mut usize) -> i32;
            glake_offload_stats_json() -> *mut c_char;
            glake_offload_site_create(*mut u64) -> i32;
            glake_offload_site_release(u64) -> i32;
            glake_offload_ask(u64, i32, u64, i32) -> i32;
            glake_offload_needs(u64, u64, *mut bool) -> i32;
            glake_offload_site_json(u64, bool) -> *mut c_char;
            glake_offload_packed(u64, *const Pack, *mut u64, *mut i32, *mut u64, usize, *mut usize) -> i32;
            glake_offload_leaf_begins(u64) -> i32;
            glake_offload_untimed(u64) -> i32;
            glake_offload_replays(u64, u32, bool) -> i32;
            glake_offload_unpacked(u64, u64, *mut u64, usize, *mut usize) -> i32;
            glake_offload_freed(u64, u64) -> i32;
            glake_offload_dropped(u64, u64) -> i32;
            glake_is_private(*const c_void, *mut bool) -> i32;
            glake_generation(*const c_void, *mut u64) -> i32;
        }
    };
}

macro_rules! signatures {
    ($($name:ident($($argument:ty),*) $(-> $answer:ty)?;)*) => {
        /// Function types under the names of the functions; `gmlake.h` describes their contracts.
        #[allow(non_camel_case_types)]
        pub mod signatures {
            use super::*;

            $(
                #[doc = concat!("`", stringify!($name), "`")]
                pub type $name = unsafe extern "C" fn($($argument),*) $(-> $answer)?;
            )*
        }

        /// Names of all functions.
        pub const NAMES: &[&str] = &[$(stringify!($name)),*];
    };
}

functions!(signatures);

/// Defines a structure of functions to be found in an open library, each under its own name and with its declared type: `table! { struct
/// Functions { glake_alloc, glake_free } }`. Its function `of` takes a lookup from names to addresses, and checks the version first: only a
/// library of [`Version::OURS`] has these functions.
#[macro_export]
macro_rules! table {
    ($(#[$attribute:meta])* $visible:vis struct $table:ident { $($name:ident),* $(,)? }) => {
        $(#[$attribute])*
        #[derive(Clone, Copy, Debug)]
        $visible struct $table {
            $($visible $name: $crate::signatures::$name,)*
        }

        impl $table {
            /// Looks up all functions of the table.
            ///
            /// # Errors
            /// `glake_abi::Unfit`.
            ///
            /// # Safety
            /// Every address returned by `find` belongs to the same library, which is never closed.
            $visible unsafe fn of<E>(
                mut find: impl FnMut(&::std::ffi::CStr) -> ::std::result::Result<*const ::std::ffi::c_void, E>,
            ) -> ::std::result::Result<$table, $crate::Unfit<E>> {
                // SAFETY: the caller's promise.
                unsafe { $crate::check(&mut find) }?;
                Ok($table {
                    $($name: {
                        let name = concat!(stringify!($name), "\0");
                        // A Rust identifier contains no zero byte.
                        let name = ::std::ffi::CStr::from_bytes_until_nul(name.as_bytes()).unwrap_or_default();
                        let found = find(name).map_err($crate::Unfit::Missing)?;
                        // SAFETY: a function of this type: its library is of this interface.
                        unsafe {
                            ::std::mem::transmute::<*const ::std::ffi::c_void, $crate::signatures::$name>(found)
                        }
                    },)*
                })
            }
        }
    };
}

/// Checks that the library behind `find` is of [`Version::OURS`]; called by [`table!`](crate::table).
///
/// # Errors
/// [`Unfit`].
///
/// # Safety
/// As of [`table!`](crate::table).
pub unsafe fn check<E>(find: &mut impl FnMut(&CStr) -> Result<*const c_void, E>) -> Result<(), Unfit<E>> {
    let interface = find(c"glake_abi").map_err(Unfit::Missing)?;
    let release = find(c"glake_version").map_err(Unfit::Missing)?;
    // SAFETY: the name has had this signature in every version.
    let interface = unsafe { std::mem::transmute::<*const c_void, signatures::glake_abi>(interface) };
    // SAFETY: as above.
    let release = unsafe { std::mem::transmute::<*const c_void, signatures::glake_version>(release) };
    // SAFETY: both take nothing and answer constants, the second a text that ends with a zero.
    let (interface, release) = unsafe { (interface(), CStr::from_ptr(release())) };
    // Copied, because a refused library is closed.
    let found = Version { interface, release: release.to_string_lossy().into_owned().into() };
    if found == Version::OURS { Ok(()) } else { Err(Unfit::OtherVersion { found }) }
}

/// Reason why a library cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unfit<E> {
    /// The library lacks a function.
    Missing(E),
    /// The library is of another interface or release.
    OtherVersion {
        /// Version of the library.
        found: Version,
    },
}
