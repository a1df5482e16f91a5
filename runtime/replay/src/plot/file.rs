//! Output file of a picture: written completely or not at all.

use std::fs;
use std::path::{Path, PathBuf};

use super::{Distribution, Panel, PlotError, distribution, draw};

/// Checks, before the work that the picture shows, that the file can be written.
///
/// # Errors
/// [`PlotError::NotSvg`], or [`PlotError::Unwritable`] if the folder does not exist.
pub fn check(path: &Path) -> Result<(), PlotError> {
    if path.extension().is_none_or(|ending| !ending.eq_ignore_ascii_case("svg")) {
        return Err(PlotError::NotSvg { path: path.to_owned() });
    }
    fs::metadata(folder(path)).map(|_| ()).map_err(|source| unwritable(path, source))
}

/// Draws the panels one below the other. The file gets its name only once it is complete.
///
/// # Errors
/// [`PlotError`]; an earlier file of that name stays as it is.
pub fn write(path: &Path, panels: &[Panel]) -> Result<(), PlotError> {
    check(path)?;
    save(path, &draw::svg(panels)?)
}

/// Draws distributions of times, all in one panel. The file appears as with [`write()`].
///
/// # Errors
/// [`PlotError`]; an earlier file of that name stays as it is.
pub fn write_distributions(path: &Path, title: &str, of: &[Distribution]) -> Result<(), PlotError> {
    check(path)?;
    save(path, &distribution::svg(title, of)?)
}

fn save(path: &Path, picture: &str) -> Result<(), PlotError> {
    let draft = draft(path);
    let written = fs::write(&draft, picture).and_then(|()| fs::rename(&draft, path));
    written.map_err(|source| {
        // The file may not exist.
        let _ = fs::remove_file(&draft);
        unwritable(path, source)
    })
}

fn folder(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn draft(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    folder(path).join(format!(".{name}.{}", std::process::id()))
}

fn unwritable(path: &Path, source: std::io::Error) -> PlotError {
    PlotError::Unwritable { path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use glake_units::Bytes;

    use super::super::Curve;
    use super::*;
    use crate::Point;

    fn panel() -> Panel {
        let points = (0..100)
            .map(|i| Point { at_us: i * 1000, active: Bytes::mib(i * i), reserved: Bytes::mib(i * 120) })
            .collect();
        let curve = |policy: &str| Curve {
            policy: policy.to_owned(),
            variant: String::new(),
            peak: Bytes::mib(99 * 120),
            points: Vec::clone(&points),
        };
        Panel {
            title: "a <trace> & more".to_owned(),
            begin_us: 0,
            curves: vec![curve("glake"), curve("caching")],
        }
    }

    fn scratch(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("glake-plot-{}-{name}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        folder
    }

    #[test]
    fn appears_whole() {
        let folder = scratch("whole");
        let path = folder.join("memory.svg");
        write(&path, &[panel(), panel()]).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.starts_with("<svg") && text.trim_end().ends_with("</svg>"));
        for needle in ["a &lt;trace&gt; &amp; more", "glake", "caching", "seconds", "GiB", "11.60 GiB"] {
            assert!(text.contains(needle), "{needle}");
        }
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn leaves_nothing_half_written() {
        let folder = scratch("half");
        let taken = folder.join("taken.svg");
        fs::create_dir(&taken).unwrap();
        assert!(matches!(write(&taken, &[panel()]), Err(PlotError::Unwritable { .. })));
        assert!(matches!(write(&folder.join("none.svg"), &[]), Err(PlotError::Empty)));
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn refuses_early_what_it_cannot_write() {
        assert!(matches!(check(Path::new("plot.png")), Err(PlotError::NotSvg { .. })));
        assert!(matches!(check(Path::new("plot")), Err(PlotError::NotSvg { .. })));
        assert!(matches!(check(Path::new("/no/such/folder/plot.svg")), Err(PlotError::Unwritable { .. })));
        assert!(check(Path::new("plot.SVG")).is_ok());
    }

    #[test]
    fn draws_what_has_no_extent() {
        let nothing = Panel { title: "empty".to_owned(), begin_us: 7, curves: Vec::new() };
        let mut instant = panel();
        instant.curves.iter_mut().for_each(|curve| {
            curve.points.truncate(1);
            curve.peak = Bytes::ZERO;
        });
        draw::svg(&[nothing, instant]).unwrap();
    }
}
