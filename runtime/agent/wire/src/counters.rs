//! The counters page: memory of a process on each of its GPUs, published for other processes of its user.
//!
//! ```text
//! writer  memfd `glake-counters` ─► mapped ─► sealed: nobody maps or writes it any more ─► words stored through the first mapping
//! reader  /proc/PID/fd/N ─► seals, size, version, checksum ─► is `pid`, started at `start`, the process that owns the descriptor?
//! ```
//!
//! | word | content |
//! |---|---|
//! | 0, 1 | magic number, version |
//! | 2 | sequence number: odd while the record is being written |
//! | 3, 4, 5 | process id in its namespace, start time in clock ticks since boot, time of the last change (monotonic clock, ns) |
//! | 6 | number of GPUs |
//! | 7.. | backend: text of 8 words; then the GPUs: a name of 4 words, and 13 numbers each; then the checksum of all words |
//!
//! Invariant: a reader accepts a record only if its sequence number is even and its checksum right, so that no partial record is seen.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering, fence};

use glake_units::Bytes;
use rustix::fs::SealFlags;
use serde::{Deserialize, Serialize};

use crate::PAGE_GPUS;
use crate::page::{self, PageError};

/// Number of words of the page's record.
pub const COUNTERS_WORDS: usize = HEADER + BACKEND + PAGE_GPUS * GPU + 1;
const MAGIC: u64 = u64::from_le_bytes(*b"glakecnt");
const COUNTERS_VERSION: u64 = 1;
/// Index of the sequence number.
const SEQUENCE: usize = 2;
const HEADER: usize = 7;
const BACKEND: usize = 8;
const NAME: usize = 4;
const NUMBERS: usize = 13;
const GPU: usize = NAME + NUMBERS;
const RECORD: usize = COUNTERS_WORDS * size_of::<u64>();
const _: () = assert!(RECORD as u64 <= page::SIZE);
const SEALS: SealFlags =
    SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::FUTURE_WRITE).union(SealFlags::SEAL);

/// Memory of a process on its GPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// Process id in the process's own namespace.
    pub pid: u32,
    /// Start time of the process in clock ticks since boot.
    pub start: u64,
    /// Time of the last change, in nanoseconds of the monotonic clock.
    pub changed_ns: u64,
    /// Device of the process, such as `cuda` or `sim:h200x4@/run/gpus`.
    pub backend: String,
    /// GPUs with a pool of the process, [`PAGE_GPUS`] at most.
    pub gpus: Vec<GpuCounters>,
}

/// Memory of a process on one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuCounters {
    /// Name of the GPU: its PCI address, or the number of a simulated GPU.
    pub gpu: String,
    /// Memory of the GPU.
    pub total: Bytes,
    /// Physical memory of the pool.
    pub reserved: Bytes,
    /// Allocated blocks, rounded up. Blocks that hits allocate after the last free or miss may be missing.
    pub live: Bytes,
    /// Free reserved memory in partly used extents.
    pub waste_hard: Bytes,
    /// Whole free extents that are not joined.
    pub waste_soft: Bytes,
    /// Free memory that is pending on a stream.
    pub waste_stream: Bytes,
    /// Evicted extents with contents in host memory.
    pub evicted_host: Bytes,
    /// Evicted extents with contents in memory of other GPUs.
    pub evicted_peers: Bytes,
    /// Evicted extents with contents in files.
    pub evicted_files: Bytes,
    /// Evicted extents without contents.
    pub discarded: Bytes,
    /// Bytes that evictions have copied off the GPU.
    pub copied_out: Bytes,
    /// Bytes that refills have copied to the GPU.
    pub copied_back: Bytes,
    /// Memory on this GPU for copies of other GPUs: contexts and staging buffers.
    pub relays: Bytes,
}

impl GpuCounters {
    /// Returns the evicted memory at all places, without discarded memory.
    pub fn evicted(&self) -> Bytes {
        [self.evicted_host, self.evicted_peers, self.evicted_files].into_iter().sum()
    }

    fn numbers(&self) -> [Bytes; NUMBERS] {
        let GpuCounters { gpu: _, total, reserved, live, waste_hard, waste_soft, waste_stream, .. } = *self;
        let GpuCounters { evicted_host, evicted_peers, evicted_files, discarded, .. } = *self;
        let GpuCounters { copied_out, copied_back, relays, .. } = *self;
        [
            total,
            reserved,
            live,
            waste_hard,
            waste_soft,
            waste_stream,
            evicted_host,
            evicted_peers,
            evicted_files,
            discarded,
            copied_out,
            copied_back,
            relays,
        ]
    }
}

impl Counters {
    /// Creates a page of zeros, which `map` maps for writing, and seals it. The page stays writable through that mapping alone.
    ///
    /// # Errors
    /// [`PageError::Os`]; Linux has the seal since 5.1.
    pub fn create_page<M>(
        map: impl FnOnce(BorrowedFd<'_>) -> std::io::Result<M>,
    ) -> Result<(OwnedFd, M), PageError> {
        let memory = page::create("glake-counters")?;
        // The mapping must not outlive the size, and cannot be made after the last seals.
        page::seal(&memory, SealFlags::SHRINK | SealFlags::GROW)?;
        let mapped = map(memory.as_fd())?;
        page::seal(&memory, SEALS)?;
        Ok((memory, mapped))
    }

    /// Publishes the counters in the words of a page. The caller is the only writer. GPUs beyond the page's last are left out, and texts are
    /// cut.
    pub fn publish(&self, words: &[AtomicU64]) {
        let Some(sequence) = words.get(SEQUENCE) else { return };
        // Even, and another one, also after a process that stopped while it wrote.
        let next = (sequence.load(Ordering::Relaxed) | 1).wrapping_add(1);
        let mut record = [0; RECORD];
        page::encode(&mut record, self.words(next));
        sequence.store(next.wrapping_sub(1), Ordering::Relaxed);
        fence(Ordering::Release);
        let values = record.chunks_exact(size_of::<u64>()).map(page::word);
        for (word, value) in
            words.iter().zip(values).enumerate().filter(|(at, _)| *at != SEQUENCE).map(|of| of.1)
        {
            word.store(value, Ordering::Relaxed);
        }
        sequence.store(next, Ordering::Release);
    }

    fn words(&self, sequence: u64) -> impl Iterator<Item = u64> {
        let count = self.gpus.len().min(PAGE_GPUS);
        let header = [
            MAGIC,
            COUNTERS_VERSION,
            sequence,
            u64::from(self.pid),
            self.start,
            self.changed_ns,
            count as u64,
        ];
        let gpus =
            self.gpus.iter().take(count).flat_map(|gpu| {
                text_words::<NAME>(&gpu.gpu).into_iter().chain(gpu.numbers().map(Bytes::get))
            });
        header.into_iter().chain(text_words::<BACKEND>(&self.backend)).chain(gpus)
    }
}

/// Returns a text in words, cut to their size at a character.
fn text_words<const N: usize>(text: &str) -> [u64; N] {
    let mut end = text.len().min(N * size_of::<u64>());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    let mut words = [0; N];
    for (word, bytes) in words.iter_mut().zip(text.as_bytes()[..end].chunks(size_of::<u64>())) {
        *word = page::word(bytes);
    }
    words
}

/// Takes a text of `count` words.
fn take_text(words: &mut impl Iterator<Item = u64>, count: usize) -> String {
    let bytes: Vec<u8> = words.take(count).flat_map(u64::to_le_bytes).collect();
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

/// Counters page of another process.
#[derive(Debug)]
pub struct CountersView {
    file: File,
}

impl CountersView {
    /// Takes a page of another process.
    ///
    /// # Errors
    /// [`PageError::Unsealed`] if the contents could be changed by others than their writer, or a read could fail at any time.
    pub fn new(page: OwnedFd) -> Result<Self, PageError> {
        page::check(&page, SEALS)?;
        Ok(CountersView { file: File::from(page) })
    }

    /// Reads the current counters. The caller compares [`Counters::pid`] and [`Counters::start`] with the process that owns the page.
    ///
    /// # Errors
    /// [`PageError`].
    pub fn read(&self) -> Result<Counters, PageError> {
        page::read(&self.file, decode)
    }
}

fn decode(record: &[u8; RECORD]) -> Result<Option<Counters>, PageError> {
    let version = page::word(&record[size_of::<u64>()..]);
    if page::word(record) == MAGIC && version != COUNTERS_VERSION {
        return Err(PageError::Version { found: version, known: COUNTERS_VERSION });
    }
    Ok(page::decode(record).and_then(counters))
}

fn counters(mut words: impl Iterator<Item = u64>) -> Option<Counters> {
    let (magic, _, sequence) = (words.next()?, words.next()?, words.next()?);
    if magic != MAGIC || sequence % 2 == 1 {
        return None;
    }
    let pid = u32::try_from(words.next()?).ok()?;
    let (start, changed_ns) = (words.next()?, words.next()?);
    let count = usize::try_from(words.next()?).ok().filter(|count| *count <= PAGE_GPUS)?;
    let backend = take_text(&mut words, BACKEND);
    let mut gpus = Vec::with_capacity(count);
    for _ in 0..count {
        let gpu = take_text(&mut words, NAME);
        let mut next = || words.next().map(Bytes::new);
        gpus.push(GpuCounters {
            gpu,
            total: next()?,
            reserved: next()?,
            live: next()?,
            waste_hard: next()?,
            waste_soft: next()?,
            waste_stream: next()?,
            evicted_host: next()?,
            evicted_peers: next()?,
            evicted_files: next()?,
            discarded: next()?,
            copied_out: next()?,
            copied_back: next()?,
            relays: next()?,
        });
    }
    Some(Counters { pid, start, changed_ns, backend, gpus })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt as _;

    use proptest::prelude::*;
    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    fn counters(number: u64, gpus: usize) -> Counters {
        let bytes = Bytes::new(number);
        let gpu = |at| GpuCounters {
            gpu: format!("0000:{at:02x}:00.0"),
            live: bytes,
            relays: bytes,
            ..GpuCounters::default()
        };
        Counters {
            pid: 7,
            start: number,
            changed_ns: number,
            backend: "sim:h200x4@/run/gpus".to_owned(),
            gpus: (0..gpus).map(gpu).collect(),
        }
    }

    /// Returns the page's record as a mapping would have it.
    fn published(counters: &Counters) -> Vec<u8> {
        let words: Vec<AtomicU64> = (0..COUNTERS_WORDS).map(|_| AtomicU64::new(0)).collect();
        counters.publish(&words);
        words.iter().flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).collect()
    }

    fn read(record: &[u8]) -> Result<Option<Counters>, PageError> {
        decode(record.try_into().unwrap())
    }

    #[test]
    fn a_record_is_read_as_it_was_written_and_cut_where_it_is_too_long() {
        let written = counters(5, 3);
        assert_eq!(read(&published(&written)).unwrap(), Some(written));
        let long = Counters { backend: "é".repeat(100), ..counters(5, PAGE_GPUS + 9) };
        let seen = read(&published(&long)).unwrap().unwrap();
        assert_eq!((seen.gpus.len(), seen.backend), (PAGE_GPUS, "é".repeat(32)));
    }

    #[test]
    fn a_record_that_is_being_written_or_of_another_version_is_not_read() {
        let mut record = published(&counters(5, 1));
        record[SEQUENCE * 8] |= 1;
        assert!(read(&record).unwrap().is_none(), "odd");
        assert!(read(&[0; RECORD]).unwrap().is_none(), "not written yet");
        let mut record = published(&counters(5, 1));
        record[8] = 2;
        let error = read(&record).unwrap_err();
        assert!(matches!(error, PageError::Version { found: 2, known: 1 }), "{error}");
    }

    #[test]
    fn only_a_sealed_page_of_the_right_size_is_read() {
        let (page, ()) = Counters::create_page(|_| Ok(())).unwrap();
        // No other process can write to it.
        let file = File::from(page.try_clone().unwrap());
        assert_eq!(file.write_all_at(&[1], 0).unwrap_err().kind(), std::io::ErrorKind::PermissionDenied);
        assert!(file.set_len(1).is_err() && file.set_len(8192).is_err());
        assert!(page::seal(&page, SealFlags::WRITE).is_err());
        assert!(matches!(CountersView::new(page).unwrap().read(), Err(PageError::Garbled)));
        let writable = page::create("page").unwrap();
        page::seal(&writable, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).unwrap();
        let error = CountersView::new(writable).unwrap_err();
        assert!(error.to_string().contains("F_SEAL_FUTURE_WRITE"), "{error}");
        let short = memfd_create("page", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        page::seal(&short, SEALS).unwrap();
        assert!(CountersView::new(short).is_err());
        assert!(CountersView::new(File::open("/dev/null").unwrap().into()).is_err());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(500))]

        /// A damaged record is refused, or is equal to the one that was written.
        #[test]
        fn a_damaged_record_is_refused(at in 0..RECORD, with: u8, cut in 0..RECORD, gpus in 0..PAGE_GPUS) {
            let (one, other) = (published(&counters(1, gpus)), published(&counters(2, gpus)));
            let mut damaged = one.clone();
            damaged[at] = with;
            if let Ok(Some(seen)) = read(&damaged) {
                prop_assert_eq!(&damaged, &one);
                prop_assert_eq!(seen, counters(1, gpus));
            }
            // The beginning of one record and the end of another one, as a read beside a write sees them.
            let mixed = [&one[..cut], &other[cut..]].concat();
            if let Ok(Some(_)) = read(&mixed) {
                prop_assert!(mixed == one || mixed == other);
            }
        }
    }
}
