//! Who goes first where several copies want the same links, and whether the links give what they gave.
//!
//! ```text
//!   adaptive ─► prioritized ─► barriers ─► urgent_calls   background copies give way, on the links and on the host
//!            ─► contention                                GPUs whose memory is copied at the same time
//!            ─► drift                                     whether the graph still holds
//!   deferred                                              copies whose ways are found as late as can be
//! ```

pub(crate) mod adaptive;
pub(crate) mod barriers;
pub(crate) mod contention;
pub(crate) mod deferred;
pub(crate) mod drift;
pub(crate) mod prioritized;
pub(crate) mod urgent_calls;

pub(crate) use adaptive::Adaptive;
