//! Regions, as a program asks for them.

use std::sync::Arc;
use std::time::Duration;

use glake_device::{Address, DeviceId, Stream};
use glake_tiers::{ByteRange, CleanCounts, CopyPolicy, LiveBlock, Policy, RegionError, RegionOptions};
use glake_units::Bytes;

use super::super::device::DeviceMemory;
use super::super::device_registry::DeviceRegistry;
use super::super::gate::{Admission, DEFAULT, Gate, Tags, UseId, WhenClosed};
use super::super::imports::Imports;
use super::super::{ProcessError, Result};
use super::tagged::{Kind, Tagged};
use super::{
    Background, Cleaner, Hook, LiveCallback, MemoryUsage, Refill, RefillReport, RegionSet, RegionView,
    Shrink, ShrinkReport, current_region,
};
use crate::config;

/// The regions of a process: what a program defines, moves and asks about.
#[derive(Debug)]
pub struct Regions {
    /// Before `set`: what it is still doing there ends with it.
    pub(super) background: Background,
    /// Before `set` too.
    pub(super) cleaner: Cleaner,
    pub(super) set: Arc<RegionSet>,
}

impl Regions {
    pub(in super::super) fn new(
        registry: &Arc<DeviceRegistry>,
        config: config::Tiers,
        imports: &Arc<Imports>,
    ) -> Regions {
        Regions {
            background: Background::default(),
            cleaner: Cleaner::default(),
            set: Arc::new(RegionSet::new(registry, config, imports)),
        }
    }

    /// What the other parts of the process ask of the regions.
    pub(in super::super) fn set(&self) -> &Arc<RegionSet> {
        &self.set
    }

    /// Nothing goes on in the background from then on.
    pub(in super::super) fn stop_background(&self) {
        self.cleaner.stop();
        self.background.stop();
    }

    /// Makes a region. The same tag with the same options again is no error. Its extents are of `tiers.extent`.
    ///
    /// # Errors
    /// [`ProcessError::OtherOptions`]; [`ProcessError::ReservedTag`]; [`ProcessError::NoThread`] where there is none to clean it.
    pub fn define(&self, options: RegionOptions) -> Result<()> {
        let extent = self.set.config.extent;
        let (clean, prepare) = (options.clean, options.host_copy == CopyPolicy::Prepare);
        let kept = options.policy != Policy::Discard;
        self.set.table.define(RegionOptions { extent, closed: true, ..options })?;
        if clean && kept {
            self.set.flags.set_cleaned();
        }
        if (clean || prepare) && kept {
            self.cleaner.start(&self.set)?;
        }
        self.prepare_once()
    }

    /// The calling thread's allocations go to this region from now on, until it leaves it; private pools go before.
    ///
    /// # Errors
    /// [`ProcessError::UnknownTag`].
    pub fn enter(&self, tag: &str) -> Result<()> {
        let tagged = self.set.table.get(tag)?;
        current_region::push(&self.set.flags, tagged);
        Ok(())
    }

    /// The calling thread leaves the region that it entered last.
    ///
    /// # Errors
    /// [`ProcessError::InNoRegion`].
    pub fn leave(&self) -> Result<()> {
        if current_region::pop(&self.set.flags) { Ok(()) } else { Err(ProcessError::InNoRegion) }
    }

    /// The program promises not to write to a region's bytes until it is unsealed, on any device. With `strict` they are mapped
    /// read-only, while no use of the region runs.
    ///
    /// # Errors
    /// [`ProcessError::UnknownTag`]; [`ProcessError::Region`] where its policy is another one; [`ProcessError::StillUsed`].
    pub fn seal(&self, tag: &str, strict: bool) -> Result<()> {
        let tagged = self.set.table.get(tag)?;
        let timeout = Duration::from_millis(self.set.config.drain_timeout_ms);
        let tags = Tags::of(&[tag]);
        let closing = strict.then(|| self.set.gate.close(&tags, Some(timeout))).transpose()?;
        // Who still may go on would write to what is being mapped anew.
        if closing.as_ref().is_some_and(|closing| !closing.is_agreed()) {
            return Err(ProcessError::NotAgreed { tags });
        }
        tagged.seal(strict)?;
        self.set.registry.observers.agent().start_is_over();
        Ok(())
    }

    /// Its bytes may change again.
    ///
    /// # Errors
    /// [`ProcessError::UnknownTag`]; what the pool answers.
    pub fn unseal(&self, tag: &str) -> Result<()> {
        Ok(self.set.table.get(tag)?.unseal()?)
    }

    /// Pins host memory for a region ahead, where it was made so.
    ///
    /// # Errors
    /// [`ProcessError::Region`].
    pub fn prepare(&self, tag: &str) -> Result<()> {
        for region in self.set.table.get(tag)?.regions() {
            region.prepare(&self.set.stores.host(region.pool().device())?)?;
        }
        Ok(())
    }

    /// Keeps the memory of the block that an address lies in on its GPU, or, asked as often, no longer.
    ///
    /// # Errors
    /// [`ProcessError::InNoBlock`]; [`ProcessError::Region`] where some of it is evicted, or was not fixed.
    pub fn fix(&self, address: Address, fixed: bool) -> Result<()> {
        let (_, region) = self.region_at(address)?;
        Ok(if fixed { region.fix(address) } else { region.unfix(address) }?)
    }

    /// Of the block that begins at an address these bytes count and no others, or with `None` all of them again. Only what counts is
    /// copied when its memory leaves; the rest has any value afterwards. It ends with the block.
    ///
    /// # Errors
    /// [`ProcessError::InNoBlock`]; [`ProcessError::Pool`] where no block begins there, or a range leaves it.
    pub fn set_live(&self, address: Address, ranges: Option<&[ByteRange]>) -> Result<()> {
        self.set.set_live(address, ranges)
    }

    /// As [`Regions::set_live`], asked anew at each shrink that takes the block: on a thread of its own, with no lock held, once the uses
    /// of its memory have ended or are parked and all work of the GPUs has ended. Where it does not answer within the time that hooks
    /// have (without hooks, `tiers.drain_timeout_ms`), for all blocks together, or wrongly, all bytes count.
    ///
    /// # Errors
    /// As [`Regions::set_live`].
    pub fn ask_live(&self, address: Address, call: LiveCallback) -> Result<()> {
        self.set.ask_live(address, call)
    }

    /// Gives memory of GPUs back, with the gate closed for what leaves; it is closed until that is back. All regions of a device go
    /// one after the other, devices at once. Without a gate, the caller promises that no work on what leaves is enqueued from now
    /// on until the refill is over.
    ///
    /// # Errors
    /// [`ProcessError::StillUsed`], [`ProcessError::HookRefused`], [`ProcessError::HookTimedOut`]: nothing was moved, the gate is
    /// open. [`ProcessError::Region`]: no bytes are lost, the same call goes on from there.
    pub fn shrink(&self, ask: &Shrink) -> Result<ShrinkReport> {
        self.set.shrink(ask)
    }

    /// Brings memory back to the addresses that it had. Where `wait` is false that goes on in the background: what it meets is
    /// logged, and met again by whoever needs the memory. Where it is waited for longer than its timeout it goes on so too. What is
    /// shrunk after that stays away.
    ///
    /// # Errors
    /// [`ProcessError::StillComing`]. [`ProcessError::NoRoom`]: others took the memory. [`ProcessError::Region`]. No bytes are lost, the same call goes on.
    pub fn refill(&self, ask: &Refill) -> Result<RefillReport> {
        if ask.wait {
            return match ask.timeout {
                Some(timeout) => self.refill_within(ask, timeout),
                None => self.set.refill(ask),
            };
        }
        let request = self.request(ask, None)?;
        let (regions, ask) = (self.set.clone(), ask.clone());
        self.background.spawn(move || {
            if let Err(error) = regions.refill_requested(&ask, Some(&request)) {
                tracing::warn!(target: "glake::regions", %error, "a refill in the background failed");
            }
        })?;
        Ok(RefillReport::default())
    }

    /// A stream's later work finds a region of a device there: it waits for a refill that is under way; where there is none, what is
    /// evicted comes back before this returns.
    ///
    /// # Errors
    /// As [`Regions::refill`].
    pub fn wait_for(&self, tag: &str, device: i64, stream: Stream) -> Result<()> {
        let device = self.set.registry.device(device)?.id();
        let tagged = self.set.table.get(tag)?;
        for region in tagged.regions().iter().filter(|region| region.pool().device() == device) {
            match region.wait(device, stream) {
                Err(RegionError::Evicted { .. }) => self.set.bring_back(&tagged, region)?,
                waited => waited?,
            }
        }
        Ok(())
    }

    /// What comes back first; what is not named comes after it, in the order of first allocations.
    ///
    /// # Errors
    /// [`ProcessError::UnknownTag`]: the order is as it was.
    pub fn set_order(&self, tags: &[String]) -> Result<()> {
        self.set.table.set_order(tags)
    }

    /// Every region on every device, what lies in none and graphs' pools too.
    ///
    /// # Errors
    /// What the pools answer.
    pub fn views(&self) -> Result<Vec<RegionView>> {
        self.set.views()
    }

    /// The region that a block lies in; `None`: it lies in none, or there is no such block.
    pub fn tag_of(&self, address: Address) -> Option<String> {
        self.set.registry.devices.iter().find_map(|memory| {
            let started = memory.started()?;
            let LiveBlock { domain, .. } = started.pool.find(address)?;
            let (tagged, _) = self.set.table.of_domain(memory.id(), domain)?;
            (tagged.tag() != DEFAULT).then(|| tagged.tag().to_owned())
        })
    }

    /// What is on each GPU, and who holds it.
    ///
    /// # Errors
    /// What the driver answers when asked for its free memory.
    pub fn memory_usage(&self) -> Result<Vec<MemoryUsage>> {
        self.set.memory_usage()
    }

    /// The gate.
    pub fn gate(&self) -> &Gate {
        &self.set.gate
    }

    /// Begins a use of memory: of these regions and of what lies in none, or of everything. While it lasts nothing of that leaves.
    /// Uses do not nest: one that begins under another while a shrink waits for the other waits for that shrink. Where its time ends
    /// while it brings memory back, that goes on in the background, and the next use finds it done.
    ///
    /// # Errors
    /// [`ProcessError::UnknownTag`]; [`ProcessError::Closed`] where it is to be refused; [`ProcessError::HeldTooLong`]; what its
    /// refill meets.
    pub fn begin_use(&self, tags: &Tags, when: WhenClosed, timeout: Option<Duration>) -> Result<UseId> {
        let id = self.pass_gate(tags, timeout, |gate, left| gate.admit(tags, when, left))?;
        self.set.registry.observers.agent().has_loaded();
        self.set.resume_relays();
        Ok(id)
    }

    /// Waits until a use could begin, as [`Regions::begin_use`] would, and begins none: no shrink waits for who waits here. Where a
    /// shrink comes next, the use that begins then waits again.
    ///
    /// # Errors
    /// As [`Regions::begin_use`].
    pub fn wait_for_gate(&self, tags: &Tags, when: WhenClosed, timeout: Option<Duration>) -> Result<()> {
        self.pass_gate(tags, timeout, |gate, left| gate.wait(tags, when, left))
    }

    fn pass_gate<T>(
        &self,
        tags: &Tags,
        timeout: Option<Duration>,
        attempt: impl Fn(&Gate, Option<Duration>) -> Result<Admission<T>>,
    ) -> Result<T> {
        self.set.check(tags)?;
        let begin = std::time::Instant::now();
        loop {
            let left = timeout.map(|timeout| timeout.saturating_sub(begin.elapsed()));
            match attempt(&self.set.gate, left)? {
                Admission::Admitted(passed) => return Ok(passed),
                Admission::Evicted(evicted) => self.refill_for_use(tags, evicted, begin, timeout)?,
            }
        }
    }

    /// Who is told before memory leaves or comes back, and after; replaces who was told before. A hook is given the event as JSON on
    /// a thread of its own and answers 0. One before that answers otherwise, or takes longer than `timeout`, keeps what was asked
    /// for from being done. Of memory that comes back because it is touched they are told ("touched"), and not waited for.
    pub fn set_hooks(&self, before: Option<Hook>, after: Option<Hook>, timeout: Option<Duration>) {
        self.set.hooks.set(before, after, timeout);
    }

    /// Brings back what a copy is about to touch at an address; one load where nothing is evicted.
    ///
    /// # Errors
    /// As [`Regions::refill`].
    #[inline]
    pub fn bring_back(&self, address: Address) -> Result<()> {
        self.set.touched(address)
    }

    /// Pins what is configured, with the first region.
    fn prepare_once(&self) -> Result<()> {
        let wanted = self.set.config.host_prepare;
        if wanted.is_zero() || !self.set.take_preparation() {
            return Ok(());
        }
        let regions = self.set.clone();
        self.background.spawn(move || {
            let device = regions.registry.devices.iter().find(|memory| memory.started().is_some());
            let device = device.map_or(DeviceId(0), DeviceMemory::id);
            let prepared = regions.stores.host(device).and_then(|host| Ok(host.prepare(wanted)?));
            if let Err(error) = prepared {
                tracing::warn!(target: "glake::regions", %error, "host memory was not pinned ahead");
            }
        })
    }
}

impl RegionSet {
    /// Whether there are such tags. What lies in no region is always there; graphs' pools that are new are looked for.
    fn check(&self, tags: &Tags) -> Result<()> {
        let Tags::These(tags) = tags else { return Ok(()) };
        tags.iter().try_for_each(|tag| {
            self.table.known(tag).or_else(|_| {
                self.table.cover(&self.registry.devices);
                self.table.known(tag)
            })?;
            Ok(())
        })
    }

    pub(in super::super) fn views(&self) -> Result<Vec<RegionView>> {
        self.table.cover(&self.registry.devices);
        let mut tags = self.table.named(None)?;
        self.table.sort(&mut tags);
        Ok(tags.iter().flat_map(|tagged| self.views_of(tagged)).collect())
    }

    fn views_of(&self, tagged: &Arc<Tagged>) -> Vec<RegionView> {
        let regions = tagged.regions();
        let none = RegionView {
            tag: tagged.tag().to_owned(),
            policy: tagged.options.policy,
            host_copy: tagged.options.host_copy,
            sealed: tagged.is_sealed(),
            clean: tagged.options.clean.then(CleanCounts::default),
            device: None,
            resident: Bytes::ZERO,
            evicted: Bytes::ZERO,
            decommitted: Bytes::ZERO,
            live: Bytes::ZERO,
            places: Vec::new(),
            predicted_refill: Duration::ZERO,
        };
        if regions.is_empty() {
            // Of a private pool that is gone there is nothing to see.
            return if tagged.kind == Kind::Graph { Vec::new() } else { vec![none] };
        }
        let of = |region: &Arc<glake_tiers::Region>| {
            let (resident, evicted) = region.sizes();
            RegionView {
                sealed: region.is_sealed(),
                clean: none.clean.map(|_| region.clean_counts(self.gate.last_use_of(tagged.tag()))),
                device: Some(region.pool().device()),
                resident,
                evicted,
                decommitted: region.decommitted(),
                live: region.pool().blocks_of(region.domain()).iter().map(|block| block.size).sum(),
                places: region.places(),
                predicted_refill: self.prediction.refill(region),
                ..none.clone()
            }
        };
        regions.iter().map(of).collect()
    }
}
