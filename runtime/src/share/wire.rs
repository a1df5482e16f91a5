//! The two messages: what is asked of an exporter, and its answer.
//!
//! One request is one packet and is answered by one packet, so that an exporter keeps nothing of a client between two, and
//! no more descriptors are ever on the way than one packet holds.

use super::ExportId;
use super::handle::{VERSION, take};

/// So many descriptors fit a message (Linux: `SCM_MAX_FD`).
pub(super) const MOST_FDS: usize = 253;
const MAGIC: [u8; 4] = *b"GLSQ";
/// How long a request is.
pub(super) const REQUEST: usize = 17;
/// How long an answer is.
pub(super) const REPLY: usize = 5;

/// For the descriptors of an export from some index on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) id: ExportId,
    pub(super) from: u32,
}

/// An answer, without the descriptors themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reply {
    /// With so many descriptors.
    Descriptors(u32),
    /// There is no such export, or it has no more extents.
    Unknown,
    /// The client is not of the same user.
    Refused,
    /// That was no request.
    Malformed,
    /// The pool or the driver does not give the memory out.
    Failed,
}

impl Request {
    pub(super) fn encode(self) -> [u8; REQUEST] {
        let mut bytes = [0; REQUEST];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4] = VERSION;
        bytes[5..13].copy_from_slice(&self.id.0.to_le_bytes());
        bytes[13..].copy_from_slice(&self.from.to_le_bytes());
        bytes
    }

    pub(super) fn decode(mut bytes: &[u8]) -> Option<Self> {
        let rest = &mut bytes;
        let known = take(rest) == Some(MAGIC) && take(rest) == Some([VERSION]);
        let id = take(rest).map(u64::from_le_bytes)?;
        let from = take(rest).map(u32::from_le_bytes)?;
        (known && rest.is_empty()).then_some(Request { id: ExportId(id), from })
    }
}

impl Reply {
    pub(super) fn encode(self) -> [u8; REPLY] {
        let (kind, count) = match self {
            Reply::Descriptors(count) => (0, count),
            Reply::Unknown => (1, 0),
            Reply::Refused => (2, 0),
            Reply::Malformed => (3, 0),
            Reply::Failed => (4, 0),
        };
        let [a, b, c, d] = u32::to_le_bytes(count);
        [kind, a, b, c, d]
    }

    pub(super) fn decode(mut bytes: &[u8]) -> Option<Self> {
        let rest = &mut bytes;
        let (kind, count) = (take(rest)?, take(rest).map(u32::from_le_bytes)?);
        match (kind, rest.is_empty()) {
            ([0], true) => Some(Reply::Descriptors(count)),
            ([1], true) => Some(Reply::Unknown),
            ([2], true) => Some(Reply::Refused),
            ([3], true) => Some(Reply::Malformed),
            ([4], true) => Some(Reply::Failed),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_back_what_it_writes() {
        let request = Request { id: ExportId(1 << 50), from: 253 };
        assert_eq!(Request::decode(&request.encode()), Some(request));
        assert_eq!(Request::decode(&request.encode()[1..]), None);
        assert_eq!(Request::decode(&[0; REQUEST]), None);
        for reply in
            [Reply::Descriptors(253), Reply::Unknown, Reply::Refused, Reply::Malformed, Reply::Failed]
        {
            assert_eq!(Reply::decode(&reply.encode()), Some(reply));
            assert_eq!(Reply::decode(&reply.encode()[..4]), None);
        }
        assert_eq!(Reply::decode(&[9; REPLY]), None);
    }
}
