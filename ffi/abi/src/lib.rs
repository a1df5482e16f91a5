//! The C interface of `libgmlake.so`, declared once: constants, structures, callbacks, functions.
//!
//! ```text
//!                    ┌─► glake-ffi       defines them, and writes gmlake.h
//! glake-abi ─────────┼─► client          `glake bench`     ─┐
//!                    ├─► glake-python    Python            ─┼─► open the library and look up functions by [`table!`]
//!                    └─► glake-preload   unchanged programs ┘
//! ```
//!
//! Only a library of this [`Version`] is used: its interface must have these signatures, and its release must behave as the opener expects.
//! A table checks that first.

mod callbacks;
#[cfg(feature = "client")]
pub mod client;
mod constants;
mod functions;
mod statistics;
mod structures;
mod version;

pub use callbacks::*;
pub use constants::*;
pub use functions::{NAMES, Unfit, check, signatures};
pub use statistics::*;
pub use structures::*;
pub use version::{ABI, Version};
