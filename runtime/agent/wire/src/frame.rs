//! Frames: a length in bytes, then JSON of that length.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Version of the protocol.
pub const VERSION: u32 = 1;

/// Maximum size of the JSON of one frame.
pub const MOST_BYTES: usize = 64 << 10;

const LENGTH: usize = size_of::<u32>();

/// Fields that every frame carries in addition to its message. Unknown fields are ignored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Envelope<M> {
    /// Version of the protocol.
    pub v: u32,
    /// Number of the message in its direction. 0: the message is not numbered, and is sent at most once.
    pub seq: u64,
    /// Number of the last message that the sender has received.
    pub ack: u64,
    /// Payload of the frame.
    #[serde(flatten)]
    pub message: M,
}

impl<M> Envelope<M> {
    /// Wraps a message that is not numbered.
    pub fn unnumbered(message: M) -> Self {
        Envelope { v: VERSION, seq: 0, ack: 0, message }
    }
}

/// Reason why bytes are not a frame; the connection must be closed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// The frame is longer than [`MOST_BYTES`].
    #[error("a frame of {length} bytes: at most {MOST_BYTES} are allowed")]
    TooLong {
        /// Length that the frame declares.
        length: usize,
    },
    /// The JSON is not a known message.
    #[error("the frame is not a known message: {0}")]
    Malformed(#[from] serde_json::Error),
    /// The frame has another protocol version.
    #[error("a frame of version {found} of the protocol: this speaks {VERSION}")]
    Version {
        /// Version that the frame declares.
        found: u32,
    },
}

/// Encodes a frame.
///
/// # Errors
/// [`FrameError::TooLong`].
pub fn frame<M: Serialize>(envelope: &Envelope<M>) -> Result<Vec<u8>, FrameError> {
    let mut bytes = Vec::new();
    append_frame(&mut bytes, envelope)?;
    Ok(bytes)
}

/// Encodes a frame behind others. After an error the buffer is as before.
///
/// # Errors
/// [`FrameError::TooLong`].
pub(crate) fn append_frame<M: Serialize>(
    bytes: &mut Vec<u8>,
    envelope: &Envelope<M>,
) -> Result<(), FrameError> {
    let begin = bytes.len();
    bytes.extend([0; LENGTH]);
    let encoded = serde_json::to_writer(&mut *bytes, envelope).map_err(FrameError::Malformed);
    let length = bytes.len() - begin - LENGTH;
    let prefix = encoded.and_then(|()| match u32::try_from(length) {
        Ok(prefix) if length <= MOST_BYTES => Ok(prefix),
        _ => Err(FrameError::TooLong { length }),
    });
    match prefix {
        Ok(prefix) => bytes[begin..begin + LENGTH].copy_from_slice(&prefix.to_le_bytes()),
        Err(_) => bytes.truncate(begin),
    }
    prefix.map(drop)
}

/// Decoder of frames from a stream that may be split anywhere.
#[derive(Debug, Default)]
pub struct Frames {
    bytes: Vec<u8>,
    /// Number of buffered bytes that were decoded already.
    taken: usize,
}

impl Frames {
    /// Appends the next bytes of the stream.
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.drain(..std::mem::take(&mut self.taken));
        self.bytes.extend_from_slice(bytes);
    }

    /// Returns the next complete frame, if any.
    ///
    /// # Errors
    /// [`FrameError`].
    pub fn take<M: DeserializeOwned>(&mut self) -> Result<Option<Envelope<M>>, FrameError> {
        #[derive(Deserialize)]
        struct Version {
            v: u32,
        }
        let rest = self.bytes.get(self.taken..).unwrap_or_default();
        let Some((prefix, rest)) = rest.split_first_chunk::<LENGTH>() else { return Ok(None) };
        let length = usize::try_from(u32::from_le_bytes(*prefix)).unwrap_or(usize::MAX);
        if length > MOST_BYTES {
            return Err(FrameError::TooLong { length });
        }
        let Some(json) = rest.get(..length) else { return Ok(None) };
        let Version { v } = serde_json::from_slice(json)?;
        if v != VERSION {
            return Err(FrameError::Version { found: v });
        }
        let envelope = serde_json::from_slice(json)?;
        self.taken += LENGTH + length;
        Ok(Some(envelope))
    }

    /// Returns whether an incomplete frame is buffered.
    pub fn is_inside(&self) -> bool {
        self.taken < self.bytes.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{Request, ToAgent, ToWorker};

    fn read_all(frames: &mut Frames) -> Result<Vec<Envelope<ToAgent>>, FrameError> {
        std::iter::from_fn(|| frames.take().transpose()).collect()
    }

    proptest! {
        #[test]
        fn however_a_stream_is_cut_the_frames_are_the_same(cuts in prop::collection::vec(1_usize..40, 1..60)) {
            let said: Vec<_> = (1..20)
                .map(|seq| Envelope { v: VERSION, seq, ack: seq / 2, message: ToAgent::Want { deadline_ms: Some(seq) } })
                .collect();
            let stream: Vec<u8> = said.iter().flat_map(|envelope| frame(envelope).unwrap()).collect();
            let (mut frames, mut heard, mut rest) = (Frames::default(), Vec::new(), &stream[..]);
            for cut in cuts.into_iter().cycle() {
                let (now, later) = rest.split_at(cut.min(rest.len()));
                frames.push(now);
                heard.extend(read_all(&mut frames).unwrap());
                rest = later;
                if rest.is_empty() {
                    break;
                }
            }
            prop_assert_eq!(heard, said);
            prop_assert!(!frames.is_inside());
        }

        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut frames = Frames::default();
            frames.push(&bytes);
            while let Ok(Some(_)) = frames.take::<ToAgent>() {}
            let mut frames = Frames::default();
            frames.push(&u32::try_from(bytes.len()).unwrap().to_le_bytes());
            frames.push(&bytes);
            let _ = (frames.take::<ToWorker>(), frames.take::<Request>());
        }

        /// Whatever stands beside it, an operator's question is read or refused.
        #[test]
        fn no_question_panics(
            op in "ps|watch|shrink|refill|explain|metrics|[a-z]{0,6}",
            fields in prop::collection::vec(("every_ms|worker|timeout_ms|waits|v|op", "-?[0-9]{1,22}|null|\"x\"|\\[\\]|1e9|\\{\\}"), 0..4),
        ) {
            let fields: String = fields.iter().map(|(name, value)| format!(",\"{name}\":{value}")).collect();
            let json = format!("{{\"v\":1,\"seq\":0,\"ack\":0,\"op\":{op:?}{fields}}}");
            let mut frames = Frames::default();
            frames.push(&u32::try_from(json.len()).unwrap().to_le_bytes());
            frames.push(json.as_bytes());
            if let Ok(Some(heard)) = frames.take::<Request>() {
                let _ = heard.message.longest();
            }
        }
    }

    #[test]
    fn a_malformed_frame_is_reported() {
        let framed = |json: &[u8]| [&u32::try_from(json.len()).unwrap().to_le_bytes()[..], json].concat();
        let (open, close) = ("[".repeat(30_000), "]".repeat(30_000));
        let deep = format!("{{\"v\":1,\"seq\":1,\"ack\":0,\"op\":\"bye\",\"x\":{open}{close}}}");
        let cases: [(Vec<u8>, &str); 5] = [
            (u32::MAX.to_le_bytes().to_vec(), "a frame of 4294967295 bytes: at most 65536 are allowed"),
            (framed(b"{]"), "the frame is not a known message: "),
            (framed(deep.as_bytes()), "the frame is not a known message: recursion limit exceeded"),
            (framed(b"{\"v\":2,\"seq\":1,\"ack\":0,\"op\":\"bye\"}"), "a frame of version 2 of the protocol"),
            (framed(b"{\"v\":1,\"seq\":-1,\"ack\":0,\"op\":\"bye\"}"), "the frame is not a known message: "),
        ];
        for (bytes, says) in cases {
            let mut frames = Frames::default();
            frames.push(&bytes);
            let error = frames.take::<ToAgent>().unwrap_err().to_string();
            assert!(error.starts_with(says), "{error}");
        }
    }

    #[test]
    fn additions_of_later_versions_are_ignored() {
        let mut frames = Frames::default();
        for json in [
            &b"{\"v\":1,\"seq\":1,\"ack\":0,\"op\":\"want\",\"deadline_ms\":null,\"colour\":\"red\"}"[..],
            b"{\"v\":1,\"seq\":2,\"ack\":0,\"op\":\"dance\",\"how\":[1,{}]}",
        ] {
            frames.push(&u32::try_from(json.len()).unwrap().to_le_bytes());
            frames.push(json);
        }
        let heard: Vec<_> = read_all(&mut frames).unwrap().into_iter().map(|heard| heard.message).collect();
        assert_eq!(heard, [ToAgent::Want { deadline_ms: None }, ToAgent::Unknown]);
    }
}
