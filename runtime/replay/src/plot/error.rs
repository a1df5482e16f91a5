//! Errors of drawing a picture.

use std::path::PathBuf;

/// Reason why a picture was not drawn; no file was written.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum PlotError {
    /// The file name does not end in `.svg`: name another file.
    #[error(
        "{}: only SVG is drawn (a PNG would need a font of this machine): name a file that ends in .svg, and \
         convert it with rsvg-convert or a browser", path.display()
    )]
    NotSvg {
        /// Path given by the caller.
        path: PathBuf,
    },
    /// The file cannot be written there: name another.
    #[error("{}: cannot be written: {source}", path.display())]
    Unwritable {
        /// Path given by the caller.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        source: std::io::Error,
    },
    /// No data to draw.
    #[error("nothing to plot: no run has anything to show")]
    Empty,
    /// The figures cannot be drawn.
    #[error("the plot cannot be drawn: {reason}")]
    Undrawable {
        /// Error of the drawing library.
        reason: String,
    },
}
