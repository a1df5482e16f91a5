//! `libglake_preload.so`: under `LD_PRELOAD`, passes the copies of an unchanged program to the engine of `libgmlake.so`.
//!
//! ```text
//! program ─► cudaMemcpy, cuMemcpyHtoDAsync_v2, … ─┬─ small, switched off, of another kind ───────────┬─► the real function
//!            (runtime, driver)                    └─ engine ─ dlopen ─► glake_copy_try ─┬─ not taken ─┘
//!                                                                                       └─ taken: done
//! program ─► cuGetProcAddress, cudaGetDriverEntryPoint (entries) ─► the real answer, or the functions above
//! program ─► cudaGetLastError (last_error) ─► the real answer, or the failure of a copy that was taken
//! ```
//!
//! Invariants: no code runs when the library is loaded or when the process ends. A call that the engine does not take reaches the real
//! function unchanged. The only state is what was looked up (functions, the library) and, for a thread with a failed copy, its error number
//! for `cudaGetLastError`. No lock is ever waited for, so that a child forked at any moment continues natively.
//!
//! The engine, its paths and its threads belong to `libgmlake.so`, of which a process has one.

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
