//! The `glake` command, and what it shows and measures.
//!
//! ```text
//! main ─► commands ─┬► demo      the whole story on real bytes     ─┐
//!                   ├► bench     the hot path, copies, shrinks      ├► rig: all GPUs of a backend
//!                   ├► topo      devices and links, drawn          ─┤
//!                   ├► doctor    what this machine can do          ─┘
//!                   └► glake_replay
//! ```

pub mod bench;
pub mod commands;
mod copies;
pub mod demo;
pub mod doctor;
mod installed;
mod records;
mod rig;
mod target;
pub mod top;
pub mod topo;
