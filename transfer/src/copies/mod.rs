//! Kinds of copies, each with its choice of links and its resources.
//!
//! ```text
//!   span        dispatch of a copy between two spans to its kind
//!   pinned      between pinned memory and a GPU, in one piece or split: most copies
//!   pageable    from or to unregistered host memory, through pinned slots
//!   scattered   lists of blocks, by kernels of every GPU
//!   broadcast   one range to several GPUs
//!   captured    recorded into a graph
//!   foreign     GPU memory that relays may not access, through slots in the relays' memory
//!
//!   fork        one copy from the user's stream onto several lanes, and back
//!   native      copies by the driver alone        handle      completion of enqueued copies
//!   resources   kernels, slots and branches       route       kinds of memory at both ends
//! ```

pub(crate) mod broadcast;
pub(crate) mod captured;
pub(crate) mod foreign;
pub(crate) mod fork;
pub(crate) mod handle;
pub(crate) mod native;
pub(crate) mod pageable;
pub(crate) mod pinned;
pub(crate) mod resources;
pub(crate) mod scattered;
pub(crate) mod shared;
pub(crate) mod span;
