//! The activity page: the state of a worker that the agent reads without a request.
//!
//! A sealed memfd of one page. The worker writes it when its first use begins and when its last use ends; the agent reads it
//! only when it chooses victims. A checksum lets a reader detect a concurrent write and retry.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;

use rustix::fs::{
    MemfdFlags, OFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fcntl_getfl, fcntl_setfl, fstat,
    ftruncate, memfd_create,
};
use xxhash_rust::xxh3::xxh3_64;

const SIZE: u64 = 4096;
/// Maximum number of a worker's GPUs whose memory the page lists.
pub const PAGE_GPUS: usize = 16;
const NUMBERS: usize = 5 + PAGE_GPUS;
const FIELDS: usize = NUMBERS * size_of::<u64>();
const RECORD: usize = FIELDS + size_of::<u64>();
/// Maximum number of reads that collide with a write before the page is rejected.
const TRIES: usize = 100;

/// Activity of a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Activity {
    /// Number of running uses, without those that wait at safe points.
    pub uses: u64,
    /// Number of uses begun so far; at least 1 once the program has declared its initial memory complete. 0: it is loading, and its memory
    /// is in use.
    pub begun: u64,
    /// Whether uses have reached safe points so far, so that more are expected.
    pub parks: bool,
    /// Whether an operation runs that cannot be paused, such as a graph capture.
    pub captures: bool,
    /// End of the last use, in nanoseconds of the monotonic clock.
    pub idle_since_ns: u64,
    /// Bytes that the worker's pools hold on each GPU, in flight included, indexed by the worker's own GPU numbers.
    pub made: [u64; PAGE_GPUS],
}

/// Reason why an activity page cannot be trusted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PageError {
    /// The page has another size, or other processes may change its size.
    #[error("the activity page is no memfd of {SIZE} bytes that is sealed against shrinking and growing")]
    Unsealed,
    /// The page's bytes never matched their checksum.
    #[error("the activity page holds no valid record")]
    Garbled,
    /// Error of the operating system.
    #[error("the activity page: {0}")]
    Os(#[from] std::io::Error),
}

/// Activity page of this process.
#[derive(Debug)]
pub struct ActivityPage {
    file: File,
}

/// Activity page of another process.
#[derive(Debug)]
pub struct ActivityView {
    file: File,
}

impl ActivityPage {
    /// Creates a page without activity.
    ///
    /// # Errors
    /// [`PageError::Os`].
    pub fn new() -> Result<Self, PageError> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memory = memfd_create("glake-activity", flags).map_err(std::io::Error::from)?;
        ftruncate(&memory, SIZE).map_err(std::io::Error::from)?;
        fcntl_add_seals(&memory, SEALS).map_err(std::io::Error::from)?;
        let page = ActivityPage { file: File::from(memory) };
        page.write(Activity::default())?;
        Ok(page)
    }

    /// Publishes the current activity with one system call.
    ///
    /// # Errors
    /// [`PageError::Os`].
    pub fn write(&self, activity: Activity) -> Result<(), PageError> {
        Ok(self.file.write_all_at(&encode(activity), 0)?)
    }
}

impl AsFd for ActivityPage {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl ActivityView {
    /// Takes a page that another process sent.
    ///
    /// # Errors
    /// [`PageError::Unsealed`]: a read could fail or block at any time.
    pub fn new(page: OwnedFd) -> Result<Self, PageError> {
        let sealed = fcntl_get_seals(&page).is_ok_and(|seals| seals.contains(SEALS));
        let size = fstat(&page).map_err(std::io::Error::from)?.st_size;
        if !sealed || u64::try_from(size) != Ok(SIZE) {
            return Err(PageError::Unsealed);
        }
        // A write of the worker would make each read store the time of an access, which nobody reads.
        let _ = fcntl_getfl(&page).and_then(|flags| fcntl_setfl(&page, flags | OFlags::NOATIME));
        Ok(ActivityView { file: File::from(page) })
    }

    /// Reads the current activity.
    ///
    /// # Errors
    /// [`PageError`].
    pub fn read(&self) -> Result<Activity, PageError> {
        let mut record = [0; RECORD];
        for _ in 0..TRIES {
            self.file.read_exact_at(&mut record, 0)?;
            if let Some(activity) = decode(&record) {
                return Ok(activity);
            }
        }
        Err(PageError::Garbled)
    }
}

const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

fn encode(activity: Activity) -> [u8; RECORD] {
    let Activity { uses, begun, parks, captures, idle_since_ns, made } = activity;
    let mut record = [0; RECORD];
    let numbers = [uses, begun, u64::from(parks), u64::from(captures), idle_since_ns].into_iter().chain(made);
    for (field, number) in record.chunks_exact_mut(size_of::<u64>()).zip(numbers) {
        field.copy_from_slice(&number.to_le_bytes());
    }
    let sum = xxh3_64(&record[..FIELDS]);
    record[FIELDS..].copy_from_slice(&sum.to_le_bytes());
    record
}

fn decode(record: &[u8; RECORD]) -> Option<Activity> {
    let mut numbers = record.chunks_exact(size_of::<u64>()).map(|field| {
        let mut number = [0; size_of::<u64>()];
        number.copy_from_slice(field);
        u64::from_le_bytes(number)
    });
    let mut next = || numbers.next();
    let (uses, begun, parks, captures) = (next()?, next()?, next()? != 0, next()? != 0);
    let idle_since_ns = next()?;
    let mut made = [0; PAGE_GPUS];
    made.iter_mut().try_for_each(|made| next().map(|number| *made = number))?;
    (next()? == xxh3_64(&record[..FIELDS])).then_some(Activity {
        uses,
        begun,
        parks,
        captures,
        idle_since_ns,
        made,
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn a_reader_never_sees_a_partial_record() {
        let page = ActivityPage::new().unwrap();
        let view = ActivityView::new(page.as_fd().try_clone_to_owned().unwrap()).unwrap();
        assert_eq!(view.read().unwrap(), Activity::default());
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for number in 0..50_000 {
                    let (parks, captures) = (number % 2 == 0, number % 2 == 1);
                    let (idle_since_ns, made) = (number, [number; PAGE_GPUS]);
                    page.write(Activity {
                        uses: number,
                        begun: number,
                        parks,
                        captures,
                        idle_since_ns,
                        made,
                    })
                    .unwrap();
                }
                over.store(true, Ordering::Relaxed);
            });
            while !over.load(Ordering::Relaxed) {
                let seen = view.read().unwrap();
                assert_eq!(
                    (seen.uses, seen.begun, seen.made),
                    (seen.idle_since_ns, seen.idle_since_ns, [seen.uses; PAGE_GPUS])
                );
            }
        });
        assert_eq!(view.read().unwrap().uses, 49_999);
    }

    #[test]
    fn a_page_without_a_shrink_seal_is_refused() {
        let unsealed = memfd_create("page", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&unsealed, SIZE).unwrap();
        assert!(matches!(ActivityView::new(unsealed), Err(PageError::Unsealed)));
        let short = memfd_create("page", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        fcntl_add_seals(&short, SEALS).unwrap();
        assert!(matches!(ActivityView::new(short), Err(PageError::Unsealed)));
        let file = tempfile::tempfile().unwrap();
        file.set_len(SIZE).unwrap();
        assert!(matches!(ActivityView::new(file.into()), Err(PageError::Unsealed)));
        let garbled = ActivityPage::new().unwrap();
        garbled.file.write_all_at(&[7], 0).unwrap();
        let view = ActivityView::new(garbled.as_fd().try_clone_to_owned().unwrap()).unwrap();
        assert!(matches!(view.read(), Err(PageError::Garbled)));
    }
}
