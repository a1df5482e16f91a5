//! Which region the calling thread allocates in.
//!
//! Invariant: a process's [`RegionFlags`] count the entries that its threads' stacks hold together, so that a process in whose regions no
//! thread is learns it by one load. A thread that ends leaves what it entered.

use std::cell::RefCell;
use std::sync::Arc;

use super::flags::RegionFlags;
use super::tagged::Tagged;

/// An entry of a thread's stack.
#[derive(Debug)]
struct CurrentRegions {
    /// Whose: tells the processes of one program apart, of which tests have several.
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

/// The calling thread allocates in this region from now on.
pub(super) fn push(flags: &Arc<RegionFlags>, tagged: Arc<Tagged>) {
    flags.add_thread();
    let entered = CurrentRegions { flags: flags.clone(), tagged };
    // A thread at its end allocates in no region.
    let _ = STACK.try_with(|stack| stack.borrow_mut().push(entered));
}

/// The calling thread allocates where it did before; false where it is in no region.
pub(super) fn pop(flags: &Arc<RegionFlags>) -> bool {
    let popped = STACK.try_with(|stack| {
        let mut stack = stack.borrow_mut();
        let at = stack.iter().rposition(|entered| Arc::ptr_eq(&entered.flags, flags))?;
        Some(stack.remove(at))
    });
    popped.ok().flatten().is_some()
}

/// What the innermost region that the thread is in answers.
pub(super) fn with_innermost<T>(flags: &Arc<RegionFlags>, ask: impl FnOnce(&Tagged) -> T) -> Option<T> {
    let found = STACK.try_with(|stack| {
        let stack = stack.borrow();
        let entered = stack.iter().rev().find(|entered| Arc::ptr_eq(&entered.flags, flags))?;
        Some(ask(&entered.tagged))
    });
    found.ok().flatten()
}
