//! Shared accounting of one simulated GPU that several processes use.
//!
//! ```text
//!   FOLDER/gpu-0    header: magic, capacity    then one record per owner: pid, start time, bytes, time when found dead,
//!                                              state (locked, checkpointed), bytes saved by a checkpoint, running calls
//! ```
//!
//! Each process keeps its own bytes, so a dead process's memory is gone by itself; only its count remains. A driver takes some time to
//! return a dead process's memory. So does the ledger: the count disappears `reclaim` after another process first finds the owner dead. A
//! process is identified by its id and start time, because ids are reused; a zombie counts as dead. All processes that share a folder must
//! see each other's process ids. A checkpointed process's memory is not counted until it is restored.
//!
//! Invariants: the counted bytes never exceed the capacity. Only the owner, or the process that locked it, changes a living owner's bytes.
//! Every change is made under the lock on the file, which the operating system releases however a process dies. The file stays when its
//! last user is gone: it belongs to the creator of the folder.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use glake_meter::ProcessStat;
use glake_units::Bytes;

use super::calls::{self, Calls, Condition, Words};
use super::system::GRANULE;
use super::topology::SimGpu;

const MAGIC: u64 = u64::from_le_bytes(*b"glakegp2");
/// Number of words in the header and in a record.
const WORDS: usize = 8;
/// Number of leading words written by the owner; the state, the saved bytes and the running calls follow.
const OWNED: usize = 4;
const USED: usize = 2;
const CONDITION: usize = OWNED;
const SAVED: usize = OWNED + 1;
const CALLS: usize = OWNED + 2;
/// Maximum number of owners, more than a GPU has.
const RECORDS: usize = 255;
const WORD: usize = size_of::<u64>();
const LENGTH: usize = (1 + RECORDS) * WORDS * WORD;

/// One process's share of a GPU used by several.
#[derive(Debug)]
pub(super) struct Account {
    ledger: Ledger,
    record: usize,
    owner: Owner,
    used: u64,
}

/// File with the accounts of one GPU.
#[derive(Debug)]
pub(super) struct Ledger {
    file: File,
    words: Words,
    capacity: u64,
    reclaim: Duration,
}

/// Record of a living process.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) record: usize,
    pub(super) condition: Condition,
    /// Bytes the process had when it was checkpointed.
    pub(super) saved: u64,
    used: u64,
}

/// Identity of a process for its whole life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Owner {
    pid: u32,
    /// Start time of the process, in clock ticks since boot.
    start: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct ProcessRecord {
    owner: Owner,
    used: u64,
    /// Nanoseconds since boot at which the owner was found dead; zero while it lives.
    found_dead: u64,
}

impl Ledger {
    /// Opens the file of a GPU, or creates it.
    pub(super) fn open(folder: &Path, index: usize, gpu: &SimGpu) -> io::Result<Self> {
        let capacity = gpu.memory.get() / GRANULE * GRANULE;
        let reclaim = Duration::from_secs_f64(gpu.reclaim.0.max(0.0) / 1e6);
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        let path = folder.join(format!("gpu-{index}"));
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false).mode(0o600).open(&path)?;
        let _locked = Locked::new(&file)?;
        if file.metadata()?.len() == 0 {
            file.set_len(LENGTH as u64)?;
            put(&file, 0, &[MAGIC, capacity])?;
        }
        let is_whole = file.metadata()?.len() == LENGTH as u64;
        match header(&file) {
            Ok([MAGIC, known]) if known == capacity && is_whole => Ok(()),
            Ok([MAGIC, known]) if is_whole => {
                Err(format!("is of a GPU of {}, and not of {}", Bytes::new(known), Bytes::new(capacity)))
            }
            _ => Err("is not of a simulated GPU, or of another version: remove its folder".to_owned()),
        }
        .map_err(|why| io::Error::new(io::ErrorKind::InvalidData, format!("{} {why}", path.display())))?;
        let words = Words::new(&file, LENGTH as u64)?;
        Ok(Ledger { file, words, capacity, reclaim })
    }

    pub(super) fn capacity(&self) -> Bytes {
        Bytes::new(self.capacity)
    }

    /// Returns the bytes used in total, and the id and bytes of each living process.
    pub(super) fn read(&self) -> io::Result<(u64, Vec<(u32, u64)>)> {
        let _locked = Locked::new(&self.file)?;
        let records = self.reclaimed()?;
        let living = records.iter().filter(|record| record.owner.pid != 0 && record.found_dead == 0);
        Ok((sum(&records), living.map(|record| (record.owner.pid, record.used)).collect()))
    }

    /// Returns all records after marking dead owners and clearing expired ones. The lock must be held.
    fn reclaimed(&self) -> io::Result<Vec<ProcessRecord>> {
        let mut bytes = vec![0; LENGTH];
        self.file.read_exact_at(&mut bytes, 0)?;
        let (words, _) = bytes.as_chunks::<WORD>();
        let words: Vec<u64> = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
        let (rows, _) = words.as_chunks::<WORDS>();
        let mut records: Vec<ProcessRecord> = rows[1..].iter().copied().map(ProcessRecord::from).collect();
        let now = now();
        let reclaim = u64::try_from(self.reclaim.as_nanos()).unwrap_or(u64::MAX);
        for (index, record) in records.iter_mut().enumerate().filter(|(_, record)| record.owner.pid != 0) {
            let before = *record;
            if record.found_dead == 0 && !record.owner.is_alive() {
                record.found_dead = now;
            }
            if record.found_dead != 0 && now.saturating_sub(record.found_dead) >= reclaim {
                *record = ProcessRecord::default();
                self.begin(index, *record)?;
            } else if *record != before {
                self.write(index, *record)?;
            }
        }
        Ok(records)
    }

    /// Overwrites a record for a new owner.
    fn begin(&self, record: usize, value: ProcessRecord) -> io::Result<()> {
        put(&self.file, word(record, OWNED), &[0; WORDS - OWNED])?;
        self.write(record, value)
    }

    fn write(&self, record: usize, value: ProcessRecord) -> io::Result<()> {
        let owned: [u64; OWNED] = [value.owner.pid.into(), value.owner.start, value.used, value.found_dead];
        put(&self.file, word(record, 0), &owned)
    }

    /// Locks the ledger against changes until the guard is dropped.
    pub(super) fn lock(&self) -> io::Result<Locked> {
        Locked::new(&self.file)
    }

    /// Returns the records of a process. The lock must be held.
    pub(super) fn places(&self, pid: u32) -> io::Result<Vec<Place>> {
        let records = self.reclaimed()?.into_iter().enumerate();
        let own = records.filter(|(_, record)| record.owner.pid == pid && pid != 0 && record.found_dead == 0);
        own.map(|(record, ProcessRecord { used, .. })| {
            let mut saved = [0; WORD];
            self.file.read_exact_at(&mut saved, word(record, SAVED))?;
            let condition = self.words.condition(at(record));
            Ok(Place { record, condition, saved: u64::from_le_bytes(saved), used })
        })
        .collect()
    }

    pub(super) fn set_condition(&self, record: usize, condition: Condition) {
        self.words.set_condition(at(record), condition);
    }

    /// Waits until no call of the record's owner runs; returns false if one still does at `until`.
    pub(super) fn wait_for_calls(&self, record: usize, until: Instant) -> bool {
        self.words.wait_for_calls(at(record), until)
    }

    /// Excludes a record's bytes from the count. The lock must be held.
    pub(super) fn save(&self, place: Place) -> io::Result<()> {
        // Adding keeps the bytes saved by an earlier caller that was killed before it finished.
        put(&self.file, word(place.record, SAVED), &[place.saved + place.used])?;
        put(&self.file, word(place.record, USED), &[0])
    }

    /// Includes a record's saved bytes in the count again. The lock must be held.
    pub(super) fn load(&self, place: Place) -> io::Result<()> {
        put(&self.file, word(place.record, USED), &[place.used + place.saved])?;
        put(&self.file, word(place.record, SAVED), &[0])
    }

    /// Returns whether `size` more bytes fit. The lock must be held.
    pub(super) fn has_room(&self, size: u64) -> io::Result<bool> {
        let used = sum(&self.reclaimed()?);
        Ok(used.checked_add(size).is_some_and(|all| all <= self.capacity))
    }
}

/// Returns the offset of a word of a record.
fn word(record: usize, word: usize) -> u64 {
    (((1 + record) * WORDS + word) * WORD) as u64
}

/// Returns the offsets of the record's words that change without the lock.
fn at(record: usize) -> calls::RecordWords {
    calls::RecordWords { condition: word(record, CONDITION), calls: word(record, CALLS) }
}

fn put(file: &File, offset: u64, words: &[u64]) -> io::Result<()> {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    file.write_all_at(&bytes, offset)
}

fn header(file: &File) -> io::Result<[u64; 2]> {
    let mut bytes = [0; 2 * WORD];
    file.read_exact_at(&mut bytes, 0)?;
    let (words, _) = bytes.as_chunks::<WORD>();
    Ok([u64::from_le_bytes(words[0]), u64::from_le_bytes(words[1])])
}

impl Account {
    /// Opens this process's account with a GPU.
    pub(super) fn open(ledger: Ledger) -> io::Result<Self> {
        let owner = Owner::this_process()?;
        let _locked = Locked::new(&ledger.file)?;
        let free = ledger.reclaimed()?.iter().position(|record| record.owner.pid == 0);
        let record = free.ok_or(io::Error::from(io::ErrorKind::QuotaExceeded))?;
        ledger.begin(record, ProcessRecord { owner, ..ProcessRecord::default() })?;
        drop(_locked);
        Ok(Account { ledger, record, owner, used: 0 })
    }

    /// Takes memory; returns false if all processes together would exceed the capacity.
    pub(super) fn take(&mut self, size: u64) -> io::Result<bool> {
        let _locked = Locked::new(&self.ledger.file)?;
        let used = sum(&self.ledger.reclaimed()?);
        let fits = used.checked_add(size).is_some_and(|all| all <= self.ledger.capacity);
        if fits {
            self.set(self.used + size)?;
        }
        Ok(fits)
    }

    /// Returns memory to the account.
    pub(super) fn give(&mut self, size: u64) {
        // If this fails, other processes see too much memory used, never too little.
        if let Ok(_locked) = Locked::new(&self.ledger.file) {
            let _ = self.set(self.used.saturating_sub(size));
        }
    }

    /// Returns the calls of this process, which block while it is locked.
    pub(super) fn calls(&self) -> io::Result<Calls> {
        Ok(Calls::new(Words::new(&self.ledger.file, LENGTH as u64)?, at(self.record)))
    }

    /// Returns the bytes used by all processes.
    pub(super) fn used_by_all(&self) -> io::Result<u64> {
        self.ledger.read().map(|(used, _)| used)
    }

    fn set(&mut self, used: u64) -> io::Result<()> {
        self.used = used;
        self.ledger.write(self.record, ProcessRecord { owner: self.owner, used, found_dead: 0 })
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        // A forked child only has a copy of its parent's account, which stays open.
        if self.owner.pid == std::process::id()
            && let Ok(_locked) = Locked::new(&self.ledger.file)
        {
            let _ = self.ledger.begin(self.record, ProcessRecord::default());
        }
    }
}

impl Owner {
    fn this_process() -> io::Result<Owner> {
        let pid = std::process::id();
        Ok(Owner { pid, start: ProcessStat::of(pid)?.start })
    }

    fn is_alive(self) -> bool {
        running(self.pid).is_some_and(|process| process.start == self.start)
    }
}

impl From<[u64; WORDS]> for ProcessRecord {
    fn from([pid, start, used, found_dead, ..]: [u64; WORDS]) -> ProcessRecord {
        let pid = u32::try_from(pid).unwrap_or(u32::MAX);
        ProcessRecord { owner: Owner { pid, start }, used, found_dead }
    }
}

/// Returns whether a process is alive.
pub(super) fn is_alive(pid: u32) -> bool {
    running(pid).is_some()
}

/// Returns the status of a process that has not ended.
fn running(pid: u32) -> Option<ProcessStat> {
    ProcessStat::of(pid).ok().filter(|process| !process.has_ended())
}

/// Returns the nanoseconds since boot, the same for every process; never zero.
fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: an out-parameter of this frame.
    unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut time) };
    (time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64).max(1)
}

fn sum(records: &[ProcessRecord]) -> u64 {
    records.iter().fold(0, |sum, record| sum.saturating_add(record.used))
}

/// Guard of the lock on a ledger's file.
#[derive(Debug)]
pub(super) struct Locked(File);

impl Locked {
    fn new(file: &File) -> io::Result<Self> {
        file.lock()?;
        file.try_clone().map(Locked)
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        let _ = self.0.unlock();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Micros, SimTopology};

    const RECLAIM: Duration = Duration::from_millis(5);
    const MIB: u64 = 1 << 20;

    fn ledger(folder: &Path, mib: u64) -> io::Result<Ledger> {
        let mut gpu = SimTopology::uniform(1, Bytes::mib(mib)).gpus.remove(0);
        gpu.reclaim = Micros(5000.0);
        Ledger::open(folder, 0, &gpu)
    }

    fn account(folder: &Path) -> Account {
        Account::open(ledger(folder, 100).unwrap()).unwrap()
    }

    #[test]
    fn accounts_share_a_capacity() {
        let folder = tempfile::tempdir().unwrap();
        let (mut one, mut two) = (account(folder.path()), account(folder.path()));
        assert!(one.take(60 * MIB).unwrap());
        assert!(!two.take(50 * MIB).unwrap());
        assert!(two.take(40 * MIB).unwrap());
        let pid = std::process::id();
        assert_eq!(one.ledger.read().unwrap(), (100 * MIB, vec![(pid, 60 * MIB), (pid, 40 * MIB)]));
        one.give(60 * MIB);
        assert!(two.take(60 * MIB).unwrap());
        drop(two);
        assert_eq!(one.used_by_all().unwrap(), 0);
    }

    #[test]
    fn memory_of_dead_processes_is_reclaimed() {
        let folder = tempfile::tempdir().unwrap();
        let mut one = account(folder.path());
        // Looks like a dead process: its id may be reused, but the start time differs.
        let dead = Owner { start: one.owner.start + 1, ..one.owner };
        one.ledger.write(7, ProcessRecord { owner: dead, used: 70 * MIB, found_dead: 0 }).unwrap();
        assert!(!one.take(60 * MIB).unwrap(), "it is not back yet");
        assert_eq!(one.ledger.read().unwrap(), (70 * MIB, vec![(dead.pid, 0)]), "counted, but nobody's");
        std::thread::sleep(RECLAIM);
        assert!(one.take(60 * MIB).unwrap());
        assert_eq!(one.used_by_all().unwrap(), 60 * MIB);
    }

    #[test]
    fn a_file_of_another_gpu_is_refused_with_its_name() {
        let folder = tempfile::tempdir().unwrap();
        drop(account(folder.path()));
        let path = folder.path().join("gpu-0");
        let error = ledger(folder.path(), 98).unwrap_err().to_string();
        assert_eq!(error, format!("{} is of a GPU of 100.00 MiB, and not of 98.00 MiB", path.display()));
        std::fs::write(&path, "text").unwrap();
        let error = ledger(folder.path(), 100).unwrap_err().to_string();
        assert_eq!(
            error,
            format!("{} is not of a simulated GPU, or of another version: remove its folder", path.display())
        );
    }
}
