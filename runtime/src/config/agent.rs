//! Configuration keys of the node agent, which grants leases to workers.

use std::path::PathBuf;

use super::knob::knobs;

/// Returns whether `text` is a valid worker name.
pub(crate) fn is_name(text: &str) -> bool {
    let is_allowed =
        |character: char| character.is_ascii_alphanumeric() || matches!(character, '.' | '_' | '-');
    (1..=64).contains(&text.len()) && text.chars().all(is_allowed)
}

knobs! {
    /// Connection to the node agent.
    Agent as agent {
        [agent]
        /// Socket of the agent that the process joins when its first pool starts, as printed by `glake serve`.
        ///
        /// If the agent cannot be reached, the process logs it once, continues without a lease and retries in the background. A set-uid or
        /// set-gid process, one with file capabilities, and one with simulated GPUs of its own do not join by themselves. Empty: as absent.
        socket: Option<PathBuf> = None, "the path of a socket, from the root",
            if |socket| socket.as_ref().is_none_or(|path| path.is_absolute() || path.as_os_str().is_empty()),
            absent "it joins none by itself" as "";
        /// Name of this worker at the agent, unless `glake_join` sets another one before the first pool starts: the name of its entry in
        /// the agent's file.
        name: Option<String> = None, "1 to 64 of A-Z a-z 0-9 . _ -",
            if |name| name.as_ref().is_none_or(|name| is_name(name)),
            absent "the program's name and its number" as "chat";
    }
}
