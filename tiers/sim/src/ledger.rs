//! What several processes use of one simulated GPU, counted in common.
//!
//! ```text
//!   FOLDER/gpu-0    header: magic, capacity    then one record an owner: pid, start time, bytes, when it was found dead,
//!                                              whether it is locked or checkpointed, what it had then, its calls
//! ```
//!
//! Each process keeps its own bytes, so a dead process's are gone by themselves; only what it counted stays. As a
//! driver takes a while to give a dead process's memory back, so do the others: its count goes `reclaim` after somebody
//! has first found it dead. A process is known by its id and by when it started, since ids are used again; one that has
//! ended and that its parent has not waited for is dead. All who share a folder see each other's process ids. What a
//! process that is checkpointed had is not counted until it is restored.
//!
//! Invariants: what is counted never passes the capacity; only its owner changes a living owner's bytes, or who has
//! locked it; every change is made under the lock on the file, which the operating system lets go of whatever way a process dies. The file
//! stays when its last user has gone: it belongs to whoever made the folder.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use glake_process::ProcessStat;
use glake_units::Bytes;

use super::calls::{self, Calls, Condition, Words};
use super::system::GRANULE;
use super::topology::SimGpu;

const MAGIC: u64 = u64::from_le_bytes(*b"glakegp2");
/// Words of the header, and of a record.
const WORDS: usize = 8;
/// Those of a record that its owner writes; then its condition, what it had when it was checkpointed, its calls.
const OWNED: usize = 4;
const USED: usize = 2;
const CONDITION: usize = OWNED;
const SAVED: usize = OWNED + 1;
const CALLS: usize = OWNED + 2;
/// More owners than a GPU has.
const RECORDS: usize = 255;
const WORD: usize = size_of::<u64>();
const LENGTH: usize = (1 + RECORDS) * WORDS * WORD;

/// One process's part of a GPU that several use.
#[derive(Debug)]
pub(super) struct Account {
    ledger: Ledger,
    record: usize,
    owner: Owner,
    used: u64,
}

/// The file that the memory of one GPU is counted in.
#[derive(Debug)]
pub(super) struct Ledger {
    file: File,
    words: Words,
    capacity: u64,
    reclaim: Duration,
}

/// A record of a process that lives.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) record: usize,
    pub(super) condition: Condition,
    /// What it had when it was checkpointed.
    pub(super) saved: u64,
    used: u64,
}

/// A process, for as long as it lives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Owner {
    pid: u32,
    /// Clock ticks from the machine's start to its own.
    start: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct ProcessRecord {
    owner: Owner,
    used: u64,
    /// Nanoseconds since the machine's start; zero while nobody has found its owner dead.
    found_dead: u64,
}

impl Ledger {
    /// Opens, or makes, the file of a GPU.
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

    /// What is used by all, and by each living process: its id and its bytes.
    pub(super) fn read(&self) -> io::Result<(u64, Vec<(u32, u64)>)> {
        let _locked = Locked::new(&self.file)?;
        let records = self.reclaimed()?;
        let living = records.iter().filter(|record| record.owner.pid != 0 && record.found_dead == 0);
        Ok((sum(&records), living.map(|record| (record.owner.pid, record.used)).collect()))
    }

    /// All records, those of the dead marked and, after a while, cleared. Under the lock.
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

    /// Writes a record anew, as of somebody else.
    fn begin(&self, record: usize, value: ProcessRecord) -> io::Result<()> {
        put(&self.file, word(record, OWNED), &[0; WORDS - OWNED])?;
        self.write(record, value)
    }

    fn write(&self, record: usize, value: ProcessRecord) -> io::Result<()> {
        let owned: [u64; OWNED] = [value.owner.pid.into(), value.owner.start, value.used, value.found_dead];
        put(&self.file, word(record, 0), &owned)
    }

    /// Nobody else changes anything until this is dropped.
    pub(super) fn lock(&self) -> io::Result<Locked> {
        Locked::new(&self.file)
    }

    /// The records of a process. Under the lock.
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

    /// Waits until no call of the record's owner runs; false: one does at that time.
    pub(super) fn wait_for_calls(&self, record: usize, until: Instant) -> bool {
        self.words.wait_for_calls(at(record), until)
    }

    /// What a record has counts no more. Under the lock.
    pub(super) fn save(&self, place: Place) -> io::Result<()> {
        // What was saved before, by who did not come to the end, is added to nothing.
        put(&self.file, word(place.record, SAVED), &[place.saved + place.used])?;
        put(&self.file, word(place.record, USED), &[0])
    }

    /// It counts again. Under the lock.
    pub(super) fn load(&self, place: Place) -> io::Result<()> {
        put(&self.file, word(place.record, USED), &[place.used + place.saved])?;
        put(&self.file, word(place.record, SAVED), &[0])
    }

    /// Whether so much more fits. Under the lock.
    pub(super) fn has_room(&self, size: u64) -> io::Result<bool> {
        let used = sum(&self.reclaimed()?);
        Ok(used.checked_add(size).is_some_and(|all| all <= self.capacity))
    }
}

/// The offset of a word of a record.
fn word(record: usize, word: usize) -> u64 {
    (((1 + record) * WORDS + word) * WORD) as u64
}

/// Where those words of a record lie that are not changed under the lock alone.
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

    /// Takes memory; false where all processes together have too much.
    pub(super) fn take(&mut self, size: u64) -> io::Result<bool> {
        let _locked = Locked::new(&self.ledger.file)?;
        let used = sum(&self.ledger.reclaimed()?);
        let fits = used.checked_add(size).is_some_and(|all| all <= self.ledger.capacity);
        if fits {
            self.set(self.used + size)?;
        }
        Ok(fits)
    }

    /// Gives memory back.
    pub(super) fn give(&mut self, size: u64) {
        // Where that fails others see too much, never too little.
        if let Ok(_locked) = Locked::new(&self.ledger.file) {
            let _ = self.set(self.used.saturating_sub(size));
        }
    }

    /// The calls of this process, which wait while it is locked.
    pub(super) fn calls(&self) -> io::Result<Calls> {
        Ok(Calls::new(Words::new(&self.ledger.file, LENGTH as u64)?, at(self.record)))
    }

    /// What all processes use.
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
        // A forked child has the account of its parent, which goes on.
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

/// Whether a process lives.
pub(super) fn is_alive(pid: u32) -> bool {
    running(pid).is_some()
}

/// A process that has not ended.
fn running(pid: u32) -> Option<ProcessStat> {
    ProcessStat::of(pid).ok().filter(|process| !process.has_ended())
}

/// Nanoseconds since the machine's start, the same for every process; never zero.
fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: an out-parameter of this frame.
    unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut time) };
    (time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64).max(1)
}

fn sum(records: &[ProcessRecord]) -> u64 {
    records.iter().fold(0, |sum, record| sum.saturating_add(record.used))
}

/// The lock on a ledger's file, while it lives.
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
    fn memory_of_the_dead_comes_back_after_a_while() {
        let folder = tempfile::tempdir().unwrap();
        let mut one = account(folder.path());
        // As a process that died: its id may be used again, but it started at another time.
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
