//! The links that copies take: which GPUs serve, what each stream of the program has there, and when it is given up.
//!
//! ```text
//!   lane_sets ─► lane_set   what one stream of the program has on all relays
//!   relays                  which GPUs serve, and which were lost
//!   suspension              how relays are given up, and their contexts with them
//! ```

pub(crate) mod lane_set;
pub(crate) mod lane_sets;
pub(crate) mod relays;
pub(crate) mod suspension;
