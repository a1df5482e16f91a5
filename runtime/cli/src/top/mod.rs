//! `glake top`: who has the memory of the GPUs, who waits for it, for whom and why.
//!
//! ```text
//! agent ─► Snapshot ─► workers ───┐              ┌► App, keys ─► draw ─► screen
//! /proc ─► pages ────► processes ─┴► Scene ──────┴► draw ─► print              --once
//! └────── feed ──────┘
//! ```
//!
//! `workers`, `processes`, `scene`, `app`, `draw` and `paint` are pure: they know neither clocks, files nor terminals. `feed`, `pages` and
//! `screen` do.

pub mod app;
pub mod draw;
pub mod feed;
pub mod pages;
pub mod paint;
pub mod print;
pub mod processes;
pub mod scene;
pub mod screen;
#[cfg(test)]
mod tests;
pub mod workers;
