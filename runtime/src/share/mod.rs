//! Blocks shared with other processes: transfer of the descriptors of a block's extents.
//!
//! ```text
//!  exporting process                                         another process of the same user
//!
//!  GpuPool::export ─► Exporter ─── handle, a few bytes ────────► open(handle)
//!                        │          (by any channel)             │ connects, asks by export id
//!                   thread glake-share ◄── Unix socket, SCM_RIGHTS ──┘
//!                                                                    └─► descriptors, a few at a time ─► Import::open
//! ```
//!
//! The socket is in the abstract namespace, under a name that only handles contain; both processes need the same network and process
//! namespaces. The thread has the pool create descriptors on request and closes them after sending. Each process has only a few descriptors
//! of a block open at a time, however many extents the block has.
//!
//! ```
//! use std::sync::Arc;
//! use glake_device::owned::{CompletionEvents, DeviceSet};
//! use glake_sim::{SimOptions, Simulator};
//! use glake_device::{DeviceId, Driver, Stream};
//! use glake_runtime::share::{Exporter, open};
//! use glake_tiers::{GpuPool, Import, PoolOptions, PoolStream};
//! use glake_units::Bytes;
//!
//! let driver: Arc<dyn Driver> = Arc::new(Simulator::new(SimOptions::default())?);
//! let options = PoolOptions { exportable: true, ..PoolOptions::default() };
//! let pool = Arc::new(GpuPool::new(driver.clone(), DeviceId(0), options)?);
//! let stream = PoolStream::of(&*driver, DeviceId(0), Stream::LEGACY)?;
//! let block = pool.malloc(Bytes::mib(20), stream)?;
//! pool.write(block.address, b"one byte is one byte")?;
//! let exporter = Exporter::new();
//! let shared = exporter.share(block.address, move |part| pool.export(block.address, part))?;
//!
//! // In the other process:
//! let mut opened = open(&shared.handle)?;
//! let receive = |from| Ok::<_, Box<dyn std::error::Error>>(opened.descriptors.receive(from)?);
//! let import =
//!     Import::open(&CompletionEvents::new(driver), DeviceId(0), DeviceSet::EMPTY, &opened.sizes, receive)?;
//! let mut bytes = [0; 20];
//! import.read(shared.offset, &mut bytes)?;
//! assert_eq!(&bytes, b"one byte is one byte");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod error;
mod exporter;
mod handle;
mod importer;
mod server;
#[cfg(test)]
mod tests;
mod wire;

pub use error::ShareError;
pub use exporter::{ExportId, Exporter, Shared};
pub use importer::{Descriptors, Opened, open};
