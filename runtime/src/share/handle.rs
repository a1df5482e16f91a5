//! Handle by which another process finds a shared block.
//!
//! ```text
//! "GLSH" version | pid, start of the process, socket's name, export id, runs of extents of one size (postcard)
//!   4       1
//! ```
//!
//! Handles of other processes are decoded with limits: on the length before, on the number of extents after.

use glake_units::Bytes;
use serde::{Deserialize, Serialize};

use super::{ExportId, ShareError};

/// Name of a socket in the abstract namespace.
pub(super) type Name = [u8; 16];

const MAGIC: [u8; 4] = *b"GLSH";
pub(super) const VERSION: u8 = 2;
/// Maximum number of extents; more than any GPU has granules.
const MOST_EXTENTS: u64 = 1 << 20;
/// Maximum length of a handle, above that of the maximum number of extents.
const MOST_BYTES: usize = 16 << 20;

/// A decoded share handle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Handle {
    pub(super) pid: u32,
    pub(super) started: u64,
    pub(super) name: Name,
    pub(super) id: ExportId,
    /// Size of each extent.
    pub(super) sizes: Vec<Bytes>,
}

/// Encoded form: consecutive extents of one size are one run (count, bytes), which keeps it short.
#[derive(Serialize, Deserialize)]
struct Body {
    pid: u32,
    started: u64,
    name: Name,
    id: ExportId,
    runs: Vec<(u32, u64)>,
}

impl Handle {
    pub(super) fn encode(&self) -> Vec<u8> {
        let runs = self.sizes.chunk_by(|one, next| one == next);
        let run = |run: &[Bytes]| (count(run.len()), run.first().map_or(0, |size| size.get()));
        let (pid, started, name, id) = (self.pid, self.started, self.name, self.id);
        framed(MAGIC, &Body { pid, started, name, id, runs: runs.map(run).collect() })
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, ShareError> {
        let wrong = |reason| ShareError::Malformed { length: bytes.len(), reason };
        let rest = bytes.strip_prefix(&MAGIC).ok_or_else(|| wrong("it does not begin with GLSH"))?;
        match rest.split_first() {
            Some((&VERSION, body)) => Self::decode_body(body).map_err(wrong),
            Some((&found, _)) => Err(ShareError::OtherVersion { found, known: VERSION }),
            None => Err(wrong("it is cut short")),
        }
    }

    fn decode_body(bytes: &[u8]) -> Result<Self, &'static str> {
        if bytes.len() > MOST_BYTES {
            return Err("it is too long");
        }
        let read = postcard::take_from_bytes::<Body>(bytes);
        let (Body { pid, started, name, id, runs }, rest) = read.map_err(|error| match error {
            postcard::Error::DeserializeUnexpectedEnd => "it is cut short",
            _ => "its numbers make no sense",
        })?;
        let total: u64 = runs.iter().map(|(count, _)| u64::from(*count)).sum();
        if total > MOST_EXTENTS || runs.iter().any(|(count, size)| *count == 0 || *size == 0) {
            return Err("its sizes make no sense");
        }
        if !rest.is_empty() {
            return Err("it goes on after its end");
        }
        if runs.is_empty() {
            return Err("it names no memory");
        }
        let sizes = runs.into_iter().flat_map(|(count, size)| (0..count).map(move |_| Bytes::new(size)));
        Ok(Handle { pid, started, name, id, sizes: sizes.collect() })
    }
}

/// Encodes a message after its magic number and the version. Numbers and lists of numbers always encode.
pub(super) fn framed(magic: [u8; 4], message: &impl Serialize) -> Vec<u8> {
    let mut bytes = magic.to_vec();
    bytes.push(VERSION);
    postcard::to_extend(message, bytes).unwrap_or_default()
}

/// Converts a count of extents, which is below 2^32.
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
        let length = |sizes| handle(sizes).encode().len();
        assert_eq!(length(vec![16 << 20; 5000]), length(vec![16 << 20; 128]));
        assert_eq!(length(vec![1, 2, 2, 1]), length(vec![1, 2, 3]));
        assert!(length(vec![16 << 20; 5000]) < 50);
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
        let (pid, started, name, id) = (7, 0, [0; 16], ExportId(3));
        let sent = |runs| framed(MAGIC, &Body { pid, started, name, id, runs });
        assert!(reason(&sent(vec![(u32::MAX, 5)])).contains("sizes make no sense"));
        assert!(reason(&sent(vec![(1 << 19, 5), (1 << 19, 6), (1, 7)])).contains("sizes make no sense"));
        assert!(reason(&[&whole[..5], &vec![0; MOST_BYTES + 1]].concat()).contains("too long"));
        // A list of 2^63 runs, none of which follows.
        let mut huge = sent(Vec::new());
        huge.truncate(huge.len() - 1);
        huge.extend([0xff; 8].iter().chain(&[0x7f]));
        assert!(matches!(Handle::decode(&huge), Err(ShareError::Malformed { .. })));
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
            let _ = Handle::decode(&[&MAGIC[..], &[VERSION], &bytes].concat());
        }
    }
}
