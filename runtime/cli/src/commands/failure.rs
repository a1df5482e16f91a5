//! Failures of commands and their exit codes.

use std::error::Error as _;
use std::fmt::Display;
use std::io;
use std::num::{IntErrorKind, ParseIntError};
use std::process::ExitCode;

use clap::error::ErrorKind;

use glake_runtime::backend::BackendError;
use glake_runtime::config::ConfigError;

use super::output::note;

/// Why a command did not do what was asked, in one line, and its exit code.
#[derive(Debug)]
pub enum Failure {
    /// Invalid arguments, configuration or input. Exit code 2.
    Usage(String),
    /// Failure of a command. Exit code 1.
    Failed(String),
    /// There is no room for what was asked, and it was not begun: all is as it was. Exit code 3.
    NoRoom(String),
    /// Process that cannot be changed, or not by this caller, and was not touched. Exit code 4.
    Untouched(String),
    /// Process that is lost permanently. Exit code 5.
    Lost(String),
    /// The results say what went wrong already. Exit code 1, and not a word more.
    Told,
    /// Reader that closed the output, which is not a failure. Exit code 0.
    ReaderGone,
}

impl Failure {
    /// Wrong arguments or input.
    pub fn usage(message: impl Display) -> Self {
        Failure::Usage(message.to_string())
    }

    /// Creates a [`Failure::Failed`] from a message.
    pub fn failed(message: impl Display) -> Self {
        Failure::Failed(message.to_string())
    }

    /// Creates a [`Failure::Untouched`] from a message.
    pub(super) fn untouched(message: impl Display) -> Self {
        Failure::Untouched(message.to_string())
    }

    /// The same, and what it is about.
    pub(super) fn about(self, what: &str) -> Self {
        match self {
            Failure::Usage(message) => Failure::Usage(format!("{what}: {message}")),
            Failure::Failed(message) => Failure::Failed(format!("{what}: {message}")),
            failure => failure,
        }
    }

    /// Returns the message of the failure.
    pub(super) fn message(&self) -> &str {
        match self {
            Failure::Usage(message)
            | Failure::Failed(message)
            | Failure::NoRoom(message)
            | Failure::Untouched(message)
            | Failure::Lost(message) => message,
            Failure::Told | Failure::ReaderGone => "",
        }
    }

    /// Writes its line to standard error.
    pub(super) fn report(self) -> ExitCode {
        match self {
            Failure::Usage(message) => say(&message, 2),
            Failure::Failed(message) => say(&message, 1),
            Failure::NoRoom(message) => say(&message, glake_agent::NO_ROOM),
            Failure::Untouched(message) => say(&message, glake_agent::UNTOUCHED),
            Failure::Lost(message) => say(&message, glake_agent::LOST),
            Failure::Told => ExitCode::from(1),
            Failure::ReaderGone => ExitCode::SUCCESS,
        }
    }
}

fn say(message: &str, code: u8) -> ExitCode {
    note(one_line(message));
    ExitCode::from(code)
}

impl From<ConfigError> for Failure {
    fn from(error: ConfigError) -> Self {
        Failure::usage(error)
    }
}

/// A model that does not exist is a mistake of who named it; a driver that does not answer is not.
impl From<BackendError> for Failure {
    fn from(error: BackendError) -> Self {
        match error {
            BackendError::Topology(_) => Failure::usage(error),
            _ => Failure::failed(error),
        }
    }
}

/// Standard output could not be written.
impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Failure::ReaderGone,
            _ => Failure::Failed(format!("cannot write the result: {error}")),
        }
    }
}

/// Converts an outcome of the argument parser: help and version are results, all else is wrong usage.
pub(super) fn from_clap(error: &clap::Error) -> Result<(), Failure> {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => Ok(error.print()?),
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let _ = error.print();
            Err(Failure::Usage("no command given: see above".to_owned()))
        }
        _ => {
            let text = error.render().to_string();
            let text = text.split("\n\nUsage:").next().unwrap_or_default();
            let text = text.split("\n\nFor more information").next().unwrap_or_default();
            let text = text.trim_start_matches("error: ").replace("\n\n", "; ");
            let text = match error.source().and_then(|source| source.downcast_ref::<ParseIntError>()) {
                Some(source) => text.replace(&source.to_string(), whole_number(source)),
                None => text,
            };
            Err(Failure::Usage(format!("{}; try --help", one_line(&text))))
        }
    }
}

/// Explains why a value is no whole number: no option takes numbers below zero.
fn whole_number(error: &ParseIntError) -> &'static str {
    match error.kind() {
        IntErrorKind::PosOverflow | IntErrorKind::NegOverflow => "it is too large",
        _ => "it is a whole number, 0 or more",
    }
}

/// Several lines become one.
fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
