//! Recorded allocator calls of a program, read from GLake's text traces and from torch's snapshots.
//!
//! ```text
//! file ─► open ─► text      (trace v1 and v2, gzip or plain) ─┐
//!               └ pickle ─► snapshot (torch's _dump_snapshot) ┴► build ─► Trace: events, blocks, streams, peaks
//! ```
//!
//! Files are read as streams, and may be hostile: `bounds` limits memory and unpacked size in proportion to the size of the file.
//!
//! Invariants of a [`Trace`], whatever its source: a block is allocated once, before its other events; its free is requested at most once
//! and completed at most once, in that order; time never decreases; blocks and streams are numbered from zero in order of first appearance.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::Path;

use flate2::bufread::MultiGzDecoder;
use glake_units::Bytes;

pub use bounds::OverBudget;
pub use error::{Fault, SnapshotFault, TraceError};
pub use pickle::PickleFault;
pub use recording::{BlockId, Event, Peaks, Recorded, StreamIndex, Trace};

mod bounds;
mod error;
mod pickle;
mod recording;
mod snapshot;
mod text;

use bounds::{Bounds, Budget, TooLong, Unpacked};
use recording::Builder;

const GZIP: [u8; 2] = [0x1f, 0x8b];
const PICKLE: u8 = 0x80;
const ZIP: [u8; 2] = *b"PK";
const BUFFER: usize = 64 << 10;

impl Trace {
    /// Reads a trace v1 or v2, or a torch snapshot; each gzip or plain. Of a snapshot, takes the device with the most events.
    ///
    /// # Errors
    ///
    /// [`TraceError`]: the file cannot be read, or is not a trace that can be replayed.
    pub fn open(path: &Path) -> Result<Trace, TraceError> {
        Trace::open_device(path, None)
    }

    /// Reads a trace like [`Trace::open`], but takes this device of a snapshot.
    ///
    /// # Errors
    ///
    /// [`TraceError`]: the file cannot be read, or is not a trace that can be replayed.
    pub fn open_device(path: &Path, device: Option<u32>) -> Result<Trace, TraceError> {
        let unreadable = |source| TraceError::Unreadable { path: path.to_owned(), source };
        let file = File::open(path).map_err(unreadable)?;
        // Zero for a pipe and for a device, which may be endless.
        let bounds = Bounds::of(Bytes::new(file.metadata().map_err(unreadable)?.len()));
        let file = Unpacked::new(file, bounds.unpacked);
        Trace::read(path, &mut BufReader::with_capacity(BUFFER, file), bounds, device)
    }

    /// Reads a trace like [`Trace::open_device`], from the file's content. Errors name `path`.
    ///
    /// # Errors
    ///
    /// [`TraceError`]: not a trace that can be replayed.
    pub fn from_bytes(path: &Path, mut bytes: &[u8], device: Option<u32>) -> Result<Trace, TraceError> {
        let bounds = Bounds::of(Bytes::new(bytes.len() as u64));
        Trace::read(path, &mut bytes, bounds, device)
    }

    /// Reads a trace from a file with these bounds.
    fn read(
        path: &Path,
        from: &mut dyn BufRead,
        bounds: Bounds,
        device: Option<u32>,
    ) -> Result<Trace, TraceError> {
        let packed = from.fill_buf().is_ok_and(|begin| begin.starts_with(&GZIP));
        let budget = Budget::new(bounds.memory);
        let build = if packed {
            let unpacked = Unpacked::new(MultiGzDecoder::new(from), bounds.unpacked);
            read_plain(&mut BufReader::with_capacity(BUFFER, unpacked), budget, device)
        } else {
            read_plain(from, budget, device)
        };
        let path = path.to_owned();
        let build = match build {
            Ok(build) => build,
            Err(Stop::Read(source)) => {
                return Err(match TooLong::of(&source) {
                    Some(TooLong { bound }) => TraceError::Unpacked { path, bound },
                    None if !packed => TraceError::Unreadable { path, source },
                    None if source.kind() == io::ErrorKind::UnexpectedEof => TraceError::Truncated { path },
                    None => TraceError::Corrupt { path, source },
                });
            }
            Err(Stop::Fault(Reason::Line(text::LineFault { line, fault }))) => {
                return Err(TraceError::Line { path, line, fault });
            }
            Err(Stop::Fault(Reason::Snapshot(fault))) => return Err(TraceError::Snapshot { path, fault }),
        };
        if build.is_empty() {
            return Err(TraceError::Empty { path });
        }
        let name = name_of(&path);
        Ok(build.finish(name))
    }
}

/// Reason why reading stopped: an error of the file, or a fault of its content.
#[derive(Debug)]
enum Stop<F> {
    Read(io::Error),
    Fault(F),
}

impl<F> Stop<F> {
    fn map<G>(self, fault: impl FnOnce(F) -> G) -> Stop<G> {
        match self {
            Stop::Read(error) => Stop::Read(error),
            Stop::Fault(found) => Stop::Fault(fault(found)),
        }
    }
}

impl<F> From<io::Error> for Stop<F> {
    fn from(error: io::Error) -> Self {
        Stop::Read(error)
    }
}

enum Reason {
    Line(text::LineFault),
    Snapshot(SnapshotFault),
}

fn read_plain(from: &mut dyn BufRead, budget: Budget, device: Option<u32>) -> Result<Builder, Stop<Reason>> {
    let begin = from.fill_buf()?;
    if begin.starts_with(&ZIP) {
        let found = "a zip archive (torch.save writes one)";
        return Err(Stop::Fault(Reason::Snapshot(SnapshotFault::Container { found })));
    }
    match begin.first() {
        Some(&PICKLE) => snapshot::read(from, budget, device).map_err(|stop| stop.map(Reason::Snapshot)),
        _ => text::read(from, budget).map_err(|stop| stop.map(Reason::Line)),
    }
}

/// Returns the trace's name: `opt13_LR` for `traces/opt13_LR.trace.gz`.
fn name_of(path: &Path) -> String {
    let mut name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    for ending in [".gz", ".trace", ".txt", ".pickle", ".pkl"] {
        if let Some(shorter) = name.strip_suffix(ending).filter(|shorter| !shorter.is_empty()) {
            name = shorter.to_owned();
        }
    }
    name
}

#[cfg(test)]
mod open_tests {
    use std::io::Write;

    use flate2::{Compression, write::GzEncoder};

    use super::*;

    fn gzip(text: &str) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(text.as_bytes()).unwrap();
        encoder.finish().unwrap()
    }

    fn refused(bytes: &[u8]) -> String {
        let error = Trace::from_bytes(Path::new("dir/x.trace.gz"), bytes, None).unwrap_err().to_string();
        assert!(!error.contains('\n') && error.starts_with("dir/x.trace.gz:"), "{error}");
        error
    }

    #[test]
    fn gzip_and_plain_read_the_same() {
        let text = "a 0 512 0 1\nf 0 2\n";
        for bytes in [text.as_bytes().to_vec(), gzip(text)] {
            let trace = Trace::from_bytes(Path::new("dir/x.trace.gz"), &bytes, None).unwrap();
            assert_eq!((trace.name(), trace.events().len()), ("x", 3));
        }
    }

    /// Endless content: `begin`, and then `again` over and over.
    struct Endless<'a> {
        begin: &'a [u8],
        again: &'a [u8],
    }

    impl io::Read for Endless<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let begin = self.begin.read(buffer)?;
            if begin > 0 {
                return Ok(begin);
            }
            let whole = buffer.len() - buffer.len() % self.again.len();
            buffer[..whole].chunks_mut(self.again.len()).for_each(|part| part.copy_from_slice(self.again));
            Ok(whole)
        }
    }

    fn endless(begin: &[u8], again: &[u8]) -> String {
        let bounds = Bounds { memory: Bytes::mib(4), unpacked: Bytes::mib(8) };
        let from = Unpacked::new(Endless { begin, again }, bounds.unpacked);
        let from = &mut BufReader::with_capacity(BUFFER, from);
        Trace::read(Path::new("x"), from, bounds, None).unwrap_err().to_string()
    }

    #[test]
    fn endless_files_end_at_a_bound_of_memory_or_of_their_unpacked_size() {
        for again in
            [b"]".as_slice(), b"}", b"(", b")", b"N", b"N2", b")\x94", b"\x8c\x00", b"N\x85", b"K\x01q\x07"]
        {
            let error = endless(b"\x80\x04", again);
            assert!(error.contains("needs more than 4.00 MiB of memory"), "{again:?}: {error}");
        }
        let error = endless(b"a 0 1 0 0\n", b"s 0 0 0\n");
        assert!(error.starts_with("x:") && error.contains("needs more than 4.00 MiB of memory"), "{error}");
        for (begin, again) in
            [(&b""[..], &b"\0\0\0\0\0\0\0\0"[..]), (b"\x80\x04X\xff\xff\xff\x7f", b"aaaaaaaa")]
        {
            assert!(endless(begin, again).contains("its content is larger than 8.00 MiB"));
        }
    }

    #[test]
    fn bad_files_are_refused_in_one_line() {
        assert!(Trace::open(Path::new("/nonexistent")).unwrap_err().to_string().contains("cannot be read"));
        assert!(refused(b"").contains("no events"));
        assert!(refused(b"# only a header\n").contains("no events"));
        let whole = gzip(&"a 0 512 0 1\nf 0 2\n".repeat(400));
        assert!(refused(&whole[..whole.len() / 2]).contains("truncated"));
        assert!(refused(&whole[..1]).contains("not an event"));
        let mut bent = whole.clone();
        let middle = bent.len() - 6;
        bent[middle] ^= 0xff;
        assert!(refused(&bent).contains("corrupt"));
        assert!(refused(b"PK\x03\x04").contains("zip archive"));
        assert!(refused(b"a 0 5\n").contains("x.trace.gz:1: the stream is missing"));
    }
}
