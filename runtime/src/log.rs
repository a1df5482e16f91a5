//! Log output on standard error.

use std::io::{self, IsTerminal as _};

use tracing_subscriber::EnvFilter;

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
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr);
    // A report of a failed write would panic, since it goes to the same closed terminal or pipe.
    let _ = log.with_ansi(io::stderr().is_terminal()).log_internal_errors(false).try_init();
    Ok(())
}
