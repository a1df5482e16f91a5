//! `libglake_preload.so`: under `LD_PRELOAD`, the copies of an unchanged program are handed to the engine of `libgmlake.so`.
//!
//! ```text
//! program ─► cudaMemcpy, cuMemcpyHtoDAsync_v2, … ─┬─ small, switched off, of another kind ───────────┬─► the real function
//!            (runtime, driver)                    └─ engine ─ dlopen ─► glake_copy_try ─┬─ not taken ─┘
//!                                                                                       └─ taken: done
//! program ─► cuGetProcAddress, cudaGetDriverEntryPoint (entries) ─► the real answer, or the functions above
//! program ─► cudaGetLastError (last_error) ─► the real answer, or the failure of a copy that was taken
//! ```
//!
//! Invariants: nothing runs when it is loaded and nothing when the process ends; a call that is not taken reaches the real
//! function as it was made; it holds no state of copies, only what it found (functions, the library) and, for a thread
//! whose copy failed, the number that `cudaGetLastError` owes it; no lock is ever waited for, so that a child that was
//! forked at any moment goes on natively.
//!
//! The engine, its paths and its threads are `libgmlake.so`'s, of which a process has one.

mod copy;
mod driver;
mod engine;
mod entries;
mod last_error;
mod library;
mod real;
mod runtime;

pub use driver::*;
pub use entries::*;
pub use last_error::*;
pub use runtime::*;
