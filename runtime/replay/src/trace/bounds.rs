//! Bounds on what a file may become. Memory is charged before it is allocated, so that a small file cannot take all of a machine's memory.
//!
//! A recording of real work needs memory in proportion to its size: a compressed snapshot of torch has 6 to 10 bytes for each event, which
//! becomes some 300 bytes here. Small files may use a fixed amount, so that their compression does not matter.

use std::fmt;
use std::io::{self, BufRead, Read};

use glake_units::Bytes;

/// Memory for the content of a file of any size.
const LEAST_MEMORY: Bytes = Bytes::mib(512);
/// Memory for the content of a larger file, in multiples of its size.
const MEMORY_TIMES: u64 = 64;
/// Unpacked size of a compressed file of any size.
const LEAST_UNPACKED: Bytes = Bytes::mib(512);
/// Unpacked size of a larger compressed file, in multiples of its size. Real recordings compress to a twentieth.
const UNPACKED_TIMES: u64 = 64;

/// Bounds of a file's content.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    pub(super) memory: Bytes,
    pub(super) unpacked: Bytes,
}

impl Bounds {
    /// Returns the bounds of a file of this size.
    pub(super) fn of(file: Bytes) -> Self {
        let times = |times| file.checked_mul(times).unwrap_or(Bytes::MAX);
        Bounds {
            memory: times(MEMORY_TIMES).max(LEAST_MEMORY),
            unpacked: times(UNPACKED_TIMES).max(LEAST_UNPACKED),
        }
    }
}

/// Memory that the content of a file may still use.
#[derive(Debug)]
pub(super) struct Budget {
    bound: Bytes,
    left: u64,
}

/// The content of a file needs more memory than its size justifies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "it needs more than {bound} of memory, the bound for a file of its size ({MEMORY_TIMES} times its size, at least \
     {LEAST_MEMORY})"
)]
pub struct OverBudget {
    /// Bound of the memory.
    pub bound: Bytes,
}

impl Budget {
    /// Creates a budget of `bound` bytes.
    pub(super) fn new(bound: Bytes) -> Self {
        Budget { bound, left: bound.get() }
    }

    /// Charges `bytes`.
    pub(super) fn charge(&mut self, bytes: usize) -> Result<(), OverBudget> {
        let left = u64::try_from(bytes).ok().and_then(|bytes| self.left.checked_sub(bytes));
        self.left = left.ok_or(OverBudget { bound: self.bound })?;
        Ok(())
    }

    /// Charges the growth of a list that is to hold `more` further items, and grows the list.
    pub(super) fn reserve<T>(&mut self, list: &mut Vec<T>, more: usize) -> Result<(), OverBudget> {
        let (len, capacity) = (list.len(), list.capacity());
        if more > capacity - len {
            let grown = (len + more).max(capacity * 2);
            self.charge((grown - capacity).saturating_mul(size_of::<T>()))?;
            list.reserve_exact(grown - len);
        }
        Ok(())
    }

    /// Appends to a list, and charges its growth.
    pub(super) fn push<T>(&mut self, list: &mut Vec<T>, item: T) -> Result<(), OverBudget> {
        if list.len() == list.capacity() {
            self.reserve(list, 4)?;
        }
        list.push(item);
        Ok(())
    }
}

/// Reader that fails once a compressed file has unpacked to more than its size justifies.
pub(super) struct Unpacked<R> {
    from: R,
    left: u64,
    bound: Bytes,
}

/// A compressed file unpacks to more than its size justifies.
#[derive(Clone, Copy, Debug)]
pub(super) struct TooLong {
    pub(super) bound: Bytes,
}

impl fmt::Display for TooLong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "it has more than {}, the bound for a file of its size ({UNPACKED_TIMES} times its size, at least \
             {LEAST_UNPACKED})",
            self.bound
        )
    }
}

impl std::error::Error for TooLong {}

impl TooLong {
    /// Returns the bound if the error is one of this kind.
    pub(super) fn of(error: &io::Error) -> Option<TooLong> {
        error.get_ref().and_then(|inner| inner.downcast_ref()).copied()
    }
}

impl<R: Read> Unpacked<R> {
    /// Wraps the unpacked content of a file.
    pub(super) fn new(from: R, bound: Bytes) -> Self {
        Unpacked { from, left: bound.get(), bound }
    }
}

impl<R: Read> Read for Unpacked<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.from.read(buffer)?;
        match self.left.checked_sub(read as u64) {
            Some(left) => self.left = left,
            None => return Err(io::Error::other(TooLong { bound: self.bound })),
        }
        Ok(read)
    }
}

/// Reads up to the end of a line, and keeps at most `most` bytes of it, without its end. Returns false at the end of the file.
pub(super) fn read_line(from: &mut dyn BufRead, most: u64, line: &mut Vec<u8>) -> io::Result<bool> {
    line.clear();
    let read = from.take(most).read_until(b'\n', line)?;
    if line.last() == Some(&b'\n') {
        line.pop();
    } else if read as u64 == most {
        from.skip_until(b'\n')?;
    }
    Ok(read > 0)
}

#[cfg(test)]
mod tests {
    use std::io::BufReader;

    use super::*;

    #[test]
    fn memory_is_charged_before_it_is_allocated() {
        let mut budget = Budget::new(Bytes::mib(8));
        let mut list = Vec::new();
        let mut pushed = 0_u64;
        let refused = loop {
            match budget.push(&mut list, [0_u8; 1 << 10]) {
                Ok(()) => pushed += 1,
                Err(refused) => break refused,
            }
        };
        assert!((4096..=8192).contains(&pushed) && list.capacity() <= 8192, "{pushed}");
        assert_eq!(refused, OverBudget { bound: Bytes::mib(8) });
        assert_eq!(Bounds::of(Bytes::ZERO).memory, Bytes::mib(512));
        assert_eq!(Bounds::of(Bytes::gib(1)).memory, Bytes::gib(64));
        assert_eq!(Bounds::of(Bytes::MAX).unpacked, Bytes::MAX);
    }

    #[test]
    fn a_line_is_kept_in_part_and_read_to_its_end() {
        let mut from = BufReader::with_capacity(3, &b"abcdefgh\nij\n\nk"[..]);
        let (mut line, mut lines) = (Vec::new(), Vec::new());
        while read_line(&mut from, 5, &mut line).unwrap() {
            lines.push(String::from_utf8(line.clone()).unwrap());
        }
        assert_eq!(lines, ["abcde", "ij", "", "k"]);
    }
}
