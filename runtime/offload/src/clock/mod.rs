//! Issue points of copies.
//!
//! ```text
//!  position        packs ────────────►│◄──────────── unpacks
//!  copies out      a  b  c  d         │                          in the order of packs, each at its pack
//!  settled         .  .  .  a  b      │  c  d                    these have ended before the step's work
//!  reloads                       d    │  c     b  a              in the order of unpacks, ahead by bytes
//! ```
//!
//! Issue points are positions of the recorded order, never time of the host. Invariants: nothing is issued twice; an
//! item that was offloaded is reloaded at its first unpack or before; a pass that diverges goes on on demand.

#[allow(clippy::module_inception)] // the folder's noun has a file
mod clock;

pub use clock::{Clock, Orders};
