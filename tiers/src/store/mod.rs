//! Where copies of a GPU's bytes go, and how they get there: places as data.

use std::sync::Arc;

use crate::{HostPool, Mover, Place};

/// Where copies go.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub enum Store {
    /// Pinned memory of the host.
    Host(Arc<HostPool>),
}

impl Store {
    /// What it is of.
    pub fn place(&self) -> Place {
        match self {
            Store::Host(_) => Place::Host,
        }
    }
}

/// How bytes are moved.
#[derive(Clone, Copy, Debug)]
pub struct Transit<'a> {
    /// By whom.
    pub mover: &'a dyn Mover,
}
