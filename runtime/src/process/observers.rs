//! Who wants to be told. Called on the thread at hand, with no lock held.

use std::fmt;
use std::sync::Arc;

use parking_lot::RwLock;

use super::Shortage;

/// Told of a request that is about to be refused.
pub type OnShortage = Arc<dyn Fn(&Shortage) + Send + Sync>;

/// The observers of a process: one of each kind.
#[derive(Default)]
pub(super) struct Observers {
    shortage: RwLock<Option<OnShortage>>,
}

impl Observers {
    pub(super) fn watch_shortage(&self, observer: Option<OnShortage>) {
        let before = std::mem::replace(&mut *self.shortage.write(), observer);
        // Its end is the program's code.
        drop(before);
    }

    pub(super) fn tell_shortage(&self, shortage: &Shortage) {
        let observer = self.shortage.read().clone();
        if let Some(observer) = observer {
            observer(shortage);
        }
    }
}

impl fmt::Debug for Observers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Observers").field("shortage", &self.shortage.read().is_some()).finish()
    }
}
