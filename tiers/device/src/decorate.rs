//! Shared parts of the decorators: the description of a call and the delegation of every verb.
//!
//! A decorator implements `around(&self, call, verb)`, which sees each call and decides whether to make it, and writes `delegate!(group)`
//! for each group of verbs that needs no special treatment.

use glake_units::Bytes;

use crate::{Address, DeviceId, Verb};

/// Description of one call of a verb, as seen by a decorator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// Verb that was called.
    pub verb: Verb,
    /// Device in whose context the call runs; `None` if the verb names none.
    pub device: Option<DeviceId>,
    /// Start address; zero if the verb has none.
    pub start: Address,
    /// Size in bytes; zero if the verb has none.
    pub size: Bytes,
    /// Number of devices named by [`Verb::SetAccess`]; zero for other verbs.
    pub gpus: u32,
}

/// Delegates one verb, given its name, its arguments and the remaining fields of its [`Call`].
macro_rules! delegate_one {
    (safe $name:ident $verb:ident ($($arg:ident: $ty:ty),*) -> $out:ty, $($field:ident: $value:expr),*) => {
        fn $name(&self, $($arg: $ty),*) -> $crate::Result<$out> {
            let call = $crate::Call { verb: $crate::Verb::$verb, $($field: $value),* };
            self.around(call, |driver| driver.$name($($arg),*))
        }
    };
    (unsafe $name:ident $verb:ident ($($arg:ident: $ty:ty),*) -> $out:ty, $($field:ident: $value:expr),*) => {
        unsafe fn $name(&self, $($arg: $ty),*) -> $crate::Result<$out> {
            let call = $crate::Call { verb: $crate::Verb::$verb, $($field: $value),* };
            // SAFETY: the caller's promise is passed on as it is.
            self.around(call, |driver| unsafe { driver.$name($($arg),*) })
        }
    };
}

/// Delegates one group of the verbs of [`crate::Driver`] through `self.around`.
macro_rules! delegate {
    (@ $($kind:tt $name:ident $verb:ident ($($arg:ident: $ty:ty),*) -> $out:ty
        $(, on $device:expr)? $(, at $start:expr)? $(, of $size:expr)? $(, for $gpus:expr)?;)*) => {
        $($crate::decorate::delegate_one!($kind $name $verb ($($arg: $ty),*) -> $out,
            device: $crate::decorate::or!([$(Some($device))?] None),
            start: $crate::decorate::or!([$($start)?] $crate::Address(0)),
            size: $crate::decorate::or!([$($size)?] glake_units::Bytes::ZERO),
            gpus: $crate::decorate::or!([$($gpus)?] 0));)*
    };
    (devices) => { $crate::decorate::delegate!(@
        safe devices Devices () -> Vec<$crate::DeviceInfo>;
        safe memory_info MemoryInfo (device: $crate::DeviceId) -> $crate::MemoryInfo, on device;
    ); };
    (memory) => { $crate::decorate::delegate!(@
        safe granularity Granularity (properties: $crate::ExtentProperties) -> glake_units::Bytes;
        safe reserve Reserve (size: glake_units::Bytes) -> $crate::Address, of size;
        unsafe unreserve Unreserve (start: $crate::Address, size: glake_units::Bytes) -> (), at start, of size;
        safe create Create (size: glake_units::Bytes, properties: $crate::ExtentProperties) -> $crate::Handle,
            of size;
        unsafe release Release (handle: $crate::Handle) -> ();
        unsafe map Map (start: $crate::Address, size: glake_units::Bytes, handle: $crate::Handle) -> (),
            at start, of size;
        unsafe unmap Unmap (start: $crate::Address, size: glake_units::Bytes) -> (), at start, of size;
        unsafe set_access SetAccess (start: $crate::Address, size: glake_units::Bytes,
            access: &[$crate::Access]) -> (),
            at start, of size, for u32::try_from(access.len()).unwrap_or(u32::MAX);
        safe export Export (handle: $crate::Handle) -> std::os::fd::OwnedFd;
        safe import Import (shared: std::os::fd::BorrowedFd<'_>) -> $crate::Handle;
        safe alloc_plain AllocPlain (device: $crate::DeviceId, size: glake_units::Bytes) -> $crate::Address,
            on device, of size;
        unsafe free_plain FreePlain (device: $crate::DeviceId, start: $crate::Address) -> (), on device, at start;
    ); };
    // Work of a stream.
    (work) => { $crate::decorate::delegate!(@
        unsafe copy Copy (device: $crate::DeviceId, request: $crate::CopyRequest, stream: $crate::Stream)
            -> (), on device, at request.to, of request.size;
        unsafe copy_between CopyBetween (device: $crate::DeviceId, request: $crate::CopyRequest,
            owners: $crate::CopyDevices, stream: $crate::Stream)
            -> (), on device, at request.to, of request.size;
        unsafe copy_batch CopyBatch (device: $crate::DeviceId, requests: &[$crate::CopyRequest],
            stream: $crate::Stream) -> (), on device, of requests.iter().map(|request| request.size).sum();
        unsafe fill Fill (device: $crate::DeviceId, start: $crate::Address, size: glake_units::Bytes,
            byte: u8, stream: $crate::Stream) -> (), on device, at start, of size;
        unsafe launch Launch (device: $crate::DeviceId, request: &$crate::LaunchRequest<'_>,
            stream: $crate::Stream) -> (), on device;
        unsafe stream_write_value StreamWriteValue (device: $crate::DeviceId, stream: $crate::Stream,
            address: $crate::Address, value: u32) -> (), on device, at address;
    ); };
    (copy_on) => { $crate::decorate::delegate!(@
        unsafe copy_on Copy (request: $crate::CopyRequest, stream: $crate::Stream)
            -> (), at request.to, of request.size;
    ); };
    (bytes) => { $crate::decorate::delegate!(@
        safe read_now ReadNow (device: $crate::DeviceId, from: $crate::Address, into: &mut [u8])
            -> (), on device,
            at from, of glake_units::Bytes::new(into.len() as u64);
        unsafe write_now WriteNow (device: $crate::DeviceId, to: $crate::Address, bytes: &[u8])
            -> (), on device,
            at to, of glake_units::Bytes::new(bytes.len() as u64);
    ); };
    (streams) => { $crate::decorate::delegate!(@
        safe stream_create StreamCreate (device: $crate::DeviceId, priority: $crate::Priority)
            -> $crate::Stream, on device;
        unsafe stream_destroy StreamDestroy (device: $crate::DeviceId, stream: $crate::Stream)
            -> (), on device;
        safe stream_id StreamId (device: $crate::DeviceId, stream: $crate::Stream)
            -> $crate::StreamId, on device;
        safe stream_device StreamDevice (stream: $crate::Stream) -> $crate::DeviceId;
        safe stream_wait_event StreamWaitEvent (device: $crate::DeviceId, stream: $crate::Stream,
            event: $crate::Event) -> (), on device;
        unsafe stream_wait_value StreamWaitValue (device: $crate::DeviceId, stream: $crate::Stream,
            address: $crate::Address, value: u32, compare: $crate::Compare) -> (), on device, at address;
        safe capture_state CaptureState (device: $crate::DeviceId, stream: $crate::Stream)
            -> $crate::CaptureState, on device;
        safe event_create EventCreate (device: $crate::DeviceId, kind: $crate::EventKind)
            -> $crate::Event, on device;
        safe event_elapsed EventElapsed (device: $crate::DeviceId, from: $crate::Event, to: $crate::Event)
            -> f64, on device;
    ); };
    // Verbs that record a point in time or wait for one.
    (completion) => { $crate::decorate::delegate!(@
        safe stream_synchronize StreamSynchronize (device: $crate::DeviceId, stream: $crate::Stream)
            -> (), on device;
        unsafe event_destroy EventDestroy (device: $crate::DeviceId, event: $crate::Event) -> (), on device;
        safe event_record EventRecord (device: $crate::DeviceId, event: $crate::Event,
            stream: $crate::Stream) -> (), on device;
        safe event_record_context EventRecordContext (device: $crate::DeviceId, event: $crate::Event)
            -> (), on device;
        safe event_query EventQuery (device: $crate::DeviceId, event: $crate::Event) -> bool, on device;
        safe event_synchronize EventSynchronize (device: $crate::DeviceId, event: $crate::Event)
            -> (), on device;
        safe context_synchronize ContextSynchronize (device: $crate::DeviceId) -> (), on device;
    ); };
    (contexts) => { $crate::decorate::delegate!(@
        safe primary_of PrimaryOf (stream: $crate::Stream) -> Option<$crate::DeviceId>;
        safe has_context HasContext (device: $crate::DeviceId) -> bool, on device;
        safe release_context ReleaseContext (device: $crate::DeviceId) -> (), on device;
    ); };
    (kernels) => { $crate::decorate::delegate!(@
        safe module_load ModuleLoad (device: $crate::DeviceId, source: &$crate::ModuleSource)
            -> $crate::Module, on device;
        unsafe module_unload ModuleUnload (device: $crate::DeviceId, module: $crate::Module) -> (), on device;
        safe kernel_find KernelFind (device: $crate::DeviceId, module: $crate::Module, name: &str)
            -> $crate::Kernel, on device;
    ); };
    (reach) => { $crate::decorate::delegate!(@
        safe can_access_peer CanAccessPeer (device: $crate::DeviceId, peer: $crate::DeviceId)
            -> bool, on device;
        safe enable_peer_access EnablePeerAccess (device: $crate::DeviceId, peer: $crate::DeviceId)
            -> (), on device;
        safe pointer_attributes PointerAttributes (address: $crate::Address) -> $crate::PointerAttributes,
            at address;
        unsafe host_register HostRegister (start: $crate::Address, size: glake_units::Bytes) -> (),
            at start, of size;
        unsafe host_unregister HostUnregister (start: $crate::Address) -> (), at start;
    ); };
}

/// Expands to the expression in brackets, or to the default.
macro_rules! or {
    ([] $default:expr) => {
        $default
    };
    ([$given:expr] $default:expr) => {
        $given
    };
}

pub(crate) use {delegate, delegate_one, or};
