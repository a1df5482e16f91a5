//! What a process was started with: open files that are none of its business, and none of its workers'.

use std::env;
use std::fs;

/// Of a descriptor that no child has, in what `/proc` says of its flags.
const CLOSED_AT_EXEC: u32 = 0o2_000_000;
/// The first that systemd hands over.
const FIRST_SOCKET: i32 = 3;

/// Closes whatever this process was started with but its three streams and the sockets that systemd hands over, for the
/// workers that it starts would have it too: a pipe of whoever started it would stay open as long as they run.
///
/// It closes all that a child would have. So it is for the beginning of a program, before anything is opened but files
/// of the standard library, which no child has.
pub fn close_inherited() {
    let told = |name| env::var(name).ok().and_then(|text| text.parse::<i32>().ok());
    let first = told("LISTEN_FDS_FIRST_FD").unwrap_or(FIRST_SOCKET);
    let sockets = first..first.saturating_add(told("LISTEN_FDS").unwrap_or(0));
    let entries = fs::read_dir("/proc/self/fd").into_iter().flatten().filter_map(Result::ok);
    let numbers: Vec<i32> = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    let others = numbers.into_iter().filter(|number| *number > 2 && !sockets.contains(number));
    for number in others.filter(|number| is_inherited(*number)) {
        // Nobody here knows it.
        let _ = nix::unistd::close(number);
    }
}

/// Whether a child would have it; one that has been closed since has none.
fn is_inherited(number: i32) -> bool {
    let told = fs::read_to_string(format!("/proc/self/fdinfo/{number}")).unwrap_or_default();
    let flags =
        told.lines().find_map(|line| u32::from_str_radix(line.strip_prefix("flags:")?.trim(), 8).ok());
    flags.is_some_and(|flags| flags & CLOSED_AT_EXEC == 0)
}
