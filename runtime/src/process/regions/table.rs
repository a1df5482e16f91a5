//! Tags of a process: the options of each tag's regions, its region on each device, and the order in which tags are evicted.
//!
//! Invariant: `is_away` is true from before a shrink begins until the pools' records show that all memory of the tag is back. Every move
//! ends with a check of the records ([`Tagged::settle`]). The gate reads `is_away`, and the flags count it; neither stores anything else
//! about evictions.
//!
//! Every allocation and copy first reads the [`RegionFlags`]: whether any thread is in a region, any region is cleaned, or anything is
//! evicted.

use std::collections::{BTreeMap, VecDeque};
use std::hash::BuildHasher as _;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use glake_device::DeviceId;
use glake_device::owned::DeviceSet;
use glake_stitch::{Allocator, DomainId};
use glake_tiers::{CopyPolicy, GpuPool, Policy, Region, RegionError, RegionOptions};
use glake_units::Bytes;
use parking_lot::Mutex;
use rustc_hash::{FxBuildHasher, FxHashSet};

use super::super::device::DeviceMemory;
use super::super::gate::{DEFAULT, Evicted, GRAPH, Gate, Tags, is_reserved};
use super::super::{ProcessError, Result};
use super::{copy_name, policy_name};
use crate::sync::RwLock;

/// Number of released tags that stay: most programs never have as many, and a tag may be without memory for a while.
const MANY_UNHELD: usize = 256;

/// Number of forgotten tags whose memory one definition releases.
const LEAVING_AT_ONCE: usize = 2;

/// Number of tags that an error names.
const SHOWN: usize = 10;

/// Number of forgotten names that are known; then all of them are given up.
const MOST_FORGOTTEN: usize = 1 << 16;

fn hash_of(tag: &str) -> u64 {
    FxBuildHasher.hash_one(tag)
}

/// All tags, by name.
#[derive(Debug)]
pub(super) struct Table {
    devices: usize,
    extent: Bytes,
    /// Counter that orders first allocations.
    pub(super) clock: AtomicU64,
    inner: RwLock<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    tagged: BTreeMap<String, Arc<Tagged>>,
    /// Number of tags whose last definition was released, and that are still here.
    unheld: usize,
    /// Number of such tags above which those without memory are forgotten; 0 until the first search.
    most_unheld: usize,
    /// Domains of forgotten tags whose memory is to be released.
    leaving: VecDeque<(Arc<GpuPool>, DomainId)>,
    /// Hashes of the names of forgotten tags: a use or a move that names one finds it without memory.
    forgotten: FxHashSet<u64>,
    /// Order of refills as the program set it.
    order: Vec<String>,
}

impl Inner {
    /// Takes the released tags out of the table that have no live block and that no thread knows. The table is locked meanwhile, so that
    /// none of them can be found before it is gone. The next search comes after as many releases as there are tags left, because a search
    /// walks all live blocks.
    fn forget(&mut self) -> Vec<Arc<Tagged>> {
        let mut live: Vec<(DeviceId, FxHashSet<DomainId>)> = Vec::new();
        let mut is_empty = |region: &Arc<Region>| {
            let (device, pool) = (region.pool().device(), region.pool());
            if !live.iter().any(|(known, _)| *known == device) {
                live.push((device, pool.live_domains()));
            }
            !live.iter().any(|(known, domains)| *known == device && domains.contains(&region.domain()))
        };
        let gone = self.tagged.extract_if(.., |_, tagged| {
            let released = tagged.kind == Kind::Defined && tagged.held.load(Ordering::Relaxed) == 0;
            let is_alone = released && Arc::strong_count(tagged) == 1;
            is_alone && !tagged.is_away() && !tagged.is_sealed() && tagged.regions().iter().all(&mut is_empty)
        });
        let gone: Vec<Arc<Tagged>> = gone.map(|(_, tagged)| tagged).collect();
        if self.forgotten.len() > MOST_FORGOTTEN {
            self.forgotten.clear();
        }
        self.forgotten.extend(gone.iter().map(|tagged| hash_of(tagged.tag())));
        let regions = gone.iter().flat_map(|tagged| tagged.regions());
        self.leaving.extend(regions.map(|region| (region.pool().clone(), region.domain())));
        self.unheld -= gone.len();
        self.most_unheld = 2 * self.unheld;
        gone
    }
}

impl Table {
    pub(super) fn new(devices: usize, extent: Bytes) -> Table {
        Table { devices, extent, clock: AtomicU64::new(0), inner: RwLock::default() }
    }

    /// Defines a tag, or confirms an equal definition.
    pub(super) fn define(&self, options: RegionOptions) -> Result<()> {
        if options.tag.is_empty() || is_reserved(&options.tag) {
            return Err(ProcessError::invalid(format!(
                "a region cannot be called '{}': that is memory outside of regions; take another name, of one letter or more",
                options.tag
            )));
        }
        let mut inner = self.inner.write();
        match inner.tagged.get(&options.tag) {
            Some(tagged) if tagged.options == options => {
                let again = tagged.held.fetch_add(1, Ordering::Relaxed) == 0;
                inner.unheld -= usize::from(again);
                Ok(())
            }
            Some(tagged) => Err(ProcessError::invalid(format!(
                "region '{}' is there as {}, and was asked for as {}: take another tag, or the same options",
                options.tag,
                described(&tagged.options),
                described(&options)
            ))),
            None => {
                let tagged = Tagged::new(options.clone(), Kind::Defined, self.devices);
                tagged.held.store(1, Ordering::Relaxed);
                inner.tagged.insert(options.tag, Arc::new(tagged));
                Ok(())
            }
        }
    }

    /// Takes back one definition of a tag. Above [`MANY_UNHELD`] tags without one, those without memory are forgotten.
    pub(super) fn release(&self, tag: &str) -> Result<()> {
        let tagged = self.get(tag)?;
        let mut inner = self.inner.write();
        let held = tagged.held.load(Ordering::Relaxed);
        if held == 0 {
            return Err(ProcessError::invalid(format!(
                "region '{tag}' was released as often as it was defined: define it before it is released again"
            )));
        }
        tagged.held.store(held - 1, Ordering::Relaxed);
        drop(tagged);
        inner.unheld += usize::from(held == 1);
        let gone =
            if inner.unheld > inner.most_unheld.max(MANY_UNHELD) { inner.forget() } else { Vec::new() };
        drop(inner);
        // The end of a region releases its domain, with calls of the driver.
        drop(gone);
        Ok(())
    }

    /// Releases the memory of a few forgotten tags, as far as the work on it has completed: a program that defines many tags makes about as
    /// much memory as it releases.
    pub(super) fn give_back(&self) {
        for _ in 0..LEAVING_AT_ONCE {
            if self.inner.read().leaving.is_empty() {
                return;
            }
            let Some((pool, domain)) = self.inner.write().leaving.pop_front() else { return };
            if let Err(error) = pool.trim_domain(domain) {
                tracing::debug!(target: "glake::regions", device = %pool.device(), %error, "a forgotten region's memory stays for now");
            }
            if pool.has_domain(domain) {
                self.inner.write().leaving.push_back((pool, domain));
            }
        }
    }

    /// Returns an existing tag.
    pub(super) fn get(&self, tag: &str) -> Result<Arc<Tagged>> {
        let inner = self.inner.read();
        inner.tagged.get(tag).cloned().ok_or_else(|| {
            let names = inner.tagged.keys().take(SHOWN).map(|tag| format!("'{tag}'"));
            let known = match names.collect::<Vec<_>>() {
                known if known.is_empty() => "none".to_owned(),
                known => known.join(", "),
            };
            let more = match inner.tagged.len().saturating_sub(SHOWN) {
                0 => String::new(),
                more => format!(" and {more} more"),
            };
            ProcessError::invalid(format!(
                "there is no region '{tag}': {known}{more} are there; define it first"
            ))
        })
    }

    /// Returns an existing tag; the default one always exists.
    pub(super) fn known(&self, tag: &str) -> Result<Arc<Tagged>> {
        if tag == DEFAULT { Ok(self.reserved(tag.to_owned(), Kind::Default)) } else { self.get(tag) }
    }

    /// Returns a tag as [`Table::known`] does; `None` if it was forgotten, because it had no memory.
    pub(super) fn find(&self, tag: &str) -> Result<Option<Arc<Tagged>>> {
        match self.known(tag) {
            Err(_) if self.inner.read().forgotten.contains(&hash_of(tag)) => Ok(None),
            known => known.map(Some),
        }
    }

    /// Returns the named tags in the given order, or all. Forgotten ones are left out.
    pub(super) fn named(&self, tags: Option<&[String]>) -> Result<Vec<Arc<Tagged>>> {
        match tags {
            None => Ok(self.inner.read().tagged.values().cloned().collect()),
            Some(tags) => {
                let mut found: Vec<Arc<Tagged>> = Vec::new();
                for tag in tags {
                    let Some(tagged) = self.find(tag)? else { continue };
                    if !found.iter().any(|other| Arc::ptr_eq(other, &tagged)) {
                        found.push(tagged);
                    }
                }
                Ok(found)
            }
        }
    }

    /// Creates tags for memory outside regions: the default domain and the private pools of each started pool. Up to [`MANY_UNHELD`] tags of
    /// released private pools stay, because a use may name one.
    pub(super) fn cover(&self, devices: &[DeviceMemory]) {
        for started in devices.iter().filter_map(DeviceMemory::started) {
            let default = self.reserved(DEFAULT.to_owned(), Kind::Default);
            default.cover(&started.pool, Allocator::default_domain(), &self.clock);
            let device = started.pool.device();
            let domains: Vec<(DomainId, String)> = started
                .private
                .domains(&started.pool)
                .into_iter()
                .map(|(domain, id)| (domain, format!("{GRAPH}{id}")))
                .collect();
            for tagged in self.inner.read().tagged.values().filter(|tagged| tagged.kind == Kind::Graph) {
                let is_own = |own| domains.iter().any(|(domain, tag)| *domain == own && tag == tagged.tag());
                tagged.forget(device, is_own);
            }
            for (domain, tag) in domains {
                self.reserved(tag, Kind::Graph).cover(&started.pool, domain, &self.clock);
            }
        }
        let is_over = |tagged: &Arc<Tagged>| {
            tagged.kind == Kind::Graph && !tagged.is_away() && tagged.regions.lock().is_empty()
        };
        if self.inner.read().tagged.values().filter(|tagged| is_over(tagged)).count() > MANY_UNHELD {
            self.inner.write().tagged.retain(|_, tagged| !is_over(tagged) || Arc::strong_count(tagged) > 1);
        }
    }

    fn reserved(&self, tag: String, kind: Kind) -> Arc<Tagged> {
        if let Some(tagged) = self.inner.read().tagged.get(&tag) {
            return tagged.clone();
        }
        let options = RegionOptions { extent: self.extent, ..RegionOptions::of(tag.clone()) };
        let mut inner = self.inner.write();
        inner.tagged.entry(tag).or_insert_with(|| Arc::new(Tagged::new(options, kind, self.devices))).clone()
    }

    /// Returns the tag and the region of a domain of a device.
    pub(super) fn of_domain(&self, device: DeviceId, domain: DomainId) -> Option<(Arc<Tagged>, Arc<Region>)> {
        let inner = self.inner.read();
        inner.tagged.values().find_map(|tagged| Some((tagged.clone(), tagged.region_of(device, domain)?)))
    }

    /// Sets the order of refills; tags that are not named follow.
    pub(super) fn set_order(&self, tags: &[String]) -> Result<()> {
        tags.iter().try_for_each(|tag| self.find(tag).map(|_| ()))?;
        self.inner.write().order = tags.to_vec();
        Ok(())
    }

    /// Sorts into the order of refills: the program's order, then regions by first allocation, then graph pools, then memory outside
    /// regions.
    pub(super) fn sort(&self, tags: &mut [Arc<Tagged>]) {
        let inner = self.inner.read();
        let said = |tagged: &Arc<Tagged>| inner.order.iter().position(|tag| tag == tagged.tag());
        tags.sort_by_key(|tagged| {
            let kind = match tagged.kind {
                Kind::Defined => 0,
                Kind::Graph => 1,
                Kind::Default => 2,
            };
            (said(tagged).unwrap_or(usize::MAX), kind, tagged.first())
        });
    }
}

fn described(options: &RegionOptions) -> String {
    format!("{} with host_copy {}", policy_name(options.policy), copy_name(options.host_copy))
}

impl Evicted for Table {
    fn evicted(&self, tags: &Tags) -> Vec<String> {
        let inner = self.inner.read();
        let evicted = inner.tagged.values().filter(|tagged| tagged.is_away() && tags.use_of(tagged.tag()));
        evicted.map(|tagged| tagged.tag().to_owned()).collect()
    }
}

#[cfg(test)]
#[cfg(schedules)]
mod schedules {
    use shuttle::thread;

    use super::*;
    use crate::sync::schedules;

    /// A name refers to one tag, even if several threads define and look it up at once.
    #[test]
    fn a_name_means_one_tag() {
        schedules(|| {
            let table = Arc::new(Table::new(1, Bytes::mib(64)));
            let threads: Vec<_> = (0..3)
                .map(|_| {
                    let table = table.clone();
                    thread::spawn(move || {
                        table.define(RegionOptions::of("weights".to_owned())).unwrap();
                        let graph = table.reserved(format!("{GRAPH}(1, 0)"), Kind::Graph);
                        table.set_order(&["weights".to_owned()]).unwrap();
                        let mut all = table.named(None).unwrap();
                        table.sort(&mut all);
                        assert_eq!(all[0].tag(), "weights");
                        (table.get("weights").unwrap(), graph)
                    })
                })
                .collect();
            let found: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
            let same = |one: &Arc<Tagged>, other: &Arc<Tagged>| Arc::ptr_eq(one, other);
            assert!(found.windows(2).all(|two| same(&two[0].0, &two[1].0) && same(&two[0].1, &two[1].1)));
            assert_eq!(table.named(None).unwrap().len(), 2);
        });
    }
}

/// Origin of a tag's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Region that the program defined.
    Defined,
    /// Private pools with one number.
    Graph,
    /// Default domain: memory outside regions.
    Default,
}

/// A tag and its regions.
#[derive(Debug)]
pub(super) struct Tagged {
    pub(super) options: RegionOptions,
    pub(super) kind: Kind,
    /// Number of definitions that were not released; changes under the table's lock.
    held: AtomicUsize,
    /// Domains of a defined region by device, created at the first allocation.
    domains: Box<[OnceLock<DomainId>]>,
    /// Regions in order of creation; a defined tag has one for each device.
    regions: Mutex<Vec<Arc<Region>>>,
    /// Whether the tag is sealed, and strictly; also applies to regions created later.
    seal: Mutex<Option<bool>>,
    /// Position among first allocations of all tags; `u64::MAX` if there was none.
    first: AtomicU64,
    /// Number of shrinks in progress.
    out: Mutex<u32>,
    /// Number of shrinks by device, including those that found nothing to move.
    shrinks: Box<[AtomicU64]>,
    is_away: AtomicBool,
    /// Devices on which a touching thread runs a refill whose hooks were called, as the bits of a [`DeviceSet`].
    touched: AtomicU64,
}

/// Guard of the first thread to touch an evicted region.
#[derive(Debug)]
pub(super) struct FirstTouch<'s> {
    tagged: &'s Tagged,
    device: DeviceSet,
}

impl Tagged {
    pub(super) fn new(options: RegionOptions, kind: Kind, devices: usize) -> Tagged {
        Tagged {
            options,
            kind,
            held: AtomicUsize::new(0),
            domains: (0..devices).map(|_| OnceLock::new()).collect(),
            regions: Mutex::default(),
            seal: Mutex::default(),
            first: AtomicU64::new(u64::MAX),
            out: Mutex::default(),
            shrinks: (0..devices).map(|_| AtomicU64::new(0)).collect(),
            is_away: AtomicBool::new(false),
            touched: AtomicU64::new(0),
        }
    }

    pub(super) fn tag(&self) -> &str {
        &self.options.tag
    }

    /// Returns the domain for allocations on a device, creating it if needed.
    #[inline]
    pub(super) fn domain(&self, pool: &Arc<GpuPool>, clock: &AtomicU64) -> Option<DomainId> {
        let place = self.domains.get(usize::try_from(pool.device().0).ok()?)?;
        Some(*place.get_or_init(|| {
            let region = Arc::new(Region::new(pool, self.options.clone()));
            let domain = region.domain();
            let seal = self.seal.lock();
            if let Some(strict) = *seal {
                // A pool that refuses this also refuses the next request.
                let _ = region.seal(strict);
            }
            self.regions.lock().push(region);
            self.note_first(clock);
            domain
        }))
    }

    /// Seals its current and future regions.
    ///
    /// # Errors
    /// As [`Region::seal`].
    pub(super) fn seal(&self, strict: bool) -> std::result::Result<(), RegionError> {
        if self.options.policy != Policy::Sealed {
            return Err(RegionError::NotSealable { tag: self.options.tag.clone() });
        }
        let mut seal = self.seal.lock();
        *seal = Some(strict);
        self.regions().iter().try_for_each(|region| region.seal(strict))
    }

    /// Unseals its regions.
    ///
    /// # Errors
    /// As [`Region::unseal`]; it stays sealed then.
    pub(super) fn unseal(&self) -> std::result::Result<(), RegionError> {
        let mut seal = self.seal.lock();
        self.regions().iter().try_for_each(|region| region.unseal())?;
        *seal = None;
        Ok(())
    }

    pub(super) fn is_sealed(&self) -> bool {
        self.seal.lock().is_some()
    }

    fn note_first(&self, clock: &AtomicU64) {
        let now = clock.fetch_add(1, Ordering::Relaxed);
        self.first.fetch_min(now, Ordering::Relaxed);
    }

    /// Creates the region of an existing domain if there is none.
    pub(super) fn cover(&self, pool: &Arc<GpuPool>, domain: DomainId, clock: &AtomicU64) {
        let mut regions = self.regions.lock();
        let known =
            |region: &Arc<Region>| region.domain() == domain && region.pool().device() == pool.device();
        if !regions.iter().any(known) {
            regions.push(Arc::new(Region::over(pool, domain, self.options.clone())));
            self.note_first(clock);
        }
    }

    /// Drops the regions of a device whose domains no longer exist.
    pub(super) fn forget(&self, device: DeviceId, is_own: impl Fn(DomainId) -> bool) {
        self.regions.lock().retain(|region| region.pool().device() != device || is_own(region.domain()));
    }

    pub(super) fn regions(&self) -> Vec<Arc<Region>> {
        self.regions.lock().clone()
    }

    /// Returns the region of a domain of a device.
    pub(super) fn region_of(&self, device: DeviceId, domain: DomainId) -> Option<Arc<Region>> {
        let regions = self.regions.lock();
        regions.iter().find(|region| region.domain() == domain && region.pool().device() == device).cloned()
    }

    pub(super) fn first(&self) -> u64 {
        self.first.load(Ordering::Relaxed)
    }

    pub(super) fn eviction_cost(&self, region: &Region) -> EvictionCost {
        match self.kind {
            Kind::Defined => {
                EvictionCost::of(self.options.policy, self.options.host_copy, region.is_sealed())
            }
            Kind::Graph => EvictionCost::Graph,
            Kind::Default => EvictionCost::Default,
        }
    }

    /// Returns whether some of its memory is evicted or about to be.
    #[inline]
    pub(super) fn is_away(&self) -> bool {
        self.is_away.load(Ordering::Acquire)
    }

    /// Counts a shrink on a device: earlier refill requests without a waiter no longer apply there.
    pub(super) fn count_shrink(&self, device: DeviceId) {
        if let Some(count) = usize::try_from(device.0).ok().and_then(|place| self.shrinks.get(place)) {
            count.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// Returns the number of shrinks by device.
    pub(super) fn shrinks(&self) -> impl Iterator<Item = u64> + '_ {
        self.shrinks.iter().map(|count| count.load(Ordering::Acquire))
    }

    /// Begins a shrink on a device: a thread that touches the memory from now on requests a refill.
    pub(super) fn begin_out(&self, flags: &RegionFlags, device: DeviceId) {
        self.count_shrink(device);
        self.out_begins(flags);
    }

    /// Marks memory as leaving until [`Tagged::end_out`]; earlier refill requests stay valid.
    pub(super) fn out_begins(&self, flags: &RegionFlags) {
        let mut out = self.out.lock();
        *out += 1;
        if !self.is_away.swap(true, Ordering::AcqRel) {
            flags.add_evicted();
        }
    }

    /// Ends a shrink and updates the mark.
    pub(super) fn end_out(&self, flags: &RegionFlags, gate: &Gate) {
        *self.out.lock() -= 1;
        self.settle(flags, gate);
    }

    /// Updates the mark of evicted memory from the pools' records, after a move, a free or a release.
    pub(super) fn settle(&self, flags: &RegionFlags, gate: &Gate) {
        let out = self.out.lock();
        let is_away = *out > 0 || !self.regions().iter().all(|region| region.is_usable());
        match (self.is_away.swap(is_away, Ordering::AcqRel), is_away) {
            (false, true) => flags.add_evicted(),
            (true, false) => flags.sub_evicted(),
            _ => {}
        }
        drop(out);
        gate.changed();
    }

    /// Claims the first touch of its region on a device; `None` if another thread has it.
    pub(super) fn touch_first(&self, device: DeviceId) -> Option<FirstTouch<'_>> {
        let device = DeviceSet::of(device);
        let touched = self.touched.fetch_or(device.bits(), Ordering::Relaxed);
        device
            .intersection(DeviceSet::from_bits(touched))
            .is_empty()
            .then_some(FirstTouch { tagged: self, device })
    }
}

impl Drop for FirstTouch<'_> {
    fn drop(&mut self) {
        self.tagged.touched.fetch_and(!self.device.bits(), Ordering::Relaxed);
    }
}

/// Returns the bytes that a refill of a region must move: at least 1 if a move was interrupted.
pub(super) fn wanting(region: &Region) -> Bytes {
    if region.is_whole() { Bytes::ZERO } else { region.sizes().1.max(Bytes::new(1)) }
}

/// Order of evictions when only a part is wanted: cheapest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum EvictionCost {
    /// Bytes are discarded without a copy.
    Discarded,
    /// A host copy of the bytes may already exist.
    Copied,
    /// Bytes must be copied.
    Kept,
    /// Pool of a graph: all its bytes must be copied.
    Graph,
    /// Memory outside regions, which every use needs.
    Default,
}

impl EvictionCost {
    /// Returns the cost of a region that a program defined.
    pub(super) fn of(policy: Policy, host_copy: CopyPolicy, sealed: bool) -> EvictionCost {
        match policy {
            Policy::Discard => EvictionCost::Discarded,
            Policy::Sealed if sealed && host_copy == CopyPolicy::Retain => EvictionCost::Copied,
            Policy::Keep | Policy::Sealed => EvictionCost::Kept,
        }
    }
}

/// Returns the bytes to move of each candidate so that the sum reaches `wanted`, in the given order. Candidates without bytes are left out.
pub(super) fn in_order<T: Copy>(sizes: &[(T, Bytes)], wanted: Bytes) -> Vec<(T, Bytes)> {
    let mut left = wanted;
    let mut chosen = Vec::new();
    for &(which, size) in sizes {
        let amount = size.min(left);
        if amount.is_zero() {
            continue;
        }
        left = left.saturating_sub(amount);
        chosen.push((which, amount));
    }
    chosen
}

/// Two counters in one word: threads inside regions in the low bits, tags with evicted memory in the high bits. Between them are the flags
/// for cleaned regions and decommitted memory.
#[derive(Debug, Default)]
pub(in super::super) struct RegionFlags(AtomicU64);

/// One tag with evicted memory.
const EVICTED: u64 = 1 << 32;
/// Flag: regions are cleaned, so that a write may invalidate a copy.
const CLEANED: u64 = 1 << 31;
/// Flag: parts of live blocks may be decommitted.
const DECOMMITTED: u64 = 1 << 30;

impl RegionFlags {
    /// Returns whether no thread is in a region or in plain memory, and nothing is evicted. One relaxed load suffices: a thread that enters a region sees its
    /// own write, and a use of memory that another thread shrinks is a race in the program.
    #[inline]
    pub(in super::super) fn is_quiet(&self) -> bool {
        self.0.load(Ordering::Relaxed) & !(CLEANED | DECOMMITTED) == 0
    }

    /// Returns whether anything is evicted or about to be.
    #[inline]
    pub(in super::super) fn is_any_evicted(&self) -> bool {
        self.0.load(Ordering::Relaxed) >= EVICTED
    }

    /// Returns whether writes must be reported: anything is evicted, or any region is cleaned.
    #[inline]
    pub(in super::super) fn are_writes_told(&self) -> bool {
        self.0.load(Ordering::Relaxed) >= CLEANED
    }

    /// Returns whether any region is cleaned.
    #[inline]
    pub(in super::super) fn is_any_cleaned(&self) -> bool {
        self.0.load(Ordering::Relaxed) & CLEANED != 0
    }

    /// Returns whether parts of live blocks may be decommitted.
    #[inline]
    pub(in super::super) fn is_any_decommitted(&self) -> bool {
        self.0.load(Ordering::Relaxed) & DECOMMITTED != 0
    }

    /// Sets the flag for the rest of the process's life.
    pub(super) fn set_decommitted(&self) {
        self.0.fetch_or(DECOMMITTED, Ordering::Release);
    }

    /// Sets the flag for the rest of the process's life.
    pub(super) fn set_cleaned(&self) {
        self.0.fetch_or(CLEANED, Ordering::Release);
    }

    pub(super) fn add_thread(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn sub_thread(&self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }

    pub(super) fn add_evicted(&self) {
        self.0.fetch_add(EVICTED, Ordering::Release);
    }

    pub(super) fn sub_evicted(&self) {
        self.0.fetch_sub(EVICTED, Ordering::Release);
    }
}

#[cfg(test)]
mod choose_tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_costs_least_goes_first() {
        let costs = [
            EvictionCost::of(Policy::Discard, CopyPolicy::Drop, false),
            EvictionCost::of(Policy::Sealed, CopyPolicy::Retain, true),
            EvictionCost::of(Policy::Sealed, CopyPolicy::Retain, false),
            EvictionCost::Graph,
            EvictionCost::Default,
        ];
        assert!(costs.is_sorted());
        assert_eq!(costs[2], EvictionCost::of(Policy::Keep, CopyPolicy::Retain, true));
        assert_eq!(costs[2], EvictionCost::of(Policy::Sealed, CopyPolicy::Drop, true));
    }

    proptest! {
        #[test]
        fn as_much_as_is_wanted_or_there(sizes in prop::collection::vec(0..1000_u64, 0..12), wanted in 0..6000_u64) {
            let sizes: Vec<(usize, Bytes)> = sizes.into_iter().map(Bytes::new).enumerate().collect();
            let chosen = in_order(&sizes, Bytes::new(wanted));
            let total: u64 = chosen.iter().map(|(_, amount)| amount.get()).sum();
            let there: u64 = sizes.iter().map(|(_, size)| size.get()).sum();
            prop_assert_eq!(total, wanted.min(there));
            prop_assert!(chosen.is_sorted_by(|a, b| a.0 < b.0));
            prop_assert!(chosen.iter().all(|(which, amount)| !amount.is_zero() && *amount <= sizes[*which].1));
            // All but the last are taken whole.
            prop_assert!(chosen.iter().rev().skip(1).all(|(which, amount)| *amount == sizes[*which].1));
        }
    }
}
