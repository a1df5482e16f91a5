//! The kinds of copies: how each finds its links, and what it needs besides lanes.
//!
//! ```text
//!   pinned      between pinned memory and a GPU, in one piece or split: what most copies are
//!   pageable    of memory that the driver does not know, through pinned slots
//!   scattered   lists of blocks, by kernels of every GPU
//!   broadcast   one range to several GPUs
//!   captured    recorded into a graph
//!   foreign     of GPU memory that is not ours, through slots in the relays' memory
//! ```

pub(crate) mod broadcast;
pub(crate) mod captured;
pub(crate) mod foreign;
pub(crate) mod kernels;
pub(crate) mod pageable;
pub(crate) mod pinned;
pub(crate) mod resources;
pub(crate) mod scattered;
pub(crate) mod span;
