//! What a call asks for besides its bytes.

use std::ffi::c_void;

use glake_device::Stream;
use glake_transfer::{CopyOptions, Priority};

use crate::block;
use crate::status::Failure;

/// A copy of the usual priority.
pub const GLAKE_COPY_NORMAL: u32 = 0;
/// A copy that background ones make way for.
pub const GLAKE_COPY_CRITICAL: u32 = 1;
/// A copy that makes way: few bytes of it are in flight at a time.
pub const GLAKE_COPY_BACKGROUND: u32 = 2;
/// The call returns when the bytes are there.
pub const GLAKE_COPY_NOW: u32 = 0x10;
/// With `GLAKE_COPY_NOW`: the bytes are read back and compared, and copied again where they differ.
pub const GLAKE_COPY_VERIFY: u32 = 0x20;
/// Stream 0 is the calling thread's own default stream, not the legacy one.
pub const GLAKE_COPY_PTDS: u32 = 0x40;
/// Over the GPU's own link alone, as the driver makes it.
pub const GLAKE_COPY_DIRECT: u32 = 0x80;

/// What the flags of a call say.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    pub(super) stream: Stream,
    pub(super) priority: Priority,
    pub(super) now: bool,
    pub(super) verify: bool,
    pub(super) direct: bool,
}

impl Asked {
    pub(super) fn of(stream: *mut c_void, flags: u32) -> Result<Asked, Failure> {
        const PRIORITY: u32 = 0xf;
        const KNOWN: u32 =
            PRIORITY | GLAKE_COPY_NOW | GLAKE_COPY_VERIFY | GLAKE_COPY_PTDS | GLAKE_COPY_DIRECT;
        let set = |flag| flags & flag != 0;
        let priority = match flags & PRIORITY {
            GLAKE_COPY_NORMAL => Priority::Normal,
            GLAKE_COPY_CRITICAL => Priority::Critical,
            GLAKE_COPY_BACKGROUND => Priority::Background,
            other => {
                return Err(Failure::invalid(format_args!(
                    "flags {flags:#x} ask for priority {other}: 0 (normal), 1 (critical) and 2 (background) are there"
                )));
            }
        };
        if flags & !KNOWN != 0 {
            let unknown = flags & !KNOWN;
            return Err(Failure::invalid(format_args!(
                "flags {flags:#x} have {unknown:#x}, which means nothing"
            )));
        }
        if set(GLAKE_COPY_VERIFY) && !set(GLAKE_COPY_NOW) {
            return Err(Failure::invalid(
                "GLAKE_COPY_VERIFY needs GLAKE_COPY_NOW: bytes are compared once they are there",
            ));
        }
        let stream = match block::stream(stream) {
            Stream(0) if set(GLAKE_COPY_PTDS) => Stream::PER_THREAD,
            stream => stream,
        };
        let (now, verify) = (set(GLAKE_COPY_NOW), set(GLAKE_COPY_VERIFY));
        Ok(Asked { stream, priority, now, verify, direct: set(GLAKE_COPY_DIRECT) })
    }

    pub(super) fn options(self, waited: bool) -> CopyOptions {
        CopyOptions { priority: self.priority, verify: self.verify, waited }
    }
}
