//! Log output on standard error.

use std::io::{self, IsTerminal as _, Write as _};

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

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
    let log = tracing_subscriber::fmt().with_env_filter(parsed).with_writer(io::stderr);
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

#[cfg(test)]
mod tests {
    use super::*;

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
