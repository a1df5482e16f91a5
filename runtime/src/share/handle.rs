//! What one process tells another so that it finds a shared block.
//!
//! ```text
//! "GLSH" version | pid | start of the process | socket's name | export id | runs | (count, size) a run
//!   4       1    |  4  |          8           |      16       |     8     |  4   |    4      8
//! ```
//!
//! Numbers are little-endian. Extents of one size in a row are one run, so that a handle stays short.

use glake_units::Bytes;

use super::{ExportId, ShareError};

/// How a socket is called.
pub(super) type Name = [u8; 16];

const MAGIC: [u8; 4] = *b"GLSH";
pub(super) const VERSION: u8 = 1;
const HEAD: usize = 45;
const RUN: usize = 12;
/// More than any GPU has granules.
const MOST_EXTENTS: u64 = 1 << 20;

/// A share handle, read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Handle {
    pub(super) pid: u32,
    pub(super) started: u64,
    pub(super) name: Name,
    pub(super) id: ExportId,
    /// Of each extent.
    pub(super) sizes: Vec<Bytes>,
}

impl Handle {
    pub(super) fn encode(&self) -> Vec<u8> {
        let runs: Vec<&[Bytes]> = self.sizes.chunk_by(|one, next| one == next).collect();
        let mut bytes = Vec::with_capacity(HEAD + runs.len() * RUN);
        bytes.extend(MAGIC);
        bytes.push(VERSION);
        bytes.extend(self.pid.to_le_bytes());
        bytes.extend(self.started.to_le_bytes());
        bytes.extend(self.name);
        bytes.extend(self.id.0.to_le_bytes());
        bytes.extend(count(runs.len()).to_le_bytes());
        for run in runs {
            bytes.extend(count(run.len()).to_le_bytes());
            bytes.extend(run.first().map_or(0, |size| size.get()).to_le_bytes());
        }
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, ShareError> {
        let wrong = |reason| ShareError::Malformed { length: bytes.len(), reason };
        let mut rest = bytes;
        if take::<4>(&mut rest) != Some(MAGIC) {
            return Err(wrong("it does not begin with GLSH"));
        }
        match take(&mut rest).map(u8::from_le_bytes) {
            Some(VERSION) => {}
            Some(found) => return Err(ShareError::OtherVersion { found, known: VERSION }),
            None => return Err(wrong("it is cut short")),
        }
        Self::decode_body(&mut rest).map_err(wrong)
    }

    fn decode_body(rest: &mut &[u8]) -> Result<Self, &'static str> {
        const SHORT: &str = "it is cut short";
        let pid = take(rest).map(u32::from_le_bytes).ok_or(SHORT)?;
        let started = take(rest).map(u64::from_le_bytes).ok_or(SHORT)?;
        let name = take(rest).ok_or(SHORT)?;
        let id = take(rest).map(u64::from_le_bytes).map(ExportId).ok_or(SHORT)?;
        let runs = take(rest).map(u32::from_le_bytes).ok_or(SHORT)?;
        let mut sizes = Vec::new();
        let mut total = 0;
        for _ in 0..runs {
            let count = take(rest).map(u32::from_le_bytes).ok_or(SHORT)?;
            let size = take(rest).map(u64::from_le_bytes).ok_or(SHORT)?;
            total += u64::from(count);
            if count == 0 || size == 0 || total > MOST_EXTENTS {
                return Err("its sizes make no sense");
            }
            sizes.extend((0..count).map(|_| Bytes::new(size)));
        }
        if !rest.is_empty() {
            return Err("it goes on after its end");
        }
        if sizes.is_empty() {
            return Err("it names no memory");
        }
        Ok(Handle { pid, started, name, id, sizes })
    }
}

/// The next bytes, if there are so many.
pub(super) fn take<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (first, others) = rest.split_first_chunk::<N>()?;
    *rest = others;
    Some(*first)
}

/// A count of what a process holds in memory: extents are fewer than 2^32.
pub(super) fn count(of: usize) -> u32 {
    u32::try_from(of).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn handle(sizes: Vec<u64>) -> Handle {
        let sizes = sizes.into_iter().map(Bytes::new).collect();
        Handle { pid: 7, started: 1 << 40, name: *b"0123456789abcdef", id: ExportId(3), sizes }
    }

    #[test]
    fn equal_extents_cost_nothing() {
        assert_eq!(handle(vec![16 << 20; 5000]).encode().len(), HEAD + RUN);
        assert_eq!(handle(vec![1, 2, 2, 1]).encode().len(), HEAD + 3 * RUN);
    }

    #[test]
    fn what_is_none_is_told() {
        let whole = handle(vec![2 << 20, 4 << 20]).encode();
        for length in 0..whole.len() {
            let error = Handle::decode(&whole[..length]).unwrap_err();
            assert!(matches!(error, ShareError::Malformed { .. }), "{length}: {error}");
        }
        let reason = |bytes: &[u8]| Handle::decode(bytes).unwrap_err().to_string();
        assert!(reason(&[&whole[..], &[0]].concat()).contains("goes on after its end"));
        assert!(reason(b"something else entirely").contains("does not begin with GLSH"));
        assert!(reason(&handle(Vec::new()).encode()).contains("names no memory"));
        assert!(reason(&handle(vec![0]).encode()).contains("make no sense"));
        let mut huge = handle(vec![5]).encode();
        huge[HEAD..HEAD + 4].fill(0xff);
        assert!(reason(&huge).contains("make no sense"));
        let mut other = whole;
        other[4] = 9;
        assert!(matches!(Handle::decode(&other), Err(ShareError::OtherVersion { found: 9, known: VERSION })));
    }

    proptest! {
        #[test]
        fn reads_back_what_it_writes(sizes in prop::collection::vec(1..4_u64, 1..50)) {
            let one = handle(sizes);
            prop_assert_eq!(Handle::decode(&one.encode()).unwrap(), one);
        }

        #[test]
        fn survives_anything(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Handle::decode(&[&b"GLSH\x01"[..], &bytes].concat());
        }
    }
}
