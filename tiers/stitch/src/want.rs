//! A request on the slow path, and the runs that it may take.

use crate::domain::StreamLists;
use crate::ids::DomainId;
use crate::run::Run;

/// A request that missed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Want {
    /// Packed size in bytes.
    pub(crate) size: u64,
    pub(crate) requested: u64,
    pub(crate) lists: StreamLists,
    pub(crate) domain: DomainId,
    /// Smallest request that is stitched.
    pub(crate) stitch_from: u64,
}

/// Runs that one stream may take, in address order: at home, then whole slabs, which only an alias can use.
#[derive(Debug, Default)]
pub(crate) struct Runs {
    pub(crate) all: Vec<Run>,
    pub(crate) home: usize,
}

impl Runs {
    pub(crate) fn home(&self) -> &[Run] {
        &self.all[..self.home]
    }

    /// Returns the shortest run at home that is long enough.
    pub(crate) fn shortest(&self, size: u64) -> Option<Run> {
        self.home().iter().filter(|run| run.size() >= size).min_by_key(|run| run.size()).copied()
    }
}
