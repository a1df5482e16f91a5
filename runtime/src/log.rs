//! Log output on standard error.
//!
//! Invariant: text of other programs (errors, names) is escaped here, in all fields: a log line is one line, and no terminal acts on it.

use std::fmt;
use std::io::{self, IsTerminal as _};

use glake_units::printable;
use tracing::field::Field;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::field::MakeExt as _;
use tracing_subscriber::fmt::FormatFields;
use tracing_subscriber::fmt::format::{Writer, debug_fn};

/// Error of an invalid log filter.
#[derive(Debug, thiserror::Error)]
#[error("log filter {filter:?}: {source}; write a tracing filter such as info or warn,glake::transfer=debug")]
pub struct LogError {
    filter: String,
    #[source]
    source: tracing_subscriber::filter::ParseError,
}

/// Sends the process's logs to standard error unless another subscriber is installed.
///
/// # Errors
/// The filter cannot be parsed.
pub fn start(filter: &str) -> Result<(), LogError> {
    let filter =
        EnvFilter::try_new(filter).map_err(|source| LogError { filter: filter.to_owned(), source })?;
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).fmt_fields(fields());
    let _ = log.with_ansi(io::stderr().is_terminal()).try_init();
    Ok(())
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
}
