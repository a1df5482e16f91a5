//! Connection to the node agent, which controls the leases of this process.

use std::ffi::c_char;
use std::path::Path;

use crate::{guard, library};

/// Joins the agent at socket `agent` under `name`: from then on the agent grants the memory that may be created, beginning with the memory
/// held now. `agent` null: the socket of `agent.socket` (`GLAKE_AGENT`), else the user's default socket. `name` null: the program's name
/// and process id. Ranks of a launcher (`RANK`, `WORLD_SIZE`) are called `name/RANK` and receive memory together. The call waits up to 5
/// seconds for the agent's answer, and as long for a refusal whose reason may pass. Joining again with the same arguments is no error. A
/// process that already holds memory thereby reports that its load is complete: from then on its memory may be evicted between uses.
///
/// `GLAKE_UNAVAILABLE`: no trusted agent answers, or the agent refuses this process; the text says why. `GLAKE_INVALID`: the name is
/// invalid, or this process has joined another agent or under another name: with `GLAKE_AGENT` it joins by itself when its first pool
/// starts. Nothing has changed then.
///
/// # Safety
/// Each is null or a text that ends with a zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_join(name: *const c_char, agent: *const c_char) -> i32 {
    guard::answer(|| {
        // SAFETY: the caller's promise.
        let (name, agent) = unsafe { (guard::text(name, "name")?, guard::text(agent, "agent")?) };
        Ok(library::process()?.agent().join(name, agent.map(Path::new))?)
    })
}

/// Returns whether this process joins an agent by itself with its first pool, because `agent.socket` or `GLAKE_AGENT` names one. False
/// before the process has started (`glake_started`).
#[unsafe(no_mangle)]
pub extern "C" fn glake_joins_agent() -> bool {
    let joins = || Ok(library::started_process()?.is_some_and(|process| process.agent().joins_by_itself()));
    !library::is_forked() && guard::value(false, joins)
}

/// Disconnects from the agent: only the limits bound this process from then on. Does nothing without an agent, in a forked child, and at
/// the end of the process.
#[unsafe(no_mangle)]
pub extern "C" fn glake_leave() -> i32 {
    library::give_up(|process| {
        process.agent().leave();
        Ok(())
    })
}
