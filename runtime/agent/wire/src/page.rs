//! Pages: sealed memfds of 4 KiB in which a process publishes a record, and which other processes read without a request.
//!
//! A record is a row of little-endian words. The last word is the checksum of the others, so that a reader detects a concurrent write and
//! reads again.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt as _;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use xxhash_rust::xxh3::xxh3_64;

/// Size of every page.
pub(crate) const SIZE: u64 = 4096;
const WORD: usize = size_of::<u64>();
/// Maximum number of reads that collide with a write before the page is rejected.
const TRIES: usize = 100;

/// Reason why a page cannot be trusted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PageError {
    /// The page has another size, or other processes may change its size or its contents.
    #[error("the page is no memfd of {SIZE} bytes with the seals {}", names(*seals))]
    Unsealed {
        /// Seals that the page must have.
        seals: u32,
    },
    /// The page's bytes never matched their checksum.
    #[error("the page holds no valid record")]
    Garbled,
    /// The page is of another version of GLake.
    #[error(
        "the page has version {found} of its format, and this program knows version {known}: use the glake command that was \
             installed with the process's library"
    )]
    Version {
        /// Version of the page.
        found: u64,
        /// Version that this program knows.
        known: u64,
    },
    /// Error of the operating system.
    #[error("the page: {0}")]
    Os(#[from] std::io::Error),
}

fn names(seals: u32) -> String {
    let known = [
        (SealFlags::SHRINK, "F_SEAL_SHRINK"),
        (SealFlags::GROW, "F_SEAL_GROW"),
        (SealFlags::FUTURE_WRITE, "F_SEAL_FUTURE_WRITE"),
        (SealFlags::SEAL, "F_SEAL_SEAL"),
    ];
    let seals = SealFlags::from_bits_retain(seals);
    let names = known.iter().filter(|(seal, _)| seals.contains(*seal)).map(|(_, name)| *name);
    names.collect::<Vec<_>>().join(", ")
}

/// Creates an unsealed page of zeros.
pub(crate) fn create(name: &str) -> std::io::Result<OwnedFd> {
    let memory = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&memory, SIZE)?;
    Ok(memory)
}

/// Adds seals to a page.
pub(crate) fn seal(page: &OwnedFd, seals: SealFlags) -> std::io::Result<()> {
    Ok(fcntl_add_seals(page, seals)?)
}

/// Checks the size and the seals of a page of another process.
pub(crate) fn check(page: impl AsFd, seals: SealFlags) -> Result<(), PageError> {
    let is_sealed = fcntl_get_seals(&page).is_ok_and(|found| found.contains(seals));
    let size = fstat(&page).map_err(std::io::Error::from)?.st_size;
    match is_sealed && u64::try_from(size) == Ok(SIZE) {
        true => Ok(()),
        false => Err(PageError::Unsealed { seals: seals.bits() }),
    }
}

/// Reads a page until `decode` accepts its first `N` bytes.
pub(crate) fn read<const N: usize, T>(
    file: &File,
    decode: impl Fn(&[u8; N]) -> Result<Option<T>, PageError>,
) -> Result<T, PageError> {
    let mut record = [0; N];
    for _ in 0..TRIES {
        file.read_exact_at(&mut record, 0)?;
        if let Some(read) = decode(&record)? {
            return Ok(read);
        }
    }
    Err(PageError::Garbled)
}

/// Fills a record with words, followed by their checksum.
pub(crate) fn encode(record: &mut [u8], words: impl IntoIterator<Item = u64>) {
    let fields = record.len().saturating_sub(WORD);
    let (numbers, sum) = record.split_at_mut(fields);
    for (field, word) in numbers.chunks_exact_mut(WORD).zip(words) {
        field.copy_from_slice(&word.to_le_bytes());
    }
    sum.copy_from_slice(&xxh3_64(numbers).to_le_bytes());
}

/// Returns the words of a record without its checksum; `None` if the checksum is wrong.
pub(crate) fn decode(record: &[u8]) -> Option<impl Iterator<Item = u64>> {
    let (numbers, sum) = record.split_at(record.len().checked_sub(WORD)?);
    let mut words = numbers.chunks_exact(WORD).map(word);
    (word(sum) == xxh3_64(numbers)).then_some(std::iter::from_fn(move || words.next()))
}

/// Returns the word at the beginning of the bytes.
pub(crate) fn word(bytes: &[u8]) -> u64 {
    let mut word = [0; WORD];
    word.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
    u64::from_le_bytes(word)
}
