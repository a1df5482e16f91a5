//! The knobs of the node agent, which gives workers their leases.

use std::path::PathBuf;

use super::knob::knobs;

/// Whether a worker may be called so.
pub(crate) fn is_name(text: &str) -> bool {
    let is_allowed =
        |character: char| character.is_ascii_alphanumeric() || matches!(character, '.' | '_' | '-');
    (1..=64).contains(&text.len()) && text.chars().all(is_allowed)
}

knobs! {
    /// Who gives this process its leases.
    Agent as agent {
        [agent]
        /// The socket of the agent that this process joins when its first pool starts, as `glake serve` says it.
        ///
        /// Where the agent cannot be reached that is said once, the program goes on without a lease, and it is tried again in the background.
        /// A process with other rights than whoever started it (set-uid, set-gid, capabilities of its file), or with GPUs that are simulated
        /// for it alone, does not join by itself. Empty: as absent.
        socket: Option<PathBuf> = None, "the path of a socket, from the root",
            if |socket| socket.as_ref().is_none_or(|path| path.is_absolute() || path.as_os_str().is_empty()),
            absent "it joins none by itself" as "";
        /// What the agent calls this worker, where `glake_join` said no other name before the first pool started: that of its entry in the agent's file.
        name: Option<String> = None, "1 to 64 of A-Z a-z 0-9 . _ -",
            if |name| name.as_ref().is_none_or(|name| is_name(name)),
            absent "the program's name and its number" as "chat";
    }
}
