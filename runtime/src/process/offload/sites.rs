//! Sites of a program that offload, by number: their plans.
//!
//! A site has no memory of its own: what becomes of bytes is said here, and done by whoever asks ([`Offload`]).
//!
//! [`Offload`]: super::Offload

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use glake_offload::{ItemId, Links, Pack, Preset, Request, ScopeId, Site, Verdict};
use glake_units::{Bandwidth, Bytes};
use rustc_hash::FxHashMap;

use super::super::{ProcessError, Result};
use crate::sync::Mutex;

/// What a link is taken to carry each way: a plan that offloads everything orders its copies by positions alone.
const LINK: Bandwidth = Bandwidth(50.0);

/// All sites of a process. A number is above 0 and never given twice.
#[derive(Debug, Default)]
pub struct Sites {
    known: Mutex<FxHashMap<u64, Arc<Mutex<Planned>>>>,
    given: AtomicU64,
}

/// A site, and the reloads that are to begin and were not asked for yet.
#[derive(Debug)]
pub(super) struct Planned {
    site: Site,
    reloads: VecDeque<ItemId>,
}

/// What becomes of bytes that were packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedItem {
    /// By which number the pass knows them.
    pub item: ItemId,
    /// Whether they stay, are to be offloaded, or are not to be stored.
    pub verdict: Verdict,
}

impl Sites {
    /// A new site, which has seen no pass.
    pub fn create(&self) -> u64 {
        let request = Request::new(Bytes::MAX, Links::new(LINK, LINK)).preset(Preset::Memory);
        let planned = Planned { site: Site::new(request), reloads: VecDeque::new() };
        let id = self.given.fetch_add(1, Ordering::Relaxed) + 1;
        self.known.lock().insert(id, Arc::new(Mutex::new(planned)));
        id
    }

    /// Forgets a site and its plans.
    ///
    /// # Errors
    /// [`ProcessError::UnknownSite`].
    pub fn release(&self, id: u64) -> Result<()> {
        self.known.lock().remove(&id).map(drop).ok_or(ProcessError::UnknownSite { id })
    }

    /// Bytes that this pass has not packed yet. Fills `begin` with items whose reloads are to begin before, as far as there is
    /// room, and says how many these are; the others come with the next call.
    ///
    /// # Errors
    /// [`ProcessError::UnknownSite`].
    pub fn packed(&self, id: u64, pack: Pack, begin: &mut [u64]) -> Result<(PackedItem, usize)> {
        let planned = self.of(id)?;
        let mut planned = planned.lock();
        let (item, verdict, reloads) = planned.site.packed(pack);
        if item.index() == 0 {
            // Of a pass that is over.
            planned.reloads.clear();
        }
        Ok((PackedItem { item, verdict }, planned.fill(reloads, begin)))
    }

    /// A scope is computed again from here on, or was. Reloads that are to begin come with the next call.
    ///
    /// # Errors
    /// [`ProcessError::UnknownSite`].
    pub fn replays(&self, id: u64, scope: ScopeId, begins: bool) -> Result<()> {
        let planned = self.of(id)?;
        let mut planned = planned.lock();
        if begins {
            let reloads = planned.site.replays(scope);
            planned.reloads.extend(reloads);
        } else {
            planned.site.replayed(scope);
        }
        Ok(())
    }

    /// A handle of an item is unpacked. `begin` as of [`Sites::packed`].
    ///
    /// # Errors
    /// [`ProcessError::UnknownSite`]; [`ProcessError::Pass`].
    pub fn unpacked(&self, id: u64, item: ItemId, begin: &mut [u64]) -> Result<usize> {
        let planned = self.of(id)?;
        let mut planned = planned.lock();
        let reloads = planned.site.unpacked(item)?;
        Ok(planned.fill(reloads, begin))
    }

    /// The GPU's copy of an item is gone again, and a handle of it lives.
    ///
    /// # Errors
    /// [`ProcessError::UnknownSite`].
    pub fn freed(&self, id: u64, item: ItemId) -> Result<()> {
        self.of(id)?.lock().site.freed(item);
        Ok(())
    }

    /// The handle of an item is gone. With the last one the pass is over.
    ///
    /// # Errors
    /// [`ProcessError::UnknownSite`]; [`ProcessError::Pass`].
    pub fn dropped(&self, id: u64, item: ItemId) -> Result<()> {
        Ok(self.of(id)?.lock().site.dropped(item)?)
    }

    pub(super) fn of(&self, id: u64) -> Result<Arc<Mutex<Planned>>> {
        self.known.lock().get(&id).cloned().ok_or(ProcessError::UnknownSite { id })
    }
}

impl Planned {
    fn fill(&mut self, reloads: Vec<ItemId>, begin: &mut [u64]) -> usize {
        self.reloads.extend(reloads);
        let count = begin.len().min(self.reloads.len());
        for (begin, item) in begin.iter_mut().zip(self.reloads.drain(..count)) {
            *begin = item.index() as u64;
        }
        count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reloads_that_find_no_room_come_with_the_next_call() {
        let sites = Sites::default();
        let site = sites.create();
        let size = Pack::new(Bytes::mib(8));
        let mut begun = Vec::new();
        for pass in 0..2 {
            let mut begin = [0; 1];
            let packed: Vec<_> = (0..6).map(|_| sites.packed(site, size, &mut begin).unwrap().0).collect();
            begun.clear();
            for packed in packed.iter().rev() {
                let count = sites.unpacked(site, packed.item, &mut begin).unwrap();
                begun.extend_from_slice(&begin[..count]);
            }
            packed.iter().for_each(|packed| sites.dropped(site, packed.item).unwrap());
            let away = packed.iter().rev().filter(|packed| packed.verdict == Verdict::Offload);
            let away: Vec<u64> = away.map(|packed| packed.item.index() as u64).collect();
            assert_eq!(begun, away, "pass {pass}");
        }
        sites.release(site).unwrap();
        for error in [sites.release(site).unwrap_err(), sites.packed(site, size, &mut []).unwrap_err()] {
            assert!(matches!(error, ProcessError::UnknownSite { .. }), "{error}");
        }
        let other = sites.create();
        assert!(other > site);
        assert!(matches!(sites.dropped(other, ItemId::new(0)), Err(ProcessError::Pass(_))));
    }
}
