//! Disks that are full, and processes that may write little.

use std::process::{Command, Stdio};

use super::*;

/// A small file system in memory, unmounted at the end.
struct Mount(TempDir);

impl Mount {
    /// `None` where this process may not mount.
    fn new(size: &str) -> Option<Mount> {
        let root = tempfile::tempdir().unwrap();
        let options = format!("size={size},mode=0700");
        let mut mount = Command::new("mount");
        let mount = mount.args(["-t", "tmpfs", "-o", &options, "glake-test"]).arg(root.path());
        let done = mount.stderr(Stdio::null()).status().is_ok_and(|status| status.success());
        done.then_some(Mount(root))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0.path()).status();
    }
}

#[test]
fn a_full_disk_is_told_before_a_byte_is_written() {
    let Some(mount) = Mount::new("4m") else {
        return eprintln!("skipped: this process may not mount a tmpfs");
    };
    let tier = FileTier::open(mount.0.path()).unwrap();
    let first = sealed(&tier, &bytes(2 << 20));
    match tier.create(Bytes::mib(3)).unwrap_err() {
        FileError::DiskFull { wanted, free, .. } => {
            assert_eq!(wanted, Bytes::mib(3));
            assert!(free < Bytes::mib(2), "{free}");
        }
        other => panic!("{other}"),
    }
    assert_eq!(tier.statistics().files, 1, "nothing is left of it");
    assert_eq!(names(&tier).len(), 2);
    first.read(Bytes::ZERO, &mut vec![0; 2 << 20]).unwrap();
    drop(first);
    drop(sealed(&tier, &bytes(3 << 20)));
}

/// Set in the process that [`a_limit_of_the_process_is_told`] starts.
const LIMITED: &str = "GLAKE_TEST_LIMITED";

#[test]
fn a_limit_of_the_process_is_told() {
    if std::env::var_os(LIMITED).is_some() {
        let (_root, tier) = tier();
        let error = tier.create(Bytes::mib(1)).unwrap_err();
        assert!(matches!(error, FileError::TooLarge { limit, .. } if limit == Bytes::kib(512)), "{error}");
        assert_eq!(names(&tier).len(), 1);
        drop(sealed(&tier, &bytes(1000)));
        return;
    }
    let own = "file::tests::full::a_limit_of_the_process_is_told";
    let mut shell = Command::new("bash");
    shell
        .args(["-c", "ulimit -f 512; exec \"$0\" --exact \"$1\""])
        .arg(std::env::current_exe().unwrap())
        .arg(own);
    let output = shell.env(LIMITED, "1").output().unwrap();
    assert!(output.status.success(), "{output:?}");
}
