//! Bindings to single C functions, one line for each.
//!
//! ```text
//! call  name(arguments)       = c_function(arguments);             a status becomes an exception
//! read  name(arguments) -> T  = c_function(arguments [, &out]);    the last parameter receives the result
//! address                     the same, for a pointer, which Python sees as an integer
//! json  name(arguments)       = c_function(arguments);             the result is a text, or null
//! now   name(arguments) -> T  = c_function(arguments);             the result itself, without releasing the GIL
//! ```
//!
//! Python's names and texts stand in `glake/_glake.pyi`.

use std::ffi::{CString, c_char, c_void};
use std::ptr;

use glake_abi::{Block, ByteRange, CopyBlock, GLAKE_LEASE_NONE};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::{InvalidError, c_text, checked, taken, text, written};
use crate::library::symbols;

/// Conversion of an argument, before the call, to a value that lives until the call returns.
pub(crate) trait Prepare {
    type Prepared;

    fn prepare(self) -> PyResult<Self::Prepared>;
}

macro_rules! prepare {
    ($($type:ty),*) => {$(
        impl Prepare for $type {
            type Prepared = $type;

            fn prepare(self) -> PyResult<$type> {
                Ok(self)
            }
        }
    )*};
}

prepare!(bool, i32, i64, u32, u64, usize, f64, (u64, u64), Option<u64>, Vec<usize>);
prepare!(Vec<(usize, usize, usize)>);

impl<'a> Prepare for &'a [u8] {
    type Prepared = &'a [u8];

    fn prepare(self) -> PyResult<&'a [u8]> {
        Ok(self)
    }
}

impl Prepare for String {
    type Prepared = CString;

    fn prepare(self) -> PyResult<CString> {
        c_text(self)
    }
}

impl Prepare for Option<String> {
    type Prepared = Option<CString>;

    fn prepare(self) -> PyResult<Option<CString>> {
        self.map(c_text).transpose()
    }
}

impl Prepare for Vec<String> {
    type Prepared = Vec<CString>;

    fn prepare(self) -> PyResult<Vec<CString>> {
        self.into_iter().map(c_text).collect()
    }
}

impl Prepare for Option<Vec<(u64, u64)>> {
    type Prepared = Option<Vec<ByteRange>>;

    fn prepare(self) -> PyResult<Option<Vec<ByteRange>>> {
        Ok(self.map(|ranges| ranges.into_iter().map(|(start, end)| ByteRange { start, end }).collect()))
    }
}

/// Conversion of a prepared argument to the C type.
pub(crate) trait Pass<C> {
    fn pass(&self) -> C;
}

macro_rules! pass {
    ($($type:ty),*) => {$(
        impl Pass<$type> for $type {
            fn pass(&self) -> $type {
                *self
            }
        }
    )*};
}

pass!(bool, i32, i64, u32, u64, usize, f64);

impl<T> Pass<*const T> for *const T {
    fn pass(&self) -> *const T {
        *self
    }
}

impl Pass<*mut c_void> for usize {
    fn pass(&self) -> *mut c_void {
        ptr::with_exposed_provenance_mut(*self)
    }
}

impl Pass<*const c_void> for usize {
    fn pass(&self) -> *const c_void {
        ptr::with_exposed_provenance(*self)
    }
}

impl Pass<*const c_char> for CString {
    fn pass(&self) -> *const c_char {
        self.as_ptr()
    }
}

impl Pass<*const c_char> for Option<CString> {
    fn pass(&self) -> *const c_char {
        self.as_deref().map_or(ptr::null(), |text| text.as_ptr())
    }
}

/// Returns pointers to the texts.
fn pointers(texts: &[CString]) -> Vec<*const c_char> {
    texts.iter().map(|text| text.as_ptr()).collect()
}

/// Returns addresses as pointers.
fn addresses(addresses: &[usize]) -> Vec<*mut c_void> {
    addresses.iter().map(Pass::pass).collect()
}

fn copy_blocks(blocks: &[(usize, usize, usize)]) -> Vec<CopyBlock> {
    blocks
        .iter()
        .map(|(to, from, size)| CopyBlock { to: to.pass(), from: from.pass(), size: *size })
        .collect()
}

macro_rules! bindings {
    ($($(#[$attribute:meta])* $kind:ident $name:ident($($argument:ident: $type:ty),*) $(-> $answer:ty)? =
        $function:ident($($passed:expr),*);)*) => {
        $(binding! { $(#[$attribute])* $kind $name($($argument: $type),*) $(-> $answer)? = $function($($passed),*) })*

        /// Adds the bindings to the module.
        pub(crate) fn add(module: &Bound<'_, PyModule>) -> PyResult<()> {
            $(module.add_function(wrap_pyfunction!($name, module)?)?;)*
            Ok(())
        }
    };
}

macro_rules! binding {
    ($(#[$attribute:meta])* call $name:ident($($argument:ident: $type:ty),*) = $function:ident($($passed:expr),*)) => {
        #[pyfunction]
        $(#[$attribute])*
        fn $name(py: Python<'_>, $($argument: $type),*) -> PyResult<()> {
            $(let $argument = Prepare::prepare($argument)?;)*
            // SAFETY: pointers to arguments are valid until the call returns; the library looks addresses of blocks up, and the caller
            // of a copy keeps both ranges until the copy is complete.
            checked(py, |symbols| unsafe { (symbols.$function)($(Pass::pass(&$passed)),*) })
        }
    };
    ($(#[$attribute:meta])* read $name:ident($($argument:ident: $type:ty),*) -> $answer:ty =
        $function:ident($($passed:expr),*)) => {
        #[pyfunction]
        $(#[$attribute])*
        fn $name(py: Python<'_>, $($argument: $type),*) -> PyResult<$answer> {
            $(let $argument = Prepare::prepare($argument)?;)*
            let mut answer = <$answer>::default();
            // SAFETY: as for `call`; the result is written to a local variable.
            checked(py, |symbols| unsafe { (symbols.$function)($(Pass::pass(&$passed),)* &raw mut answer) })?;
            Ok(answer)
        }
    };
    ($(#[$attribute:meta])* address $name:ident($($argument:ident: $type:ty),*) = $function:ident($($passed:expr),*)) => {
        #[pyfunction]
        $(#[$attribute])*
        fn $name(py: Python<'_>, $($argument: $type),*) -> PyResult<usize> {
            $(let $argument = Prepare::prepare($argument)?;)*
            let mut address = 0;
            checked(py, |symbols| {
                let mut pointer = ptr::null_mut();
                // SAFETY: as for `read`.
                let status = unsafe { (symbols.$function)($(Pass::pass(&$passed),)* &raw mut pointer) };
                address = pointer.expose_provenance();
                status
            })?;
            Ok(address)
        }
    };
    ($(#[$attribute:meta])* json $name:ident($($argument:ident: $type:ty),*) = $function:ident($($passed:expr),*)) => {
        #[pyfunction]
        $(#[$attribute])*
        fn $name(py: Python<'_>, $($argument: $type),*) -> PyResult<String> {
            $(let $argument = Prepare::prepare($argument)?;)*
            // SAFETY: as for `call`; the result is a text that this module has to free, or null.
            written(py, |symbols| unsafe { (symbols.$function)($(Pass::pass(&$passed)),*) })
        }
    };
    ($(#[$attribute:meta])* now $name:ident($($argument:ident: $type:ty),*) -> $answer:ty = $function:ident($($passed:expr),*)) => {
        #[pyfunction]
        $(#[$attribute])*
        fn $name($($argument: $type),*) -> PyResult<$answer> {
            // SAFETY: the function takes numbers, reads a value, and does not wait.
            Ok(unsafe { (symbols()?.$function)($(Pass::pass(&$passed)),*) })
        }
    };
}

bindings! {
    now abi() -> u32 = glake_abi();
    #[pyo3(signature = (preset=None, file=None, overrides=None))]
    call configure(preset: Option<String>, file: Option<String>, overrides: Option<String>) =
        glake_configure(preset, file, overrides);
    call start() = glake_start();
    now started() -> bool = glake_started();
    read device_count() -> i32 = glake_device_count();

    #[pyo3(signature = (device, size, stream=0))]
    address alloc(device: i32, size: usize, stream: usize) = glake_alloc(device, size, stream);
    call free(address: usize) = glake_free(address);
    call record_stream(address: usize, stream: usize) = glake_record_stream(address, stream);
    read largest(device: i32) -> u64 = glake_largest(device);
    #[pyo3(signature = (device=-1, keep=0))]
    read trim(device: i32, keep: u64) -> u64 = glake_trim(device, keep);
    call set_fraction(device: i32, fraction: f64) = glake_set_fraction(device, fraction);
    read fraction(device: i32) -> f64 = glake_fraction(device);
    read decommit(address: usize, bytes: u64) -> u64 = glake_decommit(address, bytes);
    read commit(address: usize, bytes: u64) -> u64 = glake_commit(address, bytes);
    call read_evicted(to: usize, from_: usize, bytes: u64) = glake_read_evicted(to, from_, bytes);
    read is_private(address: usize) -> bool = glake_is_private(address);
    read generation(address: usize) -> u64 = glake_generation(address);

    call pool_create(device: i32, id: (u64, u64)) = glake_pool_create(device, id.0, id.1);
    call pool_release(device: i32, id: (u64, u64)) = glake_pool_release(device, id.0, id.1);
    read pool_use_count(device: i32, id: (u64, u64)) -> i32 = glake_pool_use_count(device, id.0, id.1);
    call pool_fix(id: (u64, u64), fixed: bool) = glake_pool_fix(id.0, id.1, fixed);
    call pool_trim(device: i32, id: (u64, u64)) = glake_pool_trim(device, id.0, id.1);

    call region_define(tag: String, policy: u32, host_copy: u32) = glake_region_define(tag, policy, host_copy);
    call region_release(tag: String) = glake_region_release(tag);
    call region_push(tag: String) = glake_region_push(tag);
    call region_pop() = glake_region_pop();
    call plain_push() = glake_plain_push();
    call plain_pop() = glake_plain_pop();
    #[pyo3(signature = (tag, strict=false))]
    call region_seal(tag: String, strict: bool) = glake_region_seal(tag, strict);
    call region_unseal(tag: String) = glake_region_unseal(tag);
    call region_prepare(tag: String) = glake_region_prepare(tag);
    call region_fix(address: usize, fixed: bool) = glake_region_fix(address, fixed);
    call region_wait(tag: String, device: i32, stream: usize) = glake_region_wait(tag, device, stream);
    call region_order(tags: Vec<String>) = glake_region_order(pointers(&tags).as_ptr(), tags.len());
    json regions_json() = glake_regions_json();
    json shrink(request: String) = glake_shrink(request);
    json refill(request: String) = glake_refill(request);
    json memory_usage_json() = glake_memory_usage_json();
    call live_ranges(address: usize, ranges: Option<Vec<(u64, u64)>>) = glake_live_ranges(
        address,
        ranges.as_ref().map_or(ptr::null(), |ranges| ranges.as_ptr()),
        ranges.as_ref().map_or(0, Vec::len)
    );

    read use_begin(tags: Vec<String>, when_closed: u32, timeout_ms: i64) -> u64 =
        glake_use_begin(pointers(&tags).as_ptr(), tags.len(), when_closed, timeout_ms);
    call gate_wait(tags: Vec<String>, when_closed: u32, timeout_ms: i64) =
        glake_gate_wait(pointers(&tags).as_ptr(), tags.len(), when_closed, timeout_ms);
    call use_end(entered: u64) = glake_use_end(entered);
    call use_join(entered: u64) = glake_use_join(entered);
    call use_leave(entered: u64) = glake_use_leave(entered);
    now safepoint_wanted() -> bool = glake_safepoint_wanted();
    now use_wanted(entered: u64) -> bool = glake_use_wanted(entered);
    json gate_json() = glake_gate_json();

    #[pyo3(signature = (to, from_, size, stream=0, flags=0))]
    read copy_async(to: usize, from_: usize, size: usize, stream: usize, flags: u32) -> u64 =
        glake_copy_async(to, from_, size, stream, flags);
    #[pyo3(signature = (blocks, stream=0, flags=0))]
    read copy_list(blocks: Vec<(usize, usize, usize)>, stream: usize, flags: u32) -> u64 =
        glake_copy_list(copy_blocks(&blocks).as_ptr(), blocks.len(), stream, flags);
    #[pyo3(signature = (to, from_, size, stream=0, flags=0))]
    read copy_to_all(to: Vec<usize>, from_: usize, size: usize, stream: usize, flags: u32) -> u64 =
        glake_copy_to_all(addresses(&to).as_ptr(), to.len(), from_, size, stream, flags);
    call copy_wait(handle: u64) = glake_copy_wait(handle);
    read copy_done(handle: u64) -> bool = glake_copy_done(handle);
    call copy_drop(handle: u64) = glake_copy_drop(handle);
    #[pyo3(signature = (on=true))]
    call multi_path(on: bool) = glake_multi_path(i32::from(on));
    json copy_stats_json() = glake_copy_stats_json();
    call stream_synchronize(device: i32, stream: usize) = glake_stream_synchronize(device, stream);
    call host_register(address: usize, size: usize) = glake_host_register(address, size);
    call host_unregister(address: usize) = glake_host_unregister(address);
    call offload_room(device: i32, bytes: u64, freed: u64) = glake_offload_room(device, bytes, freed);
    call offload_prepare(device: i32, bytes: u64) = glake_offload_prepare(device, bytes);
    json offload_stats_json() = glake_offload_stats_json();

    json stats_json(device: i32) = glake_stats_json(device);
    json snapshot_json() = glake_snapshot_json();
    call reset_peaks(device: i32) = glake_reset_peaks(device);
    call reset_totals(device: i32) = glake_reset_totals(device);
    #[pyo3(signature = (enabled, max_entries=u64::MAX, clear=false))]
    call record_history(enabled: bool, max_entries: u64, clear: bool) =
        glake_record_history(enabled, max_entries, clear);
    now history_enabled() -> bool = glake_history_enabled();

    call lease_set(device: i32, bytes: Option<u64>) = glake_lease_set(device, bytes.unwrap_or(GLAKE_LEASE_NONE));
    call lease_grant(device: i32, bytes: u64) = glake_lease_grant(device, bytes);
    read lease_take(device: i32, bytes: u64) -> u64 = glake_lease_take(device, bytes);
    call leave() = glake_leave();
    call enable_peer(device: i32, peer: i32) = glake_enable_peer(device, peer);
    address open_shared(handle: &[u8], device: i32) = glake_open_shared(handle.as_ptr(), handle.len(), device);
    call close_shared(address: usize) = glake_close_shared(address);
}

#[pyfunction]
pub(crate) fn version() -> PyResult<String> {
    // SAFETY: a constant text.
    Ok(unsafe { text((symbols()?.glake_version)()) }.unwrap_or_default())
}

#[pyfunction]
pub(crate) fn device_name() -> PyResult<Option<String>> {
    // SAFETY: null or a text that the library keeps.
    Ok(unsafe { text((symbols()?.glake_device_name)()) })
}

#[pyfunction]
pub(crate) fn device_of(py: Python<'_>, address: usize) -> PyResult<Option<i32>> {
    let mut device = -1;
    // SAFETY: the library looks the address up; the result is written to a local variable.
    checked(py, |symbols| unsafe { (symbols.glake_device_of)(address.pass(), &raw mut device) })?;
    Ok((device >= 0).then_some(device))
}

#[pyfunction]
pub(crate) fn find(py: Python<'_>, address: usize) -> PyResult<Option<(usize, u64, u64, i32)>> {
    let mut found = (0, 0, 0, 0);
    let outcome = checked(py, |symbols| {
        let mut block = Block { base: ptr::null_mut(), size: 0, requested: 0, device: 0 };
        // SAFETY: the library looks the address up; the result is written to a local variable.
        let status = unsafe { (symbols.glake_find)(address.pass(), &raw mut block) };
        found = (block.base.expose_provenance(), block.size, block.requested, block.device);
        status
    });
    match outcome {
        Ok(()) => Ok(Some(found)),
        Err(error) if error.is_instance_of::<InvalidError>(py) => Ok(None),
        Err(error) => Err(error),
    }
}

#[pyfunction]
pub(crate) fn region_of(py: Python<'_>, address: usize) -> PyResult<Option<String>> {
    let symbols = symbols()?;
    // SAFETY: the library looks the address up; the result is a text that this module has to free, or null.
    Ok(py.detach(|| taken(symbols, unsafe { (symbols.glake_region_of)(address.pass()) })))
}

#[pyfunction]
pub(crate) fn share(py: Python<'_>, address: usize) -> PyResult<(Bound<'_, PyBytes>, u64)> {
    /// Size of the buffer for a handle, more than any handle takes.
    const CAPACITY: usize = 4096;
    let mut handle = [0; CAPACITY];
    let (mut length, mut offset) = (0, 0);
    checked(py, |symbols| {
        let (start, length, offset) = (handle.as_mut_ptr(), &raw mut length, &raw mut offset);
        // SAFETY: the library writes at most `CAPACITY` bytes and two numbers, to local variables.
        unsafe { (symbols.glake_share)(address.pass(), start, CAPACITY, length, offset) }
    })?;
    Ok((PyBytes::new(py, handle.get(..length).unwrap_or(&handle)), offset))
}
