//! Reader of trace v1 and v2: one event per line.
//!
//! ```text
//! # trace v1: header lines begin with '#', and may be missing
//! a id bytes stream t_us     allocated
//! r id t_us                  free requested
//! f id t_us                  free completed
//! s id stream t_us           used on another stream too (v2)
//! ```

use std::io::BufRead;

use glake_units::Bytes;

use super::Stop;
use super::bounds::{Budget, read_line};
use super::error::Fault;
use super::recording::{Builder, Recorded};

/// Number of bytes of a line that are read; the rest of a longer line is ignored.
const LONGEST: u64 = 64 << 10;

/// Fault of a line.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct LineFault {
    /// Line number, from 1.
    pub(super) line: u32,
    pub(super) fault: Fault,
}

/// Reads a whole text.
pub(super) fn read(from: &mut dyn BufRead, budget: Budget) -> Result<Builder, Stop<LineFault>> {
    let mut build = Builder::new(budget);
    let (mut number, mut line) = (0_u32, Vec::new());
    while read_line(from, LONGEST, &mut line)? {
        number = number.checked_add(1).ok_or(Stop::Fault(LineFault {
            line: u32::MAX,
            fault: Fault::TooMany { what: "lines", limit: u64::from(u32::MAX) },
        }))?;
        read_event(&mut build, number, &line)
            .map_err(|fault| Stop::Fault(LineFault { line: number, fault }))?;
    }
    Ok(build)
}

fn read_event(build: &mut Builder, number: u32, line: &[u8]) -> Result<(), Fault> {
    let line = line.trim_ascii();
    let mut fields = Fields { rest: line };
    match line {
        [] | [b'#'] => Ok(()),
        [b'#', header @ ..] => read_header(build, header),
        [b'a', b' ' | b'\t', ..] => {
            fields.skip();
            let id = fields.number("id")?;
            let bytes = fields.number("size")?;
            let stream = fields.number("stream")?;
            let at_us = fields.time()?;
            build.allocate(number, id, bytes, stream, at_us)
        }
        [b'r', b' ' | b'\t', ..] => {
            fields.skip();
            let id = fields.number("id")?;
            let at_us = fields.time()?;
            build.free_requested(number, id, at_us)
        }
        [b'f', b' ' | b'\t', ..] => {
            fields.skip();
            let id = fields.number("id")?;
            let at_us = fields.time()?;
            build.free_completed(number, id, at_us)
        }
        [b's', b' ' | b'\t', ..] => {
            fields.skip();
            let id = fields.number("id")?;
            let stream = fields.number("stream")?;
            let at_us = fields.time()?;
            build.record_stream(number, id, stream, at_us)
        }
        _ => Err(Fault::NotAnEvent { found: excerpt(line) }),
    }
}

/// Reads a header line. It may name the version (`trace v1`) and torch's peaks (`active_peak N reserved_peak N`); the rest is ignored.
fn read_header(build: &mut Builder, header: &[u8]) -> Result<(), Fault> {
    let header = String::from_utf8_lossy(header);
    let mut words = header.split([' ', '\t', ':', ';', ',']).filter(|word| !word.is_empty());
    if let (Some("trace"), Some(version)) = (words.next(), words.next()) {
        let numbered = version.strip_prefix('v').is_some_and(|n| n.bytes().all(|b| b.is_ascii_digit()));
        if numbered && !matches!(version, "v1" | "v2") {
            return Err(Fault::UnknownVersion { version: version.to_owned() });
        }
    }
    let after = |name: &str| {
        let mut words = header.split_ascii_whitespace();
        words.find(|&word| word == name)?;
        words.next()?.parse().ok().map(Bytes::new)
    };
    if let (Some(active_peak), Some(reserved_peak)) = (after("active_peak"), after("reserved_peak")) {
        build.recorded = Some(Recorded { active_peak, reserved_peak });
    }
    Ok(())
}

/// Unread fields of a line.
struct Fields<'a> {
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    fn next(&mut self) -> &'a [u8] {
        let start = self.rest.iter().position(|byte| !byte.is_ascii_whitespace()).unwrap_or(self.rest.len());
        let rest = self.rest.get(start..).unwrap_or_default();
        let end = rest.iter().position(u8::is_ascii_whitespace).unwrap_or(rest.len());
        let (field, rest) = rest.split_at(end);
        self.rest = rest;
        field
    }

    fn skip(&mut self) {
        self.next();
    }

    fn number(&mut self, name: &'static str) -> Result<u64, Fault> {
        let found = self.next();
        if found.is_empty() {
            return Err(Fault::Missing { field: name });
        }
        let mut number = 0_u64;
        for &byte in found {
            if !byte.is_ascii_digit() {
                return Err(not_a_number(name, found));
            }
            number = number
                .checked_mul(10)
                .and_then(|tens| tens.checked_add(u64::from(byte - b'0')))
                .ok_or_else(|| not_a_number(name, found))?;
        }
        Ok(number)
    }

    /// Returns the time, the last field of every event.
    fn time(&mut self) -> Result<u64, Fault> {
        let at_us = self.number("time")?;
        let more = self.rest.trim_ascii();
        if more.is_empty() { Ok(at_us) } else { Err(Fault::Trailing { found: excerpt(more) }) }
    }
}

#[cold]
fn not_a_number(field: &'static str, found: &[u8]) -> Fault {
    let digits = |text: &[u8]| !text.is_empty() && text.iter().all(u8::is_ascii_digit);
    let shown = excerpt(found);
    match found {
        [b'-', rest @ ..] if digits(rest) => Fault::Negative { field, found: shown },
        _ if digits(found) => Fault::TooLarge { field, found: shown },
        _ => Fault::NotANumber { field, found: shown },
    }
}

/// Returns the beginning of a line, short enough for a one-line message.
fn excerpt(bytes: &[u8]) -> String {
    const SHOWN: usize = 40;
    let text = String::from_utf8_lossy(bytes.get(..SHOWN).unwrap_or(bytes)).into_owned();
    if bytes.len() > SHOWN { text + "…" } else { text }
}

#[cfg(test)]
mod tests {
    use super::super::Event;
    use super::*;

    fn read_text(mut text: &[u8]) -> Result<Builder, Stop<LineFault>> {
        read(&mut text, Budget::new(Bytes::mib(64)))
    }

    fn fault(text: &str) -> (u32, Fault) {
        match read_text(text.as_bytes()) {
            Err(Stop::Fault(LineFault { line, fault })) => (line, fault),
            _ => panic!("{text:?} was read"),
        }
    }

    #[test]
    fn reads_both_versions_with_and_without_a_header() {
        let text = "# trace v2: anything\n# of this run: active_peak 1024 reserved_peak 2097152\n\
                    a 10 700 3 5\ns 10 4 6\nr 10 7\r\nf 10 9\n\n";
        let trace = read_text(text.as_bytes()).unwrap().finish("t".into());
        assert_eq!(trace.events().len(), 4);
        assert!(matches!(trace.events()[1], Event::RecordStream { .. }));
        assert_eq!(trace.streams(), [3, 4]);
        assert_eq!(trace.line_of(0), Some(3));
        let recorded = trace.recorded().unwrap();
        assert_eq!((recorded.active_peak, recorded.reserved_peak), (Bytes::new(1024), Bytes::mib(2)));
        assert_eq!(trace.duration_us(), 4);
        assert!(read_text(b"a 0 1 0 0").unwrap().finish("t".into()).recorded().is_none());
    }

    #[test]
    fn says_what_is_wrong_and_where() {
        assert_eq!(fault("a 0 1 0 0\nf 9 1\n"), (2, Fault::UnknownBlock { id: 9 }));
        assert_eq!(fault("a 0 1 0 0\nr 0 1\nf 0 1\nf 0 2\n"), (4, Fault::DoubleFree { id: 0 }));
        assert_eq!(fault("a 0 -5 0 0\n"), (1, Fault::Negative { field: "size", found: "-5".into() }));
        assert_eq!(fault("a 0 0 0 0\n"), (1, Fault::NoBytes { id: 0 }));
        for size in ["99999999999999999999999", "18446744073709551615"] {
            assert!(matches!(fault(&format!("a 0 {size} 0 0")), (1, Fault::TooLarge { field: "size", .. })));
        }
        assert_eq!(fault("\na 0 x 0 0"), (2, Fault::NotANumber { field: "size", found: "x".into() }));
        assert_eq!(fault("a 0 5 0"), (1, Fault::Missing { field: "time" }));
        assert_eq!(fault("r 0 5 0"), (1, Fault::Trailing { found: "0".into() }));
        assert!(matches!(fault("q 0 5 0"), (1, Fault::NotAnEvent { .. })));
        assert!(matches!(fault("allocate"), (1, Fault::NotAnEvent { .. })));
        assert_eq!(fault("# trace v3: later"), (1, Fault::UnknownVersion { version: "v3".into() }));
    }

    proptest::proptest! {
        #[test]
        fn arbitrary_bytes_are_read_or_refused(text in "[afrs# 0-9\n-]{0,200}") {
            let _ = read_text(text.as_bytes());
        }
    }
}
