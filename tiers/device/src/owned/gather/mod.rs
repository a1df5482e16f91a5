//! Copies by a kernel: many small blocks in one launch, or one range between the host and another GPU's memory, over the link of the GPU
//! that runs it.
//!
//! ```text
//!  Gather ── list() ─► BlockList ── push() ... ─► gather(stream, list)     the list returns once its launch has run
//!         └─ copy(stream, to, from)
//! ```
//!
//! Invariants:
//! - A kernel accesses only memory of the given spans, all of it accessible to its GPU, and its list in pinned memory.
//! - A list is written only while no kernel reads it: its holder has exclusive access, and launching consumes the list.
//! - A list that was taken is launched, or idle again when its holder drops it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use glake_units::Bytes;
use parking_lot::Mutex;

use super::{CompletionEvents, DeviceSet, OwnedEvent, Pages, Piece, Registration, Side, Span};
use crate::{
    Address, CaptureState, CopyRequest, DeviceId, DriverError, EventKind, HostKernel, Kernel, LaunchRequest,
    Module, ModuleSource, PointerKind, Refusal, Result, Stream, Touch, Touched, Touches, Usage, Verb,
};

const SOURCE: ModuleSource = ModuleSource {
    ptx: include_str!("gather.ptx"),
    host: &[
        HostKernel { name: "glake_gather", body: host::gather },
        HostKernel { name: "glake_copy", body: host::copy },
    ],
};

/// Threads of a block, and blocks of a launch: more gain nothing on an H200, fewer are slower.
const THREADS: u32 = 512;
const GATHER_BLOCKS: u32 = 16;
const COPY_BLOCKS: u32 = 8;

/// Copy kernels of one GPU.
#[derive(Debug)]
pub struct Gather {
    completion_events: Arc<CompletionEvents>,
    device: DeviceId,
    module: Module,
    gather: Kernel,
    copy: Kernel,
    /// Whether a graph contains a launch, so that the code must stay loaded.
    captured: AtomicBool,
    lists: Arc<Mutex<Lists>>,
    /// Pinned host memory of all lists in bytes.
    pinned: Bytes,
}

impl Gather {
    /// Loads the kernels and pins memory for lists. Slow the first time on a machine, because the driver compiles the kernels.
    ///
    /// # Errors
    /// Any error of the driver.
    pub fn new(completion_events: &Arc<CompletionEvents>, device: DeviceId, lists: Bytes) -> Result<Gather> {
        let driver = completion_events.driver();
        let module = driver.module_load(device, &SOURCE)?;
        // From here on, dropping the value unloads the module.
        let mut gather = Gather {
            completion_events: completion_events.clone(),
            device,
            module,
            gather: Kernel(0),
            copy: Kernel(0),
            captured: AtomicBool::new(false),
            lists: Arc::default(),
            pinned: Bytes::ZERO,
        };
        gather.gather = driver.kernel_find(device, module, "glake_gather")?;
        gather.copy = driver.kernel_find(device, module, "glake_copy")?;
        let mut lists = BlockList::several(completion_events, gather.reach(), lists)?;
        lists.iter_mut().for_each(|list| list.home = Arc::downgrade(&gather.lists));
        gather.pinned = lists.first().map_or(Bytes::ZERO, BlockList::memory);
        gather.lists.lock().idle = lists;
        Ok(gather)
    }

    /// Returns the GPU that runs the kernels.
    pub fn device(&self) -> DeviceId {
        self.device
    }

    /// Returns the bytes of host memory pinned for its lists.
    pub fn pinned(&self) -> Bytes {
        self.pinned
    }

    /// Returns whether a graph contains a launch: the kernels then stay loaded until the process exits.
    pub fn is_captured(&self) -> bool {
        self.captured.load(Ordering::Relaxed)
    }

    /// Returns whether the kernels may access this memory.
    pub fn reaches(&self, side: Side) -> bool {
        self.reach().holds(side)
    }

    /// Returns an empty list; `None` while all are in flight or held elsewhere. A list dropped without a launch is idle again.
    ///
    /// # Errors
    /// Any error of the driver when it is asked whether a list's launch has run.
    pub fn list(&self) -> Result<Option<BlockList>> {
        let (idle, count) = {
            let mut lists = self.lists.lock();
            (lists.idle.pop(), lists.launched.len())
        };
        if let Some(list) = idle {
            return Ok(Some(self.emptied(list)));
        }
        for _ in 0..count {
            let Some(list) = self.lists.lock().launched.pop_front() else { break };
            match list.done.is_passed() {
                Ok(true) => return Ok(Some(self.emptied(list))),
                passed => {
                    self.lists.lock().launched.push_back(list);
                    passed?;
                }
            }
        }
        Ok(None)
    }

    /// Enqueues the copies of a list on a stream of this GPU. An empty list is only returned to the pool.
    ///
    /// # Errors
    /// Any error of the driver; [`DriverError::Capturing`] on a stream that is being captured, because the graph would outlive the list.
    /// Nothing is enqueued then.
    pub fn gather(&self, stream: Stream, mut list: BlockList) -> Result<()> {
        let launched = match self.completion_events.driver().capture_state(self.device, stream) {
            _ if list.count() == 0 => Ok(()),
            Ok(CaptureState::None) => self.launch_list(stream, &list),
            Ok(_) => Err(DriverError::Capturing { verb: VERB, code: DriverError::CAPTURING }),
            Err(error) => Err(error),
        };
        if launched.is_err() || list.count() == 0 {
            return launched;
        }
        // If the end of the launch cannot be recorded, the list is not reused: its memory stays until all work is done.
        match list.done.record(stream).or_else(|_| list.done.record(stream)) {
            Ok(()) => self.lists.lock().launched.push_back(list),
            Err(_) => list.home = Weak::new(),
        }
        Ok(())
    }

    /// Enqueues a copy between two spans of equal size on a stream of this GPU, which may be capturing.
    ///
    /// # Errors
    /// [`Refusal::InvalidValue`] if the sizes differ, [`Refusal::NoPeerAccess`] if the GPU cannot access an end; any error of the driver.
    pub fn copy(&self, stream: Stream, to: &Span, from: &Span) -> Result<()> {
        if to.size() != from.size() {
            return Err(refused(to.start(), Refusal::InvalidValue));
        }
        let unreached = [to, from].into_iter().find(|end| !self.reaches(end.side()));
        if let Some(end) = unreached {
            return Err(refused(end.start(), Refusal::NoPeerAccess));
        }
        let driver = self.completion_events.driver();
        let recorded = driver.capture_state(self.device, stream)? != CaptureState::None;
        let touch = |span: &Span| [Touch { address: span.start(), size: span.size() }];
        let request = LaunchRequest {
            kernel: self.copy,
            grid: [COPY_BLOCKS, 1, 1],
            block: [THREADS, 1, 1],
            arguments: &[to.start().0, from.start().0, to.size().get()],
            touches: &Touched { reads: &touch(from), writes: &touch(to) },
        };
        // SAFETY: the kernel copies these bytes and touches nothing else; the spans' memory lives until it has run, and the
        // GPU reaches it.
        unsafe { driver.launch(self.device, &request, stream) }?;
        self.captured.fetch_or(recorded, Ordering::Relaxed);
        Ok(())
    }

    fn launch_list(&self, stream: Stream, list: &BlockList) -> Result<()> {
        let request = LaunchRequest {
            kernel: self.gather,
            grid: [GATHER_BLOCKS, 1, 1],
            block: [THREADS, 1, 1],
            arguments: &list.arguments(),
            touches: list,
        };
        // SAFETY: the kernel copies the list's blocks and touches nothing else. They are pieces that the GPU reaches, whose
        // memory lives until the kernel has run; the list is written again only after that.
        unsafe { self.completion_events.driver().launch(self.device, &request, stream) }
    }

    fn emptied(&self, mut list: BlockList) -> BlockList {
        list.clear();
        list.reach = self.reach();
        list
    }

    fn reach(&self) -> Reach {
        Reach { device: self.device }
    }
}

impl Drop for Gather {
    fn drop(&mut self) {
        let synchronize = || self.completion_events.synchronize(DeviceSet::of(self.device));
        // A loaded module keeps the context alive, so a transient error is retried.
        if synchronize().or_else(|_| synchronize()).is_ok() && !self.is_captured() {
            // SAFETY: all work of the device is done, and no graph holds a launch.
            let unload =
                || unsafe { self.completion_events.driver().module_unload(self.device, self.module) };
            // After a second failure the module stays loaded in the context.
            let _ = unload().or_else(|_| unload());
        }
    }
}

fn refused(address: Address, reason: Refusal) -> DriverError {
    DriverError::Refused { verb: VERB, address, reason }
}

/// List entry as the kernel reads it.
#[repr(C)]
#[derive(Clone, Copy)]
struct Block {
    to: u64,
    from: u64,
    bytes: u64,
}

const ENTRY: u64 = size_of::<Block>() as u64;
/// Size of one list in bytes: room for 2,730 entries.
const LIST: u64 = 64 << 10;

/// Check of the memory that a GPU's kernels may access.
#[derive(Clone, Copy, Debug)]
struct Reach {
    device: DeviceId,
}

impl Reach {
    #[inline]
    fn holds(self, side: Side) -> bool {
        match side.kind {
            PointerKind::Device { .. } | PointerKind::Pinned => side.reach.contains(self.device),
            // Managed memory may migrate while the kernel runs; pageable memory is out of a kernel's reach.
            PointerKind::Managed | PointerKind::Pageable => false,
        }
    }
}

/// Small blocks copied by one launch, in no particular order. The list belongs to its holder until it is launched.
#[derive(Debug)]
pub struct BlockList {
    /// Pool that the list returns to when dropped; dangling if it must not be reused.
    home: Weak<Mutex<Lists>>,
    /// Memory that holds the entries of all lists.
    memory: Arc<Registration>,
    entries: Address,
    count: u64,
    size: Bytes,
    reach: Reach,
    /// Event recorded after each launch; once it has completed, nothing reads the entries.
    done: Arc<OwnedEvent>,
}

/// Idle and launched lists of a GPU.
#[derive(Debug, Default)]
struct Lists {
    idle: Vec<BlockList>,
    /// Launched lists, oldest launch first.
    launched: VecDeque<BlockList>,
}

/// Returns an unlaunched list to the pool: there are few lists, and none is created later.
impl Drop for BlockList {
    fn drop(&mut self) {
        let Some(home) = self.home.upgrade() else { return };
        let list = BlockList {
            home: self.home.clone(),
            memory: self.memory.clone(),
            entries: self.entries,
            count: 0,
            size: Bytes::ZERO,
            reach: self.reach,
            done: self.done.clone(),
        };
        home.lock().idle.push(list);
    }
}

impl BlockList {
    /// Allocates the lists that fit into the given pinned memory, at least one.
    fn several(
        completion_events: &Arc<CompletionEvents>,
        reach: Reach,
        memory: Bytes,
    ) -> Result<Vec<BlockList>> {
        let memory =
            Arc::new(Registration::new(completion_events, Pages::new(memory.max(Bytes::new(LIST)), 0)?)?);
        (0..memory.size().get() / LIST)
            .map(|index| {
                Ok(BlockList {
                    // No pool yet: the owner of all lists sets it.
                    home: Weak::new(),
                    entries: Address(memory.start().0 + index * LIST),
                    memory: memory.clone(),
                    count: 0,
                    size: Bytes::ZERO,
                    reach,
                    done: Arc::new(OwnedEvent::new(
                        completion_events.driver(),
                        reach.device,
                        EventKind::Plain,
                    )?),
                })
            })
            .collect()
    }

    /// Returns the size of the pinned memory that the list is part of.
    fn memory(&self) -> Bytes {
        self.memory.size()
    }

    /// Returns the number of blocks in the list.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Returns the total bytes of the blocks.
    pub fn size(&self) -> Bytes {
        self.size
    }

    /// Returns whether the list has no room for another block.
    pub fn is_full(&self) -> bool {
        self.count == LIST / ENTRY
    }

    /// Adds a piece to the list. One warp copies it, so pieces beyond 64 KiB should be split.
    ///
    /// # Errors
    /// [`Refusal::InvalidValue`] if the list is full, [`Refusal::NoPeerAccess`] if the GPU cannot access an end. Nothing is added then.
    #[inline]
    pub fn push(&mut self, piece: &Piece<'_>) -> Result<()> {
        let CopyRequest { to, from, size } = piece.request();
        if self.is_full() {
            return Err(refused(to, Refusal::InvalidValue));
        }
        if !self.reach.holds(piece.to()) || !self.reach.holds(piece.from()) {
            return Err(refused(to, Refusal::NoPeerAccess));
        }
        let entry = Block { to: to.0, from: from.0, bytes: size.get() };
        // SAFETY: the entry lies in memory of this list, which no kernel reads and of which there is no reference.
        unsafe { self.entry(self.count).write(entry) };
        self.count += 1;
        self.size = self.size.saturating_add(size);
        Ok(())
    }

    fn clear(&mut self) {
        (self.count, self.size) = (0, Bytes::ZERO);
    }

    /// Returns the kernel's arguments: address and number of the entries.
    fn arguments(&self) -> [u64; 2] {
        [self.entries.0, self.count]
    }

    fn entry(&self, index: u64) -> *mut Block {
        let at = self.entries.0 + index * ENTRY;
        std::ptr::with_exposed_provenance_mut(usize::try_from(at).unwrap_or(0))
    }
}

/// Memory that the kernel reads and writes, including the entries.
impl Touches for BlockList {
    fn each(&self, see: &mut dyn FnMut(Usage, Touch)) {
        see(Usage::Read, Touch { address: self.entries, size: Bytes::new(self.count * ENTRY) });
        for index in 0..self.count {
            // SAFETY: an initialised entry in memory that is not written concurrently.
            let block = unsafe { self.entry(index).read() };
            let size = Bytes::new(block.bytes);
            see(Usage::Read, Touch { address: Address(block.from), size });
            see(Usage::Write, Touch { address: Address(block.to), size });
        }
    }
}

/// The kernels as host code, for the simulator.
mod host {
    use super::ENTRY;
    use crate::{Address, KernelMemory};

    /// Kernel `glake_gather(list, count)` as host code.
    pub(super) fn gather(memory: &mut dyn KernelMemory, arguments: &[u64]) {
        let [list, count] = *arguments else { return };
        let mut entries = vec![0; usize::try_from(count * ENTRY).unwrap_or(0)];
        // The next wait for the device reports a stray access.
        let _ = memory.read(Address(list), &mut entries);
        for words in entries.as_chunks::<8>().0.as_chunks::<3>().0 {
            let [to, from, bytes] = words.map(u64::from_le_bytes);
            copy(memory, &[to, from, bytes]);
        }
    }

    /// Kernel `glake_copy(to, from, bytes)` as host code.
    pub(super) fn copy(memory: &mut dyn KernelMemory, arguments: &[u64]) {
        let [to, from, bytes] = *arguments else { return };
        let mut held = vec![0; usize::try_from(bytes).unwrap_or(0)];
        if memory.read(Address(from), &mut held).is_ok() {
            let _ = memory.write(Address(to), &held);
        }
    }
}

/// Verb named by the errors of a list.
const VERB: Verb = Verb::Launch;
