//! Flags of copies.

use std::ffi::c_void;

use glake_abi::{
    GLAKE_COPY_BACKGROUND, GLAKE_COPY_BLOCKING, GLAKE_COPY_CRITICAL, GLAKE_COPY_DEVICE, GLAKE_COPY_DIRECT,
    GLAKE_COPY_FROM_GPU, GLAKE_COPY_NORMAL, GLAKE_COPY_PTDS, GLAKE_COPY_TO_GPU, GLAKE_COPY_VERIFY,
};
use glake_device::{DeviceId, Stream};
use glake_runtime::process::CopyAsk;
use glake_transfer::Priority;
use glake_transfer::paths::Direction;

use crate::block;
use crate::status::Failure;

/// Parses the flags of a copy. `waited`: the caller will wait for the copy by its handle.
pub(super) fn asked(stream: *mut c_void, flags: u32, waited: bool) -> Result<CopyAsk, Failure> {
    const PRIORITY: u32 = 0xf;
    const DEVICE: u32 = 0xff * GLAKE_COPY_DEVICE;
    const KNOWN: u32 =
        PRIORITY | GLAKE_COPY_BLOCKING | GLAKE_COPY_VERIFY | GLAKE_COPY_PTDS | GLAKE_COPY_DIRECT | DEVICE;
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
    if set(GLAKE_COPY_VERIFY) && !set(GLAKE_COPY_BLOCKING) {
        return Err(Failure::invalid(
            "GLAKE_COPY_VERIFY needs GLAKE_COPY_BLOCKING: bytes are compared once they are there",
        ));
    }
    let stream = match block::stream(stream) {
        Stream(0) if set(GLAKE_COPY_PTDS) => Stream::PER_THREAD,
        stream => stream,
    };
    let device = ((flags & DEVICE) / GLAKE_COPY_DEVICE).checked_sub(1).map(DeviceId);
    let (blocking, verify) = (set(GLAKE_COPY_BLOCKING), set(GLAKE_COPY_VERIFY));
    Ok(CopyAsk { stream, device, priority, blocking, verify, direct: set(GLAKE_COPY_DIRECT), waited })
}

/// Parses the flags of `glake_copy_try`, with the direction that the copy must have.
pub(super) fn tried(stream: *mut c_void, flags: u32) -> Result<(CopyAsk, Option<Direction>), Failure> {
    const WAYS: u32 = GLAKE_COPY_TO_GPU | GLAKE_COPY_FROM_GPU;
    let way = match flags & WAYS {
        0 => None,
        GLAKE_COPY_TO_GPU => Some(Direction::ToGpu),
        GLAKE_COPY_FROM_GPU => Some(Direction::FromGpu),
        _ => {
            return Err(Failure::invalid(format_args!(
                "flags {flags:#x} ask for a copy to a GPU and from one: set GLAKE_COPY_TO_GPU, GLAKE_COPY_FROM_GPU, or neither"
            )));
        }
    };
    Ok((asked(stream, flags & !WAYS, false)?, way))
}
