//! A bar on standard error while work takes long; nothing where that is no terminal.

use std::io::IsTerminal as _;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Progress bar of long work.
pub(super) struct Progress {
    bar: ProgressBar,
}

impl Progress {
    /// Work of `steps` steps.
    pub(super) fn new(steps: u64) -> Self {
        let bar = if std::io::stderr().is_terminal() {
            ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::stderr_with_hz(10))
        } else {
            ProgressBar::hidden()
        };
        if let Ok(style) = ProgressStyle::with_template(
            "{msg:32} {bar:30.cyan/dim} {percent:>3} %  {elapsed} elapsed, {eta} left",
        ) {
            bar.set_style(style.progress_chars("━━─"));
        }
        Progress { bar }
    }

    /// Sets the message beside the bar.
    pub(super) fn say(&self, what: impl Into<String>) {
        self.bar.set_message(what.into());
    }

    /// Sets the number of completed steps.
    pub(super) fn reach(&self, step: u64) {
        self.bar.set_position(step);
    }

    /// Takes the bar away, for a line in its place.
    pub(super) fn pause<T>(&self, write: impl FnOnce() -> T) -> T {
        self.bar.suspend(write)
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
