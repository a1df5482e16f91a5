//! The C interface of `libgmlake.so`, declared once: numbers, structures, callbacks, functions.
//!
//! ```text
//!                    ┌─► glake-ffi       defines them, and writes gmlake.h
//! glake-abi ─────────┼─► glake-client    Rust programs   ─┐
//!                    ├─► glake-python    Python          ─┼─► open the library and find what they need by [`table!`]
//!                    └─► glake-preload   unchanged ones  ─┘
//! ```
//!
//! Only a library that answers [`ABI`] has these signatures: a table asks for that first.

mod callbacks;
mod constants;
mod functions;
mod statistics;
mod structures;

pub use callbacks::*;
pub use constants::*;
pub use functions::{NAMES, Unfit, check, signatures};
pub use statistics::*;
pub use structures::*;

/// The number of this interface: raised when a structure or a signature changes.
pub const ABI: u32 = 2;
