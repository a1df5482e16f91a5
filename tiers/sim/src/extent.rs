//! Physical memory behind a handle.
//!
//! Exportable memory lies in a file of its own, sealed at its size, so that the descriptor is all that an importer needs and the operating
//! system keeps the bytes until the last process has released them. All other memory is a range of its device's arena.

use std::os::fd::AsFd;

use super::arena::Arena;
use super::budget;
use super::context::ContextId;
use super::denial::{Checked, Denial};
use super::file::{MappedFile, MemoryFile};
use super::order::Shadow;
use super::system::Source;
use glake_device::{DeviceId, Place};
use glake_units::Bytes;

#[derive(Debug)]
pub(super) struct Extent {
    pub(super) place: Place,
    pub(super) size: u64,
    pub(super) backing: Backing,
    /// Number of mappings of the extent.
    pub(super) mappings: u32,
    /// Whether the handle was released, so that only mappings keep the memory.
    pub(super) released: bool,
    pub(super) kind: Kind,
    /// Whether the memory was created for RDMA.
    pub(super) gpu_direct: bool,
    /// Context in which the extent was created; `None` for imported memory and host memory.
    pub(super) made_in: Option<ContextId>,
    /// Last uses of the memory.
    pub(super) shadow: Shadow,
}

/// Origin of memory, which determines the devices that can access it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Created by handle: accessible as granted per mapping.
    Mapped,
    /// Like `cudaMalloc`: accessible to its own GPU and to enabled peers.
    Plain,
    /// From a memory pool, like `cudaMallocAsync`: accessible to its own GPU only, regardless of enabled peers.
    Pool,
    /// Like `cudaMallocManaged`: accessible to every device.
    Managed,
}

#[derive(Debug)]
pub(super) enum Backing {
    /// A range of the arena.
    Arena { offset: u64 },
    /// A file of its own.
    Own(Own<MemoryFile>),
    /// Another process's file, which does not count as device memory here.
    Imported(Own<MappedFile>),
}

/// A memory file and its share of the mapping budget.
#[derive(Debug)]
pub(super) struct Own<F> {
    pub(super) file: F,
}

impl<F> Own<F> {
    /// Reserves the budget, then opens the file with `open`.
    pub(super) fn new(size: u64, open: impl FnOnce() -> Checked<F>) -> Checked<Self> {
        if !budget::take(1) {
            return Err(Denial::OutOfMemory(Bytes::new(size)));
        }
        let file = open().inspect_err(|_| budget::give(1))?;
        Ok(Own { file })
    }
}

impl<F> Drop for Own<F> {
    fn drop(&mut self) {
        budget::give(1);
    }
}

impl Extent {
    pub(super) fn new(place: Place, size: u64, backing: Backing) -> Self {
        Extent {
            place,
            size,
            backing,
            mappings: 0,
            released: false,
            kind: Kind::Mapped,
            gpu_direct: false,
            made_in: None,
            shadow: Shadow::default(),
        }
    }

    /// Returns the host address of the byte at `offset`.
    pub(super) fn pointer(&self, arena: &Arena, offset: u64) -> u64 {
        match &self.backing {
            Backing::Arena { offset: start } => arena.pointer(start + offset),
            Backing::Own(own) => own.file.pointer(offset),
            Backing::Imported(own) => own.file.pointer(offset),
        }
    }

    /// Returns the source for mapping the extent.
    pub(super) fn source<'a>(&'a self, arena: &'a Arena) -> Source<'a> {
        match &self.backing {
            Backing::Arena { offset } => Source::File(arena.file(), *offset),
            Backing::Own(own) => Source::File(own.file.as_fd(), 0),
            Backing::Imported(own) => Source::Mapped(own.file.pointer(0)),
        }
    }
}

/// Returns the name of a memory file, which tells an importer where the memory lies.
pub(super) fn file_name(place: Place) -> String {
    match place {
        Place::Gpu(device) => format!("glake-gpu-{}", device.0),
        Place::HostNuma(node) => format!("glake-node-{node}"),
    }
}

/// Parses a name made by [`file_name`], as the kernel shows it.
pub(super) fn place_of(name: &str) -> Option<Place> {
    let name = name.strip_prefix("/memfd:")?.trim_end_matches(" (deleted)");
    if let Some(index) = name.strip_prefix("glake-gpu-") {
        return index.parse().ok().map(|index| Place::Gpu(DeviceId(index)));
    }
    name.strip_prefix("glake-node-")?.parse().ok().map(Place::HostNuma)
}
