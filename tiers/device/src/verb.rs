//! Names of the driver's verbs, as used by errors, the record and the fault decorator.

use std::fmt;

macro_rules! verbs {
    ($($variant:ident = $name:literal),+ $(,)?) => {
        /// Names of the methods of [`crate::Driver`].
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[allow(missing_docs)]
        pub enum Verb { $($variant),+ }

        impl Verb {
            /// Every verb, in order of declaration.
            pub const ALL: &[Verb] = &[$(Verb::$variant),+];

            /// Returns the name of the trait's method.
            pub const fn name(self) -> &'static str {
                match self { $(Verb::$variant => $name),+ }
            }
        }
    };
}

verbs! {
    Devices = "devices", MemoryInfo = "memory_info",
    Granularity = "granularity", Reserve = "reserve", Unreserve = "unreserve", Create = "create",
    Release = "release", Map = "map", Unmap = "unmap", SetAccess = "set_access", Export = "export",
    Import = "import",
    Copy = "copy", CopyBetween = "copy_between", CopyBatch = "copy_batch", Fill = "fill", ReadNow = "read_now", WriteNow = "write_now",
    StreamCreate = "stream_create", StreamDestroy = "stream_destroy", StreamId = "stream_id",
    StreamDevice = "stream_device",
    StreamSynchronize = "stream_synchronize", StreamWaitEvent = "stream_wait_event",
    StreamWaitValue = "stream_wait_value", StreamWriteValue = "stream_write_value",
    CaptureState = "capture_state",
    EventCreate = "event_create", EventDestroy = "event_destroy", EventRecord = "event_record",
    EventRecordContext = "event_record_context", EventQuery = "event_query",
    EventSynchronize = "event_synchronize", EventElapsed = "event_elapsed",
    ContextSynchronize = "context_synchronize",
    OwnContexts = "own_contexts", PrimaryOf = "primary_of",
    HasContext = "has_context", ReleaseContext = "release_context",
    ModuleLoad = "module_load", ModuleUnload = "module_unload", KernelFind = "kernel_find", Launch = "launch",
    CanAccessPeer = "can_access_peer", EnablePeerAccess = "enable_peer_access", PointerAttributes = "pointer_attributes",
    HostRegister = "host_register", HostUnregister = "host_unregister",
}

impl fmt::Display for Verb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
