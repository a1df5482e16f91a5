//! `glake top`: who has the memory of the GPUs, who waits for it, for whom and why.
//!
//! ```text
//! agent ─► Snapshot ─┐                       ┌► App ─► draw ─► screen     keys
//! /proc ─► pages ────┴► scene (pure) ────────┴► draw ─► print             --once
//! ```
//!
//! `scene` and `draw` know neither clocks, files nor terminals; `pages` and `screen` do.

pub mod app;
pub mod draw;
pub mod feed;
pub mod pages;
pub mod paint;
pub mod print;
pub mod scene;
pub mod screen;
#[cfg(test)]
mod tests;
