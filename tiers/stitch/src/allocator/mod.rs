//! The allocator of one device: home, aliases, free lists and epochs behind a few pure methods.
//!
//! ```text
//! take ──hit──► Grant                                             no driver, no heap
//!   └─miss─► plan ─► settle ─ join ─ reuse alias ─ stitch ─ borrow ─ grow ─ take back ─ wait ─ refuse
//!                      └───────┴─ Ready ──┘          └── Work(plan) ──┘       └ Wait
//! ```
//!
//! Invariants (checked whole by [`Allocator::check`] in tests):
//! - the pieces of home cover every extent exactly once; a live byte belongs to one live block;
//! - a piece is in a stream's free list only if that stream may take it now, in `Anyone`'s only if its epoch has passed;
//! - reserved memory, plans included, is at most the limit;
//! - an alias maps only extents of its own domain, and an extent is released only when no alias maps it.

mod audit;
mod backing;
mod claim;
mod evict;
mod find;
mod free;
mod grow;
mod hit;
mod largest;
mod miss;
mod outcome;
mod place;
mod report;
mod shortage;
mod streams;
mod trim;
mod view;

use glake_units::Bytes;
use slab::Slab;
use smallvec::SmallVec;

use crate::alias::Aliases;
use crate::bins::QUANTUM;
use crate::domain::{Domain, DomainOptions};
use crate::domains::Domains;
use crate::error::StitchError;
use crate::extent::Extents;
use crate::free_list::FreeList;
use crate::ids::{AliasId, DomainId, Epoch, ExtentId, FreeListId, Move, PieceId};
use crate::live::LiveBlocks;
use crate::piece::Pieces;
use crate::settings::Settings;
use crate::tally::Tallies;
use crate::zone::Zone;

pub use audit::Broken;
pub use backing::Backing;
pub use claim::{Claim, Restored};
pub use find::LiveBlock;
pub use report::{BlockInfo, Segment, SegmentKind};
pub use view::{ExtentView, HomeRange};

/// Requests up to here are cut from slabs.
pub const SMALL_LIMIT: Bytes = Bytes::mib(1);

/// How long the alias addresses are, in times the device's memory.
const ALIAS_SPACE: u64 = 8;

/// A block that lies in an alias.
#[derive(Clone, Debug)]
struct Stitched {
    alias: AliasId,
    start: u64,
    size: u64,
    requested: u64,
    list: FreeListId,
    /// Where its parts that are slabs go back to.
    slabs: FreeListId,
    recorded: bool,
    /// Its bytes at home, in alias order.
    parts: Vec<PieceId>,
}

/// The allocator of one device.
#[derive(Debug)]
pub struct Allocator {
    settings: Settings,
    pieces: Pieces,
    lists: Slab<FreeList>,
    domains: Domains,
    extents: Extents,
    aliases: Aliases,
    /// Where large extents, the extents of slabs and aliases go.
    home: Zone,
    slabs: Zone,
    elsewhere: Zone,
    /// Where the zone of slabs begins.
    slab_zone: u64,
    segments: place::Segments,
    live: LiveBlocks,
    stitched: Slab<Stitched>,
    plans: Slab<outcome::Pending>,
    /// Frees belong to this epoch; it closes when an event is recorded for it.
    open: Epoch,
    /// Bytes of new extents that plans have set aside and the driver has not made yet.
    planned: u64,
    /// Whether anything was freed in it.
    uncovered: bool,
    passed: Epoch,
    /// How many extents are not resident: while there is none, a free asks no further.
    not_resident: usize,
    /// Of them, those whose last live block was freed.
    emptied: Vec<ExtentId>,
    /// Counts what changes its address: frees of stitched blocks.
    moves: Move,
    stats: Tallies,
}

impl Allocator {
    /// An allocator with nothing reserved.
    ///
    /// # Errors
    /// [`StitchError::BadSetting`] for the first knob that makes no sense.
    pub fn new(settings: Settings) -> Result<Self, StitchError> {
        check(&settings)?;
        let memory = settings.memory.get().next_multiple_of(settings.granularity.get());
        let mut allocator = Allocator {
            pieces: Pieces::default(),
            lists: Slab::new(),
            domains: Domains::default(),
            extents: Extents::new(settings.granularity.get()),
            aliases: Aliases::default(),
            home: Zone::new(0, 2 * memory),
            slabs: Zone::new(2 * memory, memory),
            slab_zone: 2 * memory,
            elsewhere: Zone::new(3 * memory, ALIAS_SPACE * memory),
            segments: place::Segments::default(),
            live: LiveBlocks::new(2 * memory),
            stitched: Slab::new(),
            plans: Slab::new(),
            open: Epoch(1),
            planned: 0,
            uncovered: false,
            passed: Epoch(0),
            not_resident: 0,
            emptied: Vec::new(),
            moves: Move::default(),
            stats: Tallies::default(),
            settings,
        };
        allocator.add_domain(DomainOptions::default());
        Ok(allocator)
    }

    /// How long the device's reservation must be: every offset is below.
    pub fn address_space(&self) -> Bytes {
        let memory = self.settings.memory.get().next_multiple_of(self.settings.granularity.get());
        Bytes::new((3 + ALIAS_SPACE) * memory)
    }

    /// The knobs.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The domain of requests that name no other.
    pub const fn default_domain() -> DomainId {
        DomainId::DEFAULT
    }

    /// A new owner of extents.
    pub fn add_domain(&mut self, options: DomainOptions) -> DomainId {
        self.domains.add(options, &mut self.lists)
    }

    /// A CUDA graph is captured in a domain: from now on it is a [`DomainOptions::private_pool`], so that the addresses in
    /// the graph stay. What is stitched or lent already stays so until it is freed.
    pub fn keep_addresses(&mut self, id: DomainId) {
        if let Some(domain) = self.domains.get_mut(id) {
            domain.options = DomainOptions { extent: domain.options.extent, ..DomainOptions::private_pool() };
        }
    }

    /// Gives a domain up: its blocks live on until they are freed, its free extents go back to the driver once all
    /// work enqueued before this call has completed, and nothing new is taken from it.
    ///
    /// # Errors
    /// [`StitchError::UnknownDomain`]; the default domain cannot be released.
    pub fn release_domain(&mut self, id: DomainId) -> Result<(), StitchError> {
        if id == Self::default_domain() {
            return Err(StitchError::UnknownDomain { domain: id });
        }
        self.domain(id)?;
        self.domains[id].released = Some(self.open);
        // Of all of it: a graph's replay may write to whatever it had, wherever that lies by now.
        let lists: Vec<FreeListId> = self.domains[id].lists().collect();
        for list in lists {
            self.renew(list);
        }
        for &alias in &self.domains[id].aliases {
            self.aliases[alias].epoch = self.open;
        }
        self.uncovered = true;
        self.drop_if_done(id);
        Ok(())
    }

    /// Says whether the bytes of a domain stay as they are: while it is sealed nothing new is handed out of it, so that no copy
    /// of them becomes old.
    ///
    /// # Errors
    /// [`StitchError::UnknownDomain`].
    pub fn seal_domain(&mut self, id: DomainId, sealed: bool) -> Result<(), StitchError> {
        self.domain(id)?;
        self.domains[id].sealed = sealed;
        Ok(())
    }

    /// Changes the most that may be reserved; what is reserved above stays until it is trimmed.
    pub fn set_limit(&mut self, limit: Bytes) {
        self.settings.limit = limit.min(self.settings.memory);
    }

    /// The epoch that frees belong to now, where there are frees that no recorded event covers.
    pub fn uncovered(&self) -> Option<Epoch> {
        self.uncovered.then_some(self.open)
    }

    /// Closes the open epoch: the caller has just recorded its event. Later frees belong to the next one.
    pub fn close_epoch(&mut self) -> Epoch {
        let closed = self.open;
        self.open = closed.next();
        self.uncovered = false;
        closed
    }

    /// The event of the last closed epoch could not be recorded: the next one has to cover its frees too.
    pub fn uncover(&mut self) {
        self.uncovered = true;
    }

    /// All work enqueued before this epoch was closed has completed.
    pub fn pass_epoch(&mut self, epoch: Epoch) {
        debug_assert!(epoch < self.open, "an epoch passes after it was closed");
        self.passed = self.passed.max(epoch);
        let domains: SmallVec<[DomainId; 4]> = self.domains.iter().map(|(id, _)| id).collect();
        for domain in domains {
            self.settle(domain);
        }
    }

    /// The last epoch that has passed.
    pub fn passed(&self) -> Epoch {
        self.passed
    }

    fn domain(&self, id: DomainId) -> Result<&Domain, StitchError> {
        match self.domains.get(id) {
            Some(domain) if !domain.is_released() => Ok(domain),
            _ => Err(StitchError::UnknownDomain { domain: id }),
        }
    }
}

/// A size as it is packed; 0 is given an address too, and what cannot be rounded up stays larger than any device.
fn packed(size: Bytes) -> u64 {
    size.get().clamp(1, u64::MAX - QUANTUM).next_multiple_of(QUANTUM)
}

fn check(settings: &Settings) -> Result<(), StitchError> {
    let granularity = settings.granularity;
    let bad = |knob, value, allowed| Err(StitchError::BadSetting { knob, value, allowed });
    if !granularity.get().is_power_of_two() || granularity < Bytes::kib(64) {
        return bad("granularity", granularity, "a power of two, at least 64 KiB");
    }
    if settings.memory < granularity || settings.memory > Bytes::gib(512) {
        return bad("memory", settings.memory, "from one granule to 512 GiB");
    }
    for (knob, value) in [
        ("extent", settings.extent),
        ("extent_near_limit", settings.extent_near_limit),
        ("slab", settings.slab),
    ] {
        if value.is_zero() || !value.is_aligned(granularity) {
            return bad(knob, value, "a multiple of the device's granularity, at least one");
        }
    }
    if settings.slab < Bytes::mib(2) || settings.slab > settings.extent_near_limit {
        return bad("slab", settings.slab, "at least 2 MiB and at most extent_near_limit");
    }
    if settings.extent_near_limit > settings.extent {
        return bad("extent_near_limit", settings.extent_near_limit, "at most extent");
    }
    Ok(())
}
