//! A request on its way through the slow path, and what it may take.

use crate::domain::StreamLists;
use crate::ids::DomainId;
use crate::run::Run;

/// A request that is no hit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Want {
    /// As it is packed.
    pub(crate) size: u64,
    pub(crate) requested: u64,
    pub(crate) lists: StreamLists,
    pub(crate) domain: DomainId,
    /// Requests below are not stitched.
    pub(crate) stitch_from: u64,
}

/// What one stream may take, in the order of addresses: at home, then whole slabs, which only an alias can use.
#[derive(Debug, Default)]
pub(crate) struct Runs {
    pub(crate) all: Vec<Run>,
    pub(crate) home: usize,
}

impl Runs {
    pub(crate) fn home(&self) -> &[Run] {
        &self.all[..self.home]
    }

    /// The shortest run at home that is long enough.
    pub(crate) fn shortest(&self, size: u64) -> Option<Run> {
        self.home().iter().filter(|run| run.size() >= size).min_by_key(|run| run.size()).copied()
    }
}
