//! A program with other rights than whoever starts it takes no agent from its environment.

#![allow(clippy::unwrap_used)] // also in the functions that tests call

use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

use glake_device::Stream;
use glake_runtime::config::{Environment, Sources};
use glake_runtime::process::Process;
use glake_units::Bytes;

const FOLDER: &str = "GLAKE_TEST_RIGHTS_FOLDER";
/// Of nobody.
const OTHER: u32 = 65_534;

/// Not a test: a program whose first memory would have it join.
#[test]
#[ignore = "the process that the test beside it starts"]
fn program() {
    let Some(folder) = std::env::var_os(FOLDER).map(PathBuf::from) else { return };
    println!("\nuser {}", rustix::process::geteuid().as_raw());
    glake_runtime::log::start("info").unwrap();
    let sources = Sources { environment: Environment::of_process(), ..Sources::default() };
    let process = Process::start(sources.load().unwrap()).unwrap();
    process.malloc(0, Bytes::mib(2), Stream(0)).unwrap();
    let leased = process.leases().view(0).unwrap().leased;
    println!("\nin {}, leased {leased:?}", folder.display());
}

fn ran(program: &Path, folder: &Path) -> String {
    let mut command = Command::new(program);
    command.args(["--exact", "rights::program", "--ignored", "--nocapture"]).env_clear();
    command.env(FOLDER, folder).env("GLAKE_AGENT", folder.join("no-such/agent.sock"));
    let output = command
        .env("GLAKE_DEVICE", format!("sim:h200x4@{}", folder.join("gpus").display()))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(output.status.success() && said.contains("leased None"), "{said}");
    said
}

#[test]
fn a_set_uid_program_does_not_join_by_itself() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: only root makes a program another user's");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let mode = |path: &Path, mode| std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    mode(folder.path(), 0o755);
    let program = folder.path().join("program");
    std::fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    let gpus = folder.path().join("gpus");
    std::fs::create_dir(&gpus).unwrap();
    let said = ran(&program, folder.path());
    assert!(!said.contains("set-uid") && said.contains("no agent: this process goes on"), "{said}");
    std::fs::remove_dir_all(&gpus).unwrap();
    std::fs::create_dir(&gpus).unwrap();
    chown(&program, Some(OTHER), Some(OTHER)).unwrap();
    chown(&gpus, Some(OTHER), Some(OTHER)).unwrap();
    mode(&program, 0o4755);
    let said = ran(&program, folder.path());
    if said.contains("\nuser 0\n") {
        eprintln!("SKIPPED: the file system of {} ignores set-uid", folder.path().display());
        return;
    }
    assert!(said.contains("the agent is not joined") && said.contains("set-uid"), "{said}");
}
