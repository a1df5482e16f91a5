//! A program that is about to run: where it is, and whether a library can be preloaded into it, as far as its file shows.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use glake_runtime::config::Environment;

/// Bits of a mode: the program runs as its file's owner, or group.
const AS_OWNER: u32 = 0o4000;
const AS_GROUP: u32 = 0o2000;

/// The size of an ELF header of 64 bits, and in it the class, and where the program headers are, how long each is, how many.
const HEADER: usize = 64;
const CLASS: usize = 4;
const TABLE: usize = 0x20;
const ENTRY: usize = 0x36;
const ENTRIES: usize = 0x38;
const CLASS_64: u8 = 2;
/// The type of the program header that names the loader.
const INTERPRETER: u32 = 3;

/// The file that a name stands for: itself where it is a path, else the first in `PATH`.
pub(super) fn found(name: &OsStr, environment: &Environment) -> Option<PathBuf> {
    if name.as_bytes().contains(&b'/') {
        return Some(PathBuf::from(name));
    }
    let folders = environment.get("PATH")?;
    std::env::split_paths(folders).map(|folder| folder.join(name)).find(|path| path.is_file())
}

/// Why nothing can be preloaded into a program; `None` where it can, or the file does not tell.
pub(super) fn refusal(path: &Path) -> Option<String> {
    let file = File::open(path).ok()?;
    let metadata = file.metadata().ok()?;
    let (user, group) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let why = if changes_owner(metadata.mode(), (metadata.uid(), metadata.gid()), (user, group)) {
        "runs as another user or group, so that the system preloads nothing into it"
    } else {
        match linking(&file).ok()? {
            Linking::Static => "is linked statically, so that nothing can be preloaded into it",
            Linking::OtherClass => {
                "is no program of 64 bits, so that the library cannot be preloaded into it"
            }
            Linking::Dynamic | Linking::Unknown => return None,
        }
    };
    Some(format!("{} {why}: its copies take one path each", path.display()))
}

/// Whether the program would not run as who starts it.
fn changes_owner(mode: u32, owner: (u32, u32), ours: (u32, u32)) -> bool {
    (mode & AS_OWNER != 0 && owner.0 != ours.0) || (mode & AS_GROUP != 0 && owner.1 != ours.1)
}

/// Linking of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Linking {
    /// With a loader, which preloads.
    Dynamic,
    /// Without a dynamic loader.
    Static,
    /// For another kind of processor mode.
    OtherClass,
    /// Any other file, such as a script.
    Unknown,
}

fn linking(file: &File) -> io::Result<Linking> {
    let mut header = [0; HEADER];
    file.read_exact_at(&mut header, 0)?;
    if !header.starts_with(b"\x7fELF") {
        return Ok(Linking::Unknown);
    }
    if header[CLASS] != CLASS_64 {
        return Ok(Linking::OtherClass);
    }
    let half = |at: usize| u64::from(u16::from_le_bytes([header[at], header[at + 1]]));
    let table = header[TABLE..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    for entry in 0..half(ENTRIES) {
        let mut kind = [0; 4];
        file.read_exact_at(&mut kind, table.saturating_add(entry * half(ENTRY)))?;
        if u32::from_le_bytes(kind) == INTERPRETER {
            return Ok(Linking::Dynamic);
        }
    }
    Ok(Linking::Static)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(name: &str, bytes: &[u8]) -> PathBuf {
        let path = std::env::temp_dir().join(format!("glake-program-{}-{name}", std::process::id()));
        std::fs::write(&path, bytes).unwrap();
        path
    }

    /// An ELF file of nothing but headers of these kinds.
    fn elf(class: u8, kinds: &[u32]) -> Vec<u8> {
        let mut bytes = vec![0; HEADER];
        bytes[..4].copy_from_slice(b"\x7fELF");
        bytes[CLASS] = class;
        bytes[TABLE] = 64;
        bytes[ENTRY] = 56;
        bytes[ENTRIES] = u8::try_from(kinds.len()).unwrap();
        for kind in kinds {
            bytes.extend(kind.to_le_bytes());
            bytes.resize(bytes.len() + 52, 0);
        }
        bytes
    }

    #[test]
    fn programs_say_how_they_are_linked() {
        for (name, bytes, says) in [
            ("dynamic", elf(CLASS_64, &[6, 3, 1]), None),
            ("static", elf(CLASS_64, &[1, 1]), Some("is linked statically")),
            ("narrow", elf(1, &[1, 3]), Some("no program of 64 bits")),
            ("cut-off", elf(CLASS_64, &[1, 1])[..70].to_vec(), None),
            ("script", [b"#!/bin/sh\n".to_vec(), vec![b'#'; 100]].concat(), None),
            ("empty", Vec::new(), None),
        ] {
            let path = written(name, &bytes);
            let refusal = refusal(&path);
            std::fs::remove_file(&path).unwrap();
            match says {
                Some(says) => {
                    assert!(refusal.as_ref().is_some_and(|why| why.contains(says)), "{name}: {refusal:?}")
                }
                None => assert_eq!(refusal, None, "{name}"),
            }
        }
        assert_eq!(refusal(Path::new("/no/such/program")), None);
        assert_eq!(refusal(&std::env::current_exe().unwrap()), None);
    }

    #[test]
    fn a_program_that_changes_its_owner_is_one_of_somebody_else() {
        assert!(changes_owner(0o104_755, (0, 0), (1000, 1000)));
        assert!(changes_owner(0o102_755, (1000, 5), (1000, 1000)));
        assert!(!changes_owner(0o104_755, (0, 0), (0, 0)));
        assert!(!changes_owner(0o100_755, (0, 0), (1000, 1000)));
    }

    #[test]
    fn a_program_is_found_as_the_system_finds_it() {
        let environment: Environment = [("PATH", "/no/such/folder:/bin")].into_iter().collect();
        assert_eq!(found(OsStr::new("sh"), &environment), Some(PathBuf::from("/bin/sh")));
        assert_eq!(found(OsStr::new("./x"), &environment), Some(PathBuf::from("./x")));
        assert_eq!(found(OsStr::new("no-such-program"), &environment), None);
    }
}
