//! `glake top` from outside: with an agent that ends, without one, on a terminal and without one.

#![allow(clippy::unwrap_used)] // also in the functions that tests call

use std::fs::{File, OpenOptions};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcgetattr, tcsetwinsize};
use serde_json::Value;

use super::supervise::{Agent, LONG, command, file};

/// Follows a worker with its agent, goes on without it, and follows the next agent.
#[test]
fn top_goes_on_without_its_agent_and_finds_the_next_one() {
    let mut agent = Agent::start(&file(""));
    let row = agent.until("chat", |row| row["state"] == "idle");
    let folder = agent.folder.path().to_owned();
    let mut top = command(&folder, &["top", "--json", "--interval", "0.1"]);
    let mut top = top.stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(top.stdout.take().unwrap()).lines().map_while(Result::ok);
    let mut values = lines.map(|line| serde_json::from_str::<Value>(&line).unwrap());
    let end = Instant::now() + LONG;
    let mut until = |what: &str, so: &dyn Fn(&Value) -> bool| {
        let seen = values.find(|value| so(value) || Instant::now() > end);
        let seen = seen.unwrap_or_else(|| panic!("{what}: top has ended"));
        assert!(so(&seen), "{what}: {seen}");
        seen
    };
    let seen = until("the agent's snapshots", &|value| value["workers"][0]["row"]["worker"] == "chat");
    let held = seen["workers"][0]["gpus"][0]["resident"].as_u64().unwrap();
    assert!(held >= 32 << 20, "{seen}");
    agent.child.kill().unwrap();
    agent.child.wait().unwrap();
    // The worker's own page says the same as its agent did.
    let own = |value: &Value| {
        let processes = value["processes"].as_array().cloned().unwrap_or_default();
        processes.into_iter().find(|process| process["pid"] == row["pid"])
    };
    let says = |value: &Value| own(value)?["gpus"][0]["reserved"].as_u64();
    until("its page", &|value| value["source"] == "pages" && says(value) == Some(held));
    // The meter of the shared GPUs says no less.
    let seen = until("the meter", &|value| value["gpus"][0]["used"].as_u64() >= Some(held));
    assert_eq!(seen["source"], "pages");
    agent.child = Agent::serve(&folder);
    until("the next agent's snapshots", &|value| value["workers"][0]["row"]["pid"] == row["pid"]);
    top.kill().unwrap();
    top.wait().unwrap();
    let once = agent.ask(&["top", "--once"]);
    let text = String::from_utf8(once.stdout).unwrap();
    assert!(once.status.success() && !text.contains('\u{1b}') && text.contains("chat"), "{text}");
    agent.ask(&["stop", "chat"]);
}

#[test]
fn without_an_agent_a_frame_is_printed_and_wrong_arguments_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    for words in [&["top", "--once"][..], &["top"]] {
        let output = command(folder.path(), words).output().unwrap();
        let (text, error) =
            (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
        assert!(output.status.success() && text.starts_with("glake top"), "{text} {error}");
        assert_eq!(error.contains("this is no terminal"), words.len() == 1, "{error}");
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    }
    for interval in ["0", "-1", "nan", "1e9", "x"] {
        let output = command(folder.path(), &["top", "--interval", interval]).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{interval}");
    }
    let socket = folder.path().join("nobody.sock");
    let output =
        command(folder.path(), &["top", "--once", "--socket", socket.to_str().unwrap()]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && text.contains("No agent answers"), "{text}");
}

/// `glake top` on a terminal of its own, without an agent.
struct OnTerminal {
    child: Child,
    /// The side of the terminal that shows.
    master: File,
    slave: File,
}

impl OnTerminal {
    fn start(folder: &Path, size: (u16, u16)) -> OnTerminal {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap();
        let slave = OpenOptions::new().read(true).write(true).open(name.to_str().unwrap()).unwrap();
        let (ws_col, ws_row) = size;
        tcsetwinsize(&slave, Winsize { ws_row, ws_col, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
        let [input, output] = [(); 2].map(|()| Stdio::from(slave.try_clone().unwrap()));
        let mut top: Command = command(folder, &["top", "--interval", "0.1"]);
        top.env("TERM", "xterm-256color").stdin(input).stdout(output).stderr(Stdio::null());
        // A job of its own, as a shell starts it.
        top.process_group(0);
        OnTerminal { child: top.spawn().unwrap(), master: File::from(master), slave }
    }

    /// Reads what is shown until it contains a text.
    fn until(&mut self, text: &str) -> String {
        let (mut shown, end) = (String::new(), Instant::now() + LONG);
        let mut bytes = [0; 4096];
        while !shown.contains(text) {
            assert!(Instant::now() < end, "{text}: {shown}");
            let ended = self.child.try_wait().unwrap();
            assert!(ended.is_none() || text == LEAVES, "{text}: {ended:?} {shown}");
            let mut ready = [rustix::event::PollFd::new(&self.master, rustix::event::PollFlags::IN)];
            let most = rustix::event::Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
            if rustix::event::poll(&mut ready, Some(&most)).unwrap() == 0 {
                continue;
            }
            let count = self.master.read(&mut bytes).unwrap();
            shown += &String::from_utf8_lossy(&bytes[..count]);
        }
        shown
    }

    fn is_raw(&self) -> bool {
        use rustix::termios::LocalModes;
        !tcgetattr(&self.slave).unwrap().local_modes.contains(LocalModes::ICANON)
    }
}

impl Drop for OnTerminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const LEAVES: &str = "\u{1b}[?1049l";

#[derive(Clone, Copy, Debug)]
enum End {
    Key(u8),
    Signal(Signal),
}

/// Whatever ends it, the terminal is as it was.
#[test]
fn the_terminal_is_restored_at_each_end() {
    let folder = tempfile::tempdir().unwrap();
    let signals = [Signal::TERM, Signal::HUP, Signal::INT].map(End::Signal);
    let ends = [End::Key(b'q'), End::Key(3)].into_iter().chain(signals);
    for end in ends {
        let mut top = OnTerminal::start(folder.path(), (80, 24));
        top.until("GPU memory");
        assert!(top.is_raw(), "{end:?}");
        match end {
            End::Key(key) => top.master.write_all(&[key]).unwrap(),
            End::Signal(signal) => kill_process(Pid::from_child(&top.child), signal).unwrap(),
        }
        top.until(LEAVES);
        let status = top.child.wait().unwrap();
        assert!(status.success(), "{end:?}: {status:?} {:?}", status.signal());
        assert!(!top.is_raw(), "{end:?}");
    }
}

/// A terminal that is closed, with the signal that a session's first program gets then, and without.
#[test]
fn top_ends_with_its_terminal() {
    let folder = tempfile::tempdir().unwrap();
    for has_signal in [true, false] {
        let mut top = OnTerminal::start(folder.path(), (80, 24));
        top.until("GPU memory");
        // Between two frames it waits for keys.
        std::thread::sleep(Duration::from_millis(30));
        top.master = File::open("/dev/null").unwrap();
        if has_signal {
            kill_process(Pid::from_child(&top.child), Signal::HUP).unwrap();
        }
        let end = Instant::now() + LONG;
        while top.child.try_wait().unwrap().is_none() {
            assert!(Instant::now() < end, "its terminal is gone, and it goes on");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Ctrl-Z and SIGTSTP give the terminal back, and `fg` takes it again; and a small screen is drawn after it has changed its size.
#[test]
fn the_terminal_is_given_back_while_top_is_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let mut top = OnTerminal::start(folder.path(), (80, 24));
    top.until("GPU memory");
    let pid = Pid::from_child(&top.child);
    for by_key in [true, false] {
        match by_key {
            true => top.master.write_all(b"\x1a").unwrap(),
            false => kill_process(pid, Signal::TSTP).unwrap(),
        }
        top.until(LEAVES);
        let status = waitpid(Some(pid), WaitOptions::UNTRACED).unwrap().unwrap().1;
        assert!(status.stopped(), "{status:?}");
        assert!(!top.is_raw());
        kill_process(pid, Signal::CONT).unwrap();
        top.until("GPU memory");
        assert!(top.is_raw());
    }
    tcsetwinsize(&top.slave, Winsize { ws_row: 5, ws_col: 20, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
    kill_process(pid, Signal::WINCH).unwrap();
    // A key in the very moment of the change is seen with the next key.
    std::thread::sleep(Duration::from_millis(300));
    top.master.write_all(b"q").unwrap();
    top.until(LEAVES);
    assert!(top.child.wait().unwrap().success());
}
