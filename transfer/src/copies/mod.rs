//! Kinds of copies, each with its choice of links and its resources.
//!
//! ```text
//!   pinned      between pinned memory and a GPU, in one piece or split: most copies
//!   pageable    from or to unregistered host memory, through pinned slots
//!   scattered   lists of blocks, by kernels of every GPU
//!   broadcast   one range to several GPUs
//!   captured    recorded into a graph
//!   foreign     GPU memory of others, through slots in the relays' memory
//! ```

pub(crate) mod broadcast;
pub(crate) mod captured;
pub(crate) mod completions;
pub(crate) mod event_pool;
pub(crate) mod foreign;
pub(crate) mod fork;
pub(crate) mod handle;
pub(crate) mod kernels;
pub(crate) mod native;
pub(crate) mod pageable;
pub(crate) mod parts;
pub(crate) mod pinned;
pub(crate) mod resources;
pub(crate) mod route;
pub(crate) mod scattered;
pub(crate) mod span;
