//! `glake serve` as systemd starts it: the socket is systemd's, and it is told how far the agent is.

#![allow(clippy::unwrap_used)] // also in the functions that tests call

use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt as _;
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// However busy the machine is, it is done by then.
const LONG: Duration = Duration::from_secs(60);
/// A worker that says what it was started with.
const WORKER: &str = "[[worker]]\nname = \"w\"\nweights = \"1GiB\"\n\
                      command = [\"sh\", \"-c\", \"ls -l /proc/self/fd; env; echo all\"]\n";

struct Unit {
    folder: tempfile::TempDir,
    listener: UnixListener,
    told: UnixDatagram,
}

impl Unit {
    /// What systemd has made before anything runs.
    fn new() -> Unit {
        let folder = tempfile::tempdir().unwrap();
        let private = folder.path().join("glake");
        std::fs::DirBuilder::new().mode(0o700).create(&private).unwrap();
        std::fs::write(folder.path().join("node.toml"), format!("[node]\nbudget = \"4GiB\"\n{WORKER}"))
            .unwrap();
        let listener = UnixListener::bind(private.join("agent.sock")).unwrap();
        let told = UnixDatagram::bind(folder.path().join("notify")).unwrap();
        told.set_read_timeout(Some(LONG)).unwrap();
        Unit { folder, listener, told }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn glake(&self, script: &str, words: &[&str]) -> Command {
        let device = format!("sim:h200x4@{}", self.path("gpus").display());
        let mut command = Command::new("sh");
        command.args(["-c", script, "sh", env!("CARGO_BIN_EXE_glake"), "--device", &device]).args(words);
        command.env_clear().env("XDG_RUNTIME_DIR", self.folder.path()).env("PATH", "/usr/bin:/bin");
        command.env("LOGS_DIRECTORY", self.path("logs"));
        command
    }

    /// The socket is its descriptor 3; it is named as the process that shall have it.
    fn serve(&self) -> Child {
        let script = "LISTEN_PID=$$ LISTEN_FDS=1 exec \"$@\" 3<&0 </dev/null";
        let mut command = self.glake(script, &["serve", self.path("node.toml").to_str().unwrap()]);
        let socket = OwnedFd::from(self.listener.try_clone().unwrap());
        command.env("NOTIFY_SOCKET", self.path("notify")).stdin(socket);
        command.spawn().unwrap()
    }

    fn ask(&self, words: &[&str]) -> Output {
        self.glake("exec \"$@\"", words).stdin(Stdio::null()).output().unwrap()
    }

    /// What systemd is told next.
    fn hear(&self) -> String {
        let mut text = [0; 256];
        let length = self.told.recv(&mut text).unwrap();
        String::from_utf8_lossy(&text[..length]).trim().to_owned()
    }

    /// What the worker was started with, once it has said all.
    fn said(&self) -> String {
        let end = Instant::now() + LONG;
        loop {
            let log = std::fs::read_to_string(self.path("logs/w.log")).unwrap_or_default();
            if log.contains("\nall\n") {
                return log;
            }
            assert!(Instant::now() < end, "{log}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Ends it, whatever becomes of the test.
struct Served(Child);

impl Served {
    fn end(&mut self) -> std::process::ExitStatus {
        kill_process(Pid::from_child(&self.0), Signal::TERM).unwrap();
        self.0.wait().unwrap()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn it_serves_the_socket_of_systemd_and_says_how_far_it_is() {
    let unit = Unit::new();
    let socket = unit.path("glake/agent.sock");
    // Two lives: the socket is there before, between and after.
    for life in 0..2 {
        let early = std::thread::scope(|scope| {
            // Whoever connects before it runs is answered when it does.
            let early = scope.spawn(|| unit.ask(&["ps", "--json"]));
            std::thread::sleep(Duration::from_millis(100));
            let mut served = Served(unit.serve());
            assert_eq!(unit.hear(), "READY=1");
            let early = early.join().unwrap();
            assert!(unit.ask(&["ps"]).status.success());
            if life == 0 {
                // Nothing of it is its workers' to have.
                let said = unit.said();
                assert!(!said.contains("LISTEN_") && !said.contains("NOTIFY_SOCKET"), "{said}");
                assert!(!said.contains("socket:"), "{said}");
            }
            assert!(served.end().success());
            assert_eq!(unit.hear(), "STOPPING=1");
            early
        });
        assert!(early.status.success(), "{early:?}");
        assert!(is_socket(&socket), "it is systemd's to remove");
    }
}

#[test]
fn it_takes_no_socket_that_is_another_s() {
    let unit = Unit::new();
    // Of another process: variables that were left from one that had been started so.
    let script = "LISTEN_PID=1 LISTEN_FDS=1 exec \"$@\" 3<&0 </dev/null";
    let other = unit.path("other");
    std::fs::DirBuilder::new().mode(0o700).create(&other).unwrap();
    let own = other.join("agent.sock");
    let node = unit.path("node.toml");
    let words = ["serve", node.to_str().unwrap(), "--socket", own.to_str().unwrap()];
    let mut command = unit.glake(script, &words);
    command
        .env("NOTIFY_SOCKET", unit.path("notify"))
        .stdin(OwnedFd::from(unit.listener.try_clone().unwrap()));
    let mut served = Served(command.spawn().unwrap());
    assert_eq!(unit.hear(), "READY=1");
    assert!(unit.ask(&["ps", "--socket", own.to_str().unwrap()]).status.success());
    assert!(served.end().success());
    assert!(!own.exists(), "this one is its own to remove");
}

fn is_socket(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt as _;
    std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket())
}
