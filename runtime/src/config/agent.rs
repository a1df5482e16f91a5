//! The knobs of the node agent, which gives workers their leases.

use std::path::PathBuf;

use super::knob::knobs;

knobs! {
    /// Who gives this process its leases.
    Agent as agent {
        [agent]
        /// The socket of the agent that this process joins when its first pool starts, as `glake serve` says it.
        ///
        /// Where the agent cannot be reached that is said once, the program goes on without a lease, and it is tried again in the background.
        /// A process that runs with another user's rights (set-uid) does not join by itself. Empty: as absent.
        socket: Option<PathBuf> = None, "the path of a socket, from the root",
            if |socket| socket.as_ref().is_none_or(|path| path.is_absolute() || path.as_os_str().is_empty()),
            absent "it joins none by itself" as "";
    }
}
