//! The node agent, which gives this process its leases.

use std::ffi::c_char;
use std::path::Path;

use crate::{guard, library};

/// Joins the agent whose socket `agent` names, as `name`: from then on it grants what may be made, beginning with what is made. Null for
/// `agent`: the socket of `agent.socket` (`GLAKE_AGENT`), else the one of this user. Null for `name`: the program's name and its number.
/// Ranks of a launcher (`RANK`, `WORLD_SIZE`) are called `name/RANK` and are given memory together. It waits for the agent's answer, 5
/// seconds at most, and as long for a refusal to pass whose reason may. To join again as the same is no error. A process that holds memory
/// says by it that all is loaded: from then on memory may leave between uses.
///
/// `GLAKE_UNAVAILABLE`: nobody answers there who can be trusted, or it refuses this process; the text says why. `GLAKE_INVALID`: the name
/// cannot be one, or this process has joined another agent, or by another name: with `GLAKE_AGENT` it does so by itself when its first pool
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

/// Whether this process joins an agent by itself, with its first pool: `agent.socket` or `GLAKE_AGENT` names one. False before the process
/// has started (`glake_started`).
#[unsafe(no_mangle)]
pub extern "C" fn glake_joins_agent() -> bool {
    let joins = || Ok(library::started_process()?.is_some_and(|process| process.agent().joins_by_itself()));
    !library::is_forked() && guard::value(false, joins)
}

/// Leaves the agent: nothing but its limits bounds this process from then on. Where none is joined, in a forked child and at the end of the
/// process nothing is done.
#[unsafe(no_mangle)]
pub extern "C" fn glake_leave() -> i32 {
    library::give_up(|process| {
        process.agent().leave();
        Ok(())
    })
}
