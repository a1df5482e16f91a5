//! Table of all domains. An id is given once: a lookup with the id of a removed domain fails even if its slot was reused.

use std::ops::{Index, IndexMut};

use slab::Slab;

use crate::domain::{Domain, DomainOptions};
use crate::error::StitchError;
use crate::free_lists::FreeLists;
use crate::ids::DomainId;

#[derive(Debug, Default)]
pub(crate) struct Domains {
    table: Slab<Domain>,
    /// Number of domains created so far.
    made: u32,
}

impl Domains {
    /// Adds a domain with free lists of its own.
    pub(crate) fn add(&mut self, options: DomainOptions, lists: &mut FreeLists) -> DomainId {
        let entry = self.table.vacant_entry();
        let id = DomainId::new(self.made, entry.key());
        self.made += 1;
        entry.insert(Domain::new(id, options, lists));
        id
    }

    pub(crate) fn get(&self, id: DomainId) -> Option<&Domain> {
        self.table.get(id.place()).filter(|domain| domain.id == id)
    }

    /// Returns a domain that exists and was not released.
    ///
    /// # Errors
    /// [`StitchError::UnknownDomain`].
    pub(crate) fn active(&self, id: DomainId) -> Result<&Domain, StitchError> {
        match self.get(id) {
            Some(domain) if !domain.is_released() => Ok(domain),
            _ => Err(StitchError::UnknownDomain { domain: id }),
        }
    }

    pub(crate) fn get_mut(&mut self, id: DomainId) -> Option<&mut Domain> {
        self.table.get_mut(id.place()).filter(|domain| domain.id == id)
    }

    /// Removes a domain from the table.
    pub(crate) fn remove(&mut self, id: DomainId) -> Option<Domain> {
        self.get(id)?;
        self.table.try_remove(id.place())
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (DomainId, &Domain)> {
        self.table.iter().map(|(_, domain)| (domain.id, domain))
    }
}

/// Looks up a domain that must exist: pieces in memory only name live domains.
impl Index<DomainId> for Domains {
    type Output = Domain;

    fn index(&self, id: DomainId) -> &Domain {
        let domain = &self.table[id.place()];
        debug_assert_eq!(domain.id, id);
        domain
    }
}

impl IndexMut<DomainId> for Domains {
    fn index_mut(&mut self, id: DomainId) -> &mut Domain {
        let domain = &mut self.table[id.place()];
        debug_assert_eq!(domain.id, id);
        domain
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_given_once() {
        let (mut domains, mut lists) = (Domains::default(), FreeLists::default());
        let mut gone = Vec::new();
        for _ in 0..100 {
            let id = domains.add(DomainOptions::default(), &mut lists);
            assert!(domains.get(id).is_some() && !gone.contains(&id));
            assert!(domains.remove(id).is_some() && domains.remove(id).is_none());
            gone.push(id);
        }
        let last = domains.add(DomainOptions::default(), &mut lists);
        assert!(gone.iter().all(|id| domains.get(*id).is_none() && id.number() != last.number()));
        assert_eq!(domains.iter().map(|(id, _)| id).collect::<Vec<_>>(), [last]);
    }
}
