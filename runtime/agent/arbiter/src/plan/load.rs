//! Requests of one run: those of a trace, or drawn from it.
//!
//! Traces have rows `t_s,worker,context_tokens,generated_tokens`, or the rows of Azure's LLM traces,
//! `TIMESTAMP,ContextTokens,GeneratedTokens`, without a worker.

use std::collections::BTreeSet;
use std::io::{self, BufRead, Read};
use std::time::Duration;

use glake_units::Bytes;

use super::PlanError;
use crate::node::Worker;

/// Maximum number of requests of a plan, over all seeds.
pub const MOST_REQUESTS: usize = 1 << 23;
/// Maximum number of tokens of a prompt or of an answer.
const MOST_TOKENS: u32 = 1 << 24;
/// Number of rows in a trace of any size.
const LEAST_ROWS: u64 = 1 << 21;
/// Bytes of a larger trace for each of its rows. Azure's rows have 45 bytes, and compress to a fifth.
const PER_ROW: u64 = 8;
/// Length of a line in bytes.
const LONGEST: u64 = 4 << 10;

/// Conversion of a trace into requests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Load {
    /// Total requests per second at random times, with lengths drawn from the trace; `None`: times of the trace.
    pub rate: Option<f64>,
    /// Duration of the run; `None`: that of the trace.
    pub duration: Option<Duration>,
    /// Zipf exponent: the n-th worker gets requests in proportion to 1 / n to this power; `None`: the trace names the workers.
    pub zipf: Option<f64>,
    /// Factor on each number of tokens.
    pub lengths: f64,
}

/// Request of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Request {
    /// Time of arrival.
    pub at: Duration,
    /// Index of the worker.
    pub worker: usize,
    /// Tokens of the prompt.
    pub context: u32,
    /// Tokens of the answer.
    pub generated: u32,
}

impl Load {
    /// Checks that each row of a trace names one of the workers.
    ///
    /// # Errors
    /// [`TraceError::NoWorkers`], [`TraceError::Unknown`].
    pub fn check(&self, trace: &Trace, workers: &[Worker]) -> Result<(), TraceError> {
        let names: BTreeSet<&str> = workers.iter().map(|worker| worker.name.as_str()).collect();
        for (row, request) in trace.rows.iter().zip(1..) {
            match &row.worker {
                None => return Err(TraceError::NoWorkers),
                Some(name) if !names.contains(name.as_str()) => {
                    return Err(TraceError::Unknown { request, name: name.clone() });
                }
                Some(_) => {}
            }
        }
        Ok(())
    }

    /// Returns whether the requests are the same for each seed.
    pub fn is_fixed(&self) -> bool {
        self.rate.is_none() && self.zipf.is_none()
    }

    /// Returns the expected number of requests.
    #[allow(clippy::cast_precision_loss)] // counts of requests
    fn expected(&self, trace: &Trace) -> f64 {
        let length = self.duration.unwrap_or(trace.span());
        match self.rate {
            Some(rate) => rate * length.as_secs_f64(),
            None => trace.rows.partition_point(|row| row.at <= length) as f64,
        }
    }

    /// Checks that the requests of all seeds are not too many.
    ///
    /// # Errors
    /// [`PlanError::TooManyRequests`].
    #[allow(clippy::cast_precision_loss)] // counts of requests
    pub fn check_count(&self, trace: &Trace, seeds: u64) -> Result<(), PlanError> {
        let found = self.expected(trace) * seeds as f64;
        match found <= MOST_REQUESTS as f64 {
            true => Ok(()),
            false => Err(PlanError::TooManyRequests { found: found.round() }),
        }
    }

    /// Returns the requests for workers with these names, identical for identical seeds. Rows with an unknown name go to the first worker.
    ///
    /// # Errors
    /// [`PlanError::TooManyRequests`].
    pub fn draw(&self, trace: &Trace, names: &[&str], seed: u64) -> Result<Vec<Request>, PlanError> {
        self.check_count(trace, 1)?;
        let mut random = fastrand::Rng::with_seed(seed);
        let length = self.duration.unwrap_or(trace.span());
        let chances = chances(self.zipf.unwrap_or(0.0), names.len());
        let request = |at, row: &Row, random: &mut fastrand::Rng| {
            let named = row.worker.as_deref().and_then(|name| names.iter().position(|other| *other == name));
            let worker = match self.zipf {
                Some(_) => place(&chances, random.f64()),
                None => named.unwrap_or(0),
            };
            let (context, generated) = (self.tokens(row.context), self.tokens(row.generated));
            Request { at, worker, context, generated }
        };
        let Some(rate) = self.rate else {
            let rows = trace.rows.iter().take_while(|row| row.at <= length);
            return Ok(rows.map(|row| request(row.at, row, &mut random)).collect());
        };
        let (mut requests, mut at) = (Vec::new(), 0.0);
        loop {
            at -= (1.0 - random.f64()).ln() / rate;
            if at > length.as_secs_f64() {
                return Ok(requests);
            }
            let row = &trace.rows[random.usize(..trace.rows.len())];
            requests.push(request(Duration::from_secs_f64(at), row, &mut random));
        }
    }

    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // clamped to what fits
    fn tokens(&self, tokens: u32) -> u32 {
        (f64::from(tokens) * self.lengths).round().clamp(1.0, f64::from(MOST_TOKENS)) as u32
    }
}

/// Returns the cumulative probabilities of the workers.
#[allow(clippy::cast_precision_loss)] // places of workers
fn chances(power: f64, count: usize) -> Vec<f64> {
    let weights: Vec<f64> = (1..=count).map(|place| (place as f64).powf(-power)).collect();
    let sum: f64 = weights.iter().sum();
    let mut below = 0.0;
    weights.into_iter().map(|weight| (below += weight / sum, below).1).collect()
}

fn place(chances: &[f64], point: f64) -> usize {
    chances.iter().position(|below| point < *below).unwrap_or(chances.len().saturating_sub(1))
}

const OWN: &str = "t_s,worker,context_tokens,generated_tokens";
const AZURE: &str = "TIMESTAMP,ContextTokens,GeneratedTokens";

/// Requests in the order of their times; the first is at 0.
#[derive(Clone, Debug)]
pub struct Trace {
    /// Rows of the trace, at least one.
    pub rows: Vec<Row>,
}

/// Row of a trace: a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Time since the first request.
    pub at: Duration,
    /// Name of the worker.
    pub worker: Option<String>,
    /// Tokens of the prompt.
    pub context: u32,
    /// Tokens of the answer.
    pub generated: u32,
}

/// Reason why a text is no trace.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// The file cannot be read.
    #[error(transparent)]
    Unreadable(#[from] io::Error),
    /// The trace has more rows than its size justifies.
    #[error(
        "line {line}: there are more than {most} requests, the bound for a file of its size (one for each {PER_ROW} bytes, \
         at least {LEAST_ROWS})"
    )]
    TooManyRows {
        /// Number of the line, from 1.
        line: usize,
        /// Bound of the number of rows.
        most: u64,
    },
    /// A line is not text.
    #[error("line {line} is not text")]
    NotText {
        /// Number of the line, from 1.
        line: usize,
    },
    /// The trace has no row.
    #[error("it has no request: a plan needs at least one row below the header {OWN}")]
    Empty,
    /// The header matches neither format.
    #[error("its first line is {found:?}: expected {OWN} or {AZURE}")]
    Header {
        /// First line of the text.
        found: String,
    },
    /// A row has too few or too many fields.
    #[error("line {line} has missing fields: {found:?} should have {wanted} fields, none of them empty")]
    Hole {
        /// Number of the line, from 1.
        line: usize,
        /// Text of the row.
        found: String,
        /// Required number of fields.
        wanted: usize,
    },
    /// A field is invalid.
    #[error("line {line}: {field} is {found:?}; give {wanted}")]
    Value {
        /// Number of the line, from 1.
        line: usize,
        /// Name of the field.
        field: &'static str,
        /// Text of the field.
        found: String,
        /// Description of valid values.
        wanted: &'static str,
    },
    /// Rows of Azure's format without an assignment to workers.
    #[error("it names no worker: share its requests out with --assign zipf:1, or zipf:0 for all alike")]
    NoWorkers,
    /// A row names a worker that is missing in the workers' file.
    #[error(
        "request {request} is for worker {name:?}, which is not in the workers' file: add it there, or use --assign"
    )]
    Unknown {
        /// Number of the request, from 1.
        request: usize,
        /// Name of the worker.
        name: String,
    },
    /// A row is earlier than the row above.
    #[error("line {line} is {back:?} before the line above it: sort the trace by time")]
    Unsorted {
        /// Number of the line, from 1.
        line: usize,
        /// Difference to the row above.
        back: Duration,
    },
}

impl Trace {
    /// Parses the text of a trace.
    ///
    /// # Errors
    /// [`TraceError`], which names the line.
    pub fn parse(text: &str) -> Result<Self, TraceError> {
        Trace::read(&mut text.as_bytes(), Bytes::new(text.len() as u64))
    }

    /// Reads a trace from a file of this size. The file may be compressed; `from` is its unpacked content.
    ///
    /// # Errors
    /// [`TraceError`], which names the line.
    pub fn read(from: &mut dyn BufRead, size: Bytes) -> Result<Self, TraceError> {
        let most = LEAST_ROWS.max(size.get() / PER_ROW);
        let mut lines = Lines { from, text: Vec::new(), line: 0 };
        let (header, _) = lines.next()?.ok_or(TraceError::Empty)?;
        let azure = match header.trim_start_matches('\u{feff}') {
            header if header.eq_ignore_ascii_case(OWN) => false,
            header if header.eq_ignore_ascii_case(AZURE) => true,
            found => return Err(TraceError::Header { found: found.chars().take(80).collect() }),
        };
        let mut rows: Vec<Row> = Vec::new();
        let mut first = None;
        while let Some((text, line)) = lines.next()? {
            if rows.len() as u64 == most {
                return Err(TraceError::TooManyRows { line, most });
            }
            let (at, row) = row(text, line, azure)?;
            let first = *first.get_or_insert(at);
            let before = rows.last().map_or(0.0, |row| row.at.as_secs_f64());
            // Sums of times may lose a nanosecond.
            if at - first < before - 1e-6 {
                return Err(TraceError::Unsorted {
                    line,
                    back: Duration::from_secs_f64(before - (at - first)),
                });
            }
            rows.push(Row { at: Duration::from_secs_f64((at - first).max(before)), ..row });
        }
        if rows.is_empty() { Err(TraceError::Empty) } else { Ok(Trace { rows }) }
    }

    /// Returns the time from the first request to the last.
    pub fn span(&self) -> Duration {
        self.rows.last().map_or(Duration::ZERO, |row| row.at)
    }
}

/// Lines of a trace that are not empty, with their numbers from 1.
struct Lines<'a> {
    from: &'a mut dyn BufRead,
    text: Vec<u8>,
    line: usize,
}

impl Lines<'_> {
    /// Returns the next line. Of a long line, only the beginning is kept, which is no valid row.
    fn next(&mut self) -> Result<Option<(&str, usize)>, TraceError> {
        loop {
            self.text.clear();
            let read = (&mut *self.from).take(LONGEST).read_until(b'\n', &mut self.text)?;
            if read == 0 {
                return Ok(None);
            }
            if read as u64 == LONGEST && self.text.last() != Some(&b'\n') {
                self.from.skip_until(b'\n')?;
            }
            self.line += 1;
            if !self.text.trim_ascii().is_empty() {
                break;
            }
        }
        let line = self.line;
        let text = str::from_utf8(&self.text).map_err(|_| TraceError::NotText { line })?;
        Ok(Some((text.trim(), line)))
    }
}

/// Parses a row. Returns its time in seconds, on the clock of the trace, and the request.
fn row(text: &str, line: usize, azure: bool) -> Result<(f64, Row), TraceError> {
    let fields: Vec<&str> = text.split(',').map(str::trim).collect();
    let wanted = if azure { 3 } else { 4 };
    if fields.len() != wanted || fields.iter().any(|field| field.is_empty()) {
        return Err(TraceError::Hole { line, found: text.chars().take(80).collect(), wanted });
    }
    let value = |field, found: &str, wanted| TraceError::Value {
        line,
        field,
        found: found.chars().take(80).collect(),
        wanted,
    };
    let tokens = |field, found: &str| {
        let number = found.parse::<u32>().ok().filter(|number| *number <= MOST_TOKENS);
        number.ok_or_else(|| value(field, found, "a number of tokens, from 0 to 16777216"))
    };
    let (context, generated) = (fields[wanted - 2], fields[wanted - 1]);
    let row = Row {
        at: Duration::ZERO,
        worker: (!azure).then(|| fields[1].to_owned()),
        context: tokens("context_tokens", context)?,
        generated: tokens("generated_tokens", generated)?,
    };
    let at =
        if azure { timestamp(fields[0]) } else { fields[0].parse().ok().filter(|at: &f64| at.is_finite()) };
    let time = if azure { "a time as 2023-11-16 18:17:03.9799600" } else { "seconds" };
    let at = at.filter(|at| at.abs() < 1e12).ok_or_else(|| value("time", fields[0], time))?;
    Ok((at, row))
}

/// Parses `2023-11-16 18:17:03.9799600` into seconds since 1970; a suffix (`Z`, `+00:00`) is ignored.
fn timestamp(text: &str) -> Option<f64> {
    let (date, time) = text.split_once([' ', 'T'])?;
    let time = time.trim_end_matches("+00:00").trim_end_matches('Z');
    let mut date = date.splitn(3, '-').map(str::parse::<i64>);
    let (year, month, day) = (date.next()?.ok()?, date.next()?.ok()?, date.next()?.ok()?);
    let mut time = time.splitn(3, ':').map(str::parse::<f64>);
    let (hour, minute, second) = (time.next()?.ok()?, time.next()?.ok()?, time.next()?.ok()?);
    if !(0..100_000).contains(&year) || !(1..=12).contains(&month) || !(1..=31).contains(&day) {
        return None;
    }
    // Days of the civil calendar, from March on: Howard Hinnant, chrono-compatible low-level date algorithms.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = year * 365 + year / 4 - year / 100 + year / 400 + (month * 153 + 2) / 5 + day - 719_469;
    #[allow(clippy::cast_precision_loss)] // days of 100,000 years
    let days = days as f64;
    Some(days * 86_400.0 + hour * 3_600.0 + minute * 60.0 + second)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_same_requests_and_zipf_prefers_the_first() {
        let trace =
            Trace::parse("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374,44\n").unwrap();
        let load = Load {
            rate: Some(10.0),
            duration: Some(Duration::from_secs(300)),
            zipf: Some(1.0),
            lengths: 0.5,
        };
        let requests = load.draw(&trace, &["a", "b", "c"], 7).unwrap();
        assert_eq!(requests, load.draw(&trace, &["a", "b", "c"], 7).unwrap());
        assert_ne!(requests, load.draw(&trace, &["a", "b", "c"], 8).unwrap());
        assert!((2_700..3_300).contains(&requests.len()), "{}", requests.len());
        let of = |worker| requests.iter().filter(|request| request.worker == worker).count();
        assert!(of(0) > of(1) && of(1) > of(2) && of(2) > 400);
        assert_eq!((requests[0].context, requests[0].generated), (187, 22));
    }
}

#[cfg(test)]
mod trace_tests {
    use super::*;

    #[test]
    fn both_trace_formats_are_read() {
        let own = Trace::parse("t_s,worker,context_tokens,generated_tokens\n5,a,10,2\n7.5,b,1,0\n").unwrap();
        assert_eq!(
            (own.rows[1].at, own.rows[1].worker.as_deref()),
            (Duration::from_millis(2_500), Some("b"))
        );
        let azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-02-28 23:59:59.5,374,44\n2024-03-01 00:00:00.5,1,1\n";
        let azure = Trace::parse(azure).unwrap();
        assert_eq!(azure.span(), Duration::from_secs(86_401));
        assert_eq!(timestamp("1970-01-01 00:00:01"), Some(1.0));
    }

    #[test]
    fn errors_name_the_line_and_the_reason() {
        let own = |rows: &str| Trace::parse(&format!("{OWN}\n{rows}")).unwrap_err();
        assert!(matches!(Trace::parse("\n").unwrap_err(), TraceError::Empty));
        assert!(matches!(own(""), TraceError::Empty));
        assert!(matches!(Trace::parse("a,b\n").unwrap_err(), TraceError::Header { .. }));
        assert!(matches!(own("1,a,5\n"), TraceError::Hole { line: 2, wanted: 4, .. }));
        assert!(matches!(own("1,a,,5\n"), TraceError::Hole { line: 2, .. }));
        assert!(matches!(own("1,a,5,5\nx,a,5,5\n"), TraceError::Value { line: 3, field: "time", .. }));
        assert!(matches!(own("1,a,-5,5\n"), TraceError::Value { field: "context_tokens", .. }));
        assert!(matches!(own("2,a,5,5\n1,a,5,5\n"), TraceError::Unsorted { line: 3, .. }));
        let azure = |row: &str| Trace::parse(&format!("{AZURE}\n{row}")).unwrap_err();
        assert!(matches!(azure("yesterday,5,5\n"), TraceError::Value { field: "time", .. }));
    }
}
