//! Copies by a kernel: many small blocks in one launch, or one range between the host and another GPU's memory, over the link of the GPU
//! that runs it.
//!
//! ```text
//!  Gather ── list() ─► BlockList ── push() ... ─► gather(stream, list)     the list returns once its launch has run
//!         └─ copy(stream, to, from)
//! ```
//!
//! Invariants:
//! - A kernel accesses only memory of the given spans, all of it accessible to its GPU.
//! - A list is written only while no kernel reads it: its holder has exclusive access, and launching consumes the list.
//! - A list that was taken is launched, or idle again when its holder drops it.

mod list;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use glake_units::Bytes;
use parking_lot::Mutex;

use super::{CompletionEvents, DeviceSet, Side, Span};
use crate::{
    Address, CaptureState, DeviceId, DriverError, HostKernel, Kernel, LaunchRequest, Module, ModuleSource,
    Refusal, Result, Stream, Touch, Touched,
};
pub use list::BlockList;
use list::{Lists, Reach, VERB, host};

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
