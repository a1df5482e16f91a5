//! Inherited open files, which neither this process nor its workers should keep.

use std::env;
use std::fs;

/// Flag of close-on-exec descriptors in `/proc/self/fdinfo`.
const CLOSED_AT_EXEC: u32 = 0o2_000_000;
/// First descriptor that systemd passes.
const FIRST_SOCKET: i32 = 3;

/// Closes all inherited descriptors except the standard streams and the sockets from systemd. Workers would inherit them too: a pipe of the
/// parent would stay open as long as workers run.
///
/// The function closes every descriptor without close-on-exec. Call it at the beginning of a program, before any such descriptor is opened;
/// files of the standard library are close-on-exec.
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

/// Returns whether a child would inherit the descriptor; false if it was closed meanwhile.
fn is_inherited(number: i32) -> bool {
    let told = fs::read_to_string(format!("/proc/self/fdinfo/{number}")).unwrap_or_default();
    let flags =
        told.lines().find_map(|line| u32::from_str_radix(line.strip_prefix("flags:")?.trim(), 8).ok());
    flags.is_some_and(|flags| flags & CLOSED_AT_EXEC == 0)
}
