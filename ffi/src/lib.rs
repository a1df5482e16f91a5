//! `libgmlake.so`: the pool of a process for C, and for torch's pluggable allocator.
//!
//! ```text
//! torch ─► gmlake_* ─► shim (C++) ─┐
//! C, ctypes, PyO3 ─────► glake_* ──┴► guard ─► Process (glake-runtime) ─► GpuPool ─► driver
//!                                       │
//!                                       └ forked? at its end? started? a panic?  ─► a number, and a text for the thread
//! ```
//!
//! Invariants: nothing unwinds out of Rust; nothing runs in library constructors; what has started is never dropped, so
//! that the end of the process calls no driver; a forked child touches nothing of its parent's.
//!
//! The header is `include/gmlake.h`, written by cbindgen from this crate.

mod agent;
mod block;
mod commit;
mod context;
mod copies;
mod cost;
mod gate;
mod guard;
mod host;
mod lease;
mod library;
mod live;
mod observer;
mod offload;
mod pool;
mod region;
mod share;
mod shrink;
mod sites;
mod snapshot;
mod stats;
mod status;
mod stream;
mod torch;
mod transfer;

use std::ffi::{c_char, c_void};

pub use glake_abi::*;

pub use agent::*;
pub use block::*;
pub use commit::*;
pub use cost::*;
pub use gate::*;
pub use host::*;
pub use lease::*;
pub use library::*;
pub use live::*;
pub use observer::*;
pub use offload::*;
pub use pool::*;
pub use region::*;
pub use share::*;
pub use shrink::*;
pub use sites::*;
pub use snapshot::*;
pub use stats::*;
pub use status::*;
pub use stream::*;
pub use torch::*;
pub use transfer::*;

/// Checks each definition against its declaration in the interface.
macro_rules! held {
    ($($name:ident($($argument:ty),*) $(-> $answer:ty)?;)*) => {
        $(const _: unsafe extern "C" fn($($argument),*) $(-> $answer)? = $name;)*
    };
}

glake_abi::functions!(held);
