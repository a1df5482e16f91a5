//! Reading of trace files of any supported format.

use std::fs;
use std::io::{self, Read};
use std::path::Path;

use flate2::read::MultiGzDecoder;

use super::error::{SnapshotFault, TraceError};
use super::recording::Trace;
use super::{snapshot, text};

const GZIP: [u8; 2] = [0x1f, 0x8b];
const PICKLE: u8 = 0x80;
const ZIP: [u8; 2] = *b"PK";

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
        let bytes =
            fs::read(path).map_err(|source| TraceError::Unreadable { path: path.to_owned(), source })?;
        Trace::from_bytes(path, &bytes, device)
    }

    /// Reads a trace like [`Trace::open_device`], from the file's content. Errors name `path`.
    ///
    /// # Errors
    ///
    /// [`TraceError`]: not a trace that can be replayed.
    pub fn from_bytes(path: &Path, bytes: &[u8], device: Option<u32>) -> Result<Trace, TraceError> {
        let path = path.to_owned();
        let inflated;
        let bytes = if bytes.starts_with(&GZIP) {
            inflated = match inflate(bytes) {
                Ok(inflated) => inflated,
                Err(source) if source.kind() == io::ErrorKind::UnexpectedEof => {
                    return Err(TraceError::Truncated { path });
                }
                Err(source) => return Err(TraceError::Corrupt { path, source }),
            };
            inflated.as_slice()
        } else {
            bytes
        };
        let build = if bytes.starts_with(&ZIP) {
            let found = "a zip archive (torch.save writes one)";
            return Err(TraceError::Snapshot { path, fault: SnapshotFault::Container { found } });
        } else if bytes.first() == Some(&PICKLE) {
            match snapshot::read(bytes, device) {
                Ok(build) => build,
                Err(fault) => return Err(TraceError::Snapshot { path, fault }),
            }
        } else {
            match text::read(bytes) {
                Ok(build) => build,
                Err(text::LineFault { line, fault }) => return Err(TraceError::Line { path, line, fault }),
            }
        };
        if build.is_empty() {
            return Err(TraceError::Empty { path });
        }
        let name = name_of(&path);
        Ok(build.finish(name))
    }
}

fn inflate(bytes: &[u8]) -> io::Result<Vec<u8>> {
    let mut inflated = Vec::with_capacity(bytes.len().saturating_mul(6));
    MultiGzDecoder::new(bytes).read_to_end(&mut inflated)?;
    Ok(inflated)
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
mod tests {
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
