//! Log output on standard error.
//!
//! Invariant: text of other programs (errors, names) is escaped here, in all fields: a log line is one line, and no terminal acts on it.

use std::fmt;
use std::io::{self, IsTerminal as _, Write as _};

use glake_units::printable;
use tracing::field::Field;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::field::MakeExt as _;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::FormatFields;
use tracing_subscriber::fmt::format::{Writer, debug_fn};

/// Targets of all log events, which the parts of a filter name, in alphabetical order.
pub const TARGETS: [&str; 12] = [
    "glake::agent",
    "glake::completion",
    "glake::copies",
    "glake::ffi",
    "glake::file",
    "glake::host",
    "glake::offload",
    "glake::peers",
    "glake::regions",
    "glake::share",
    "glake::stitch",
    "glake::transfer",
];

/// Error of an invalid log filter.
#[derive(Debug, thiserror::Error)]
#[error("log filter {filter:?}: {source}; write a tracing filter such as info or warn,glake::transfer=debug")]
pub struct LogError {
    filter: String,
    #[source]
    source: tracing_subscriber::filter::ParseError,
}

/// Sends the process's logs to standard error unless another subscriber is installed. Warns there of parts of the filter that no event
/// matches: the filter may hide warnings that are logged.
///
/// # Errors
/// The filter cannot be parsed.
pub fn start(filter: &str) -> Result<(), LogError> {
    let parsed =
        EnvFilter::try_new(filter).map_err(|source| LogError { filter: filter.to_owned(), source })?;
    let log = tracing_subscriber::fmt().with_env_filter(parsed).with_writer(io::stderr).fmt_fields(fields());
    // A report of a failed write would panic, since it goes to the same closed terminal or pipe.
    let log = log.with_ansi(io::stderr().is_terminal()).log_internal_errors(false);
    if log.try_init().is_ok()
        && let Some(warning) = warning(filter)
    {
        let _ = writeln!(io::stderr(), "{warning}");
    }
    Ok(())
}

/// Returns the warning about the parts of a filter that no event matches.
fn warning(filter: &str) -> Option<String> {
    let unmatched: Vec<&str> = filter.split(',').map(str::trim).filter(|part| !is_matched(part)).collect();
    (!unmatched.is_empty()).then(|| {
        format!(
            "glake: log filter {filter:?} (GLAKE_LOG, log.filter, --log): no event matches {}; a part names one of {}, or is a level for all",
            unmatched.join(" and "),
            TARGETS.join(", ")
        )
    })
}

/// Returns whether an event of this program can match a part of a filter. A target matches all targets that begin with it. Spans, which a
/// part names in brackets, do not exist.
fn is_matched(part: &str) -> bool {
    if part.is_empty() || part.parse::<LevelFilter>().is_ok() {
        return true;
    }
    let target = part.split('=').next().unwrap_or_default();
    !part.contains('[') && TARGETS.iter().any(|known| known.starts_with(target))
}

/// Returns the format of fields: escaped, and else as `tracing_subscriber` has it.
fn fields() -> impl for<'w> FormatFields<'w> + 'static {
    let write = |writer: &mut Writer<'_>, field: &Field, value: &dyn fmt::Debug| {
        let text = format!("{value:?}");
        match (field.name(), writer.has_ansi_escapes()) {
            ("message", _) => write!(writer, "{}", printable(&text)),
            (name, true) => {
                write!(writer, "\x1b[3m{name}\x1b[0m\x1b[2m=\x1b[0m{}", printable(&text))
            }
            (name, false) => write!(writer, "{name}={}", printable(&text)),
        }
    };
    debug_fn(write).delimited(" ")
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn text_of_others_is_one_line_that_no_terminal_acts_on() {
        let lines = Lines::default();
        let into = lines.clone();
        let log = tracing_subscriber::fmt().with_writer(move || into.clone()).with_ansi(false);
        let log = log.without_time().fmt_fields(fields()).finish();
        let foreign = "chat\u{1b}[2J\n\u{202e}0";
        tracing::subscriber::with_default(log, || {
            let error = io::Error::other(foreign);
            tracing::info!(target: "glake::agent", worker = %foreign, why = foreign, %error, count = 3, "it says {foreign}");
            let span = tracing::info_span!(target: "glake::agent", "of", worker = %foreign);
            span.in_scope(|| tracing::warn!(target: "glake::agent", "inside"));
        });
        let text = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
        let escaped = r"chat\u{1b}[2J\n\u{202e}0";
        let found: Vec<&str> = text.lines().collect();
        assert_eq!(found.len(), 2, "{text}");
        let line = format!(
            " INFO glake::agent: it says {escaped} worker={escaped} why=\"{escaped}\" error={escaped} count=3"
        );
        assert_eq!(found[0], line);
        assert!(found[1].ends_with("inside") && found[1].contains(&format!("worker={escaped}")), "{text}");
        assert!(text.chars().all(|letter| letter == '\n' || !letter.is_control()), "{text}");
    }

    #[test]
    fn parts_that_match_nothing_are_named_with_the_targets_there_are() {
        for matched in
            ["", "warn", "off,glake::transfer=error", "glake=warn", "glake::re=2", "info, glake::host"]
        {
            assert_eq!(warning(matched), None, "{matched}");
        }
        for (filter, part) in [
            ("glake_tiers=warn", "glake_tiers=warn"),
            ("warn,glake::regoins=error", "glake::regoins=error"),
            ("glake::transfer::engine=4", "glake::transfer::engine=4"),
            ("glake::agent[serve]=warn", "glake::agent[serve]=warn"),
            ("glake::Stitch=5,info", "glake::Stitch=5"),
        ] {
            let told = warning(filter).unwrap();
            assert!(told.contains(&format!("no event matches {part}; ")), "{told}");
            assert!(told.contains("glake::agent, glake::completion, "), "{told}");
        }
    }
}
