//! Physical memory: what a handle names.
//!
//! Memory that may be exported lies in a file of its own, sealed at its size, so that the descriptor is all that an
//! importer needs, and so that the operating system keeps the bytes until the last process has let go of them. All
//! other memory is a range of its device's arena.

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
    /// How often it is mapped.
    pub(super) mappings: u32,
    /// Whether the handle is gone, and the memory stays for its mappings only.
    pub(super) released: bool,
    pub(super) kind: Kind,
    /// Whether it was made for RDMA.
    pub(super) gpu_direct: bool,
    /// The context that it was created in; none where that was another process's, or the host's memory.
    pub(super) made_in: Option<ContextId>,
    /// Its last uses.
    pub(super) shadow: Shadow,
}

/// How memory was made, which says who reaches it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// By handle: whom it was opened to.
    Mapped,
    /// As `cudaMalloc` does: its own GPU, and peers that were enabled.
    Plain,
    /// Out of a memory pool, as `cudaMallocAsync` does: its own GPU, whoever was enabled.
    Pool,
    /// As `cudaMallocManaged` does: everyone.
    Managed,
}

#[derive(Debug)]
pub(super) enum Backing {
    /// A range of the arena.
    Arena { offset: u64 },
    /// A file of its own.
    Own(Own<MemoryFile>),
    /// Another process's file, which does not count as memory of the device here.
    Imported(Own<MappedFile>),
}

/// A file of memory, and its part of the budget of mappings.
#[derive(Debug)]
pub(super) struct Own<F> {
    pub(super) file: F,
}

impl<F> Own<F> {
    /// `open` opens the file.
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

    /// Where the byte at `offset` can be reached.
    pub(super) fn pointer(&self, arena: &Arena, offset: u64) -> u64 {
        match &self.backing {
            Backing::Arena { offset: start } => arena.pointer(start + offset),
            Backing::Own(own) => own.file.pointer(offset),
            Backing::Imported(own) => own.file.pointer(offset),
        }
    }

    /// What it is mapped from.
    pub(super) fn source<'a>(&'a self, arena: &'a Arena) -> Source<'a> {
        match &self.backing {
            Backing::Arena { offset } => Source::File(arena.file(), *offset),
            Backing::Own(own) => Source::File(own.file.as_fd(), 0),
            Backing::Imported(own) => Source::Mapped(own.file.pointer(0)),
        }
    }
}

/// The name of a file of memory: it tells an importer where the memory lies.
pub(super) fn file_name(place: Place) -> String {
    match place {
        Place::Gpu(device) => format!("glake-gpu-{}", device.0),
        Place::HostNuma(node) => format!("glake-node-{node}"),
    }
}

/// What [`file_name`] says, read back from the name that the kernel shows.
pub(super) fn place_of(name: &str) -> Option<Place> {
    let name = name.strip_prefix("/memfd:")?.trim_end_matches(" (deleted)");
    if let Some(index) = name.strip_prefix("glake-gpu-") {
        return index.parse().ok().map(|index| Place::Gpu(DeviceId(index)));
    }
    name.strip_prefix("glake-node-")?.parse().ok().map(Place::HostNuma)
}
