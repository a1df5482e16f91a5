//! The libraries of this build, where a build or an installation puts them.

use std::path::{Path, PathBuf};

/// A library, that is asked for by its file's name.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Library {
    /// Name of the file.
    pub(crate) file: &'static str,
}

/// The pool and the engine.
pub(crate) const LIBGMLAKE: Library = Library { file: "libgmlake.so" };
/// Library preloaded into programs to take over their copies.
pub(crate) const PRELOAD: Library = Library { file: "libglake_preload.so" };

impl Library {
    /// The file that was named, or else the one beside the program, in `deps` there, or in `../lib`; an absolute path.
    ///
    /// # Errors
    /// Where it was looked for first.
    pub(crate) fn find(self, named: Option<&Path>) -> Result<PathBuf, PathBuf> {
        let program = std::env::current_exe().unwrap_or_default();
        let candidates = match named {
            Some(named) => vec![std::path::absolute(named).unwrap_or_else(|_| named.to_owned())],
            None => {
                let folder = program.parent().unwrap_or(Path::new(""));
                vec![
                    folder.join(self.file),
                    folder.join("deps").join(self.file),
                    folder.with_file_name("lib").join(self.file),
                ]
            }
        };
        let found = candidates.iter().find(|path| path.is_file()).cloned();
        found.ok_or_else(|| candidates.into_iter().next().unwrap_or_default())
    }
}
