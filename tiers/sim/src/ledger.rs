//! What several processes use of one simulated GPU, counted in common.
//!
//! ```text
//!   /dev/shm/glake-sim-NAME-0     word 0: magic   word 1: capacity   words 2..: used, one a process
//! ```
//!
//! Each process keeps its own memory, so a dead process's bytes are gone by themselves; only its count stays, and is
//! ignored: a process holds a lock on the word of its slot for as long as it lives, which the operating system lets go
//! of whatever way it dies. A lock on the first word guards changes.
//!
//! Invariant: the sum over the slots of live processes never passes the capacity.

use std::fs::{File, OpenOptions, remove_file};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::PathBuf;

const MAGIC: u64 = u64::from_le_bytes(*b"glakesim");
const WORDS: usize = 512;
const FIRST_SLOT: usize = 2;
const WORD: usize = size_of::<u64>();

/// This process's share of a device that several use.
#[derive(Debug)]
pub(super) struct Account {
    file: File,
    path: PathBuf,
    slot: usize,
    capacity: u64,
    used: u64,
}

impl Account {
    /// Opens the account of a process with the device `index` of the server `name`.
    pub(super) fn open(name: &str, index: usize, capacity: u64) -> io::Result<Self> {
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        if name.is_empty() || !name.chars().all(plain) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a name is of letters, digits, - and _"));
        }
        let path = PathBuf::from(format!("/dev/shm/glake-sim-{name}-{index}"));
        loop {
            let mut options = OpenOptions::new();
            let options = options.read(true).write(true).create(true).truncate(false).mode(0o600);
            let file = options.open(&path)?;
            let _guard = Guard::new(&file)?;
            // Whoever left last may have removed the file in between.
            if file.metadata()?.nlink() == 0 {
                continue;
            }
            if file.metadata()?.size() == 0 {
                file.set_len((WORDS * WORD) as u64)?;
                put(&file, 1, capacity)?;
                put(&file, 0, MAGIC)?;
            }
            let words = read(&file)?;
            if words[0] != MAGIC || words[1] != capacity {
                let why = "the name belongs to a device of another size";
                return Err(io::Error::new(io::ErrorKind::AlreadyExists, why));
            }
            let free = (FIRST_SLOT..WORDS).find(|slot| lock(&file, *slot, libc::F_OFD_SETLK).is_ok());
            let slot = free.ok_or(io::Error::from(io::ErrorKind::QuotaExceeded))?;
            put(&file, slot, 0)?;
            drop(_guard);
            return Ok(Account { file, path, slot, capacity, used: 0 });
        }
    }

    /// Takes memory; false where all processes together have too much.
    pub(super) fn take(&mut self, size: u64) -> io::Result<bool> {
        let _guard = Guard::new(&self.file)?;
        let mut words = read(&self.file)?;
        let fits = |words: &[u64]| sum(words).checked_add(size).is_some_and(|all| all <= self.capacity);
        if !fits(&words) {
            self.bury(&mut words)?;
        }
        let fits = fits(&words);
        if fits {
            self.used += size;
            put(&self.file, self.slot, self.used)?;
        }
        Ok(fits)
    }

    /// Gives memory back.
    pub(super) fn give(&mut self, size: u64) {
        self.used = self.used.saturating_sub(size);
        // Only this process writes this word; where that fails others see too much, never too little.
        let _ = put(&self.file, self.slot, self.used);
    }

    /// What all live processes use.
    pub(super) fn used_by_all(&self) -> io::Result<u64> {
        let _guard = Guard::new(&self.file)?;
        let mut words = read(&self.file)?;
        self.bury(&mut words)?;
        Ok(sum(&words))
    }

    /// Clears the slots of dead processes.
    fn bury(&self, words: &mut [u64]) -> io::Result<()> {
        for (slot, used) in words.iter_mut().enumerate().skip(FIRST_SLOT) {
            if *used != 0 && slot != self.slot && !is_locked(&self.file, slot)? {
                *used = 0;
                put(&self.file, slot, 0)?;
            }
        }
        Ok(())
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        let leave = || -> io::Result<()> {
            let _guard = Guard::new(&self.file)?;
            put(&self.file, self.slot, 0)?;
            let others = (FIRST_SLOT..WORDS).filter(|slot| *slot != self.slot);
            for slot in others {
                if is_locked(&self.file, slot)? {
                    return Ok(());
                }
            }
            remove_file(&self.path)
        };
        // A file that stays behind is taken over by the next of its name.
        let _ = leave();
    }
}

fn sum(words: &[u64]) -> u64 {
    words[FIRST_SLOT..].iter().fold(0, |sum, used| sum.saturating_add(*used))
}

fn read(file: &File) -> io::Result<Vec<u64>> {
    let mut bytes = [0; WORDS * WORD];
    file.read_exact_at(&mut bytes, 0)?;
    let (words, _) = bytes.as_chunks::<WORD>();
    Ok(words.iter().map(|word| u64::from_le_bytes(*word)).collect())
}

fn put(file: &File, word: usize, value: u64) -> io::Result<()> {
    file.write_all_at(&value.to_le_bytes(), (word * WORD) as u64)
}

/// The lock on the first word, while it lives.
struct Guard<'a>(&'a File);

impl<'a> Guard<'a> {
    fn new(file: &'a File) -> io::Result<Self> {
        lock(file, 0, libc::F_OFD_SETLKW)?;
        Ok(Guard(file))
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        let mut request = request(0, libc::F_UNLCK);
        // SAFETY: unlocks a range of our own open file; the request outlives the call.
        let _ = unsafe { libc::fcntl(self.0.as_raw_fd(), libc::F_OFD_SETLK, &raw mut request) };
    }
}

fn request(word: usize, kind: libc::c_int) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: (word * WORD) as libc::off_t,
        l_len: WORD as libc::off_t,
        l_pid: 0,
    }
}

/// Takes the lock on a word for this open file.
fn lock(file: &File, word: usize, command: libc::c_int) -> io::Result<()> {
    loop {
        let mut request = request(word, libc::F_WRLCK);
        // SAFETY: locks a range of our own open file; the request outlives the call.
        if unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut request) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Whether another open file holds the lock on a word.
fn is_locked(file: &File, word: usize) -> io::Result<bool> {
    let mut request = request(word, libc::F_WRLCK);
    // SAFETY: asks about a range of our own open file; the request outlives the call.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut request) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(request.l_type != libc::F_UNLCK as libc::c_short)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accounts_share_a_capacity_and_the_dead_are_forgotten() {
        let name = format!("ledger-test-{}", std::process::id());
        let mut one = Account::open(&name, 0, 100).unwrap();
        let mut two = Account::open(&name, 0, 100).unwrap();
        assert!(Account::open(&name, 0, 99).is_err());
        assert!(one.take(60).unwrap());
        assert!(!two.take(50).unwrap());
        assert!(two.take(40).unwrap());
        assert_eq!(one.used_by_all().unwrap(), 100);
        // As if the process had died: the count stays, the lock goes.
        put(&one.file, 100, 55).unwrap();
        assert_eq!(two.used_by_all().unwrap(), 100);
        one.give(60);
        assert!(two.take(60).unwrap());
        drop(two);
        assert_eq!(one.used_by_all().unwrap(), 0);
        let path = one.path.clone();
        drop(one);
        assert!(!path.exists());
    }
}
