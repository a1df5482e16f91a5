//! Detection of secure-execution mode, as ld.so calls it: the environment must not name the agent then.

use rustix::process::{getegid, geteuid, getgid, getuid};

/// Key in the kernel's auxiliary vector for secure-execution mode.
const AT_SECURE: usize = 23;

/// Returns whether the process has rights that its user lacks: set-uid, set-gid, file capabilities or a security module's. Returns `true`
/// if the kernel does not provide the vector.
pub(super) fn is_secure_execution() -> bool {
    let told = || std::fs::read("/proc/self/auxv").map_or(true, |vector| says_secure(&vector));
    getuid() != geteuid() || getgid() != getegid() || told()
}

/// Reads the flag from an auxiliary vector: pairs of a key and a value, one word each.
fn says_secure(vector: &[u8]) -> bool {
    let words = vector.chunks_exact(size_of::<usize>()).filter_map(|word| word.try_into().ok());
    let words: Vec<usize> = words.map(usize::from_ne_bytes).collect();
    words.chunks_exact(2).any(|pair| matches!(pair, [AT_SECURE, secure] if *secure != 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_says_whether_a_program_has_more_rights_than_its_user() {
        let vector = |pairs: &[(usize, usize)]| -> Vec<u8> {
            pairs
                .iter()
                .flat_map(|(kind, value)| [kind.to_ne_bytes(), value.to_ne_bytes()].concat())
                .collect()
        };
        assert!(says_secure(&vector(&[(6, 4096), (23, 1), (0, 0)])));
        assert!(!says_secure(&vector(&[(6, 4096), (23, 0), (11, 1), (0, 0)])));
        assert!(!says_secure(&[]));
        assert!(!is_secure_execution(), "tests are as their user is");
    }
}
