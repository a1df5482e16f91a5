//! Owning types over [`Driver`](crate::Driver): implemented once, so that no crate above needs unsafe code.
//!
//! ```text
//!  Reservation   addresses  ├──────┬──────┬ ─ ─ ─ ─ ─ ─ ─ ┬──────┤     Mapping: offset and size, a small value
//!                           │ live │ live │     free      │retired│
//!                              ▲      ▲                      ▲  └── waits for a completion point of its Sequence
//!  Extent        memory      [ 1 ]  [ 2 ]                  [ 1 ]       one extent may be mapped many times
//!
//!  PlainMemory   memory with an address of the driver's own: no mapping, freed once its device's work is done
//!
//!  CompletionEvents ── mark() ─► Sequence
//!                   ── record() ─► RecordedPoint ── poll(), wait() ─► CompletionProof ── unmap(.., &CompletionProof)
//! ```
//!
//! CUDA unmaps memory under running work without an error. So an unmap demands a proof: a [`CompletionProof`], which only the completion of
//! whole contexts yields, not older than the mark that the mapping was retired at. Work enqueued through raw addresses (by a program, by an
//! unsafe verb) is the duty of the code that handed the addresses out: it must have been enqueued before the [`Sequence`] that the mapping
//! is retired with was marked.

mod blocks;
mod buffer;
mod completion;
pub mod digest;
mod extent;
mod flag;
mod gather;
mod pages;
mod range;
mod reservation;
mod span;
mod stream;
mod table;

pub use crate::ids::DeviceSet;

pub use blocks::{Blocks, Lent, LentCopy, Piece, copy_piece, copy_pieces};
pub use buffer::Buffer;
pub use completion::{
    CaptureHold, CompletionEvents, CompletionProof, OwnedEvent, RecordedPoint, SeenCapture, Sequence,
    may_ask, this_thread,
};
pub use digest::{Digest, Digesting, Digests, PartialDigest};
pub use extent::{Extent, PlainMemory};
pub use flag::Flag;
pub use gather::{BlockList, Gather};
pub use pages::{Pages, Registration, SharedWords};
pub use range::PinnedRange;
pub use reservation::Reservation;
pub use span::{Side, Span, copy};
pub use stream::{OwnedStream, StreamRef};
pub use table::Mapping;
