//! The two messages: a request to an exporter and its reply.
//!
//! A request is one packet and gets a reply of one packet, so that an exporter keeps no state of a client, and no more descriptors are in
//! flight than one packet holds. The exporter chooses the number of descriptors in a reply; the client requests the following ones after it
//! has used these.

use rustix::process::{Resource, getrlimit};
use serde::{Deserialize, Serialize};

use super::ExportId;
use super::handle::{VERSION, framed};

/// Maximum number of descriptors in a message (Linux: `SCM_MAX_FD`).
pub(super) const MOST_FDS: usize = 253;
/// Maximum number of descriptors in a reply, and so in either process for a block of any size. A request takes as long as half an extent's
/// export.
pub(super) const BATCH: usize = 16;
const MAGIC: [u8; 4] = *b"GLSQ";
/// Maximum length of a request in bytes.
pub(super) const REQUEST: usize = 20;
/// Maximum length of a reply in bytes.
pub(super) const REPLY: usize = 6;

/// Request for the descriptors of an export from an index on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Request {
    pub(super) id: ExportId,
    pub(super) from: u32,
}

/// A reply, without the descriptors themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Reply {
    /// Success, with the number of descriptors.
    Descriptors(u32),
    /// The export does not exist or has no more extents.
    Unknown,
    /// The client belongs to another user.
    Refused,
    /// The request cannot be decoded.
    Malformed,
    /// The pool or the driver cannot export the memory.
    Failed,
    /// The exporter has reached its limit of open files, which is given. Earlier versions cannot decode it.
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

/// Returns the maximum number of open files of this process.
pub(super) fn open_files() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Decodes a message that must take all bytes.
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
