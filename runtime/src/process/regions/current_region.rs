//! Region in which the calling thread allocates.
//!
//! Invariant: the [`RegionFlags`] of a process count the entries of all its threads' stacks, so that one load shows whether any thread is
//! in a region. A thread's entries end with it.

use std::cell::RefCell;
use std::sync::Arc;

use super::flags::RegionFlags;
use super::tagged::Tagged;

/// Stack of the regions that a thread has entered.
#[derive(Debug)]
struct CurrentRegions {
    /// Flags of the process, which identify it: a test program has several processes.
    flags: Arc<RegionFlags>,
    tagged: Arc<Tagged>,
}

impl Drop for CurrentRegions {
    fn drop(&mut self) {
        self.flags.sub_thread();
    }
}

thread_local! {
    static STACK: RefCell<Vec<CurrentRegions>> = const { RefCell::new(Vec::new()) };
}

/// Enters a region on the calling thread.
pub(super) fn push(flags: &Arc<RegionFlags>, tagged: Arc<Tagged>) {
    flags.add_thread();
    let entered = CurrentRegions { flags: flags.clone(), tagged };
    // A thread at its end allocates in no region.
    let _ = STACK.try_with(|stack| stack.borrow_mut().push(entered));
}

/// Leaves the innermost region; returns `false` if the thread is in none.
pub(super) fn pop(flags: &Arc<RegionFlags>) -> bool {
    let popped = STACK.try_with(|stack| {
        let mut stack = stack.borrow_mut();
        let at = stack.iter().rposition(|entered| Arc::ptr_eq(&entered.flags, flags))?;
        Some(stack.remove(at))
    });
    popped.ok().flatten().is_some()
}

/// Calls `ask` with the innermost region of the thread; `None` if there is none.
pub(super) fn with_innermost<T>(flags: &Arc<RegionFlags>, ask: impl FnOnce(&Tagged) -> T) -> Option<T> {
    let found = STACK.try_with(|stack| {
        let stack = stack.borrow();
        let entered = stack.iter().rev().find(|entered| Arc::ptr_eq(&entered.flags, flags))?;
        Some(ask(&entered.tagged))
    });
    found.ok().flatten()
}
