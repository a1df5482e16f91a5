//! Digests of a GPU's memory, computed by the GPU, to verify that bytes return unchanged.
//!
//! ```text
//!  spans  [ a ][ b ]      [ c ]       ─► Digests::enqueue(stream, ..) ─► Digesting ─► wait ─► Digest
//!  digest of  [ a ][ b ][ c ]            of their bytes side by side, as a packed copy holds them
//! ```
//!
//! Invariants:
//! - The kernel reads only memory of the given spans, which its GPU can access and which the pending digest keeps alive.
//! - A buffer belongs to one launch: its list is written, and its sums are read, only while no kernel runs on it.

mod function;

use std::sync::Arc;

use glake_units::Bytes;
use parking_lot::Mutex;

use super::{CompletionEvents, DeviceSet, OwnedEvent, OwnedStream, Pages, PinnedRange, Registration, Span};
use crate::{
    Address, DeviceId, DriverError, EventKind, HostKernel, Kernel, KernelMemory, LaunchRequest, Module,
    ModuleSource, PointerKind, Refusal, Result, Stream, Touch, Touched, Verb,
};
pub use function::{Digest, PartialDigest, sum};

/// Module of the digest kernel.
pub const SOURCE: ModuleSource =
    ModuleSource { ptx: include_str!("digest.ptx"), host: &[HostKernel { name: KERNEL, body: host }] };
/// Name of the kernel in its module.
pub const KERNEL: &str = "glake_digest";

/// Threads of a block, and blocks of a launch.
const THREADS: u32 = 512;
const BLOCKS: u32 = 512;
/// Bytes that a warp processes at a time.
const PIECE: u64 = 32 << 10;
/// Required alignment of starts and sizes in bytes.
const WORD: u64 = 16;

/// List entry as the kernel reads it: start address, length, position of its first word.
type Entry = [u64; 3];
const ENTRY: usize = size_of::<Entry>();
/// Size of a launch buffer. The sums take [`SUMS`] bytes of it; the rest holds a list of 5,290 pieces, enough for 165 MiB.
const LAUNCH_BUFFER: Bytes = Bytes::kib(128);
const SUMS: usize = BLOCKS as usize * 8;

/// Digest kernel of one GPU; clones share the kernel.
#[derive(Clone, Debug)]
pub struct Digests(Arc<Loaded>);

/// The kernel and its launch resources; unloaded once no digest is in progress.
#[derive(Debug)]
struct Loaded {
    completion_events: Arc<CompletionEvents>,
    device: DeviceId,
    stream: OwnedStream,
    module: Module,
    kernel: Kernel,
    buffers: Mutex<Vec<LaunchBuffer>>,
}

/// Pinned memory for one launch: its sums, then its list.
#[derive(Debug)]
struct LaunchBuffer {
    memory: PinnedRange,
    /// Event recorded after a launch; `None` before the first.
    launched: Option<OwnedEvent>,
    pieces: u64,
}

/// A digest in progress. It keeps the memory of its spans alive until it is waited for or dropped.
#[derive(Debug)]
pub struct Digesting {
    loaded: Arc<Loaded>,
    buffers: Vec<LaunchBuffer>,
    length: u64,
    spans: Vec<Span>,
}

impl Digests {
    /// Loads the kernel and creates a stream. Slow the first time on a machine, because the driver compiles the kernel.
    ///
    /// # Errors
    /// Any error of the driver.
    pub fn new(completion_events: &Arc<CompletionEvents>, device: DeviceId) -> Result<Digests> {
        let driver = completion_events.driver();
        let stream = OwnedStream::new(driver, device)?;
        let module = driver.module_load(device, &SOURCE)?;
        let (completion_events, kernel, buffers) = (completion_events.clone(), Kernel(0), Mutex::default());
        // From here on, dropping the value unloads the module.
        let mut loaded = Loaded { completion_events, device, stream, module, kernel, buffers };
        loaded.kernel = loaded.completion_events.driver().kernel_find(device, module, KERNEL)?;
        Ok(Digests(Arc::new(loaded)))
    }

    /// Returns the GPU that computes the digests.
    pub fn device(&self) -> DeviceId {
        self.0.device
    }

    /// Returns the kernel's own stream, for memory that no other work writes to.
    pub fn stream(&self) -> Stream {
        self.0.stream.id()
    }

    /// Enqueues the digest of the concatenated bytes of `spans` on a stream of this GPU. Several may be in flight.
    ///
    /// # Errors
    /// [`Refusal::InvalidValue`] if a span does not begin at a multiple of 16 bytes, or one before the last does not have such a length;
    /// [`Refusal::NoPeerAccess`] if the GPU cannot access a span; any error of the driver, also of pinning 2 MiB when all buffers are in
    /// flight.
    pub fn enqueue(&self, stream: Stream, spans: &[Span]) -> Result<Digesting> {
        let loaded = &*self.0;
        loaded.check(spans)?;
        let (entries, length) = entries(spans);
        let mut digesting =
            Digesting { loaded: self.0.clone(), buffers: Vec::new(), length, spans: spans.to_vec() };
        let reads: Vec<Touch> =
            spans.iter().map(|span| Touch { address: span.start(), size: span.size() }).collect();
        for list in entries.chunks(LaunchBuffer::PIECES) {
            let mut buffer = loaded.buffer()?;
            buffer.fill(list);
            // If the end of the launch cannot be recorded, the buffer is not reused: its memory stays until all work is done.
            loaded.launch(stream, &buffer, &reads)?;
            let marked = buffer.launched.take().map_or_else(
                || OwnedEvent::new(loaded.completion_events.driver(), loaded.device, EventKind::Sleeping),
                Ok,
            )?;
            marked.record(stream)?;
            buffer.launched = Some(marked);
            digesting.buffers.push(buffer);
        }
        Ok(digesting)
    }
}

impl Loaded {
    fn check(&self, spans: &[Span]) -> Result<()> {
        for (at, span) in (1..).zip(spans) {
            let reached = span.kind() != PointerKind::Pageable && span.reach().contains(self.device);
            let whole = at == spans.len() || span.size().get().is_multiple_of(WORD);
            let reason = match whole && span.start().0.is_multiple_of(WORD) {
                true if reached => continue,
                true => Refusal::NoPeerAccess,
                false => Refusal::InvalidValue,
            };
            return Err(DriverError::Refused { verb: Verb::Launch, address: span.start(), reason });
        }
        Ok(())
    }

    fn launch(&self, stream: Stream, buffer: &LaunchBuffer, reads: &[Touch]) -> Result<()> {
        let sums = buffer.memory.start();
        let list = Touch {
            address: Address(sums.0 + SUMS as u64),
            size: Bytes::new(buffer.pieces.saturating_mul(ENTRY as u64)),
        };
        let request = LaunchRequest {
            kernel: self.kernel,
            grid: [BLOCKS, 1, 1],
            block: [THREADS, 1, 1],
            arguments: &[list.address.0, buffer.pieces, sums.0, u64::from(BLOCKS)],
            touches: &Touched {
                reads: &[&[list], reads].concat(),
                writes: &[Touch { address: sums, size: Bytes::new(SUMS as u64) }],
            },
        };
        // SAFETY: the kernel reads the list and its pieces, which lie in spans that the GPU reaches and that live until it has run,
        // and writes its sums; the buffer is used again only after that.
        unsafe { self.completion_events.driver().launch(self.device, &request, stream) }
    }

    /// Returns an unused buffer, allocating more if all are in flight.
    fn buffer(&self) -> Result<LaunchBuffer> {
        let mut buffers = self.buffers.lock();
        for at in 0..buffers.len() {
            let passed = buffers[at].launched.as_ref().map_or(Ok(true), OwnedEvent::is_passed);
            if passed? {
                return Ok(buffers.swap_remove(at));
            }
        }
        let mut rest =
            PinnedRange::whole(Registration::new(&self.completion_events, Pages::new(LAUNCH_BUFFER, 1)?)?);
        loop {
            let (memory, others) = match rest.split(LAUNCH_BUFFER) {
                Ok((memory, others)) => (memory, Some(others)),
                Err(memory) => (memory, None),
            };
            let buffer = LaunchBuffer { memory, launched: None, pieces: 0 };
            let Some(others) = others else { return Ok(buffer) };
            buffers.push(buffer);
            rest = others;
        }
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        if self.completion_events.synchronize(DeviceSet::of(self.device)).is_ok() {
            // SAFETY: all work of the device is done. A failure leaves the module to the context.
            let _ = unsafe { self.completion_events.driver().module_unload(self.device, self.module) };
        }
    }
}

impl Digesting {
    /// Releases the spans early. A later unmap of their memory waits for the digest, as for all enqueued work.
    #[must_use]
    pub fn let_go(mut self) -> Self {
        self.spans.clear();
        self
    }

    /// Returns whether the digest is finished, so that [`Digesting::wait`] does not block.
    ///
    /// # Errors
    /// Any error of the driver.
    pub fn is_done(&self) -> Result<bool> {
        // The last launch finishes last, because all launches use one stream.
        self.buffers
            .last()
            .and_then(|buffer| buffer.launched.as_ref())
            .map_or(Ok(true), OwnedEvent::is_passed)
    }

    /// Blocks the calling thread, asleep, until the digest is finished, and returns it.
    ///
    /// # Errors
    /// Any error of the driver.
    pub fn wait(self) -> Result<Digest> {
        let mut sum = 0_u64;
        for buffer in &self.buffers {
            buffer.launched.as_ref().map_or(Ok(()), OwnedEvent::synchronize)?;
            let sums = buffer.memory.as_slice().as_chunks::<8>().0.iter().take(BLOCKS as usize);
            sum = sums.fold(sum, |sum, found| sum.wrapping_add(u64::from_le_bytes(*found)));
        }
        Ok(Digest::finished(sum, self.length))
    }
}

impl Drop for Digesting {
    fn drop(&mut self) {
        self.loaded.buffers.lock().append(&mut self.buffers);
    }
}

impl LaunchBuffer {
    /// Capacity of a list in pieces.
    const PIECES: usize = ((128 << 10) - SUMS) / ENTRY;

    fn fill(&mut self, list: &[Entry]) {
        self.pieces = list.len() as u64;
        let (places, _) = self.memory.as_mut_slice()[SUMS..].as_chunks_mut::<8>();
        for (place, number) in places.iter_mut().zip(list.as_flattened()) {
            *place = number.to_le_bytes();
        }
    }
}

/// Splits spans into pieces in byte order; also returns the total length.
fn entries(spans: &[Span]) -> (Vec<Entry>, u64) {
    let mut length = 0;
    let mut entries = Vec::new();
    for span in spans {
        let size = span.size().get();
        let pieces = (0..size).step_by(PIECE as usize);
        entries.extend(pieces.map(|at| [span.start().0 + at, PIECE.min(size - at), (length + at) / 8]));
        length += size;
    }
    (entries, length)
}

/// Kernel `glake_digest(list, count, sums, blocks)` as host code, for the simulator.
fn host(memory: &mut dyn KernelMemory, arguments: &[u64]) {
    let [list, count, sums, blocks] = *arguments else { return };
    let length = |size: u64| usize::try_from(size).unwrap_or(0);
    let mut entries = vec![0; length(count.saturating_mul(ENTRY as u64))];
    // The next wait for the device reports a stray access.
    let _ = memory.read(Address(list), &mut entries);
    let mut found = vec![0_u8; length(blocks.saturating_mul(8))];
    let mut sum = 0_u64;
    for entry in entries.as_chunks::<8>().0.as_chunks::<3>().0 {
        let [start, bytes, position] = entry.map(u64::from_le_bytes);
        let mut held = vec![0; length(bytes)];
        let _ = memory.read(Address(start), &mut held);
        sum = sum.wrapping_add(function::sum(&held, position));
    }
    if let Some(first) = found.first_chunk_mut::<8>() {
        *first = sum.to_le_bytes();
    }
    let _ = memory.write(Address(sums), &found);
}
