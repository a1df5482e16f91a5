//! The C interface of `libgmlake.so`, declared once: numbers, structures, callbacks, functions.
//!
//! ```text
//!                    ┌─► glake-ffi       defines them, and writes gmlake.h
//! glake-abi ─────────┼─► glake-client    Rust programs   ─┐
//!                    ├─► glake-python    Python          ─┼─► open the library and find what they need by [`table!`]
//!                    └─► glake-preload   unchanged ones  ─┘
//! ```
//!
//! Only a library of this [`Version`] is used, for its interface has these signatures, and its release does what the opener
//! expects of them: a table asks for that first.

mod callbacks;
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
