//! The activity page: the state of a worker that the agent reads without a request.
//!
//! A sealed memfd of one page. The worker writes it when its first use begins and when its last use ends; the agent reads it
//! only when it chooses victims. A checksum lets a reader detect a concurrent write and retry.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;

use rustix::fs::{OFlags, SealFlags, fcntl_getfl, fcntl_setfl};

use crate::page::{self, PageError};

/// Maximum number of a worker's GPUs whose memory the page lists.
pub const PAGE_GPUS: usize = 16;
/// Numbers of a record, and its checksum.
const WORDS: usize = 5 + PAGE_GPUS + 1;
const RECORD: usize = WORDS * size_of::<u64>();

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
        let memory = page::create("glake-activity")?;
        page::seal(&memory, SEALS)?;
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
        page::check(&page, SEALS)?;
        // A write of the worker would make each read store the time of an access, which nobody reads.
        let _ = fcntl_getfl(&page).and_then(|flags| fcntl_setfl(&page, flags | OFlags::NOATIME));
        Ok(ActivityView { file: File::from(page) })
    }

    /// Reads the current activity.
    ///
    /// # Errors
    /// [`PageError`].
    pub fn read(&self) -> Result<Activity, PageError> {
        page::read::<RECORD, _>(&self.file, |record| Ok(decode(record)))
    }
}

const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

fn encode(activity: Activity) -> [u8; RECORD] {
    let Activity { uses, begun, parks, captures, idle_since_ns, made } = activity;
    let mut record = [0; RECORD];
    let numbers = [uses, begun, u64::from(parks), u64::from(captures), idle_since_ns].into_iter().chain(made);
    page::encode(&mut record, numbers);
    record
}

fn decode(record: &[u8; RECORD]) -> Option<Activity> {
    let mut numbers = page::decode(record)?;
    let mut next = || numbers.next();
    let (uses, begun, parks, captures) = (next()?, next()?, next()? != 0, next()? != 0);
    let idle_since_ns = next()?;
    let mut made = [0; PAGE_GPUS];
    made.iter_mut().try_for_each(|made| next().map(|number| *made = number))?;
    Some(Activity { uses, begun, parks, captures, idle_since_ns, made })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use rustix::fs::{MemfdFlags, fcntl_add_seals, memfd_create};

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
        let unsealed = page::create("page").unwrap();
        assert!(matches!(ActivityView::new(unsealed), Err(PageError::Unsealed { .. })));
        let short = memfd_create("page", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        fcntl_add_seals(&short, SEALS).unwrap();
        assert!(matches!(ActivityView::new(short), Err(PageError::Unsealed { .. })));
        let file = tempfile::tempfile().unwrap();
        file.set_len(page::SIZE).unwrap();
        assert!(matches!(ActivityView::new(file.into()), Err(PageError::Unsealed { .. })));
        let garbled = ActivityPage::new().unwrap();
        garbled.file.write_all_at(&[7], 0).unwrap();
        let view = ActivityView::new(garbled.as_fd().try_clone_to_owned().unwrap()).unwrap();
        assert!(matches!(view.read(), Err(PageError::Garbled)));
    }
}
