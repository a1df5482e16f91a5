//! What the decorators share: the description of a call, and the delegation of every verb.
//!
//! A decorator implements `around(&self, call, verb)`, which sees each call and decides whether to make it, and
//! writes `delegate!(group)` for each group of verbs that it does not treat by itself.

use glake_units::Bytes;

use crate::{Address, Verb};

/// One call of a verb, as a decorator sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// What was asked.
    pub verb: Verb,
    /// Where; zero if nowhere.
    pub start: Address,
    /// How much; zero where the verb names no size.
    pub size: Bytes,
    /// For [`Verb::SetAccess`], how many devices are spoken of; else zero.
    pub gpus: u32,
}

/// One verb, delegated: its name, its arguments, and where, how much and for how many devices it is.
macro_rules! delegate_one {
    (safe $name:ident $verb:ident ($($arg:ident: $ty:ty),*) -> $out:ty, $start:expr, $size:expr, $gpus:expr) => {
        fn $name(&self, $($arg: $ty),*) -> $crate::Result<$out> {
            let call = $crate::Call { verb: $crate::Verb::$verb, start: $start, size: $size, gpus: $gpus };
            self.around(call, |driver| driver.$name($($arg),*))
        }
    };
    (unsafe $name:ident $verb:ident ($($arg:ident: $ty:ty),*) -> $out:ty, $start:expr, $size:expr, $gpus:expr) => {
        unsafe fn $name(&self, $($arg: $ty),*) -> $crate::Result<$out> {
            let call = $crate::Call { verb: $crate::Verb::$verb, start: $start, size: $size, gpus: $gpus };
            // SAFETY: the caller's promise is passed on as it is.
            self.around(call, |driver| unsafe { driver.$name($($arg),*) })
        }
    };
}

/// Delegates one group of the verbs of [`crate::Driver`] through `self.around`.
macro_rules! delegate {
    (@ $($kind:tt $name:ident $verb:ident ($($arg:ident: $ty:ty),*) -> $out:ty
        $(, at $start:expr)? $(, of $size:expr)? $(, for $gpus:expr)?;)*) => {
        $($crate::decorate::delegate_one!($kind $name $verb ($($arg: $ty),*) -> $out,
            $crate::decorate::or!([$($start)?] $crate::Address(0)),
            $crate::decorate::or!([$($size)?] glake_units::Bytes::ZERO),
            $crate::decorate::or!([$($gpus)?] 0));)*
    };
    (devices) => { $crate::decorate::delegate!(@
        safe devices Devices () -> Vec<$crate::DeviceInfo>;
        safe memory_info MemoryInfo (device: $crate::DeviceId) -> $crate::MemoryInfo;
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
    ); };
    (bytes) => { $crate::decorate::delegate!(@
        unsafe copy Copy (device: $crate::DeviceId, request: $crate::CopyRequest, stream: $crate::Stream)
            -> (), at request.to, of request.size;
        unsafe copy_batch CopyBatch (device: $crate::DeviceId, requests: &[$crate::CopyRequest],
            stream: $crate::Stream) -> (), of requests.iter().map(|request| request.size).sum();
        unsafe fill Fill (device: $crate::DeviceId, start: $crate::Address, size: glake_units::Bytes,
            byte: u8, stream: $crate::Stream) -> (), at start, of size;
        safe read_now ReadNow (device: $crate::DeviceId, from: $crate::Address, into: &mut [u8]) -> (),
            at from, of glake_units::Bytes::new(into.len() as u64);
        unsafe write_now WriteNow (device: $crate::DeviceId, to: $crate::Address, bytes: &[u8]) -> (),
            at to, of glake_units::Bytes::new(bytes.len() as u64);
    ); };
    (streams) => { $crate::decorate::delegate!(@
        safe stream_create StreamCreate (device: $crate::DeviceId, priority: $crate::Priority)
            -> $crate::Stream;
        unsafe stream_destroy StreamDestroy (device: $crate::DeviceId, stream: $crate::Stream) -> ();
        safe stream_id StreamId (device: $crate::DeviceId, stream: $crate::Stream) -> $crate::StreamId;
        safe stream_device StreamDevice (stream: $crate::Stream) -> $crate::DeviceId;
        safe stream_wait_event StreamWaitEvent (device: $crate::DeviceId, stream: $crate::Stream,
            event: $crate::Event) -> ();
        unsafe stream_wait_value StreamWaitValue (device: $crate::DeviceId, stream: $crate::Stream,
            address: $crate::Address, value: u32, compare: $crate::Compare) -> (), at address;
        unsafe stream_write_value StreamWriteValue (device: $crate::DeviceId, stream: $crate::Stream,
            address: $crate::Address, value: u32) -> (), at address;
        safe capture_state CaptureState (device: $crate::DeviceId, stream: $crate::Stream)
            -> $crate::CaptureState;
        safe event_create EventCreate (device: $crate::DeviceId, kind: $crate::EventKind) -> $crate::Event;
        safe event_elapsed EventElapsed (device: $crate::DeviceId, from: $crate::Event, to: $crate::Event)
            -> f64;
    ); };
    // Everything that marks a point in time or waits for one.
    (completion) => { $crate::decorate::delegate!(@
        safe stream_synchronize StreamSynchronize (device: $crate::DeviceId, stream: $crate::Stream) -> ();
        unsafe event_destroy EventDestroy (device: $crate::DeviceId, event: $crate::Event) -> ();
        safe event_record EventRecord (device: $crate::DeviceId, event: $crate::Event,
            stream: $crate::Stream) -> ();
        safe event_record_context EventRecordContext (device: $crate::DeviceId, event: $crate::Event) -> ();
        safe event_query EventQuery (device: $crate::DeviceId, event: $crate::Event) -> bool;
        safe event_synchronize EventSynchronize (device: $crate::DeviceId, event: $crate::Event) -> ();
        safe context_synchronize ContextSynchronize (device: $crate::DeviceId) -> ();
    ); };
    (kernels) => { $crate::decorate::delegate!(@
        safe module_load ModuleLoad (device: $crate::DeviceId, source: &$crate::ModuleSource)
            -> $crate::Module;
        unsafe module_unload ModuleUnload (device: $crate::DeviceId, module: $crate::Module) -> ();
        safe kernel_find KernelFind (device: $crate::DeviceId, module: $crate::Module, name: &str)
            -> $crate::Kernel;
        unsafe launch Launch (device: $crate::DeviceId, request: &$crate::LaunchRequest<'_>,
            stream: $crate::Stream) -> ();
    ); };
    (reach) => { $crate::decorate::delegate!(@
        safe enable_peer_access EnablePeerAccess (device: $crate::DeviceId, peer: $crate::DeviceId) -> ();
        safe pointer_attributes PointerAttributes (address: $crate::Address) -> $crate::PointerKind,
            at address;
        unsafe host_register HostRegister (start: $crate::Address, size: glake_units::Bytes) -> (),
            at start, of size;
        unsafe host_unregister HostUnregister (start: $crate::Address) -> (), at start;
    ); };
}

/// The expression in brackets, or else the default.
macro_rules! or {
    ([] $default:expr) => {
        $default
    };
    ([$given:expr] $default:expr) => {
        $given
    };
}

pub(crate) use {delegate, delegate_one, or};
