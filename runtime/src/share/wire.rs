//! The two messages: what is asked of an exporter, and its answer.
//!
//! One request is one packet and is answered by one packet, so that an exporter keeps nothing of a client between two, and
//! no more descriptors are ever on the way than one packet holds. An exporter answers with as many as it likes: the client
//! asks for those that follow once it is done with these.

use rustix::process::{Resource, getrlimit};
use serde::{Deserialize, Serialize};

use super::ExportId;
use super::handle::{VERSION, framed};

/// So many descriptors fit a message (Linux: `SCM_MAX_FD`).
pub(super) const MOST_FDS: usize = 253;
/// Descriptors in an answer at most: so many does either process need for a block, however large. A request takes as long as a half of one
/// extent's export.
pub(super) const BATCH: usize = 16;
const MAGIC: [u8; 4] = *b"GLSQ";
/// How long a request is at most.
pub(super) const REQUEST: usize = 20;
/// How long an answer is at most.
pub(super) const REPLY: usize = 6;

/// For the descriptors of an export from some index on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Request {
    pub(super) id: ExportId,
    pub(super) from: u32,
}

/// An answer, without the descriptors themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
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
    /// The exporter has no descriptor left, of so many files that it may open. To earlier versions this is no answer.
    TooManyFiles(u32),
}

impl Request {
    pub(super) fn encode(self) -> Vec<u8> {
        framed(MAGIC, &self)
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        whole(bytes.strip_prefix(&MAGIC)?.strip_prefix(&[VERSION])?)
    }
}

impl Reply {
    pub(super) fn encode(self) -> Vec<u8> {
        postcard::to_extend(&self, Vec::new()).unwrap_or_default()
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        whole(bytes)
    }
}

/// How many files this process may open.
pub(super) fn open_files() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// A message that takes all of the bytes.
fn whole<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Option<T> {
    postcard::take_from_bytes(bytes).ok().filter(|(_, rest)| rest.is_empty()).map(|(message, _)| message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_back_what_it_writes() {
        let request = Request { id: ExportId(u64::MAX), from: u32::MAX };
        assert_eq!(Request::decode(&request.encode()), Some(request));
        assert_eq!(request.encode().len(), REQUEST);
        assert_eq!(Request::decode(&request.encode()[1..]), None);
        assert_eq!(Request::decode(&[&request.encode()[..], &[0]].concat()), None);
        assert_eq!(Request::decode(&[0; REQUEST]), None);
        let replies = [
            Reply::Descriptors(u32::MAX),
            Reply::Unknown,
            Reply::Refused,
            Reply::Malformed,
            Reply::Failed,
            Reply::TooManyFiles(u32::MAX),
        ];
        for reply in replies {
            let bytes = reply.encode();
            assert_eq!(Reply::decode(&bytes), Some(reply));
            assert_eq!(Reply::decode(&bytes[..bytes.len() - 1]), None);
            assert!(bytes.len() <= REPLY);
        }
        assert_eq!(Reply::decode(&[9; REPLY]), None);
    }
}
