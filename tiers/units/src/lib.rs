//! Units shared by all GLake crates (amounts of memory, rates, times), descriptions of metrics in them, and text for people.
//!
//! The lowest crate: independent of devices, allocators and the operating system.
//!
//! ```
//! use glake_units::Bytes;
//! let extent: Bytes = "16MiB".parse().unwrap();
//! assert_eq!(extent, Bytes::mib(16));
//! assert_eq!(Bytes::new(700).align_up(Bytes::new(512)), Some(Bytes::new(1024)));
//! assert_eq!(Bytes::gib(3).to_string(), "3.00 GiB");
//! ```

mod bytes;
pub mod metrics;
mod rate;
mod text;

pub use bytes::{Bytes, ParseBytesError};
pub use rate::{Bandwidth, Micros};
pub use text::printable;
