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
//!
//! The digest function is identical on a GPU and on the host:
//!
//! ```text
//!  bytes    [ word 0 ][ word 1 ] ─ ─ ─ [ word n, zeros ]        of 8 bytes
//!               │ 0       │ 1               │ n                 mixed with its position
//!  sum          └────── + ┴ ─ ─ ─ ─ ─ ─ + ──┘                   in any order
//!  digest       mix(sum, length)
//! ```
//!
//! An invertible step maps each word at its position to its term, so a change of one word always changes the sum. The digest detects
//! accidental corruption; it does not resist deliberate forgery.

use std::fmt;
use std::sync::Arc;

use glake_units::Bytes;
use parking_lot::Mutex;

use super::{CompletionEvents, DeviceSet, OwnedEvent, OwnedStream, Pages, PinnedRange, Registration, Span};
use crate::{
    Address, DeviceId, DriverError, EventKind, HostKernel, Kernel, KernelMemory, LaunchRequest, Module,
    ModuleSource, PointerKind, Refusal, Result, Stream, Touch, Touched, Verb,
};

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
    let mut total = 0_u64;
    for entry in entries.as_chunks::<8>().0.as_chunks::<3>().0 {
        let [start, bytes, position] = entry.map(u64::from_le_bytes);
        let mut held = vec![0; length(bytes)];
        let _ = memory.read(Address(start), &mut held);
        total = total.wrapping_add(sum(&held, position));
    }
    if let Some(first) = found.first_chunk_mut::<8>() {
        *first = total.to_le_bytes();
    }
    let _ = memory.write(Address(sums), &found);
}

/// Constant of the term generator, splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
const KEY: u64 = 0x9E37_79B9_7F4A_7C15;
const FIRST: u64 = 0xBF58_476D_1CE4_E5B9;
const SECOND: u64 = 0x94D0_49BB_1331_11EB;

/// 64-bit digest of bytes: differs for any two inputs that differ in one 8-byte word, and for all but one in 2⁶⁴ of other pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Digest(u64);

impl Digest {
    /// Computes the digest of host bytes.
    pub fn of(bytes: &[u8]) -> Digest {
        Digest::finished(sum(bytes, 0), bytes.len() as u64)
    }

    /// Builds the digest of `length` bytes from the sum of their terms.
    fn finished(sum: u64, length: u64) -> Digest {
        Digest(mix(sum, length))
    }
}

/// Incremental digest of host bytes that arrive in consecutive parts.
#[derive(Clone, Copy, Debug, Default)]
pub struct PartialDigest {
    sum: u64,
    length: u64,
}

impl PartialDigest {
    /// Adds the next part. Every part but the last must be a multiple of 8 bytes.
    pub fn add(&mut self, part: &[u8]) {
        debug_assert!(self.length.is_multiple_of(8), "parts are whole words");
        self.sum = self.sum.wrapping_add(sum(part, self.length / 8));
        self.length += part.len() as u64;
    }

    /// Returns the digest of all parts in sequence.
    pub fn finish(self) -> Digest {
        Digest::finished(self.sum, self.length)
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// Returns the sum of the terms of `bytes`, whose first word has index `position`.
pub fn sum(bytes: &[u8], position: u64) -> u64 {
    let (words, rest) = bytes.as_chunks::<8>();
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    let last = (!rest.is_empty()).then_some(&last);
    let terms = words.iter().chain(last).zip(position..);
    terms.fold(0, |sum, (word, position)| sum.wrapping_add(mix(u64::from_le_bytes(*word), position)))
}

fn mix(word: u64, position: u64) -> u64 {
    let mut held = word ^ position.wrapping_add(1).wrapping_mul(KEY);
    held = held.wrapping_mul(FIRST);
    held ^= held >> 32;
    held = held.wrapping_mul(SECOND);
    held ^ held >> 32
}

#[cfg(test)]
mod function_tests {
    use super::*;

    fn bytes(length: usize) -> Vec<u8> {
        (0..length).map(|at| (at.wrapping_mul(167) + (at >> 8)).to_le_bytes()[0]).collect()
    }

    #[test]
    fn one_flipped_bit_is_found_wherever_it_is() {
        for length in [1, 7, 8, 9, 16, 31, 1000] {
            let mut bytes = bytes(length);
            let whole = Digest::of(&bytes);
            for bit in 0..length * 8 {
                bytes[bit / 8] ^= 1 << (bit % 8);
                assert_ne!(Digest::of(&bytes), whole, "bit {bit} of {length} bytes");
                bytes[bit / 8] ^= 1 << (bit % 8);
            }
        }
    }

    #[test]
    fn parts_have_the_digest_of_the_whole() {
        for length in [0, 5, 8, 100, 4096, 4099] {
            let bytes = bytes(length);
            for step in [8, 64, 1024] {
                let mut parts = PartialDigest::default();
                bytes.chunks(step).for_each(|part| parts.add(part));
                assert_eq!(parts.finish(), Digest::of(&bytes), "{length} bytes by {step}");
            }
        }
    }

    #[test]
    fn swapped_words_are_found() {
        let bytes = bytes(4096);
        let whole = Digest::of(&bytes);
        for step in [8, 16, 512, 2048] {
            for at in (0..4096 - step).step_by(8) {
                let mut changed = bytes.clone();
                for byte in at..at + 8 {
                    changed.swap(byte, byte + step);
                }
                assert!(changed == bytes || Digest::of(&changed) != whole, "{at} and {step} after it");
            }
        }
        let mut turned = bytes.clone();
        turned.rotate_left(8);
        assert_ne!(Digest::of(&turned), whole);
    }

    #[test]
    fn the_length_counts() {
        let digests: Vec<Digest> = (0..40).map(|length| Digest::of(&vec![0; length])).collect();
        for (at, digest) in digests.iter().enumerate() {
            assert!(!digests[..at].contains(digest), "{at} zeros");
        }
    }

    #[test]
    fn parts_add_up() {
        let bytes = bytes(1003);
        for cut in (0..1003).step_by(8) {
            let parts = sum(&bytes[..cut], 0).wrapping_add(sum(&bytes[cut..], cut as u64 / 8));
            assert_eq!(Digest::finished(parts, 1003), Digest::of(&bytes), "{cut}");
        }
    }
}
