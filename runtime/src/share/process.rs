//! Which process a number means.

/// When a process started, in the kernel's ticks since boot: with its number this tells it from a later process of that
/// number. `None` where there is no such process.
pub(crate) fn started(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    start_of(&stat)
}

/// The 22nd field; the second, the command's name, may hold anything, parentheses and blanks too.
fn start_of(stat: &str) -> Option<u64> {
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_do_not_confuse() {
        let rest = "S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20 21";
        assert_eq!(start_of(&format!("12 (a) b (c)) {rest}")), Some(4711));
        assert_eq!(start_of("12 (short) S 1"), None);
        assert!(started(std::process::id()).is_some_and(|start| start > 0));
        assert_eq!(started(u32::MAX), None);
    }
}
