//! Why there is no picture.

use std::path::PathBuf;

/// Why there is no picture; nothing was written.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum PlotError {
    /// Only SVG is drawn: name another file.
    #[error(
        "{}: only SVG is drawn (a PNG would need a font of this machine): name a file that ends in .svg, and \
         convert it with rsvg-convert or a browser", path.display()
    )]
    NotSvg {
        /// What was asked for.
        path: PathBuf,
    },
    /// The file cannot be written there: name another.
    #[error("{}: cannot be written: {source}", path.display())]
    Unwritable {
        /// Where.
        path: PathBuf,
        /// The operating system's answer.
        #[source]
        source: std::io::Error,
    },
    /// There is nothing to draw.
    #[error("nothing to plot: no run has anything to show")]
    Empty,
    /// The figures cannot be drawn.
    #[error("the plot cannot be drawn: {reason}")]
    Undrawable {
        /// What the drawing library says.
        reason: String,
    },
}
